"""A faster linear layer for training: the product in bfloat16, everything around it in float32.

Weights, activations, gradients and the optimizer stay in float32; only the operands of a linear layer's three products
(output, gradient of the input, gradient of the weight) are rounded to bfloat16, as in mixed-precision training. Routers
are no linear layers of the library and keep full precision, so the experts chosen are those of the float32 model as
far as its inputs allow. On a processor with bfloat16 instructions the products take well under half the time.

This module knows tensors. It is used in training only.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class _Bfloat16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):  # type: ignore[override]
        rows = inputs.reshape(-1, inputs.shape[-1]).bfloat16()
        weight = weight.bfloat16()
        ctx.save_for_backward(rows, weight)
        return (rows @ weight.T).float().reshape(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        grad = grad_out.reshape(-1, grad_out.shape[-1]).bfloat16()
        grad_inputs = (grad @ weight).float().reshape(*grad_out.shape[:-1], -1)
        return grad_inputs, (grad.T @ rows).float()


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return _Bfloat16Linear.apply(input, layer.weight)  # type: ignore[return-value]


def use_bfloat16_products(model: nn.Module) -> None:
    """Let every linear layer without bias of a model multiply in bfloat16, in place."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.bias is None:
            layer.forward = partial(_forward, layer)
