"""Blocks of experts in few bits: a fraction of the bytes to move, for a stated rounding.

A matrix becomes codes, scales and (below 8 bits) zeros in the form that `low_bit` defines, independent of any processor's instructions:

| tensor in the block | 8 bits | 4 bits |
|---|---|---|
| ``name.codes`` uint8 | [outputs, inputs] | [outputs, ceil(inputs / 2)]: input 2 i low in byte i, input 2 i + 1 high |
| ``name.scale`` bfloat16 | [outputs, 1] | [outputs, groups] |
| ``name.zero`` bfloat16 | - | [outputs, groups] |

Biases stay as they are. `DequantisedStore` turns such blocks back into full ones while reading, so that whatever computes with experts
computes with the rounded weights; it saves reading, not memory (`product_blocks` saves both). Which calls may be computed in few bits is
not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from moecache.low_bit import LowBit, dequantise, group_size, quantise
from moecache.stores.blocks import BlockLayout, Store, StoreCounters, StoreError, TensorSpec, aligned_bytes, checked_range
from moecache.stores.packed_file import PackedHeader

PACKED_BITS = (8, 4)

Tensors = dict[str, tuple[tuple[int, ...], str]]  # shape and type by name


def low_bit_layout(full: BlockLayout, bits: int, is_transposed: bool) -> BlockLayout:
    """How a block looks whose matrices are in few bits.

    Raises
    ------
    ValueError : bits other than 8 and 4.
    """

    def of_matrix(spec: TensorSpec, outputs: int, inputs: int, groups: int) -> Tensors:
        codes = {f"{spec.name}.codes": ((outputs, inputs if bits == 8 else -(-inputs // 2)), "uint8")}
        names = ("scale",) if bits == 8 else ("scale", "zero")
        return codes | {f"{spec.name}.{name}": ((outputs, groups), "bfloat16") for name in names}

    return layout_of_matrices(full, bits, is_transposed, of_matrix)


def layout_of_matrices(
    full: BlockLayout, bits: int, is_transposed: bool, of_matrix: Callable[[TensorSpec, int, int, int], Tensors]
) -> BlockLayout:
    """A block in which every matrix of a full one is replaced by the tensors of (matrix, outputs, inputs, groups); the rest stays.

    Raises
    ------
    ValueError : bits other than 8 and 4.
    """
    if bits not in PACKED_BITS:
        raise ValueError(f"bits={bits!r} cannot be packed; choose 16, 8 or 4")
    tensors: Tensors = {}
    for spec in full.tensors:
        if len(spec.shape) != 2:
            tensors[spec.name] = (spec.shape, spec.dtype)
            continue
        outputs, inputs = outputs_and_inputs(spec, is_transposed)
        tensors |= of_matrix(spec, outputs, inputs, -(-inputs // group_size(inputs, bits)))
    return BlockLayout.of(tensors)


def round_block(full: Mapping[str, torch.Tensor], low: Mapping[str, torch.Tensor], bits: int, is_transposed: bool) -> None:
    """Fill the views of a low-bit block from those of a full one."""
    for name, weight in full.items():
        if weight.ndim != 2:
            low[name].copy_(weight)
            continue
        rounded = quantise(weight.T if is_transposed else weight, bits)
        low[f"{name}.codes"].copy_(rounded.codes if bits == 8 else _nibbles(rounded.codes))
        low[f"{name}.scale"].copy_(rounded.scale)
        if bits == 4:
            low[f"{name}.zero"].copy_(rounded.zero)


def unround_block(low: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor], bits: int, is_transposed: bool) -> None:
    """Fill the views of a full block with the weights that a low-bit one stands for."""
    for name, weight in full.items():
        if weight.ndim != 2:
            weight.copy_(low[name])
            continue
        inputs = weight.shape[0] if is_transposed else weight.shape[1]
        matrix = dequantise(low_bit_of(low, name, inputs, bits), weight.dtype)
        weight.copy_(matrix.T if is_transposed else matrix)


def low_bit_of(low: Mapping[str, torch.Tensor], name: str, num_inputs: int, bits: int) -> LowBit:
    """A matrix of a low-bit block, one code a byte."""
    codes, scale = low[f"{name}.codes"], low[f"{name}.scale"]
    zero = low.get(f"{name}.zero", torch.zeros_like(scale))
    plain = codes if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)[:, :num_inputs]
    return LowBit(plain, scale, zero, bits, group_size(num_inputs, bits))


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes [N, K] below 16 a byte: the even input in the low half."""
    even, odd = codes[:, 0::2], codes[:, 1::2]
    packed = even.clone()
    packed[:, : odd.shape[1]] |= odd << 4
    return packed


def outputs_and_inputs(spec: TensorSpec, is_transposed: bool) -> tuple[int, int]:
    """Outputs and inputs of a matrix in a full block."""
    return (spec.shape[1], spec.shape[0]) if is_transposed else (spec.shape[0], spec.shape[1])


class DequantisedStore:
    """Full blocks out of a store of low-bit ones; see `Store`. A part of a block costs as much as the whole.

    Parameters
    ----------
    store : the low-bit blocks; it is closed with this one.
    header : their file's, for the number of bits and the full layout.
    """

    def __init__(self, store: Store, header: PackedHeader) -> None:
        if header.bits is None or header.full_layout is None:
            raise StoreError("these blocks are not in few bits; read them as they are")
        self.store, self._bits, self._is_transposed = store, header.bits, header.is_transposed
        self.layout = header.full_layout
        self.num_layers, self.num_experts = store.num_layers, store.num_experts
        self.alignment = 1
        self.counters = StoreCounters()

    @torch.no_grad()
    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Read a low-bit block and write the weights that it stands for; see `Store.read`."""
        first, end = checked_range(self, layer, expert, out, first_byte, num_bytes)
        low, full = aligned_bytes(self.store.layout.block_bytes), aligned_bytes(self.layout.block_bytes)
        self.store.read(layer, expert, low)
        views = self.store.layout.views(torch.from_numpy(low)), self.layout.views(torch.from_numpy(full))
        unround_block(*views, self._bits, self._is_transposed)
        out[first:end] = full[first:end]
        self.counters.add(end - first)

    def close(self) -> None:
        """Close the store underneath."""
        self.store.close()
