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
    Eviction,
    Fallback,
    Landing,
    StepLog,
    Steps,
    forget,
    growth_table,
    make_resident,
    new_state,
    replay,
)
from moecache.kernel.state import EVICTIONS, NUM_COUNTS
from moecache.policy import Policy
from moecache.trace import DecisionLog, ModelShape

COLD_STARTS = ("first", "random", "empty")
LOG_BLOCK = 1024  # tokens decided per kernel call, so that the buffer for arrivals stays small
NO_SCORES = np.zeros((1, 1, 0), np.int16)


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

    Attributes
    ----------
    state : CacheState, the kernel's arrays.
    counts : [L,12] int64, calls by outcome and the other counters so far.

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
    ) -> None:
        self.shape, self.policy = shape, policy
        self.num_slots = slots_per_layer(shape, num_slots)
        self.rules = policy.compile(shape.top_k)
        self._residents = _cold_residents(shape, self.num_slots, cold_start, seed)
        self.state: CacheState = new_state(shape.num_layers, shape.num_experts, shape.top_k, self.num_slots)
        make_resident(self.state, self._residents)

    @property
    def counts(self) -> np.ndarray:
        """[L,12] int64: calls by outcome, evictions, copies booked, admitted, dropped on arrival, first choices substituted."""
        return self.state.counts

    def reset(self) -> np.ndarray:
        """Cold start again, as at a document boundary: scores, accounts and copies under way are forgotten, the clock runs on.

        Returns
        -------
        [n,7] int64 : the cancelled copies, as rows of the arrivals log.
        """
        cancelled = self._copies_under_way()
        forget(self.state)
        make_resident(self.state, self._residents)
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
        keep_log: bool = True,
    ) -> DecisionLog | None:
        """Advance layers first_layer .. first_layer + l - 1 by T tokens.

        Parameters
        ----------
        topk_ids : [T,l,K] int, the router's calls in rank order.
        gate_weights : [T,l,K] float32, in rank order.
        selection_scores : [T,l,E] float16; needed when misses may be substituted by score.
        first_layer : the first of the l consecutive layers.
        is_exact : [T] bool, tokens whose misses are all waited for.
        keep_log : False keeps only `counts`.

        Returns
        -------
        DecisionLog of these tokens and layers, or None without `keep_log`. Clocks in `arrivals` count this cache's tokens.

        Raises
        ------
        ValueError : arrays that do not fit the cache or each other, ids that are no experts, scores that are missing or not
            float16, or layers at different tokens.
        """
        steps = self._steps(topk_ids, gate_weights, selection_scores, first_layer, is_exact)
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

    def _decide_block(self, steps: Steps, log: StepLog, block: slice, first_layer: int) -> np.ndarray:
        """Decide one block of tokens into its part of the log; returns the block's arrivals."""
        num_tokens, num_layers, top_k = steps.topk_ids[block].shape
        under_way = int(self.state.ring[first_layer : first_layer + num_layers, 1].sum())
        most = under_way + num_tokens * num_layers * top_k
        part = StepLog(
            log.outcome[block], log.computed_ids[block], log.evicted_ids[block], log.substituted_mass[block],
            np.empty((most, 7), np.int64), np.zeros(1, np.int64),
        )
        cut = {name: array[block] for name, array in steps._asdict().items() if name != "score_bits"}
        scores = steps.score_bits[block] if steps.score_bits.size else steps.score_bits
        replay(self.state, self.rules, Steps(score_bits=scores, **cut), part, first_layer)
        return part.arrivals[: part.num_arrivals[0]].copy()

    def _steps(
        self,
        topk_ids: np.ndarray,
        gate_weights: np.ndarray,
        selection_scores: np.ndarray | None,
        first_layer: int,
        is_exact: np.ndarray | None,
    ) -> Steps:
        num_tokens = self._check_steps(topk_ids, gate_weights, selection_scores, first_layer, is_exact)
        if selection_scores is None and needs_scores(self.policy):
            raise ValueError(
                f"policy {self.policy.label!r} substitutes by selection score, but no selection scores are given; "
                "record them, or use fallback='random_resident' or 'drop', or wait for every miss"
            )
        scores = NO_SCORES if selection_scores is None or not needs_scores(self.policy) else selection_scores.view(np.int16)
        growth, epoch = self._growth(first_layer, num_tokens)
        is_exact = np.zeros(num_tokens, np.uint8) if is_exact is None else np.asarray(is_exact, np.uint8)
        return Steps(
            _frozen(topk_ids, np.int16), _frozen(gate_weights, np.float32), _frozen(scores, np.int16),
            _frozen(is_exact, np.uint8), _frozen(growth, np.float64), _frozen(epoch, np.int64),
        )

    def _check_steps(
        self,
        topk_ids: np.ndarray,
        gate_weights: np.ndarray,
        selection_scores: np.ndarray | None,
        first_layer: int,
        is_exact: np.ndarray | None,
    ) -> int:
        """T, after refusing what the kernel would misread: it indexes without looking."""
        shape, size = self.shape, topk_ids.shape
        if len(size) != 3 or size[2] != shape.top_k or not 0 <= first_layer <= shape.num_layers - size[1]:
            raise ValueError(
                f"topk_ids {list(size)} from layer {first_layer} do not fit a cache of {shape.num_layers} layers and "
                f"top-{shape.top_k}: they must be [tokens, layers, {shape.top_k}]"
            )
        if topk_ids.dtype.kind not in "iu" or (topk_ids.size and not 0 <= topk_ids.min() <= topk_ids.max() < shape.num_experts):
            raise ValueError(f"topk_ids must be integers in 0..{shape.num_experts - 1}, got {_range(topk_ids)}")
        expected = {"gate_weights": (gate_weights, size, "f"), "is_exact": (is_exact, size[:1], "biu")}
        expected["selection_scores"] = (selection_scores, (*size[:2], shape.num_experts), "f")
        for name, (array, right_size, kinds) in expected.items():
            if array is not None and (array.shape != right_size or array.dtype.kind not in kinds):
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, but topk_ids {list(size)} ask for {list(right_size)}")
        if selection_scores is not None and selection_scores.dtype != np.float16:
            raise ValueError(f"selection_scores are {selection_scores.dtype}; decisions are made on float16: round them with to_recorded")
        clocks = self.state.clock[first_layer : first_layer + size[1]]
        if clocks.min() != clocks.max():
            raise ValueError(f"layers {first_layer}..{first_layer + size[1] - 1} stand at different tokens {clocks}; decide them apart")
        return size[0]

    def _growth(self, first_layer: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        if self.policy.eviction != Eviction.DECAYED_COUNT:
            return np.ones(num_tokens), np.zeros(num_tokens, np.int64)
        assert self.policy.half_life is not None
        return growth_table(self.policy.half_life, int(self.state.clock[first_layer]) + 1, num_tokens)


def needs_scores(policy: Policy) -> bool:
    """True when the policy may ask for the best stand-in by selection score."""
    return policy.fallback == Fallback.SUBSTITUTE and not policy.waits_for_every_miss


def rank_order(gate_weights: np.ndarray, topk_ids: np.ndarray) -> np.ndarray:
    """[..,K] int64: positions sorted by gate weight, largest first, the lower expert id first among equals."""
    by_id = np.argsort(topk_ids, axis=-1, kind="stable")
    weights = np.take_along_axis(gate_weights, by_id, axis=-1)
    return np.take_along_axis(by_id, np.argsort(-weights, axis=-1, kind="stable"), axis=-1)


def _range(array: np.ndarray) -> str:
    return f"{array.dtype} {array.min()}..{array.max()}" if array.size else f"{array.dtype}"


def _frozen(array: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    view = np.ascontiguousarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view


def _empty_log(shape: tuple[int, ...], num_arrivals: int) -> StepLog:
    return StepLog(
        np.empty(shape, np.uint8), np.empty(shape, np.int16), np.empty(shape, np.int16), np.empty(shape[:2], np.float32),
        np.empty((num_arrivals, 7), np.int64), np.zeros(1, np.int64),
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
        generator = np.random.default_rng(seed)
        return np.stack([generator.permutation(experts)[:slots] for _ in range(layers)])
    profile = np.asarray(cold_start)
    if profile.ndim != 2 or profile.shape[0] != layers or profile.shape[1] < slots or profile.dtype.kind not in "iu":
        raise ValueError(f"a cold-start profile must be integers [{layers}, at least {slots}], got {profile.dtype} {profile.shape}")
    profile = profile[:, :slots]
    if profile.min() < 0 or profile.max() >= experts or any(np.unique(row).size < slots for row in profile):
        raise ValueError(f"a cold-start profile must name different experts in 0..{experts - 1} in each layer")
    return profile


__all__ = ["COLD_STARTS", "EVICTIONS", "NUM_COUNTS", "CapacityError", "ExpertCache", "needs_scores", "rank_order", "slots_per_layer"]
