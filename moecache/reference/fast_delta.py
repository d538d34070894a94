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

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

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
    """Outputs [B,T,H,V] and every SEGMENT-th state [B,H,segments,D,V], from q, k [B,T,H,D], v [B,T,H,V], g, b [B,T,H]."""
    num_rows, num_tokens, num_heads, key_width = key.shape
    value_width = value.shape[3]
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
                _advance(state, key[b, t, h], value[b, t, h], np.exp(log_decay[b, t, h]), strength[b, t, h], error)
                q, o = query[b, t, h], out[b, t, h]
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
    """Gradients of q, k [B,T,H,D], v [B,T,H,V], g and b [B,T,H]."""
    num_rows, num_tokens, num_heads, key_width = key.shape
    value_width = value.shape[3]
    grad_query, grad_key, grad_value = np.empty_like(query), np.empty_like(key), np.empty_like(value)
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
                    _advance(states[n + 1], key[b, t, h], value[b, t, h], decay, strength[b, t, h], errors[n])
                for n in range(num - 1, -1, -1):
                    t = first + n
                    q, k, beta = query[b, t, h], key[b, t, h], strength[b, t, h]
                    grad_o, grad_q, grad_k = grad_out[b, t, h], grad_query[b, t, h], grad_key[b, t, h]
                    _retreat_read(grad_state, states[n + 1], errors[n], q, k, beta, grad_o, grad_q, grad_k, grad_e)
                    grad_v, total = grad_value[b, t, h], np.float32(0)
                    for j in range(value_width):
                        grad_v[j] = beta * grad_e[j]
                        total += grad_e[j] * errors[n, j]
                    grad_strength[b, t, h] = total
                    grad_decay[b, t, h] = _retreat_write(grad_state, states[n], k, np.exp(log_decay[b, t, h]), grad_v, grad_k)
    return grad_query, grad_key, grad_value, grad_decay, grad_strength


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):  # type: ignore[override]
        tensors = tuple(x.detach().contiguous() for x in tensors)
        out, kept = delta_forward(*(x.numpy() for x in tensors))
        ctx.save_for_backward(*tensors)
        ctx.kept = kept
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        arrays = [x.numpy() for x in (grad_out.contiguous(), *ctx.saved_tensors)]
        return tuple(map(torch.from_numpy, delta_backward(*[*arrays, ctx.kept])))


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_options: object) -> tuple[Tensor, None]:
    """The library's chunked delta rule, for training: no initial state, no final state, normalised queries and keys.

    Parameters
    ----------
    query, key : [B,T,heads of keys,D], not yet normalised.
    value : [B,T,H,V].
    g, beta : log decay and write strength [B,T,H].
    """
    normalise = modeling_qwen3_next.l2norm
    repeats = value.shape[2] // key.shape[2]
    query = normalise(query) * query.shape[-1] ** -0.5
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, normalise(key)))
    return _DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[return-value]


@contextmanager
def fast_delta_rule() -> Iterator[None]:
    """While inside, Qwen3-Next layers use the compiled recurrence."""
    name = "torch_chunk_gated_delta_rule"
    before = getattr(modeling_qwen3_next, name)
    setattr(modeling_qwen3_next, name, delta_rule)
    try:
        yield
    finally:
        setattr(modeling_qwen3_next, name, before)
