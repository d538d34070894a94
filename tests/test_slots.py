"""Blocks of memory: aligned, taken once, seen through views that outlive what is in them."""

from __future__ import annotations

import pytest
import torch

from moecache.runtime import slots
from moecache.runtime.slots import PoolTooLarge, SlotPool
from moecache.stores.blocks import ALIGNMENT, BlockLayout

LAYOUT = BlockLayout.of({"gate_up_proj": ((6, 5), "bfloat16"), "down_proj": ((5, 3), "float32")})


def test_every_block_starts_at_a_page():
    pool = SlotPool(LAYOUT, 5)
    assert len(pool) == 5
    assert [block.data_ptr() % ALIGNMENT for block in pool.blocks] == [0] * 5
    assert {block.numel() for block in pool.blocks} == {LAYOUT.block_bytes}
    assert pool.num_bytes == 5 * LAYOUT.block_bytes


def test_blocks_do_not_overlap_and_views_see_what_is_written_to_them():
    pool = SlotPool(LAYOUT, 3)
    for number, block in enumerate(pool.blocks):
        block.fill_(number)
    assert [set(block.tolist()) for block in pool.blocks] == [{0}, {1}, {2}]
    pool.blocks[1][:60].view(torch.bfloat16).fill_(2.5)
    assert torch.equal(pool.views[1]["gate_up_proj"], torch.full((6, 5), 2.5, dtype=torch.bfloat16))
    assert pool.views[0]["gate_up_proj"].data_ptr() == pool.blocks[0].data_ptr()


def test_memory_that_is_not_there_is_refused_before_it_is_touched(monkeypatch):
    monkeypatch.setattr(slots, "free_bytes", lambda device: 10 * LAYOUT.block_bytes)
    SlotPool(LAYOUT, 10)
    with pytest.raises(PoolTooLarge, match=r"slots need .* GiB of cpu memory, of which .* GiB are free; ask for fewer slots"):
        SlotPool(LAYOUT, 11)


def test_memory_that_the_system_promises_and_does_not_give_is_refused(monkeypatch):
    monkeypatch.setattr(slots, "free_bytes", lambda device: None)
    with pytest.raises(PoolTooLarge, match="ask for fewer slots"):
        SlotPool(LAYOUT, 2**60 // LAYOUT.block_bytes)


def test_free_memory_is_read_from_the_system():
    free = slots.free_bytes("cpu")
    assert free is None or 2**20 < free < 2**50
