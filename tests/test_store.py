"""Blocks and the stores that hold them: what is read is what was stored, and what cannot be read is said."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch

from moecache import hf_internals
from moecache.blocks import ALIGNMENT, BlockLayout, StoreError, aligned_bytes
from moecache.store import RamStore


@pytest.fixture(scope="module")
def model():
    return tiny_models.qwen3_moe()


def test_a_layout_keeps_tensors_apart_and_aligned():
    layout = BlockLayout.of({"a": ((3, 5), "bfloat16"), "b": ((7,), "uint8"), "c": ((2, 2), "float32")})
    assert [(spec.offset, spec.num_bytes) for spec in layout.tensors] == [(0, 30), (64, 7), (128, 16)]
    assert layout.block_bytes == ALIGNMENT
    assert layout.expert_bytes == 53
    assert BlockLayout.from_dict(layout.to_dict()) == layout


def test_views_are_the_bytes_of_the_block():
    layout = BlockLayout.of({"a": ((2, 3), "float32"), "b": ((4,), "bfloat16")})
    block = torch.zeros(layout.block_bytes + 64, dtype=torch.uint8)
    views = layout.views(block)
    views["a"].copy_(torch.arange(6.0).view(2, 3))
    views["b"].fill_(2.0)
    assert block[:24].view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert block[64:72].view(torch.bfloat16).tolist() == [2.0] * 4


@pytest.mark.parametrize("change", [{"block_bytes": 100}, {"block_bytes": 8192 + 1}, {"offset": 8192}, {"num_bytes": 3}, {"dtype": "x"}])
def test_a_layout_that_cannot_be_is_refused(change):
    values = BlockLayout.of({"a": ((2, 3), "float32")}).to_dict()
    if "block_bytes" in change:
        values.update(change)
    else:
        values["tensors"][0].update(change)
    with pytest.raises(ValueError, match="block"):
        BlockLayout.from_dict(values)


def test_wrong_tensors_and_blocks_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        BlockLayout.of({})
    with pytest.raises(ValueError, match="'float64'"):
        BlockLayout.of({"a": ((2,), "float64")})
    with pytest.raises(ValueError, match="4096 or more"):
        BlockLayout.of({"a": ((2,), "float32")}).views(torch.zeros(64, dtype=torch.uint8))


def test_aligned_bytes_are_aligned():
    assert all(aligned_bytes(n).__array_interface__["data"][0] % ALIGNMENT == 0 for n in (1, 4096, 10_000))


def test_a_store_in_memory_holds_the_model_s_experts(model):
    store = RamStore.from_model(model)
    assert (store.num_layers, store.num_experts) == (2, 12)
    out = aligned_bytes(store.layout.block_bytes)
    for layer, module in enumerate(hf_internals.moe_layers(model)):
        for expert in range(store.num_experts):
            store.read(layer, expert, out)
            views = store.layout.views(torch.from_numpy(out))
            assert set(views) == {"gate_up_proj", "down_proj"}
            assert all(torch.equal(view, getattr(module.experts, name)[expert]) for name, view in views.items())
    assert store.counters.to_dict()["num_reads"] == 24
    assert store.counters.num_bytes == 24 * store.layout.block_bytes


def test_parts_of_a_block_make_the_whole(model):
    store = RamStore.from_model(model)
    whole, parts = np.zeros(store.layout.block_bytes, np.uint8), np.zeros(store.layout.block_bytes, np.uint8)
    store.read(1, 3, whole)
    for first in range(0, store.layout.block_bytes, 1000):
        store.read(1, 3, parts, first, min(1000, store.layout.block_bytes - first))
    assert np.array_equal(whole, parts)


def test_a_copy_of_a_store_is_equal(model):
    store = RamStore.from_model(model)
    copy = RamStore.from_store(store, progress=False)
    assert all(np.array_equal(copy.block(layer, e), store.block(layer, e)) for layer in range(2) for e in range(12))


@pytest.mark.parametrize(
    ("asked", "told"),
    [((2, 0), "outside 2 layers"), ((0, 12), "12 experts"), ((0, 0, 0, 10**9), "outside a block"), ((-1, 0), "layer -1")],
)
def test_what_does_not_exist_is_refused(model, asked, told):
    store = RamStore.from_model(model)
    layer, expert, *part = asked
    with pytest.raises(ValueError, match=told):
        store.read(layer, expert, np.zeros(store.layout.block_bytes, np.uint8), *part)


def test_a_wrong_array_is_refused(model):
    store = RamStore.from_model(model)
    with pytest.raises(ValueError, match="bytes or more"):
        store.read(0, 0, np.zeros(store.layout.block_bytes - 1, np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        RamStore(store.layout, np.zeros((2, 3, 5), np.uint8))


def test_a_closed_store_says_so(model):
    store = RamStore.from_model(model)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.read(0, 0, np.zeros(store.layout.block_bytes, np.uint8))
