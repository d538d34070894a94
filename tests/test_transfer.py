"""Copies of experts: they arrive whole, demand goes first, nothing waits for ever, failures surface."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from moecache.runtime.slots import SlotPool
from moecache.runtime.transfer import FetchError, Transfer
from moecache.stores.blocks import BlockLayout, StoreCounters

LAYOUT = BlockLayout.of({"gate_up_proj": ((32, 256), "float32"), "down_proj": ((256, 16), "float32")})
UNIT = 4096
PATIENCE_SECONDS = 30  # of a test that would otherwise hang; none of them waits that long when it passes


class GatedStore:
    """Blocks full of one number each, handed out only while the expert's gate is open."""

    def __init__(self, layout: BlockLayout = LAYOUT) -> None:
        self.layout, self.num_layers, self.num_experts, self.alignment = layout, 4, 8, 1
        self.counters = StoreCounters()
        self.gates = {(layer, expert): threading.Event() for layer in range(4) for expert in range(8)}
        self.began = {key: threading.Event() for key in self.gates}
        self.broken: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int, int]] = []
        for gate in self.gates.values():
            gate.set()

    def read(self, layer, expert, out, first_byte=0, num_bytes=None):
        num_bytes = self.layout.block_bytes - first_byte if num_bytes is None else num_bytes
        self.reads.append((layer, expert, num_bytes))
        self.began[layer, expert].set()
        assert self.gates[layer, expert].wait(PATIENCE_SECONDS)
        if (layer, expert) in self.broken:
            raise OSError("unplugged")
        out[first_byte : first_byte + num_bytes] = content(layer, expert)
        self.counters.add(num_bytes)

    def close(self):
        pass


def content(layer, expert):
    return 1 + 8 * layer + expert


@pytest.fixture
def store():
    return GatedStore()


@pytest.fixture
def transfer(store):
    transfer = Transfer(store, num_readers=2, unit_bytes=UNIT)
    yield transfer
    for gate in store.gates.values():
        gate.set()
    transfer.close()


@pytest.fixture
def blocks():
    return SlotPool(LAYOUT, 8).blocks


def holds(block, layer, expert):
    return bool((block == content(layer, expert)).all())


def test_reads_of_one_step_are_in_flight_together(store, transfer, blocks):
    for expert in (0, 1):
        store.gates[0, expert].clear()
    tickets = [transfer.fetch(0, expert, blocks[expert]) for expert in range(3)]
    assert all(store.began[0, expert].wait(PATIENCE_SECONDS) for expert in (0, 1))
    store.gates[0, 1].set()
    transfer.wait(tickets[1])
    transfer.wait(tickets[2])
    assert not tickets[0].is_done
    store.gates[0, 0].set()
    transfer.wait(tickets[0])
    assert all(holds(blocks[expert], 0, expert) for expert in range(3))


def test_background_copies_arrive_in_units(store, transfer, blocks):
    ticket = transfer.copy(1, 2, blocks[0])
    ticket.join()
    assert holds(blocks[0], 1, 2)
    assert ticket.num_bytes == LAYOUT.block_bytes
    assert {num_bytes for _, _, num_bytes in store.reads} == {UNIT}


def test_background_copy_rests_while_a_demand_read_is_out(store, transfer, blocks):
    store.gates[1, 0].clear()
    copy = transfer.copy(1, 0, blocks[0])
    assert store.began[1, 0].wait(PATIENCE_SECONDS)
    store.gates[0, 0].clear()
    demand = transfer.fetch(0, 0, blocks[1])
    assert store.began[0, 0].wait(PATIENCE_SECONDS)
    store.gates[1, 0].set()
    quick = transfer.fetch(0, 1, blocks[2])
    transfer.wait(quick)
    assert not copy.is_done
    assert sum(key[:2] == (1, 0) for key in store.reads) <= 1  # the unit that was under way, and no more
    store.gates[0, 0].set()
    transfer.wait(demand)
    copy.join()
    assert holds(blocks[0], 1, 0)


@pytest.mark.parametrize("has_begun", [True, False])
def test_waiting_for_a_background_copy_promotes_it_past_a_demand_read_that_is_out(store, transfer, blocks, has_begun):
    """Without promotion both wait for ever: the copy for the demand read, and the demand read for the test."""
    if has_begun:
        store.gates[1, 0].clear()
        copy = transfer.copy(1, 0, blocks[0])
        assert store.began[1, 0].wait(PATIENCE_SECONDS)
    store.gates[0, 0].clear()
    demand = transfer.fetch(0, 0, blocks[1])
    assert store.began[0, 0].wait(PATIENCE_SECONDS)
    if has_begun:
        store.gates[1, 0].set()
    else:
        copy = transfer.copy(1, 0, blocks[0])
    waiting = threading.Thread(target=transfer.wait, args=(copy,), daemon=True)
    waiting.start()
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()
    assert not demand.is_done
    assert holds(blocks[0], 1, 0)


def test_settling_stops_a_copy_before_its_block_is_used_again(store, transfer, blocks):
    store.gates[1, 0].clear()
    copy = transfer.copy(1, 0, blocks[0])
    assert store.began[1, 0].wait(PATIENCE_SECONDS)
    settling = threading.Thread(target=transfer.settle, args=(copy,), daemon=True)
    settling.start()
    while not copy.is_cancelled:
        pass
    assert settling.is_alive()  # a unit is still being written
    store.gates[1, 0].set()
    settling.join(PATIENCE_SECONDS)
    assert copy.num_bytes <= UNIT
    transfer.wait(transfer.fetch(2, 3, blocks[0]))
    assert holds(blocks[0], 2, 3)


def test_settling_a_copy_that_rests_or_has_not_begun_does_not_wait_for_the_demand_read(store, transfer, blocks):
    store.gates[0, 0].clear()
    transfer.fetch(0, 0, blocks[1])
    copies = [transfer.copy(1, expert, blocks[2 + expert]) for expert in range(2)]
    for copy in copies:
        transfer.settle(copy)
        assert copy.num_bytes == 0


@pytest.mark.parametrize("lane", ["fetch", "copy"])
def test_failure_in_a_thread_is_raised_by_who_waits_and_the_thread_lives_on(store, transfer, blocks, lane):
    store.broken.add((0, 5))
    ticket = getattr(transfer, lane)(0, 5, blocks[0])
    with pytest.raises(FetchError, match=r"expert 5 of layer 0 could not be read: unplugged"):
        transfer.wait(ticket)
    for _ in range(4):
        ticket = getattr(transfer, lane)(0, 6, blocks[0])
        transfer.wait(ticket)
        assert holds(blocks[0], 0, 6)


def test_closing_joins_the_threads_and_lets_go_of_the_blocks(store):
    before = threading.active_count()
    transfer = Transfer(store, num_readers=3)
    assert threading.active_count() == before + 4
    pool = SlotPool(LAYOUT, 2)
    transfer.wait(transfer.fetch(0, 0, pool.blocks[0]))
    transfer.close()
    transfer.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        transfer.fetch(0, 0, pool.blocks[0])


def test_closing_ends_copies_that_rest(store, blocks):
    transfer = Transfer(store, num_readers=1)
    store.gates[0, 0].clear()
    demand = transfer.fetch(0, 0, blocks[0])
    copy = transfer.copy(1, 0, blocks[1])
    assert store.began[0, 0].wait(PATIENCE_SECONDS)
    closing = threading.Thread(target=transfer.close, daemon=True)
    closing.start()
    copy.join()
    store.gates[0, 0].set()
    closing.join(PATIENCE_SECONDS)
    assert demand.is_done
    assert not closing.is_alive()


def test_random_traffic_leaves_in_every_block_what_was_asked_for_last(store, transfer):
    generator = np.random.default_rng(0)
    pool = SlotPool(LAYOUT, 6)
    last: dict[int, tuple] = {}
    for _ in range(300):
        number, layer, expert = (int(generator.integers(n)) for n in (6, 4, 8))
        if number in last:
            transfer.settle(last[number][0])
        begin = transfer.copy if generator.random() < 0.5 else transfer.fetch
        last[number] = (begin(layer, expert, pool.blocks[number]), layer, expert)
        if generator.random() < 0.3:
            transfer.wait(last[number][0])
    for number, (ticket, layer, expert) in last.items():
        transfer.wait(ticket)
        assert holds(pool.blocks[number], layer, expert)


def test_impossible_sizes_are_refused(store):
    with pytest.raises(ValueError, match="num_readers=0"):
        Transfer(store, num_readers=0)
    assert torch.get_num_threads() >= 1


def test_reads_that_nobody_served_are_ended_by_closing(store, transfer, blocks):
    for expert in range(8):
        store.gates[0, expert].clear()
    tickets = [transfer.fetch(0, expert, blocks[expert]) for expert in range(8)]
    assert all(store.began[0, expert].wait(PATIENCE_SECONDS) for expert in (0, 1))  # both readers are busy
    closing = threading.Thread(target=transfer.close, daemon=True)
    closing.start()
    while not transfer.is_closed:
        closing.join(0.001)
    for expert in (0, 1):
        store.gates[0, expert].set()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert all(ticket.is_done for ticket in tickets)
    assert {expert for _, expert, _ in store.reads} == {0, 1}


def test_every_reader_finds_work_when_one_is_woken(blocks):
    store = GatedStore()
    transfer = Transfer(store, num_readers=4, unit_bytes=UNIT)
    for expert in range(4):
        store.gates[0, expert].clear()
    tickets = [transfer.fetch(0, expert, blocks[expert]) for expert in range(4)]
    assert all(store.began[0, expert].wait(PATIENCE_SECONDS) for expert in range(4))  # four at once
    for expert in range(4):
        store.gates[0, expert].set()
    for ticket in tickets:
        transfer.wait(ticket)
    transfer.close()
