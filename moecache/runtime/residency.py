"""`Residency`: which block of memory holds which expert, so that what the kernel decided becomes true.

The kernel moves numbers: expert 7 is in slot 3 of layer 2. Here a slot is an index of a block, and landing is a change of index, no copy:
a background copy fills a *staging* block, which nobody computes from, and when it lands, staging block and victim's block change places. A
fetch reads straight into the victim's block.

Every block knows the expert that it holds or is about to hold, and the ticket of a copy under way into it. Three rules follow. Before a
block is computed from, its ticket is waited for. Before a block is overwritten, its ticket is settled. And a block that does not hold what
its slot says (a copy failed, there was no free block to stage it) is read when it is needed: a stall, never another expert's weights.

Policies, tokens and routers are not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from time import perf_counter

from moecache.expert_sum import Weights
from moecache.runtime.counters import Counters
from moecache.runtime.slots import SlotPool
from moecache.runtime.transfer import FetchError, Ticket, Transfer

Expert = tuple[int, int]  # layer, expert
WINDOW = 8  # reads of a prompt's experts in flight together


class Residency:
    """Blocks and what is in them.

    Parameters
    ----------
    pool : at least one block a slot, and `num_reserved` more.
    transfer : fills blocks.
    num_slots : [L] slots of each layer.
    num_reserved : free blocks that background copies leave alone, at least 1: for prompts, and for experts that are computed but not kept.
    counters : filled in.
    """

    def __init__(self, pool: SlotPool, transfer: Transfer, num_slots: Sequence[int], num_reserved: int, counters: Counters) -> None:
        self.pool, self.transfer, self.counters, self.num_reserved = pool, transfer, counters, num_reserved
        self.block_of_slot: list[list[int]] = [[-1] * int(number) for number in num_slots]
        self._names = [[(layer, expert) for expert in range(transfer.store.num_experts)] for layer in range(len(num_slots))]
        self.holds: list[Expert | None] = [None] * len(pool)  # of `_names`, so that `is` compares them
        self._tickets: list[Ticket | None] = [None] * len(pool)
        self._sources: list[str] = [""] * len(pool)
        self._is_unused = [False] * len(pool)  # brought in the background, and not computed from since
        self._staged: dict[Expert, int] = {}
        self._free = list(range(len(pool)))

    # One token

    def land(self, layer: int, expert: int, slot: int) -> None:
        """Make a background copy resident in a slot, or let go of it where `slot` is -1; where it was never begun, read it when needed."""
        block = self._staged.pop((layer, expert), None)
        if block is None:
            if slot >= 0:
                self._empty(self.block_of_slot[layer][slot])
        elif slot < 0:
            self._waste(block)
            self._free.append(block)
        else:
            old, self.block_of_slot[layer][slot] = self.block_of_slot[layer][slot], block
            self._waste(old)
            self._free.append(old)

    def fetch(self, layer: int, expert: int, slot: int, source: str = "demand") -> int:
        """Ask for an expert in a slot, or in a block of its own where `slot` is -1 (then `release` it); returns the block."""
        if slot >= 0 and (layer, expert) in self._staged:
            self.land(layer, expert, slot)
            return self.block_of_slot[layer][slot]
        block = self.block_of_slot[layer][slot] if slot >= 0 else self._free.pop()
        self._read_into(block, layer, expert, source)
        return block

    def residents(self, layer: int, calls: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
        """(call, block) of rows (call, expert, slot, outcome) that the kernel says are in place; read now where they are not after all."""
        block_of_slot, holds, names, blocks = self.block_of_slot[layer], self.holds, self._names[layer], []
        for call, expert, slot, _ in calls:
            block = block_of_slot[slot]
            if holds[block] is not names[expert]:
                self._read_into(block, layer, expert, "demand")
            blocks.append((call, block))
        return blocks

    def ask(self, layer: int, expert: int) -> None:
        """Begin a background copy into a staging block, if one is free."""
        if (layer, expert) in self._staged:
            return
        if len(self._free) <= self.num_reserved:
            self.counters.num_without_staging += 1
            return
        block = self._free.pop(0)
        self._read_into(block, layer, expert, "background")
        self._staged[layer, expert] = block

    def is_staged(self, layer: int, expert: int) -> bool:
        """True while a background copy of the expert is under way or waits to land."""
        return (layer, expert) in self._staged

    def release(self, block: int) -> None:
        """Give back a block that `fetch` took for itself."""
        self._free.append(block)

    def in_place(self, calls: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, Weights]], list[tuple[int, int]]]:
        """(call, tensors) of those (call, block) that can be computed from without waiting, and the others as they came."""
        tickets, views, here, late = self._tickets, self.pool.views, [], []
        for call, block in calls:
            ticket = tickets[block]
            if ticket is None:
                self._is_unused[block] = False
                here.append((call, views[block]))
            elif ticket.is_done:
                here.append((call, self.weights(block)))
            else:
                late.append((call, block))
        return here, late

    def weights(self, block: int) -> Weights:
        """The tensors in a block, after waiting for them where that is needed.

        Raises
        ------
        FetchError : they could not be read; the block is empty afterwards.
        """
        self._is_unused[block] = False
        ticket = self._tickets[block]
        if ticket is not None:
            self._wait(block, ticket)
        return self.pool.views[block]

    # Many tokens

    def stream(
        self, layer: int, needed: Collection[int], after: Sequence[int], landed: Sequence[int] = ()
    ) -> Iterator[tuple[int, Weights]]:
        """Hand out every needed expert of a layer once, reading those that are missing; when done, the slots hold `after`.

        Parameters
        ----------
        needed : experts to compute.
        after : [C] expert that each slot shall hold in the end, -1 = none.
        landed : experts whose background copies arrive meanwhile, kept in the end or not.
        """
        kept, wanted = {expert for expert in after if expert >= 0}, set(needed)
        here, available = self._take(layer, landed)
        present = deque(block for expert, block in sorted(here.items()) if expert in wanted or expert in kept)
        for expert, block in here.items():
            if expert not in wanted and expert not in kept:
                self._waste(block)
                available.append(block)
        missing = deque([*sorted(wanted - kept - set(here)), *sorted(kept - set(here))])  # those that pass through first
        flying: deque[int] = deque()
        block_of: dict[int, int] = {}
        while missing or flying or present:
            while missing and available and len(flying) < WINDOW:
                flying.append(available.pop())
                self._read_into(flying[-1], layer, missing.popleft(), "prefill")
            block = present.popleft() if present else flying.popleft()
            expert = self._expert_in(block)
            if expert in wanted:
                yield expert, self.weights(block)
            if expert in kept:
                block_of[expert] = block
            else:
                available.append(block)
        self.block_of_slot[layer] = [block_of[expert] if expert >= 0 else available.pop() for expert in after]
        self._free = available

    def fill(self, after: Sequence[Sequence[int]]) -> None:
        """Bring about a cold start: whatever the blocks hold, slot s of layer l then holds expert ``after[l][s]``.

        Raises
        ------
        FetchError : an expert could not be read.
        """
        self.settle()
        self._staged.clear()
        unclaimed = {holds: block for block, holds in enumerate(self.holds) if holds is not None}
        wanted = [(layer, slot, int(expert)) for layer, row in enumerate(after) for slot, expert in enumerate(row)]
        kept = {(layer, slot): unclaimed.pop((layer, expert), -1) for layer, slot, expert in wanted}
        taken = {block for block in kept.values() if block >= 0}
        self._free = [block for block in range(len(self.pool)) if block not in taken]
        reading: deque[int] = deque()
        for layer, slot, expert in wanted:
            block = kept[layer, slot] if kept[layer, slot] >= 0 else self._free.pop()
            self.block_of_slot[layer][slot] = block
            if expert >= 0 and self.holds[block] != (layer, expert):
                self._read_into(block, layer, expert, "cold_start")
                reading.append(block)
            if len(reading) > WINDOW:
                self._finish(reading.popleft())
        for block in reading:
            self._finish(block)

    def settle(self) -> None:
        """Stop every copy under way."""
        for block in range(len(self.holds)):
            if self._tickets[block] is not None:
                self._empty(block)

    # Blocks

    def _read_into(self, block: int, layer: int, expert: int, source: str) -> None:
        if self._tickets[block] is not None or self._is_unused[block]:
            self._empty(block)
        self.holds[block] = None  # until it has been asked for
        begin = self.transfer.copy if source == "background" else self.transfer.fetch
        self._tickets[block] = begin(layer, expert, self.pool.blocks[block])
        self.holds[block], self._sources[block], self._is_unused[block] = self._names[layer][expert], source, source == "background"

    def _empty(self, block: int) -> None:
        """Make sure that nobody writes to a block any more, and that nobody believes it to hold an expert."""
        self._waste(block)
        ticket = self._tickets[block]
        if ticket is not None:
            self.transfer.settle(ticket)
            self._retire(block, ticket)
        self.holds[block] = None

    def _waste(self, block: int) -> None:
        """The block's expert leaves: note it if it was brought for nothing."""
        if self._is_unused[block]:
            self._is_unused[block] = False
            self.counters.num_wasted += 1
            ticket = self._tickets[block]
            self.counters.wasted_bytes += self.pool.layout.block_bytes if ticket is None else ticket.num_bytes

    def _wait(self, block: int, ticket: Ticket) -> None:
        if not ticket.is_done:
            self.counters.num_stalls += 1
            self.counters.num_late += ticket.is_background
        start, before = perf_counter(), self.counters.seconds_waiting
        try:
            self.transfer.wait(ticket)
        except FetchError:
            expert, self.holds[block] = self.holds[block], None
            self._retire(block, ticket)
            if not ticket.is_background or expert is None:
                raise
            self._read_into(block, *expert, "demand")  # nobody was waiting when it failed; now somebody is
            self._finish(block)
        else:
            self._retire(block, ticket)
        finally:
            self.counters.seconds_waiting = before + perf_counter() - start

    def _finish(self, block: int) -> None:
        ticket = self._tickets[block]
        if ticket is not None:
            self._wait(block, ticket)

    def _retire(self, block: int, ticket: Ticket) -> None:
        self._tickets[block] = None
        self.counters.num_failed_copies += ticket.error is not None
        self.counters.add_read(self._sources[block], ticket.num_bytes)

    def _expert_in(self, block: int) -> int:
        holds = self.holds[block]
        assert holds is not None
        return holds[1]

    def _take(self, layer: int, landed: Sequence[int]) -> tuple[dict[int, int], list[int]]:
        """Blocks that hold a layer's experts, by expert, and blocks that are free: together all that the layer may use."""
        here, available = {}, self._free
        self._free = []
        arrived = [self._staged.pop((layer, expert)) for expert in landed if (layer, expert) in self._staged]
        for block in [*self.block_of_slot[layer], *arrived]:
            holds = self.holds[block]
            if holds is not None and holds[0] == layer and holds[1] not in here:
                here[holds[1]] = block
            else:
                available.append(block)
        return here, available
