"""What happens in a forward of an offloaded model: routers are heard, the kernel decides, experts are handed out.

When a router has run, its output goes to the same compiled decision as in the simulator and the emulator. What was decided is carried out
at once as far as it can be: copies that are due land, fetches and background copies are asked for. The experts module runs a little later
and gets the weights call by call, those in place first, while the others are on their way.

One token is one step of decoding. Several tokens in one forward are a prompt: they pass through the kernel in order with every miss waited
for, and then, in chunks, each expert that a chunk calls is brought once. Decoding goes on from the residency so reached.

Which memory an expert lies in is known to `Residency`; models, files and devices are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.expert_sum import Weights
from moecache.experts import replaced_rows, reroute
from moecache.families import Family, Routing, check_router, routing_of
from moecache.foresight import Foresight
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.kernel import Admission, Landing, Outcome
from moecache.low_bit_experts import LowBitExperts
from moecache.policy import WeightRule
from moecache.residency import Residency
from moecache.trace import DecisionLog

HIT, FETCHED, FORCED = int(Outcome.HIT), int(Outcome.FETCHED), int(Outcome.FORCED)
DROPPED, LOW_PRECISION = int(Outcome.DROPPED), int(Outcome.LOW_PRECISION)
LANDED = int(Landing.LANDED)


class StepListener(Protocol):
    """Who keeps what was said and decided, such as a recording."""

    def heard(self, layer: int, routing: Routing, log: DecisionLog, predicted_ids: np.ndarray | None) -> None:
        """One or several tokens at a layer."""
        ...


@dataclass
class _Chunk:
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
        self.parts: list[_Chunk] = []

    def calls(self, ids: Tensor) -> Iterator[tuple[int, Weights | None]]:
        """The token's calls, those in place first."""
        for call, weights in self._in_order():
            start = perf_counter()
            yield call, weights
            self.residency.counters.seconds_experts += perf_counter() - start
        for block in self.aside:
            self.residency.release(block)
        self.aside.clear()

    def _in_order(self) -> Iterator[tuple[int, Weights | None]]:
        for call, expert in self.others:
            yield call, None if expert < 0 else self._copy_of(expert)
        late = []
        for call, block in self.blocks:
            if self.residency.is_ready(block):
                yield call, self.residency.weights(block)
            else:
                late.append((call, block))
        for call, block in late:
            yield call, self.residency.weights(block)

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


class Decider:
    """The router hooks of one offloaded model.

    Parameters
    ----------
    family : Family.
    layers : the model's MoE layers.
    cache : ExpertCache, the one door to the kernel.
    residency : Residency, carries out.
    low_bit : copies for a policy that computes misses in low precision.
    chunk_tokens : of a prompt that are computed together.
    predict : what prefetching expects, see `foresight.PREDICTIONS`.
    """

    def __init__(
        self,
        family: Family,
        layers: Sequence[MoeLayer],
        cache: ExpertCache,
        residency: Residency,
        low_bit: LowBitExperts | None = None,
        chunk_tokens: int = 1024,
        predict: str = "stale_gate",
    ) -> None:
        self.family, self.layers, self.cache, self.residency = family, layers, cache, residency
        self.chunk_tokens = chunk_tokens
        self.weight_rule = WeightRule(cache.policy.weight_rule)
        self.sources = [LayerSource(layer, residency, low_bit) for layer in range(len(layers))]
        self.is_exact = False
        self.listeners: list[StepListener] = []
        self._is_checked = [False] * len(layers)
        self.foresight = Foresight(layers, predict) if cache.rules.max_prefetches > 0 else None
        self._asked: list[list[int]] = [[] for _ in layers]
        self._is_background = cache.rules.admission == int(Admission.BACKGROUND)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Decide at every router inside the block."""
        with ExitStack() as hooks:
            if self.foresight is not None:
                hooks.enter_context(self.foresight.listening())
                hooks.enter_context(hf_internals.overheard(self.layers, self._bring_named))
            hooks.enter_context(hf_internals.watched(self.layers, self.listen))
            yield

    def begin(self) -> None:
        """A sequence begins: nothing is expected of its first token."""
        if self.foresight is not None:
            self.foresight.begin()

    def listen(self, layer: int, output: RouterOutput) -> RouterOutput | None:
        """Decide a layer's next tokens, begin to carry it out, and return what the experts are to compute."""
        start = perf_counter()
        if not self._is_checked[layer]:
            check_router(self.family, self.layers[layer].name, output)
            self._is_checked[layer] = True
        routing = routing_of(self.family, output)
        is_prompt = len(routing.topk_ids) > 1
        expected = None if self.foresight is None else self.foresight.expect(layer, routing.topk_ids)
        chunks = self._chunks(len(routing.topk_ids))
        logs = [self._decide(layer, routing, rows, expected, self.is_exact or is_prompt) for rows in chunks]
        decided = perf_counter()
        if is_prompt:
            self.sources[layer].parts = [self._prompt_part(*each) for each in logs]
        else:
            self._carry_out(layer, routing, logs[0][1])
        moved = perf_counter()
        replaced = self._replace(output, routing, logs)
        self._add_seconds(decided - start + perf_counter() - moved, moved - decided)
        return replaced

    def _chunks(self, num_tokens: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, num_tokens)) for start in range(0, num_tokens, self.chunk_tokens)]

    def _decide(
        self, layer: int, routing: Routing, rows: slice, expected: np.ndarray | None, is_exact: bool
    ) -> tuple[slice, DecisionLog, np.ndarray]:
        """Decide some tokens; returns their rows, the log, and who is in the slots [C] afterwards."""
        part = Routing(*(getattr(routing, name)[rows] for name in ("selection_scores", "topk_ids", "gate_weights", "column")))
        predicted = None if expected is None else expected[rows]
        log = self.cache.decide(
            part.topk_ids[:, None],
            part.gate_weights[:, None],
            part.selection_scores[:, None],
            first_layer=layer,
            is_exact=np.full(len(part.topk_ids), is_exact),
            predicted_ids=None if predicted is None else predicted[:, None],
        )
        assert log is not None
        for listener in self.listeners:
            listener.heard(layer, part, log, predicted)
        state = self.cache.state
        return rows, log, state.expert_in_slot[layer, : state.num_slots[layer]].copy()

    def _replace(self, output: RouterOutput, routing: Routing, logs: list[tuple[slice, DecisionLog, np.ndarray]]) -> RouterOutput | None:
        log = logs[0][1]
        if len(routing.topk_ids) > 1:
            return None
        outcome = log.outcome[:, 0]
        rows = replaced_rows(outcome)
        return None if rows.size == 0 else reroute(self.family, self.weight_rule, output, routing, rows, log.computed_ids[:, 0])

    # Carrying out

    def _prompt_part(self, rows: slice, log: DecisionLog, after: np.ndarray) -> _Chunk:
        landed = log.arrivals[:, 3].tolist()
        return _Chunk(rows, np.unique(log.computed_ids[:, 0]).tolist(), landed, after.tolist())

    def _carry_out(self, layer: int, routing: Routing, log: DecisionLog) -> None:
        """Land, fetch and ask as one token's decision says."""
        source, residency = self.sources[layer], self.residency
        slots = self.cache.state.slot_of_expert[layer]
        self._land(layer, log, slots)
        source.blocks, source.others = [], []
        column, outcome, computed = routing.column[0].tolist(), log.outcome[0, 0].tolist(), log.computed_ids[0, 0].tolist()
        for call, became, expert in zip(column, outcome, computed, strict=True):
            if became == DROPPED:
                source.others.append((call, -1))
            elif became == LOW_PRECISION:
                source.others.append((call, expert))
            elif became in (FETCHED, FORCED):
                source.blocks.append((call, self._fetch(layer, expert, int(slots[expert]))))
            else:
                source.blocks.append((call, residency.resident(layer, expert, int(slots[expert]))))
        if self._is_background:
            self._ask(layer, routing, outcome)
        if self.foresight is not None and self.foresight.predict == "previous_token":
            self._bring(layer, routing.topk_ids[0].tolist())

    def _land(self, layer: int, log: DecisionLog, slots: np.ndarray) -> None:
        for row in log.arrivals.tolist():
            expert, reason = row[3], row[6]
            self.residency.land(layer, expert, int(slots[expert]) if reason == LANDED else -1)
        for expert in self._asked[layer]:  # foreseen, and not wanted after all
            if self.residency.is_staged(layer, expert) and self.cache.state.due[layer, expert] < 0:
                self.residency.land(layer, expert, -1)
        self._asked[layer].clear()

    def _fetch(self, layer: int, expert: int, slot: int) -> int:
        block = self.residency.fetch(layer, expert, slot)
        if slot < 0:
            self.sources[layer].aside.append(block)
        return block

    def _ask(self, layer: int, routing: Routing, outcome: list[int]) -> None:
        """Begin the background copies that this step booked."""
        state = self.cache.state
        lands = int(state.clock[layer]) + self.cache.rules.admission_delay
        for expert, became in zip(routing.topk_ids[0].tolist(), outcome, strict=True):
            if became > FORCED and state.due[layer, expert] == lands:
                self.residency.ask(layer, expert)

    # Looking ahead

    def _bring_named(self, layer: int, hidden: Tensor) -> None:
        """Begin to bring whom the next layer is expected to call; the hidden states have been asked already."""
        assert self.foresight is not None
        named = self.foresight.named(layer + 1)
        if named is not None and len(named) == 1:
            self._bring(layer + 1, named[0].tolist())

    def _bring(self, layer: int, experts: list[int]) -> None:
        slots = self.cache.state.slot_of_expert[layer]
        absent = [expert for expert in experts if slots[expert] < 0][: self.cache.rules.max_prefetches]
        for expert in absent:
            if not self.residency.is_staged(layer, expert):
                self.residency.ask(layer, expert)
                self._asked[layer].append(expert)

    def _add_seconds(self, routing: float, overhead: float) -> None:
        self.residency.counters.seconds_routing += routing
        self.residency.counters.seconds_overhead += overhead
