"""`OneToken`: the door to the kernel for decoding, one token at one layer a call.

`ExpertCache.decide` takes any number of tokens and layers, in arrays as they come, so each call makes arrays of the one flavour that the
kernel knows. For a single step that takes longer than the step. Here those arrays are made once and written into: the same kernel, the same
state and the same decisions, at a few microseconds a step. What cannot change from step to step is checked when the door is made; the ids,
with which the kernel would index unseen, are checked in every step.

What a call adds to a decayed count comes from a table that is continued when it ends, made by the same function for every instrument.

It knows no models, devices or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.cache import ExpertCache
from moecache.kernel import StepLog, Steps, growth_table, replay
from moecache.kernel.state import MOST_TOKENS
from moecache.steps import ABSENT
from moecache.trace import DecisionLog

TABLE_TOKENS = 1024
NO_ARRIVALS: list[list[int]] = []


class OneToken:
    """Decides for a cache, one token at one layer a call; the cache's own `decide` may be used in between.

    Parameters
    ----------
    cache : ExpertCache
        Whose state is advanced.

    Attributes
    ----------
    scores : [E] float16
        Selection scores of the step that is about to be decided; write them here before `decide` where `needs_scores`.
    needs_scores, needs_predictions : bool
    outcome, computed : list of K int
        What the last step decided, in rank order; see `DecisionLog`.
    arrivals : list of rows of 7 int
        Copies that landed in the last step, or were dropped.

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
        self._state, self._rules, self._clock = cache.state, cache.rules, cache.state.clock
        self.outcome: list[int] = []
        self.computed: list[int] = []
        self.arrivals = NO_ARRIVALS
        self._layer = -1
        self._make_inputs()
        self._make_log()
        self._first, self._table, self._epochs = 1, np.ones(0), np.zeros(0, np.int64)

    def _make_inputs(self) -> None:
        one_step = (1, 1, self._top_k)
        self._ids, self._weights = np.zeros(one_step, np.int16), np.zeros(one_step, np.float32)
        self._predicted = np.full(one_step, -1, np.int16)
        self._is_exact, self._growth, self._epoch = np.zeros(1, np.uint8), np.ones(1), np.zeros(1, np.int64)
        scores = np.zeros((1, 1, self._num_experts), np.float16)
        self.scores: NDArray[np.float16] = scores[0, 0]
        self._steps = Steps(
            topk_ids=_read_only(self._ids),
            gate_weights=_read_only(self._weights),
            score_bits=_read_only(scores.view(np.int16) if self.needs_scores else ABSENT),
            predicted_ids=_read_only(self._predicted if self.needs_predictions else ABSENT),
            next_use=_read_only(ABSENT.astype(np.int64)),
            is_exact=_read_only(self._is_exact),
            growth=_read_only(self._growth),
            growth_epoch=_read_only(self._epoch),
        )

    def _make_log(self) -> None:
        one_step = (1, 1, self._top_k)
        self._log = StepLog(
            outcome=np.zeros(one_step, np.uint8),
            computed_ids=np.zeros(one_step, np.int16),
            evicted_ids=np.zeros(one_step, np.int16),
            substituted_mass=np.zeros((1, 1), np.float32),
            arrivals=np.zeros((self._num_experts + 2 * self._top_k, 7), np.int64),  # under way, booked and predicted
            num_arrivals=np.zeros(1, np.int64),
        )
        self._outcome, self._computed, self._num_arrivals = self._log.outcome[0, 0], self._log.computed_ids[0, 0], self._log.num_arrivals

    def decide(
        self, layer: int, ids: Sequence[int], weights: Any, is_exact: bool = False, predicted_ids: Sequence[int] | None = None
    ) -> None:
        """Advance a layer by one token; what was decided is in the attributes.

        Parameters
        ----------
        layer : int
        ids : K expert ids in rank order.
        weights : K gate weights, float32 numbers.
        is_exact : whether all misses are waited for.
        predicted_ids : K experts to prefetch for this step, -1 = none; where `needs_predictions`.

        Raises
        ------
        ValueError
            Ids that are no experts or twice in the step, or more tokens than a cache counts.
        """
        if len(ids) != self._top_k or len(set(ids)) != self._top_k or min(ids) < 0 or max(ids) >= self._num_experts:
            raise ValueError(f"a step calls {self._top_k} different experts in 0..{self._num_experts - 1}, got {list(ids)}")
        clock = int(self._clock[layer]) + 1
        if clock > MOST_TOKENS:
            raise ValueError(f"a cache counts at most {MOST_TOKENS} tokens, and this step is number {clock}; start a new one")
        self._ids[0, 0] = ids
        self._weights[0, 0] = weights
        self._is_exact[0] = is_exact
        if self._half_life is not None:
            self._grow(clock)
        if self.needs_predictions:
            self._predict(predicted_ids)
        self._num_arrivals[0] = 0
        replay(self._state, self._rules, self._steps, self._log, layer)
        self._layer = layer
        self.outcome, self.computed = self._outcome.tolist(), self._computed.tolist()
        num_arrivals = int(self._num_arrivals[0])
        self.arrivals = self._log.arrivals[:num_arrivals].tolist() if num_arrivals else NO_ARRIVALS

    def _grow(self, clock: int) -> None:
        place = clock - self._first
        if not 0 <= place < len(self._table):
            assert self._half_life is not None
            self._first, place = clock, 0
            self._table, self._epochs = growth_table(self._half_life, clock, TABLE_TOKENS)
        self._growth[0], self._epoch[0] = self._table[place], self._epochs[place]

    def _predict(self, predicted_ids: Sequence[int] | None) -> None:
        if predicted_ids is None or len(predicted_ids) != self._top_k or min(predicted_ids) < -1 or max(predicted_ids) >= self._num_experts:
            raise ValueError(f"{self._top_k} predicted ids in -1..{self._num_experts - 1} are needed, got {predicted_ids}")
        self._predicted[0, 0] = predicted_ids

    def log(self) -> DecisionLog:
        """The last step's decisions [1, 1, K], as `ExpertCache.decide` returns them."""
        log = self._log
        return DecisionLog(
            outcome=log.outcome.copy(),
            computed_ids=log.computed_ids.copy(),
            evicted_ids=log.evicted_ids.copy(),
            arrivals=log.arrivals[: log.num_arrivals[0]].copy(),
            substituted_mass=log.substituted_mass.copy(),
        )


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
