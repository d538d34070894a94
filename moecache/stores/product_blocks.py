"""Blocks of experts in few bits as this processor multiplies with them, so that slots hold the few bits and nothing is written out.

The same numbers as in `low_bit_blocks`, in the order of `packed_products` instead of a plain one: what a disk delivers into a slot is an
operand. A slot then takes a quarter of its memory at 4 bits, and a fetch a quarter of its time.

| tensor in the block | 8 bits | 4 bits |
|---|---|---|
| ``name.product_codes`` | int8 [outputs, inputs] | uint8 [outputs, inputs / 2], in an order of the processor's own |
| ``name.product_scales``, of the model's type | [outputs] | [groups, outputs, 2]: scale, zero |

The file's header says which order it is. A processor of another kind refuses the file; the plain form is for every processor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moecache.low_bit import group_size, quantise
from moecache.packed_products import CODES, SCALES, PackedMatrix, is_right, product_order
from moecache.stores.blocks import BlockLayout, StoreError, TensorSpec
from moecache.stores.low_bit_blocks import Tensors, layout_of_matrices, outputs_and_inputs


def product_layout(full: BlockLayout, bits: int, is_transposed: bool) -> BlockLayout:
    """How a block looks whose matrices are operands of products in few bits.

    Raises
    ------
    ValueError : bits other than 8 and 4.
    """

    def of_matrix(spec: TensorSpec, outputs: int, inputs: int, groups: int) -> Tensors:
        return {
            spec.name + CODES: ((outputs, inputs), "int8") if bits == 8 else ((outputs, -(-inputs // 2)), "uint8"),
            spec.name + SCALES: ((outputs,) if bits == 8 else (groups, outputs, 2), spec.dtype),
        }

    return layout_of_matrices(full, bits, is_transposed, of_matrix)


def check_products(full: BlockLayout, bits: int, is_transposed: bool) -> str:
    """The name of this processor's order, once it is known to multiply every matrix of a full block rightly.

    Raises
    ------
    ValueError : a matrix that it cannot, or not rightly.
    """
    for spec in full.tensors:
        if len(spec.shape) == 2 and not _is_right(spec, bits, is_transposed):
            outputs, inputs = outputs_and_inputs(spec, is_transposed)
            raise ValueError(
                f"torch {torch.__version__} does not multiply {spec.name} [{outputs}, {inputs}] in {bits} bits on this processor (outputs "
                "and inputs must be multiples of 16, groups of 32 or more); pack in the plain order, or in 16 bits"
            )
    return product_order(bits)


def _is_right(spec: TensorSpec, bits: int, is_transposed: bool) -> bool:
    outputs, inputs = outputs_and_inputs(spec, is_transposed)
    return is_right(outputs, inputs, bits, group_size(inputs, bits), getattr(torch, spec.dtype))


def check_order(order: str, bits: int, where: object) -> None:
    """Refuse blocks in the order of another kind of processor.

    Raises
    ------
    StoreError : another order than this processor's.
    """
    here = product_order(bits)
    if order != here:
        raise StoreError(
            f"{where} holds experts in {bits} bits in order {order} of the processor that packed them, this one multiplies in order "
            f"{here}: pack the checkpoint again here, or in the plain order"
        )


def round_for_products(full: Mapping[str, torch.Tensor], low: Mapping[str, torch.Tensor], bits: int, is_transposed: bool) -> None:
    """Fill the views of a block of operands from those of a full one."""
    for name, weight in full.items():
        if weight.ndim != 2:
            low[name].copy_(weight)
            continue
        matrix = PackedMatrix.of(quantise(weight.T if is_transposed else weight, bits), weight.dtype)
        low[name + CODES].copy_(matrix.codes)
        low[name + SCALES].copy_(matrix.scales)
