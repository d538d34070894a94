"""Low-bit copies: the stated form by hand and against torch's packed products, clipping, bytes, and a model put back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import documents, olmoe, qwen3_next

import moecache as mc
from moecache import hf_internals
from moecache.families import model_shape
from moecache.low_bit import (
    BITS,
    dequantise,
    low_bit_copies,
    low_bit_expert_bytes,
    num_bytes,
    quantise,
    quantised_model,
    round_trip,
)


def matrix(rows=24, columns=128, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_is_its_code_times_scale_plus_zero(bits):
    low = quantise(matrix(), bits)
    value, codes = dequantise(low), low.codes.numpy().astype(np.float64)
    for row, column in ((0, 0), (3, 63), (3, 64), (23, 127)):
        group = 0 if bits == 8 else column // 64
        scale, zero = float(low.scale[row, group]), float(low.zero[row, group])
        assert float(value[row, column]) == pytest.approx((codes[row, column] - 2 ** (bits - 1)) * scale + zero, rel=1e-6)
    assert low.codes.max() <= 2**bits - 1
    assert low.scale.dtype == low.zero.dtype == torch.bfloat16


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_to_the_nearest_code(bits):
    """No other code of the same scale and zero is nearer, for any weight."""
    weight = matrix(4, 128)
    low = quantise(weight, bits)
    levels = torch.arange(2**bits)
    columns = torch.arange(128) // low.group
    scale, zero = low.scale.float()[:, columns], low.zero.float()[:, columns]
    distance = ((levels - 2 ** (bits - 1)) * scale[..., None] + zero[..., None] - weight[..., None]).abs()
    assert torch.allclose(distance.gather(-1, low.codes.long()[..., None])[..., 0], distance.amin(-1), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_clipping_lowers_the_squared_error_and_few_bits_cost_more(bits, monkeypatch):
    weight = matrix()
    clipped = (round_trip(weight, bits) - weight).square().mean()
    assert clipped > (round_trip(weight, 8) - weight).square().mean() * 10
    monkeypatch.setattr("moecache.low_bit.SHRINKING", (1.0,))
    plain = (round_trip(weight, bits) - weight).square().mean()
    assert clipped < plain * (0.97 if bits > 2 else 0.7)


def test_errors_of_gaussian_matrices_are_the_known_ones():
    weight = matrix(64, 512)
    errors = [float((round_trip(weight, bits) - weight).norm() / weight.norm()) for bits in BITS]
    assert errors[0] < 0.008
    assert 0.07 < errors[1] < 0.12
    assert 0.14 < errors[2] < 0.22
    assert 0.28 < errors[3] < 0.40


def test_four_bits_are_the_packed_products_numbers():
    weight, x = matrix(32, 128), matrix(3, 128, seed=1)
    low = quantise(weight, 4)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(low.codes.to(torch.int32), 1)
    scales_and_zeros = torch.stack([low.scale.T, low.zero.T], dim=-1).contiguous().float()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales_and_zeros)
    torch.testing.assert_close(product, x @ dequantise(low).T, rtol=1e-4, atol=1e-4)


def test_eight_bits_are_the_packed_products_numbers():
    weight, x = matrix(32, 96), matrix(3, 96, seed=1)
    low = quantise(weight, 8)
    assert (low.zero == 0).all()
    product = torch.ops.aten._weight_int8pack_mm(x, (low.codes.to(torch.int16) - 128).to(torch.int8), low.scale[:, 0].float())
    torch.testing.assert_close(product, x @ dequantise(low).T, rtol=1e-4, atol=1e-4)


def test_groups_that_do_not_divide_the_inputs_and_constant_groups():
    weight = matrix(5, 100)
    low = quantise(weight, 4)
    assert low.scale.shape == (5, 2)
    alone = quantise(weight[:, 64:], 4)
    assert torch.equal(low.codes[:, 64:], alone.codes)
    assert torch.equal(dequantise(low)[:, 64:], dequantise(alone))
    assert torch.equal(round_trip(torch.full((2, 64), 0.5), 3), torch.full((2, 64), 0.5))
    assert torch.equal(round_trip(torch.zeros(2, 64), 8), torch.zeros(2, 64))


def test_rows_in_pieces_give_the_same(monkeypatch):
    weight = matrix(3, 40).reshape(3, 1, 40).expand(3, 4, 40)
    whole = quantise(weight, 2)
    monkeypatch.setattr("moecache.low_bit.WEIGHTS_AT_ONCE", 90)
    pieces = quantise(weight, 2)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.scale, pieces.scale)


def test_bytes_count_codes_scales_and_zeros():
    assert num_bytes(1, 64, 4) == 32 + 4
    assert num_bytes(2, 100, 3) == 75 + 2 * 2 * 4
    assert num_bytes(3, 100, 8) == 300 + 6
    shape = model_shape(olmoe())
    assert shape.expert_bytes is not None
    expected = num_bytes(32, 32, 4) + num_bytes(32, 16, 4)
    assert low_bit_expert_bytes(olmoe(), 4) == expected < shape.expert_bytes / 4
    real = 2 * num_bytes(512, 2048, 4) + num_bytes(2048, 512, 4)
    assert real == 3 * 512 * 2048 * 4.5 / 8  # 4.5 bits a weight: 1.69 MiB


def test_copies_leave_the_model_alone_and_share_nothing_that_changes():
    model = qwen3_next()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    copies = low_bit_copies(model, 2)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    layer = hf_internals.moe_layers(model)[0]
    assert not torch.equal(copies.layers[0].down_proj, layer.experts.down_proj)
    assert torch.equal(copies.layers[0].down_proj, round_trip(layer.experts.down_proj, 2))
    assert layer.experts.down_proj.requires_grad


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_quantised_model_is_put_back(bits):
    model, text = qwen3_next(), documents()[0]
    exact = mc.emulate(model, text, mc.FETCH_EVERY_MISS, 6, keep_logits=True).extra["logits"]
    with quantised_model(model, bits):
        rounded = mc.emulate(model, text, mc.FETCH_EVERY_MISS, 6, keep_logits=True).extra["logits"]
        experts = hf_internals.moe_layers(model)[1].experts
        once = experts.down_proj.clone()
    again = mc.emulate(model, text, mc.FETCH_EVERY_MISS, 6, keep_logits=True).extra["logits"]
    assert np.array_equal(again, exact)
    assert 1e-4 < np.abs(rounded - exact).mean() < 2
    assert torch.equal(once, round_trip(experts.down_proj, bits))


def test_what_a_quantised_model_spares():
    model = qwen3_next()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with quantised_model(model, 4):
        same = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert not any("experts" in name or name.endswith(("q_proj.weight", "out_proj.weight")) for name in same)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= same
    assert any(name.endswith("shared_expert_gate.weight") for name in same)
    with quantised_model(model, 4, is_dense_rounded=False):
        changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert all("mlp.experts" in name for name in changed)


def test_impossible_roundings_are_refused():
    with pytest.raises(ValueError, match="low_bits=5 is unknown; choose one of 8, 4, 3, 2 bits"):
        low_bit_copies(olmoe(), 5)
    with pytest.raises(ValueError, match="must be finite"):
        quantise(torch.tensor([[1.0, float("nan")]]), 4)
