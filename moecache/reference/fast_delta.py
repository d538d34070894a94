"""A faster gated delta rule for training on one processor core: the recurrence itself, compiled.

Linear attention keeps a state S [key width, value width] per head. With decay a_t = exp(g_t), key k, value v, query q
and write strength b:

    S' = a_t S_{t-1};  e_t = v_t - S'^T k_t;  S_t = S' + k_t (b_t e_t)^T;  o_t = S_t^T q_t

On a GPU the recurrence is cut into chunks and turned into matrix products. On one core a state of 4 KB stays in the
nearest cache, and the plain recurrence costs a fraction of the chunked form, whose backward pass moves large tensors
once a chunk. The backward pass here keeps every `SEGMENT`-th state and runs a segment again before walking it back.
Same mathematics (Yang et al. 2024, Gated Delta Networks), another order of additions.

Letters: B rows, T tokens, H heads, D key width, V value width. This module knows arrays. It is used in training only.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

SEGMENT = 32


@numba.njit(cache=True, fastmath=True, inline="always")
def _advance(state, key, value, decay, strength, error):
    key_width, value_width = state.shape
    for j in range(value_width):
        error[j] = value[j]
    for i in range(key_width):
        for j in range(value_width):
            state[i, j] *= decay
            error[j] -= state[i, j] * key[i]
    for i in range(key_width):
        scale = strength * key[i]
        for j in range(value_width):
            state[i, j] += scale * error[j]


@numba.njit(cache=True, fastmath=True)
def delta_forward(query, key, value, log_decay, strength):
    """Outputs [B,T,H,V] and every SEGMENT-th state [B,H,segments,D,V], from q, k [B,T,heads of keys,D], v [B,T,H,V], g, b [B,T,H]."""
    num_rows, num_tokens, num_heads, value_width = value.shape
    key_width, repeats = key.shape[3], num_heads // key.shape[2]
    num_segments = (num_tokens + SEGMENT - 1) // SEGMENT
    out = np.zeros_like(value)
    kept = np.empty((num_rows, num_heads, num_segments, key_width, value_width), np.float32)
    state, error = np.empty((key_width, value_width), np.float32), np.empty(value_width, np.float32)
    for b in range(num_rows):
        for h in range(num_heads):
            state[:] = 0
            for t in range(num_tokens):
                if t % SEGMENT == 0:
                    kept[b, h, t // SEGMENT] = state
                k, q, o = key[b, t, h // repeats], query[b, t, h // repeats], out[b, t, h]
                _advance(state, k, value[b, t, h], np.exp(log_decay[b, t, h]), strength[b, t, h], error)
                for i in range(key_width):
                    for j in range(value_width):
                        o[j] += state[i, j] * q[i]
    return out, kept


@numba.njit(cache=True, fastmath=True, inline="always")
def _retreat_read(grad_state, state, error, q, k, beta, grad_o, grad_q, grad_k, grad_e):
    key_width, value_width = state.shape
    for j in range(value_width):
        grad_e[j] = 0
    for i in range(key_width):
        sum_q = np.float32(0)
        sum_k = np.float32(0)
        for j in range(value_width):
            sum_q += state[i, j] * grad_o[j]
            grad_state[i, j] += q[i] * grad_o[j]
            sum_k += grad_state[i, j] * error[j]
            grad_e[j] += grad_state[i, j] * k[i]
        grad_q[i] = sum_q
        grad_k[i] = beta * sum_k


@numba.njit(cache=True, fastmath=True, inline="always")
def _retreat_write(grad_state, before, k, decay, grad_v, grad_k):
    key_width, value_width = before.shape
    total = np.float32(0)
    for i in range(key_width):
        sum_k = np.float32(0)
        for j in range(value_width):
            decayed = decay * before[i, j]
            grad = grad_state[i, j] - k[i] * grad_v[j]
            sum_k += decayed * grad_v[j]
            total += grad * decayed
            grad_state[i, j] = decay * grad
        grad_k[i] -= sum_k
    return total


@numba.njit(cache=True, fastmath=True)
def delta_backward(grad_out, query, key, value, log_decay, strength, kept):
    """Gradients of q, k for every value head [B,T,H,D], of v [B,T,H,V], g and b [B,T,H]."""
    num_rows, num_tokens, num_heads, value_width = value.shape
    key_width, repeats = key.shape[3], num_heads // key.shape[2]
    shape = (num_rows, num_tokens, num_heads, key_width)
    grad_query, grad_key, grad_value = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty_like(value)
    grad_decay, grad_strength = np.empty_like(log_decay), np.empty_like(strength)
    states = np.empty((SEGMENT + 1, key_width, value_width), np.float32)
    errors = np.empty((SEGMENT, value_width), np.float32)
    grad_state, grad_e = np.empty((key_width, value_width), np.float32), np.empty(value_width, np.float32)
    for b in range(num_rows):
        for h in range(num_heads):
            grad_state[:] = 0
            for segment in range(kept.shape[2] - 1, -1, -1):
                first = segment * SEGMENT
                num = min(SEGMENT, num_tokens - first)
                states[0] = kept[b, h, segment]
                for n in range(num):
                    t = first + n
                    states[n + 1] = states[n]
                    decay = np.exp(log_decay[b, t, h])
                    _advance(states[n + 1], key[b, t, h // repeats], value[b, t, h], decay, strength[b, t, h], errors[n])
                for n in range(num - 1, -1, -1):
                    t = first + n
                    q, k, beta = query[b, t, h // repeats], key[b, t, h // repeats], strength[b, t, h]
                    grad_o, grad_q, grad_k = grad_out[b, t, h], grad_query[b, t, h], grad_key[b, t, h]
                    _retreat_read(grad_state, states[n + 1], errors[n], q, k, beta, grad_o, grad_q, grad_k, grad_e)
                    grad_v, total = grad_value[b, t, h], np.float32(0)
                    for j in range(value_width):
                        grad_v[j] = beta * grad_e[j]
                        total += grad_e[j] * errors[n, j]
                    grad_strength[b, t, h] = total
                    grad_decay[b, t, h] = _retreat_write(grad_state, states[n], k, np.exp(log_decay[b, t, h]), grad_v, grad_k)
    return grad_query, grad_key, grad_value, grad_decay, grad_strength


@numba.njit(cache=True, fastmath=True)
def normalise(rows, scale):
    """Rows [n,D] divided by their length, times scale, and scale / length [n]; a length of zero is guarded as the library's."""
    out, factors = np.empty_like(rows), np.empty(len(rows), np.float32)
    for n in range(len(rows)):
        total = np.float32(1e-6)
        for i in range(rows.shape[1]):
            total += rows[n, i] * rows[n, i]
        factors[n] = scale / np.sqrt(total)
        for i in range(rows.shape[1]):
            out[n, i] = rows[n, i] * factors[n]
    return out, factors


@numba.njit(cache=True, fastmath=True)
def normalise_backward(grads, out, factors, scale):
    """Gradient of the rows [n,D] from those of the normalised rows [n,R,D], summed over the R heads that shared a row."""
    num, repeats, width = grads.shape
    grad_rows = np.empty((num, width), np.float32)
    for n in range(num):
        row = grad_rows[n]
        row[:] = grads[n, 0]
        for r in range(1, repeats):
            for i in range(width):
                row[i] += grads[n, r, i]
        along = np.float32(0)
        for i in range(width):
            along += row[i] * out[n, i]
        along /= scale * scale
        for i in range(width):
            row[i] = factors[n] * (row[i] - out[n, i] * along)
    return grad_rows


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, log_decay, strength):  # type: ignore[override]
        ctx.scales = np.float32(query.shape[-1] ** -0.5), np.float32(1)
        pairs = zip((query, key), ctx.scales, strict=True)
        normal = [normalise(x.contiguous().numpy().reshape(-1, x.shape[-1]), scale) for x, scale in pairs]
        q, k = (rows.reshape(query.shape) for rows, _ in normal)
        v, g, beta = (x.contiguous().numpy() for x in (value, log_decay, strength))
        out, kept = delta_forward(q, k, v, g, beta)
        ctx.arrays, ctx.kept, ctx.factors = (q, k, v, g, beta), kept, [factors for _, factors in normal]
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        grads = delta_backward(*[grad_out.contiguous().numpy(), *ctx.arrays, ctx.kept])
        for_inputs = list(map(torch.from_numpy, grads[2:]))
        for_rows = []
        for grad, unit, factors, scale in zip(grads[:2], ctx.arrays[:2], ctx.factors, ctx.scales, strict=True):
            width = unit.shape[-1]
            shaped = grad.reshape(unit.size // width, -1, width)
            rows = normalise_backward(shaped, unit.reshape(-1, width), factors, scale)
            for_rows.append(torch.from_numpy(rows.reshape(unit.shape)))
        return (*for_rows, *for_inputs)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_options: object) -> tuple[Tensor, None]:
    """The library's chunked delta rule, for training: no initial state, no final state, normalised queries and keys.

    Parameters
    ----------
    query, key : [B,T,heads of keys,D], not yet normalised; each serves the value heads that follow one another.
    value : [B,T,H,V].
    g, beta : log decay and write strength [B,T,H].
    """
    return _DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[return-value]
