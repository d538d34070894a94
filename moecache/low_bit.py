"""Low-bit copies of experts: round to nearest with clipping, in the exact form that packed products compute with.

A matrix [outputs, inputs] is cut into *groups* along its inputs; a group has one `scale` and one `zero`, and b bits a weight:

    weight = (q - 2^(b-1)) x scale + zero,    q = 0 .. 2^b - 1

| bits | a group is | zero | bits a weight, for groups of 64 |
|---|---|---|---|
| 8 | a whole row | 0 | 8 + 16 / inputs |
| 4, 3, 2 | min(64, inputs) neighbours of a row; the last may be shorter | one a group | b + 0.5 |

`scale` and `zero` are bfloat16 numbers, whatever the model's type: 16 bits each in a file, and the operands of torch's packed 4-bit product
(rows of q - 8, group 64) and packed 8-bit product (q - 128). q is rounded half to even, after scale and zero were rounded. The
range of a group is [low, high] = its extremes, shrunk about their middle by the factor among 1, 0.95 .. 0.4 with the smallest squared
error (the larger factor among equals): few weights are clipped so that all others are rounded less. For 8 bits low = -high.
Arithmetic is float32; a copy is then cast to the type of the model's weights.

Experts' matrices are rounded; their biases are not. Which calls are computed from a copy is not known here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moecache import hf_internals

BITS = (8, 4, 3, 2)
GROUP = 64
SHRINKING = tuple(1.0 - 0.05 * step for step in range(13))  # 1 .. 0.4
WEIGHTS_AT_ONCE = 2**24  # of the search for clipping: some 200 MB


@dataclass(frozen=True)
class LowBit:
    """Matrices in few bits: `codes` [..., N, K] uint8 (q), `scale` and `zero` [..., N, groups] bfloat16, groups of `group` inputs."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bits: int
    group: int


def check_bits(bits: Any) -> int:
    """The number of bits itself; ValueError for one that no form is stated for."""
    if bits not in BITS:
        raise ValueError(f"low_bits={bits!r} is unknown; choose one of {', '.join(map(str, BITS))} bits a weight")
    return int(bits)


def group_size(num_inputs: int, bits: int) -> int:
    """Inputs that share a scale: the whole row for 8 bits, else at most 64."""
    return num_inputs if check_bits(bits) == 8 else min(GROUP, num_inputs)


def quantise(weight: torch.Tensor, bits: int) -> LowBit:
    """Round matrices to few bits.

    Parameters
    ----------
    weight : tensor [..., N, K]
        N outputs, K inputs, any floating type.
    bits : {8, 4, 3, 2}

    Returns
    -------
    LowBit
        On the weight's device; `zero` is 0 for 8 bits.

    Raises
    ------
    ValueError
        For another number of bits, or weights that are not finite.
    """
    group = group_size(weight.shape[-1], bits)
    rows = weight.detach().reshape(-1, weight.shape[-1])
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("weights must be finite to be rounded to few bits; this matrix holds infinity or NaN")
    step = max(1, WEIGHTS_AT_ONCE // rows.shape[1])
    parts = [_quantise_rows(rows[start : start + step].to(torch.float32), bits, group) for start in range(0, len(rows), step)]
    codes, scale, zero = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    lead = weight.shape[:-1]
    return LowBit(codes.reshape(weight.shape), scale.reshape(*lead, -1), zero.reshape(*lead, -1), bits, group)


def _quantise_rows(rows: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, K], scale and zero [n, groups] of rows [n, K]; a shorter last group is treated apart."""
    whole = rows.shape[1] // group * group
    parts = [_quantise_groups(rows[:, :whole].reshape(len(rows), -1, group), bits)]
    if whole < rows.shape[1]:
        parts.append(_quantise_groups(rows[:, None, whole:], bits))
    codes, scale, zero = zip(*parts, strict=True)
    return torch.cat([part.flatten(1) for part in codes], 1), torch.cat(scale, 1), torch.cat(zero, 1)


def _quantise_groups(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero of groups [n, g, size]: the best of the shrunk ranges."""
    low, high = groups.amin(-1), groups.amax(-1)
    if bits == 8:
        high = torch.maximum(high, -low)
        low = -high
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    least = torch.full_like(low, torch.inf)
    for factor in SHRINKING:
        tried = _rounded(groups, low, high, factor, bits)
        error = (_value(*tried, bits) - groups).square().sum(-1)
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = tried if best is None else _choose(is_better, tried, best)
    assert best is not None
    return best


def _rounded(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factor: float, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and zero for a range shrunk by `factor` about its middle."""
    half, middle = (high - low) * (factor / 2), (high + low) / 2
    if bits == 8:
        scale, zero = (half / 127).to(torch.bfloat16), torch.zeros_like(half, dtype=torch.bfloat16)
    else:
        exact = 2 * half / (2**bits - 1)
        scale, zero = exact.to(torch.bfloat16), (middle - half + exact * 2 ** (bits - 1)).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # all weights of the group are alike
    steps = torch.round((groups - zero[..., None].float()) / scale[..., None].float())
    codes = (steps + 2 ** (bits - 1)).clamp(0, 2**bits - 1).to(torch.uint8)
    return codes, scale, zero


def _choose(is_better: torch.Tensor, tried: tuple[torch.Tensor, ...], best: tuple[torch.Tensor, ...]) -> Any:
    codes = torch.where(is_better[..., None], tried[0], best[0])
    return codes, torch.where(is_better, tried[1], best[1]), torch.where(is_better, tried[2], best[2])


def _value(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (codes.float() - 2 ** (bits - 1)) * scale[..., None].float() + zero[..., None].float()


def dequantise(low_bit: LowBit, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrices [..., N, K] that the codes stand for."""
    num_inputs, last = low_bit.codes.shape[-1], low_bit.scale.shape[-1] - 1
    group_of = (torch.arange(num_inputs, device=low_bit.codes.device) // low_bit.group).clamp(max=last)
    scale, zero = low_bit.scale[..., group_of].float(), low_bit.zero[..., group_of].float()
    return ((low_bit.codes.float() - 2 ** (low_bit.bits - 1)) * scale + zero).to(dtype)


def round_trip(weight: torch.Tensor, bits: int, is_transposed: bool = False) -> torch.Tensor:
    """The weight after rounding to few bits, in its own type; `is_transposed` where it is stored as [..., inputs, outputs]."""
    matrix = weight.transpose(-1, -2) if is_transposed else weight
    rounded = dequantise(quantise(matrix, bits), weight.dtype)
    return rounded.transpose(-1, -2).contiguous() if is_transposed else rounded


def num_bytes(num_outputs: int, num_inputs: int, bits: int) -> int:
    """Bytes of one matrix in few bits: codes packed without gaps, 2 bytes a scale, and 2 a zero below 8 bits."""
    groups = num_outputs * -(-num_inputs // group_size(num_inputs, bits))
    return -(-num_outputs * num_inputs * bits // 8) + groups * (2 if bits == 8 else 4)


def low_bit_expert_bytes(model: Any, bits: int) -> int:
    """Bytes of one expert's low-bit copy, its scales and zeros included; biases keep their type.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of an understood family; only shapes are looked at.
    bits : {8, 4, 3, 2}

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        For another number of bits than 8, 4, 3 or 2, or a model without MoE layers.
    """
    experts = hf_internals.moe_layers(model)[0].experts
    total = 0
    for weight in experts.parameters():
        if weight.ndim == 3:
            outputs, inputs = weight.shape[1:] if not hf_internals.is_transposed(experts) else weight.shape[:0:-1]
            total += num_bytes(outputs, inputs, bits)
        else:
            total += weight[0].numel() * weight.element_size()
    return total


@dataclass(frozen=True)
class LowBitCopies:
    """A low-bit copy of every expert of a model, laid out in the model's own type: one experts module a MoE layer.

    Attributes
    ----------
    bits : 8, 4, 3 or 2, of each weight.
    layers : [L] modules, the model's experts with rounded matrices, in full precision again.
    """

    bits: int
    layers: tuple[nn.Module, ...]


@torch.no_grad()
def low_bit_copies(model: Any, bits: int) -> LowBitCopies:
    """Low-bit copies of all routed experts, made from the weights that the model has now.

    Keep them to emulate several policies: making them takes seconds, and as much memory as the experts themselves.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of an understood family.
    bits : {8, 4, 3, 2}

    Returns
    -------
    LowBitCopies

    Raises
    ------
    ValueError
        For another number of bits, or a model without MoE layers.
    """
    check_bits(bits)
    return LowBitCopies(bits, tuple(_low_bit_experts(layer.experts, bits) for layer in hf_internals.moe_layers(model)))


def _low_bit_experts(experts: nn.Module, bits: int) -> nn.Module:
    """The same module with rounded matrices: it shares everything else, and has no hooks."""
    twin = copy.copy(experts)
    is_transposed = hf_internals.is_transposed(experts)
    twin._parameters = {
        name: nn.Parameter(round_trip(weight, bits, is_transposed), requires_grad=False) if weight.ndim == 3 else weight
        for name, weight in experts.named_parameters(recurse=False)
    }
    twin._forward_hooks, twin._forward_pre_hooks = type(twin._forward_hooks)(), type(twin._forward_pre_hooks)()
    return twin


@contextmanager
def quantised_model(model: Any, bits: int, is_dense_rounded: bool = True) -> Iterator[Any]:
    """The model with all its large matrices rounded, inside the block: a baseline of another base precision.

    Rounded are the matrices of all routed experts and, unless told otherwise, of every other linear layer (token mixers, shared experts,
    dense layers). Left as they are: routers, embeddings and the vocabulary head, norms, convolutions, biases, and linear layers of one
    output. The weights are put back after the block, also when it ends by an error; until then a copy of them is kept.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    bits : {8, 4, 3, 2}
    is_dense_rounded : bool
        False rounds routed experts only.

    Yields
    ------
    transformers.PreTrainedModel
        The same model, rounded in place.

    Raises
    ------
    ValueError
        For another number of bits.
    """
    check_bits(bits)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for weight, is_transposed in _large_matrices(model, is_dense_rounded):
                kept.append((weight, weight.clone()))
                weight.copy_(round_trip(weight, bits, is_transposed))
        yield model
    finally:
        with torch.no_grad():
            for weight, original in kept:
                weight.copy_(original)


def _large_matrices(model: Any, is_dense_rounded: bool) -> Iterator[tuple[torch.Tensor, bool]]:
    """Each matrix to round, and whether it is stored transposed."""
    layers = hf_internals.moe_layers(model)
    for layer in layers:
        yield from (
            (weight, hf_internals.is_transposed(layer.experts)) for weight in layer.experts.parameters(recurse=False) if weight.ndim == 3
        )
    spared = {id(module) for layer in layers for module in layer.router.modules()} | {id(hf_internals.vocabulary_head(model))}
    for module in model.modules() if is_dense_rounded else ():
        if isinstance(module, nn.Linear) and id(module) not in spared and module.out_features > 1:
            yield module.weight, False
