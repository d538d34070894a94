"""`LayerSource`: hands out the weights of one layer's experts, those in place first, in the forward that is running.

What was decided is written into it beforehand. Routers, policies and the kernel are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

from torch import Tensor

from moecache.expert_sum import Weights
from moecache.runtime.low_bit_experts import LowBitExperts
from moecache.runtime.residency import Residency


@dataclass
class Chunk:
    """Some tokens of a prompt at one layer: what they call, whose copies arrive, and who is resident after them."""

    rows: slice
    needed: list[int]
    landed: list[int]
    after: list[int]


class LayerSource:
    """The weights of one layer's experts for the forward that is running (`ExpertSource`)."""

    def __init__(self, layer: int, residency: Residency, low_bit: LowBitExperts | None) -> None:
        self.layer, self.residency, self.low_bit = layer, residency, low_bit
        self.blocks: list[tuple[int, int]] = []  # (call, block) of the one token
        self.others: list[tuple[int, int]] = []  # (call, expert) that a low-bit copy computes, or -1: dropped
        self.aside: list[int] = []  # blocks of experts that are computed and not kept
        self.parts: list[Chunk] = []

    def calls(self, ids: Tensor) -> Iterator[tuple[int, Weights | None]]:
        """The token's calls, those in place first."""
        seconds = 0.0
        try:
            for computed in self._in_order():
                start = perf_counter()
                yield computed
                seconds += perf_counter() - start
        finally:
            self.residency.counters.seconds_experts += seconds
        for block in self.aside:
            self.residency.release(block)
        self.aside.clear()

    def _in_order(self) -> Iterable[tuple[int, Weights | None]]:
        residency = self.residency
        here, late = residency.in_place(self.blocks)
        if not (late or self.others):
            return here
        # One by one: low-bit copies of a layer share the tensors that they are written out to.
        others = ((call, None if expert < 0 else self._copy_of(expert)) for call, expert in self.others)
        return chain(others, here, ((call, residency.weights(block)) for call, block in late))

    def _copy_of(self, expert: int) -> Weights:
        assert self.low_bit is not None
        return self.low_bit.weights(self.layer, expert)

    def chunks(self, num_tokens: int) -> list[slice]:
        """The chunks that were decided."""
        return [part.rows for part in self.parts]

    def experts(self, chunk: int, ids: Tensor) -> Iterator[tuple[int, Weights]]:
        """Every expert of a chunk, each read once where it is not in place."""
        part = self.parts[chunk]
        for expert, weights in self.residency.stream(self.layer, part.needed, part.after, part.landed):
            start = perf_counter()
            yield expert, weights
            self.residency.counters.seconds_experts += perf_counter() - start
