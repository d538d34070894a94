"""`OneToken`: the door to the kernel for decoding, one token at one layer a call.

`ExpertCache.decide` takes any number of tokens and layers, in arrays as they come, so each call makes arrays of the one flavour that the
kernel knows. For a single step that takes longer than the step. Here those arrays are made once and written into: the same kernel, the same
state and the same decisions, at a few microseconds a step. What cannot change from step to step is checked when the door is made; the ids,
with which the kernel would index unseen, are checked in every step.

A step is *taken* as plain numbers, or *heard* at the addresses of a router's output; then it is decided.

What a call adds to a decayed count comes from a table that is continued when it ends, made by the same function for every instrument.

It knows no models, devices or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.cache import ExpertCache
from moecache.kernel import growth_table
from moecache.kernel.state import MOST_TOKENS
from moecache.one_token.compiled import IS_COMPILED, advance, hear, step
from moecache.one_token.parts import new_parts, words_of
from moecache.trace import DecisionLog

TABLE_TOKENS = 1024
NOTHING: list[Any] = []


class OneToken:
    """Decides for a cache, one token at one layer a call; the cache's own `decide` may be used in between.

    Parameters
    ----------
    cache : ExpertCache
        Whose state is advanced.

    Attributes
    ----------
    ids, weights : [K] int16, [K] float32
        The step in rank order; overwritten by the next.
    column : [K] int64
        Where in the router's own order each rank stands.
    scores : [E] float16
        Selection scores of the step, [0] where the policy needs none.
    needs_scores, needs_predictions : bool
    outcome, computed : [K] uint8, [K] int16
        What the last step decided, in rank order; see `DecisionLog`. Overwritten by the next.
    residents, others : list of (call, expert, slot, outcome)
        The same for those who carry it out: calls that a resident computes, and all others. `call` is the place in the router's own order.
    booked : list of int
        Experts whose background copies the step asked for.
    arrivals : list of rows of 7 int
        Copies that landed in the last step, or were dropped.
    is_rerouted : bool
        Whether a call was substituted or dropped.

    Raises
    ------
    ValueError
        A policy that knows the future.
    """

    def __init__(self, cache: ExpertCache) -> None:
        policy, shape = cache.policy, cache.shape
        if policy.needs_future:
            raise ValueError(f"policy {policy.label!r} knows the future, which a step at a time does not tell; simulate a recorded trace")
        self.needs_scores, self.needs_predictions = policy.needs_scores, bool(policy.max_prefetches)
        self._num_experts, self._top_k, self._half_life = shape.num_experts, shape.top_k, policy.half_life
        table_size = 0 if policy.half_life is None else TABLE_TOKENS
        self._parts = new_parts(cache.state, cache.rules, self.needs_scores, self.needs_predictions, table_size)
        self._words = np.array(words_of(self._parts), np.int64)
        self.address = int(self._words.ctypes.data)
        heard, log = self._parts.heard, self._parts.log
        self.ids, self.weights, self.column, self._calls = heard.ids, heard.weights, heard.column, heard.calls
        self.scores: NDArray[np.float16] = heard.score_bits.view(np.float16)
        self.outcome, self.computed, self._clock = log.outcome[0, 0], log.computed_ids[0, 0], cache.state.clock
        self.residents, self.others, self.booked, self.arrivals, self.is_rerouted = NOTHING, NOTHING, NOTHING, NOTHING, False

    def hear(self, logits: int, weights: int, ids: int, scores: int) -> bool:
        """Take the next step from the addresses of a router's output; see `compiled.hear`.

        Returns
        -------
        bool
            False where the general path must look at it: numbers that are not finite, weights without a sum, ids that are no step.
        """
        return hear(self.address, logits, weights, ids, scores)

    def take(self, ids: Sequence[int], weights: Any, column: Sequence[int] | None = None) -> None:
        """Take the next step as plain numbers; selection scores, where they are needed, are written to `scores`.

        Parameters
        ----------
        ids : K expert ids in rank order.
        weights : K gate weights, float32 numbers.
        column : where in the router's own order each rank stands; None = in rank order.

        Raises
        ------
        ValueError
            Ids that are no experts, or twice in the step.
        """
        if len(ids) != self._top_k or len(set(ids)) != self._top_k or min(ids) < 0 or max(ids) >= self._num_experts:
            raise ValueError(f"a step calls {self._top_k} different experts in 0..{self._num_experts - 1}, got {list(ids)}")
        self.ids[:], self.weights[:] = ids, weights
        self.column[:] = range(self._top_k) if column is None else column

    def decide(self, layer: int, is_exact: bool = False, predicted_ids: Sequence[int] | None = None) -> None:
        """Advance a layer by the step that was taken or heard; what was decided is in the attributes.

        Parameters
        ----------
        layer : int
        is_exact : whether all misses are waited for.
        predicted_ids : K experts to prefetch for this step, -1 = none; where `needs_predictions`.

        Raises
        ------
        ValueError
            Predictions that are no experts, or more tokens than a cache counts.
        """
        if self.needs_predictions:
            self._predict(predicted_ids)
        while not (advance(self.address, layer, is_exact) if IS_COMPILED else step(*self._parts, layer, is_exact)):
            self._prepare(int(self._clock[layer]) + 1)
        (num_residents, num_booked, num_arrivals, is_rerouted), *calls = self._calls.tolist()
        self.residents, self.others, self.is_rerouted = calls[:num_residents], calls[num_residents:], is_rerouted != 0
        self.booked = self._parts.heard.booked[:num_booked].tolist() if num_booked else NOTHING
        self.arrivals = self._parts.log.arrivals[:num_arrivals].tolist() if num_arrivals else NOTHING

    def _prepare(self, clock: int) -> None:
        """What a call adds to a decayed count, from this clock on."""
        if clock > MOST_TOKENS:
            raise ValueError(f"a cache counts at most {MOST_TOKENS} tokens, and this step is number {clock}; start a new one")
        assert self._half_life is not None
        heard = self._parts.heard
        heard.growth_table[:], heard.epoch_table[:] = growth_table(self._half_life, clock, TABLE_TOKENS)
        heard.first_clock[0] = clock

    def _predict(self, predicted_ids: Sequence[int] | None) -> None:
        if predicted_ids is None or len(predicted_ids) != self._top_k or min(predicted_ids) < -1 or max(predicted_ids) >= self._num_experts:
            raise ValueError(f"{self._top_k} predicted ids in -1..{self._num_experts - 1} are needed, got {predicted_ids}")
        self._parts.heard.predicted[:] = predicted_ids

    def log(self) -> DecisionLog:
        """The last step's decisions [1, 1, K], as `ExpertCache.decide` returns them."""
        log = self._parts.log
        return DecisionLog(
            outcome=log.outcome.copy(),
            computed_ids=log.computed_ids.copy(),
            evicted_ids=log.evicted_ids.copy(),
            arrivals=log.arrivals[: log.num_arrivals[0]].copy(),
            substituted_mass=log.substituted_mass.copy(),
        )
