"""`ExpertCache`: the slots of every layer under one policy, and the one door to the kernel.

Every instrument decides through `ExpertCache.decide`; none of them branches on a policy. The door makes every input C-contiguous, of
fixed dtype and read-only, because numba compiles anew for each flavour of argument.

It knows no models, devices or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moecache.kernel import (
    CacheState,
    Fallback,
    Landing,
    StepLog,
    Steps,
    forget,
    make_resident,
    new_state,
    replay,
)
from moecache.kernel.eviction import HORIZON
from moecache.kernel.hashing import random_numbers
from moecache.policy import Policy
from moecache.steps import ABSENT, check_distinct, make_steps
from moecache.trace import DecisionLog, ModelShape

COLD_STARTS = ("first", "random", "empty")
LOG_BLOCK = 1024  # tokens decided per kernel call, so that the buffer for arrivals stays small


class CapacityError(ValueError):
    """A number of slots that cannot work; the message names the bounds."""


def slots_per_layer(shape: ModelShape, num_slots: int | Sequence[int] | np.ndarray) -> np.ndarray:
    """[L] int64 slots of each layer, checked.

    Raises
    ------
    CapacityError : fewer slots than top-k, more than experts, or a list of the wrong length.
    """
    slots = np.asarray(num_slots)
    if slots.dtype.kind not in "iu" or slots.ndim > 1:
        raise CapacityError(f"num_slots={num_slots!r} must be an integer, or one integer per MoE layer")
    if slots.ndim == 1 and slots.size != shape.num_layers:
        raise CapacityError(f"num_slots lists {slots.size} layers, but the model has {shape.num_layers} MoE layers")
    slots = np.broadcast_to(slots, (shape.num_layers,)).astype(np.int64)
    if slots.min() < shape.top_k:
        raise CapacityError(
            f"num_slots={slots.min()} is below top-k={shape.top_k}: one token's experts must fit together; "
            f"use {shape.top_k}..{shape.num_experts} slots a layer"
        )
    if slots.max() > shape.num_experts:
        raise CapacityError(f"num_slots={slots.max()} exceeds the {shape.num_experts} experts a layer; use at most that many")
    return slots


class ExpertCache:
    """Residency, scores, accounts and clocks of all layers under one policy.

    Parameters
    ----------
    shape : ModelShape.
    policy : Policy.
    num_slots : slots a layer, or a list of one number a layer.
    cold_start : who is resident before the first token: "first" (experts 0..C-1), "random" (by `seed`), "empty", or a profile
        [L,n] of expert ids, most wanted first, n >= C.
    seed : of the random cold start.
    buddies : [L,E,H] int, each expert's stand-ins, best first, -1 = none (`moecache.calibrate.buddy_table`); for fallback "buddy".

    Attributes
    ----------
    state : CacheState, the kernel's arrays.
    counts : [L,17] int64, calls by `Outcome`, then the columns of `Count`, so far.

    Raises
    ------
    CapacityError, ValueError : slots, policy or cold start that do not fit the shape.
    """

    def __init__(
        self,
        shape: ModelShape,
        policy: Policy,
        num_slots: int | Sequence[int] | np.ndarray,
        cold_start: str | npt.ArrayLike = "first",
        seed: int = 0,
        buddies: np.ndarray | None = None,
    ) -> None:
        self.shape, self.policy = shape, policy
        self.num_slots = slots_per_layer(shape, num_slots)
        self.rules = policy.compile(shape.top_k)
        self._residents = _cold_residents(shape, self.num_slots, cold_start, seed)
        table = _checked_buddies(shape, policy, buddies)
        self.state: CacheState = new_state(shape.num_layers, shape.num_experts, shape.top_k, self.num_slots, table)
        make_resident(self.state, self._residents, bool(self.rules.is_packed))

    @property
    def counts(self) -> np.ndarray:
        """[L,17] int64: calls by `Outcome`, then the columns of `Count`."""
        return self.state.counts

    def reset(self, first_use: np.ndarray | None = None) -> np.ndarray:
        """Cold start again, as at a document boundary: scores, accounts and copies under way are forgotten, the clock runs on.

        Parameters
        ----------
        first_use : [L,E] int64, clock of each expert's next call, for a policy that knows the future; also before the first token.

        Returns
        -------
        [n,7] int64 : the cancelled copies, as rows of the arrivals log.
        """
        cancelled = self._copies_under_way()
        forget(self.state)
        if first_use is not None:
            self.state.eviction_score[...] = HORIZON - first_use
        make_resident(self.state, self._residents, bool(self.rules.is_packed))
        return cancelled

    def _copies_under_way(self) -> np.ndarray:
        state, rows = self.state, []
        for layer in range(self.shape.num_layers):
            head, length = state.ring[layer]
            for place in (head + np.arange(length)) % self.shape.num_experts:
                row = (state.arrival_asked[layer, place], state.clock[layer], layer, state.arrival_expert[layer, place])
                rows.append((*row, -2, 0, int(Landing.CANCELLED)))
        return np.array(rows, np.int64).reshape(-1, 7)

    def decide(
        self,
        topk_ids: np.ndarray,
        gate_weights: np.ndarray,
        selection_scores: np.ndarray | None = None,
        *,
        first_layer: int = 0,
        is_exact: np.ndarray | None = None,
        predicted_ids: np.ndarray | None = None,
        next_use: np.ndarray | None = None,
        keep_log: bool = True,
        is_checked: bool = False,
    ) -> DecisionLog | None:
        """Advance layers first_layer .. first_layer + l - 1 by T tokens.

        Parameters
        ----------
        topk_ids : [T,l,K] int, the router's calls in rank order.
        gate_weights : [T,l,K] float32, in rank order.
        selection_scores : [T,l,E] float16; needed when misses may be substituted by score.
        first_layer : the first of the l consecutive layers.
        is_exact : [T] bool, tokens whose misses are all waited for.
        predicted_ids : [T,l,P] int, experts to prefetch for each step, -1 = none; needed by a policy that prefetches.
        next_use : [T,l,K] int64, clock of each call's next call; needed by a policy that knows the future.
        keep_log : False keeps only `counts`.
        is_checked : the ids come from a `RouterTrace`, which has looked for experts called twice in a step.

        Returns
        -------
        DecisionLog of these tokens and layers, or None without `keep_log`. Clocks in `arrivals` count this cache's tokens.

        Raises
        ------
        ValueError : arrays that do not fit the cache or each other, ids that are no experts or twice in a step, scores that are missing
            or not float16, or layers at different tokens.
        """
        steps = make_steps(
            self.shape,
            self.policy,
            self._clock(first_layer, topk_ids),
            topk_ids,
            gate_weights,
            selection_scores,
            is_exact=is_exact,
            predicted_ids=predicted_ids,
            next_use=next_use,
        )
        if not is_checked:
            check_distinct(topk_ids, self._clock(first_layer, topk_ids) + 1, first_layer)
        if not keep_log:
            replay(self.state, self.rules, steps, _empty_log((1, *topk_ids.shape[1:]), 0), first_layer)
            return None
        log, arrivals = _empty_log(topk_ids.shape, 0), []
        for start in range(0, topk_ids.shape[0], LOG_BLOCK):
            block = slice(start, min(start + LOG_BLOCK, topk_ids.shape[0]))
            arrivals.append(self._decide_block(steps, log, block, first_layer))
        return DecisionLog(
            outcome=log.outcome,
            computed_ids=log.computed_ids,
            evicted_ids=log.evicted_ids,
            arrivals=np.concatenate([np.zeros((0, 7), np.int64), *arrivals]),
            substituted_mass=log.substituted_mass,
        )

    def _clock(self, first_layer: int, topk_ids: np.ndarray) -> int:
        """The clock before these steps, which all their layers must share."""
        num_layers = topk_ids.shape[1] if topk_ids.ndim == 3 else 0
        if not (num_layers and 0 <= first_layer <= self.shape.num_layers - num_layers):
            raise ValueError(
                f"topk_ids {list(topk_ids.shape)} from layer {first_layer} do not fit a cache of {self.shape.num_layers} layers and "
                f"top-{self.shape.top_k}: they must be [tokens, layers, {self.shape.top_k}]"
            )
        clocks = self.state.clock[first_layer : first_layer + num_layers]
        if clocks.min() != clocks.max():
            raise ValueError(f"layers {first_layer}..{first_layer + num_layers - 1} stand at different tokens {clocks}; decide them apart")
        return int(clocks[0])

    def _decide_block(self, steps: Steps, log: StepLog, block: slice, first_layer: int) -> np.ndarray:
        """Decide one block of tokens into its part of the log; returns the block's arrivals."""
        num_tokens, num_layers, top_k = steps.topk_ids[block].shape
        under_way = int(self.state.ring[first_layer : first_layer + num_layers, 1].sum())
        most = under_way + num_tokens * num_layers * (top_k + steps.predicted_ids.shape[2])
        part = StepLog(
            log.outcome[block],
            log.computed_ids[block],
            log.evicted_ids[block],
            log.substituted_mass[block],
            np.empty((most, 7), np.int64),
            np.zeros(1, np.int64),
        )
        cut = Steps(*(array[block] if array.size else array for array in steps))
        replay(self.state, self.rules, cut, part, first_layer)
        return part.arrivals[: part.num_arrivals[0]].copy()


def rank_order(gate_weights: np.ndarray, topk_ids: np.ndarray) -> np.ndarray:
    """[..,K] int64: positions sorted by gate weight, largest first, the lower expert id first among equals."""
    by_id = np.argsort(topk_ids, axis=-1, kind="stable")
    weights = np.take_along_axis(gate_weights, by_id, axis=-1)
    return np.take_along_axis(by_id, np.argsort(-weights, axis=-1, kind="stable"), axis=-1)


def _empty_log(shape: tuple[int, ...], num_arrivals: int) -> StepLog:
    return StepLog(
        np.empty(shape, np.uint8),
        np.empty(shape, np.int16),
        np.empty(shape, np.int16),
        np.empty(shape[:2], np.float32),
        np.empty((num_arrivals, 7), np.int64),
        np.zeros(1, np.int64),
    )


def _cold_residents(shape: ModelShape, num_slots: np.ndarray, cold_start: str | npt.ArrayLike, seed: int) -> np.ndarray:
    """[L,C] int64 expert of each slot, -1 = free."""
    layers, experts, slots = shape.num_layers, shape.num_experts, int(num_slots.max())
    if isinstance(cold_start, str):
        if cold_start not in COLD_STARTS:
            raise ValueError(f"cold_start={cold_start!r} is unknown; choose one of {', '.join(COLD_STARTS)}, or give a profile")
        if cold_start == "empty":
            return np.full((layers, slots), -1)
        if cold_start == "first":
            return np.broadcast_to(np.arange(slots), (layers, slots))
        lots = random_numbers(seed, np.arange(layers)[:, None], 0, np.arange(experts))  # not NumPy's, which may change between versions
        return np.argsort(lots, axis=1, kind="stable")[:, :slots]
    profile = np.asarray(cold_start)
    if profile.ndim != 2 or profile.shape[0] != layers or profile.shape[1] < slots or profile.dtype.kind not in "iu":
        raise ValueError(f"a cold-start profile must be integers [{layers}, at least {slots}], got {profile.dtype} {profile.shape}")
    profile = profile[:, :slots]
    if profile.min() < 0 or profile.max() >= experts or any(np.unique(row).size < slots for row in profile):
        raise ValueError(f"a cold-start profile must name different experts in 0..{experts - 1} in each layer")
    return profile


def _checked_buddies(shape: ModelShape, policy: Policy, buddies: np.ndarray | None) -> np.ndarray:
    if policy.fallback != Fallback.BUDDY:
        return ABSENT
    if buddies is None:
        raise ValueError(f"policy {policy.label!r} needs a table of buddies: make one with moecache.calibrate.buddy_table(trace)")
    table, size = np.asarray(buddies), (shape.num_layers, shape.num_experts)
    if table.ndim != 3 or table.shape[:2] != size or table.dtype.kind not in "iu" or table.size == 0:
        raise ValueError(f"buddies must be integers [{size[0]}, {size[1]}, at least 1], got {table.dtype} {list(table.shape)}")
    if table.min() < -1 or table.max() >= shape.num_experts:
        raise ValueError(f"buddies must be expert ids below {shape.num_experts}, or -1, got {table.min()}..{table.max()}")
    return table.astype(np.int16)
