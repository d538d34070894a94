"""Products with matrices that stay in few bits: torch's own packed kernels, where they exist and are right.

`low_bit` says what a matrix in few bits means. On a CPU torch multiplies such a matrix without writing it out:

| bits | weight | operand | asks for |
|---|---|---|---|
| 8 | (q - 128) x scale | q - 128 as int8 [N, K], a scale a row | K a multiple of 16 |
| 4 | (q - 8) x scale + zero | q in torch's packed order, [K / group, N, 2] scales and zeros | N a multiple of 16, groups of 32 or more |

The packed order of 4 bits may depend on the processor's instructions. `product_order` names the one that this processor uses by what it
makes of known numbers; whoever stores such a matrix stores the name with it. These operations are not documented, and one of them has been
seen to give wrong numbers for a shape that it accepts. So each shape is tried once on known numbers before it is used; where it is refused
or wrong, `packed` says None and the matrix has to be written out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from moecache.low_bit import LowBit, dequantise

TOLERANCE = 0.02  # of the largest number in the result; bfloat16 keeps 8 bits
ROW_MULTIPLE = 16
CODES, SCALES = ".product_codes", ".product_scales"  # what follows a matrix's name where both are stored


class PackedMatrix:
    """A matrix [N outputs, K inputs] in 8 or 4 bits, as torch multiplies with it.

    Parameters
    ----------
    codes : tensor
        8 bits: int8 [N, K]; 4 bits: uint8 [N, K / 2] in the order of `product_order`. Other bytes in the same memory are another matrix.
    scales : tensor
        8 bits: [N]; 4 bits: [K / group, N, 2], scale and zero. Of the type of inputs and outputs.
    """

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales, self.dtype = codes, scales, scales.dtype
        self.bits = 8 if codes.dtype == torch.int8 else 4
        self.group = codes.shape[1] if self.bits == 8 else 2 * codes.shape[1] // len(scales)

    @classmethod
    def of(cls, low_bit: LowBit, dtype: torch.dtype) -> PackedMatrix:
        """One matrix of `low_bit`, for inputs and outputs of a type."""
        if low_bit.bits == 8:
            return cls((low_bit.codes ^ 128).view(torch.int8), low_bit.scale[:, 0].to(dtype))
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(low_bit.codes.to(torch.int32), 1)
        return cls(codes, torch.stack([low_bit.scale.T, low_bit.zero.T], dim=-1).to(dtype).contiguous())

    @property
    def num_bytes(self) -> int:
        """Memory of codes, scales and zeros."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, self.scales))

    def product(self, inputs: Tensor) -> Tensor:
        """Outputs [n, N] for inputs [n, K]."""
        inputs = inputs.to(self.dtype).contiguous()
        if self.bits == 8:
            return torch.ops.aten._weight_int8pack_mm(inputs, self.codes, self.scales)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, self.codes, self.group, self.scales)


def packed(low_bit: LowBit, dtype: torch.dtype) -> PackedMatrix | None:
    """The matrix for products without writing it out; None where torch cannot, or not rightly."""
    is_there = low_bit.codes.device.type == "cpu" and is_right(*low_bit.codes.shape, low_bit.bits, low_bit.group, dtype)
    return PackedMatrix.of(low_bit, dtype) if is_there else None


@cache
def is_right(num_outputs: int, num_inputs: int, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether torch multiplies a matrix of this form rightly; tried on known numbers.

    Parameters
    ----------
    num_outputs, num_inputs : int
        N and K.
    bits, group : of `LowBit`.
    dtype : of inputs and outputs.
    """
    if bits not in (8, 4) or num_inputs % ROW_MULTIPLE or num_inputs % group:
        return False
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=random).to(torch.uint8)
    scale = torch.rand(num_outputs, num_inputs // group, generator=random).to(torch.bfloat16)
    zero = torch.zeros_like(scale) if bits == 8 else torch.rand(scale.shape, generator=random).to(torch.bfloat16)
    inputs = torch.randn(1, num_inputs, generator=random).to(dtype)
    tried = LowBit(codes, scale, zero, bits, group)
    try:
        found = PackedMatrix.of(tried, dtype).product(inputs).to(torch.float32)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = inputs.to(torch.float32) @ dequantise(tried).T
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


@cache
def product_order(bits: int) -> str:
    """The name of the order in which this processor's products want codes: equal names, equal bytes.

    8 bits have one order for all. That of 4 bits is named by a hash of what torch makes of known codes, whole blocks and a rest.

    Raises
    ------
    ValueError : this processor has no product in so many bits.
    """
    if bits == 8:
        return "rows"
    codes = torch.randint(0, 16, (208, 64), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    try:
        found = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"torch {torch.__version__} has no packed product in {bits} bits on this processor: {error}") from error
    return hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]


def with_products(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | PackedMatrix]:
    """Tensors by name, each pair of stored codes and scales as the matrix that it is."""
    made: dict[str, Tensor | PackedMatrix] = {
        name.removesuffix(CODES): PackedMatrix(codes, tensors[name.removesuffix(CODES) + SCALES])
        for name, codes in tensors.items()
        if name.endswith(CODES)
    }
    return made | {name: tensor for name, tensor in tensors.items() if not name.endswith((CODES, SCALES))}
