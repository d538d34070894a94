"""Blocks and the stores that hold them: what is read is what was stored, and what cannot be read is said."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import pytest
import tiny_models
import torch

from moecache import hf_internals
from moecache.stores.blocks import ALIGNMENT, BlockLayout, StoreError, aligned_bytes
from moecache.stores.store import HostTier, PacedStore, RamStore


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


def _small_store(num_layers=2, num_experts=8, block_bytes=8192):
    layout = BlockLayout.of({"a": ((block_bytes,), "uint8")})
    blocks = np.random.default_rng(1).integers(0, 256, (num_layers, num_experts, block_bytes)).astype(np.uint8)
    return RamStore(layout, blocks)


def _hits_of_a_plain_lru(keys, num_places):
    held, hits = OrderedDict(), []
    for key in keys:
        hits.append(key in held)
        held[key] = None
        held.move_to_end(key)
        if len(held) > num_places:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("num_places", [1, 3, 7, 16, 40])
def test_a_host_tier_is_an_exact_lru(num_places):
    store = _small_store()
    tier = HostTier(store, num_places * 8192 + 100)
    generator = np.random.default_rng(num_places)
    keys = [(int(generator.integers(2)), int(generator.integers(8) * generator.random())) for _ in range(300)]
    hits, out = [], aligned_bytes(8192)
    for key in keys:
        before = tier.counters.num_hits
        tier.read(*key, out)
        hits.append(tier.counters.num_hits > before)
        assert np.array_equal(out, store.block(*key))
    assert hits == _hits_of_a_plain_lru(keys, num_places)
    assert tier.num_places == min(num_places, 16)
    assert store.counters.num_reads == hits.count(False) == tier.counters.num_misses


def test_a_block_read_in_parts_is_one_use_and_is_read_from_below_once():
    store = _small_store()
    tier = HostTier(store, 3 * 8192)
    out = np.zeros(8192, np.uint8)
    for first in (4096, 0, 6000):
        tier.read(1, 2, out, first, min(4096, 8192 - first))
    assert np.array_equal(out, store.block(1, 2))
    assert (tier.counters.num_hits, tier.counters.num_misses) == (1, 0)  # it had been read up to its end for the first part
    assert store.counters.num_bytes == 8192


def test_threads_share_a_host_tier():
    store = _small_store()
    tier, wrong = HostTier(store, 2 * 8192), []

    def work(seed):
        generator, out = np.random.default_rng(seed), np.zeros(8192, np.uint8)
        for _ in range(200):
            key = int(generator.integers(2)), int(generator.integers(8))
            tier.read(*key, out)
            if not np.array_equal(out, store.block(*key)):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.counters.num_hits + tier.counters.num_misses == 800


def test_a_read_that_fails_below_leaves_the_tier_usable():
    store = _small_store()
    tier, plain = HostTier(store, 8192), store.read

    def broken(*args):
        raise StoreError("the disk is gone")

    store.read = broken
    with pytest.raises(StoreError, match="gone"):
        tier.read(0, 0, np.zeros(8192, np.uint8))
    store.read = plain
    out = np.zeros(8192, np.uint8)
    tier.read(0, 0, out)
    tier.read(1, 1, out)
    assert np.array_equal(out, store.block(1, 1))


def test_a_host_tier_needs_room_and_says_when_it_is_closed():
    with pytest.raises(ValueError, match="4095 bytes holds no block of 8192"):
        HostTier(_small_store(), 4095)
    tier = HostTier(_small_store(), 8192)
    tier.close()
    with pytest.raises(StoreError, match="closed"):
        tier.read(0, 0, np.zeros(8192, np.uint8))


class _Clock:
    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds


def test_a_paced_link_serves_one_read_after_the_other():
    clock = _Clock()
    paced = PacedStore(_small_store(), 0.5, 8192 / 2, lambda: clock.now, clock.sleep)
    out, ends = np.zeros(8192, np.uint8), []
    for expert, (first, size) in enumerate([(0, 8192), (0, 4096), (4096, 4096)]):
        paced.read(0, expert, out, first, size)
        ends.append(clock.now)
    assert ends == [2.5, 4.0, 5.0]
    clock.now = 100.0
    paced.read(0, 0, out)
    assert clock.now == 102.5
    assert paced.label.startswith("emulated link")
    assert paced.num_late == 0


def test_a_paced_link_waits_for_its_turn_and_a_slow_store_is_not_made_faster():
    store, clock = _small_store(), _Clock()
    paced = PacedStore(store, 0.0, 8192, lambda: clock.now, clock.sleep)
    plain = store.read

    def slow(*args):
        clock.now += 3.0
        plain(*args)

    store.read = slow
    paced.read(0, 0, np.zeros(8192, np.uint8))
    assert (clock.now, paced.num_late) == (3.0, 1)
    paced._free_at = 10.0  # another thread's reads are under way until then
    store.read = plain
    paced.read(0, 0, np.zeros(8192, np.uint8))
    assert clock.now == 11.0


def test_links_and_tiers_can_be_stacked():
    store, clock = _small_store(), _Clock()
    disk = PacedStore(store, 0.0, 8192, lambda: clock.now, clock.sleep)
    bus = PacedStore(HostTier(disk, 4 * 8192), 0.0, 8192 * 10, lambda: clock.now, clock.sleep)
    out = np.zeros(8192, np.uint8)
    for expert in (0, 0):
        bus.read(0, expert, out)
    assert clock.now == pytest.approx(1.1)
    assert np.array_equal(out, store.block(0, 0))
    with pytest.raises(ValueError, match="bytes_per_second=0"):
        PacedStore(store, 0.0, 0)
