"""A faster causal convolution for training: in the layout in which the layer holds its tokens.

Each channel c of a linear-attention layer is convolved over the last W tokens: y[t,c] = sum_j w[c,j] x[t-W+1+j,c].
The library transposes to [B,C,T] for it and back; here the sum runs over tokens as they lie, [B,T,C], which the
compiler turns into vector instructions over the channels.

Letters: B rows, T tokens, C channels, W window. This module knows arrays. It is used in training only.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor, nn


@numba.njit(cache=True, fastmath=True)
def convolve(inputs, weight):
    """Outputs [B,T,C] from inputs [B,T,C] and weight [W,C]."""
    num_rows, num_tokens, num_channels = inputs.shape
    window = weight.shape[0]
    out = np.zeros_like(inputs)
    for b in range(num_rows):
        for t in range(num_tokens):
            y = out[b, t]
            for j in range(max(0, window - 1 - t), window):
                x, w = inputs[b, t - window + 1 + j], weight[j]
                for c in range(num_channels):
                    y[c] += w[c] * x[c]
    return out


@numba.njit(cache=True, fastmath=True)
def convolve_backward(grad_out, inputs, weight):
    """Gradients of inputs [B,T,C] and weight [W,C]."""
    num_rows, num_tokens, num_channels = inputs.shape
    window = weight.shape[0]
    grad_inputs, grad_weight = np.zeros_like(inputs), np.zeros_like(weight)
    for b in range(num_rows):
        for t in range(num_tokens):
            g = grad_out[b, t]
            for j in range(max(0, window - 1 - t), window):
                x, w = inputs[b, t - window + 1 + j], weight[j]
                grad_x, grad_w = grad_inputs[b, t - window + 1 + j], grad_weight[j]
                for c in range(num_channels):
                    grad_x[c] += w[c] * g[c]
                    grad_w[c] += x[c] * g[c]
    return grad_inputs, grad_weight


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):  # type: ignore[override]
        ctx.arrays = inputs.contiguous().numpy(), np.ascontiguousarray(weight.numpy().T)
        return torch.from_numpy(convolve(*ctx.arrays))

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        grad_inputs, grad_weight = convolve_backward(*[grad_out.contiguous().numpy(), *ctx.arrays])
        return torch.from_numpy(grad_inputs), torch.from_numpy(np.ascontiguousarray(grad_weight.T))


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu", **_options: object) -> Tensor:
    """The library's causal convolution with its activation: x [B,C,T], weight [C,W], no bias -> [B,C,T].

    Raises
    ------
    ValueError : a bias or another activation, which no layer of the reference models has.
    """
    if bias is not None or activation != "silu":
        raise ValueError(f"bias {bias is not None}, activation {activation!r}: only no bias and 'silu'; train with the library's own")
    return nn.functional.silu(_Convolution.apply(x.transpose(1, 2), weight)).transpose(1, 2)  # type: ignore[union-attr]
