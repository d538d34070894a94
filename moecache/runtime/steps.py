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
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.experts import reroute
from moecache.families import Family, Routing, check_router, routing_of
from moecache.foresight import Foresight
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.kernel import Landing, Outcome
from moecache.one_token import OneToken
from moecache.one_token.routing import OneRow
from moecache.policy import WeightRule
from moecache.runtime.low_bit_experts import LowBitExperts
from moecache.runtime.residency import Residency
from moecache.runtime.source import Chunk, LayerSource
from moecache.trace import DecisionLog

LANDED = int(Landing.LANDED)
COMPUTED_ELSEWHERE = (int(Outcome.DROPPED), int(Outcome.LOW_PRECISION))  # or by nobody: not from a slot


class StepListener(Protocol):
    """Who keeps what was said and decided, such as a recording."""

    def heard(self, layer: int, routing: Routing, log: DecisionLog, predicted_ids: np.ndarray | None) -> None:
        """One or several tokens at a layer."""
        ...


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
        self.family, self.layers, self.residency = family, layers, residency
        self.chunk_tokens = chunk_tokens
        self.weight_rule = WeightRule(cache.policy.weight_rule)
        self.sources = [LayerSource(layer, residency, low_bit) for layer in range(len(layers))]
        self.is_exact = False
        self.listeners: list[StepListener] = []
        self._is_checked = [False] * len(layers)
        self.foresight = Foresight(layers, predict) if cache.rules.max_prefetches > 0 else None
        self._asked: list[list[int]] = [[] for _ in layers]
        self.use(cache)

    def use(self, cache: ExpertCache) -> None:
        """Decide by this cache from now on."""
        self.cache, self._door = cache, OneToken(cache)
        self._row = OneRow(self.family, self.weight_rule, self._door)

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
        decide = self._one_token if len(output.ids) == 1 else self._prompt
        replaced, moving = decide(layer, output)
        counters = self.residency.counters
        counters.seconds_overhead += moving
        counters.seconds_routing += perf_counter() - start - moving
        return replaced

    # One token

    def _one_token(self, layer: int, output: RouterOutput) -> tuple[RouterOutput | None, float]:
        """Decide and carry out a step of decoding; what the experts are to compute, and the seconds of carrying it out."""
        door, row = self._door, self._row
        routing = None if row.hear(output) else self._take(output)
        expected = None if self.foresight is None else self.foresight.expect(layer, door.ids[None].copy())
        door.decide(layer, self.is_exact, None if expected is None else expected[0].tolist())
        if self.listeners:
            self._tell(layer, row.routing(output) if routing is None else routing, door.log(), expected)
        replaced = self._replaced(output, routing) if door.is_rerouted else None
        start = perf_counter()
        self._carry_out(layer, door)  # last: a thread that is woken takes the interpreter at the next operation on tensors
        return replaced, perf_counter() - start

    def _replaced(self, output: RouterOutput, routing: Routing | None) -> RouterOutput:
        """What the experts are to compute; `routing` is None where the row has heard it."""
        if routing is None:
            return self._row.reroute(output)
        return reroute(self.family, self.weight_rule, output, routing, np.zeros(1, np.int64), self._door.computed[None])

    def _take(self, output: RouterOutput) -> Routing:
        """Tell the door what a router said by the general path."""
        routing, door = routing_of(self.family, output), self._door
        door.take(routing.topk_ids[0].tolist(), routing.gate_weights[0], routing.column[0].tolist())
        if door.needs_scores:
            door.scores[...] = routing.selection_scores[0]
        return routing

    def _tell(self, layer: int, routing: Routing, log: DecisionLog, predicted: np.ndarray | None) -> None:
        for listener in self.listeners:
            listener.heard(layer, routing, log, predicted)

    # Many tokens

    def _prompt(self, layer: int, output: RouterOutput) -> tuple[None, float]:
        """Decide a prompt's tokens, in chunks; no time is spent on carrying it out here."""
        routing = routing_of(self.family, output)
        expected = None if self.foresight is None else self.foresight.expect(layer, routing.topk_ids)
        self.sources[layer].parts = [self._prompt_part(layer, routing, rows, expected) for rows in self._chunks(len(routing.topk_ids))]
        return None, 0.0

    def _chunks(self, num_tokens: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, num_tokens)) for start in range(0, num_tokens, self.chunk_tokens)]

    def _prompt_part(self, layer: int, routing: Routing, rows: slice, expected: np.ndarray | None) -> Chunk:
        """Decide some tokens, every miss waited for."""
        part = Routing(*(getattr(routing, name)[rows] for name in ("selection_scores", "topk_ids", "gate_weights", "column")))
        predicted = None if expected is None else expected[rows]
        log = self.cache.decide(
            part.topk_ids[:, None],
            part.gate_weights[:, None],
            part.selection_scores[:, None],
            first_layer=layer,
            is_exact=np.ones(len(part.topk_ids), np.uint8),
            predicted_ids=None if predicted is None else predicted[:, None],
        )
        assert log is not None
        self._tell(layer, part, log, predicted)
        state = self.cache.state
        after = state.expert_in_slot[layer, : state.num_slots[layer]].tolist()
        return Chunk(rows, np.unique(log.computed_ids[:, 0]).tolist(), log.arrivals[:, 3].tolist(), after)

    # Carrying out

    def _carry_out(self, layer: int, door: OneToken) -> None:
        """Land, fetch and ask as one token's decision says."""
        source, residency = self.sources[layer], self.residency
        if door.arrivals or self._asked[layer]:
            self._land(layer, door.arrivals)
        source.others = others = []
        source.blocks = blocks = residency.residents(layer, door.residents)
        for call, expert, slot, became in door.others:
            if became in COMPUTED_ELSEWHERE:
                others.append((call, expert))
            else:
                blocks.append((call, self._fetch(layer, expert, slot)))
        for expert in door.booked:
            residency.ask(layer, expert)
        if self.foresight is not None and self.foresight.predict == "previous_token":
            self._bring(layer, door.ids.tolist())

    def _land(self, layer: int, arrivals: list[list[int]]) -> None:
        slots = self.cache.state.slot_of_expert[layer]
        for row in arrivals:
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
