"""Experts that stay in few bits in their slots: the operands of torch's own products, and nothing else."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import tiny_checkpoints
import torch
from tiny_models import lively

import moecache as mc
from moecache import hf_internals
from moecache.low_bit import quantise
from moecache.packed_products import PackedMatrix, product_order, with_products
from moecache.runtime.low_bit_experts import LowBitExperts
from moecache.runtime.plan import plan
from moecache.stores import product_blocks
from moecache.stores.blocks import StoreError, aligned_bytes
from moecache.stores.pack import pack
from moecache.stores.packed_file import PackedStore
from moecache.stores.store import open_store

TEXT = np.random.default_rng(3).integers(0, 90, 40)
SLOTS = 4


@pytest.fixture(scope="module")
def model():
    """As tiny as the products allow: outputs in multiples of 16, groups of 32 or more."""
    small = tiny_checkpoints.FAMILIES["granitemoe"]()
    small.config.intermediate_size = 64
    return lively(type(small), small.config, 0)


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    return tiny_checkpoints.save(model, tmp_path_factory.mktemp("source"))


def _packed(source, folder, bits, order="products"):
    return pack(source, folder / f"{order}-{bits}", bits=bits, progress=False, order=order)


def _logits(folder, policy=mc.FETCH_EVERY_MISS, num_slots=SLOTS, tokens=TEXT):
    model = mc.offload(folder, policy, num_slots)
    with closing(model.moecache) as runtime:
        return runtime.read(tokens, keep_logits=True).extra["logits"], runtime.stats()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_holds_the_operands_of_the_rounded_matrix(model, source, tmp_path, bits):
    with closing(open_store(_packed(source, tmp_path, bits))) as store:
        block = aligned_bytes(store.layout.block_bytes)
        found = with_products(store.layout.views(torch.from_numpy(block)))
        for layer in range(store.num_layers):
            experts = hf_internals.moe_layers(model)[layer].experts
            for expert in range(store.num_experts):
                store.read(layer, expert, block)  # other bytes under the same views are another expert
                for name, weight in experts.named_parameters():
                    meant = PackedMatrix.of(quantise(weight[expert], bits), weight.dtype)
                    inputs = torch.randn(2, weight.shape[-1], generator=torch.Generator().manual_seed(0))
                    assert (found[name].bits, found[name].group) == (meant.bits, meant.group)
                    assert torch.equal(found[name].product(inputs), meant.product(inputs))


@pytest.mark.parametrize("bits", [8, 4])
def test_slots_of_few_bits_decode_as_the_written_out_weights_do(source, tmp_path, bits):
    expected, _ = _logits(_packed(source, tmp_path, bits, "plain"))
    found, stats = _logits(_packed(source, tmp_path, bits))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    assert stats["fetched"] > 10


def test_a_fetch_moves_and_a_slot_takes_the_few_bits_only(source, tmp_path):
    _, full = _logits(source)
    _, plain = _logits(_packed(source, tmp_path, 4, "plain"))
    _, products = _logits(_packed(source, tmp_path, 4))
    assert products["fetched"] == plain["fetched"]
    with closing(PackedStore(tmp_path / "products-4")) as store:
        assert store.layout.block_bytes < store.header.full_layout.block_bytes
        assert products["bytes_demand"] == products["fetched"] * store.layout.block_bytes
        assert full["bytes_demand"] == full["fetched"] * store.header.full_layout.block_bytes


def test_a_prompt_in_chunks_is_the_same_as_token_by_token(source, tmp_path):
    folder = _packed(source, tmp_path, 4)
    expected, _ = _logits(folder)
    model = mc.offload(folder, mc.FETCH_EVERY_MISS, SLOTS, chunk_tokens=16)
    with torch.no_grad(), closing(model.moecache):
        found = model(input_ids=torch.tensor(TEXT[None])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_the_order_is_recorded_and_that_of_another_processor_refused(source, tmp_path, monkeypatch):
    folder = _packed(source, tmp_path, 4)
    with closing(PackedStore(folder)) as store:
        assert store.header.order == product_order(4) != product_order(8)
    monkeypatch.setattr(product_blocks, "product_order", lambda bits: "another")
    with pytest.raises(StoreError, match=rf"in order {product_order(4)} .* in order another: pack the checkpoint again here"):
        open_store(folder)
    open_store(_packed(source, tmp_path, 4, "plain")).close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bits": 16, "order": "products"}, "choose bits=8 or bits=4"),
        ({"bits": 4, "order": "sideways"}, "'sideways' is unknown"),
        ({"bits": 3, "order": "products"}, "bits=3"),
    ],
)
def test_what_makes_no_sense_is_refused(source, tmp_path, given, told):
    with pytest.raises(ValueError, match=told):
        pack(source, tmp_path / "packed", progress=False, **given)
    assert not (tmp_path / "packed").exists()


def test_matrices_that_torch_cannot_multiply_with_are_named(tmp_path):
    source = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["qwen3_moe"](), tmp_path / "source")
    with pytest.raises(ValueError, match=r"does not multiply (gate_up|down)_proj \[\d+, \d+\] in 4 bits .* pack in the plain order"):
        pack(source, tmp_path / "packed", bits=4, progress=False, order="products")
    assert not (tmp_path / "packed").exists()


def test_copies_for_low_precision_are_made_from_the_plain_order(source, tmp_path):
    with closing(PackedStore(_packed(source, tmp_path, 4))) as store, pytest.raises(ValueError, match="plain order"):
        LowBitExperts.packed(store, store.header)


def test_a_plan_counts_the_slots_of_a_packed_folder(source, tmp_path):
    folder = _packed(source, tmp_path, 4)
    with closing(PackedStore(folder)) as store:
        block_bytes = store.layout.block_bytes
    asked = {"memory": "10 MiB", "reserve": 0, "hardware": "nvme", "context_tokens": 10}
    found = plan(folder, **asked)
    assert found.block_bytes == block_bytes == plan(source, bits=4, **asked).block_bytes < plan(source, **asked).block_bytes
