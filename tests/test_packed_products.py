"""Products with matrices in few bits are those of the written-out matrix, or are not used."""

import pytest
import torch

from moecache.low_bit import dequantise, quantise
from moecache.packed_products import is_right, packed

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 128), (16, 32), (48, 64)])
def test_a_packed_product_is_that_of_the_written_out_matrix(num_outputs, num_inputs, bits, dtype):
    random = torch.Generator().manual_seed(1)
    rounded = quantise(torch.randn(num_outputs, num_inputs, generator=random), bits)
    inputs = torch.randn(3, num_inputs, generator=random).to(dtype)
    matrix = packed(rounded, dtype)
    assert matrix is not None
    expected = inputs.to(torch.float32) @ dequantise(rounded).T
    found = matrix.product(inputs)
    assert found.dtype == dtype
    assert (found.to(torch.float32) - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert matrix.codes.numel() == num_outputs * num_inputs * bits // 8


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "bits"),
    [(8, 32, 4), (24, 64, 4), (32, 16, 4), (16, 100, 4), (24, 40, 8), (16, 64, 3)],
)
def test_shapes_that_torch_refuses_or_gets_wrong_are_left_to_be_written_out(num_outputs, num_inputs, bits):
    assert packed(quantise(torch.randn(num_outputs, num_inputs), bits), torch.bfloat16) is None


def test_a_wrong_kernel_is_noticed(monkeypatch):
    right = torch.ops.aten._weight_int8pack_mm
    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", lambda *operands: 1.5 * right(*operands))
    is_right.cache_clear()
    assert packed(quantise(torch.randn(16, 32), 8), torch.float32) is None
    is_right.cache_clear()
