"""The one door to the kernel: arrays as they come, checked and made into the single flavour that compiled code knows.

The kernel indexes without looking, and numba compiles anew for each flavour of argument. So everything that goes in is checked here,
C-contiguous, of fixed dtype and read-only, and an absent array is one of size 0, never None.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.kernel import MissRule, Steps, growth_table
from moecache.kernel.state import MOST_TOKENS
from moecache.policy import Policy
from moecache.trace import ModelShape

ABSENT = np.zeros((1, 1, 0), np.int16)


def make_steps(
    shape: ModelShape,
    policy: Policy,
    clock: int,
    topk_ids: np.ndarray,
    gate_weights: np.ndarray,
    selection_scores: np.ndarray | None,
    is_exact: np.ndarray | None = None,
    predicted_ids: np.ndarray | None = None,
    next_use: np.ndarray | None = None,
) -> Steps:
    """What the router said, ready for the kernel; what the policy does not read is left out.

    Parameters
    ----------
    shape, policy : what the arrays must fit, and what they are needed for.
    clock : of the layers before these steps.
    topk_ids, gate_weights : [T,l,K] in rank order.
    selection_scores : [T,l,E] float16, is_exact : [T] bool, predicted_ids : [T,l,P] int, next_use : [T,l,K] int; or None.

    Raises
    ------
    ValueError : arrays that do not fit each other or the shape, ids that are no experts, or something that the policy needs is missing.
    """
    size = topk_ids.shape
    _check_ids("topk_ids", topk_ids, shape, 0)
    expected = {
        "topk_ids": (topk_ids, (*size[:2], shape.top_k), "iu"),
        "gate_weights": (gate_weights, size, "f"),
        "is_exact": (is_exact, size[:1], "biu"),
        "selection_scores": (selection_scores, (*size[:2], shape.num_experts), "f"),
        "next_use": (next_use, size, "iu"),
    }
    for name, (array, right_size, kinds) in expected.items():
        if array is not None and (array.shape != right_size or array.dtype.kind not in kinds):
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, but the steps {list(size)} ask for {list(right_size)}")
    if selection_scores is not None and selection_scores.dtype != np.float16:
        raise ValueError(f"selection_scores are {selection_scores.dtype}; decisions are made on float16: round them with to_recorded")
    if predicted_ids is not None:
        _check_predictions(predicted_ids, size, shape)
    _check_needs(policy, selection_scores, predicted_ids, next_use)
    if clock + size[0] > MOST_TOKENS:
        raise ValueError(f"a cache counts at most {MOST_TOKENS} tokens, and these steps lead to {clock + size[0]}; start a new one")
    growth, epoch = _growth(policy, clock, size[0])
    return Steps(
        topk_ids=_frozen(topk_ids, np.int16),
        gate_weights=_frozen(gate_weights, np.float32),
        score_bits=_frozen(selection_scores.view(np.int16) if selection_scores is not None and policy.needs_scores else ABSENT, np.int16),
        predicted_ids=_frozen(predicted_ids if predicted_ids is not None and policy.max_prefetches else ABSENT, np.int16),
        next_use=_frozen(next_use if next_use is not None and policy.needs_future else ABSENT, np.int64),
        is_exact=_frozen(np.zeros(size[0]) if is_exact is None else is_exact, np.uint8),
        growth=_frozen(growth, np.float64),
        growth_epoch=_frozen(epoch, np.int64),
    )


def _check_ids(name: str, ids: np.ndarray, shape: ModelShape, lowest: int) -> None:
    if ids.dtype.kind not in "iu" or (ids.size and not lowest <= ids.min() <= ids.max() < shape.num_experts):
        found = f"{ids.dtype} {ids.min()}..{ids.max()}" if ids.size else f"{ids.dtype}"
        raise ValueError(f"{name} must be integers in {lowest}..{shape.num_experts - 1}, got {found}")


def check_distinct(topk_ids: np.ndarray, first_token: int = 0, first_layer: int = 0) -> None:
    """Refuse steps [T,l,K] that call an expert twice; the error counts tokens and layers from the given ones.

    Raises
    ------
    ValueError : with the token, the layer and the expert.
    """
    ordered = np.sort(topk_ids, axis=-1)
    is_twice = ordered[..., 1:] == ordered[..., :-1]
    if is_twice.any():
        token, layer, place = np.argwhere(is_twice)[0]
        raise ValueError(
            f"token {first_token + token}, layer {first_layer + layer}: expert {ordered[token, layer, place]} is called twice in topk_ids "
            f"{topk_ids[token, layer].tolist()}; a step calls each expert once at most"
        )


def _check_predictions(predicted_ids: np.ndarray, size: tuple[int, ...], shape: ModelShape) -> None:
    if predicted_ids.ndim != 3 or predicted_ids.shape[:2] != size[:2]:
        raise ValueError(f"predicted_ids is {list(predicted_ids.shape)}, but the steps {list(size)} ask for [{size[0]}, {size[1]}, any]")
    _check_ids("predicted_ids", predicted_ids, shape, -1)


def _check_needs(policy: Policy, selection_scores: Any, predicted_ids: Any, next_use: Any) -> None:
    if selection_scores is None and policy.needs_scores:
        raise ValueError(
            f"policy {policy.label!r} substitutes by selection score, but no selection scores are given; "
            "record them, or use another fallback, or wait for every miss"
        )
    if predicted_ids is None and policy.max_prefetches:
        raise ValueError(f"policy {policy.label!r} prefetches, but nothing is predicted; give the trace predicted_ids, or max_prefetches=0")
    if next_use is None and policy.needs_future:
        name = policy.eviction.name.lower()  # type: ignore[union-attr]
        raise ValueError(f"eviction={name!r} knows the future, which only the simulator can tell from a recorded trace; use another here")


def check_recorded(policy: Policy, num_recorded: int, num_experts: int) -> None:
    """Refuse a policy that reads scores which a trace of the best `num_recorded` a step does not hold (0 = no scores at all).

    Raises
    ------
    ValueError : cache-prior, which reads the range of all scores; max-rank, whose ranks reach beyond what is recorded.
    """
    if num_recorded in (0, num_experts) or not policy.needs_scores:
        return
    held = f"the trace holds the best {num_recorded} of {num_experts} scores a step"
    if policy.miss_rule == MissRule.CACHE_PRIOR:
        raise ValueError(f"policy {policy.label!r} reads the range of all scores, but {held}; record all of them")
    if policy.miss_rule == MissRule.MAX_RANK and policy.best_ranks > num_recorded:  # type: ignore[operator]
        raise ValueError(f"policy {policy.label!r} asks for the best {policy.best_ranks} experts, but {held}; record more of them")


def _growth(policy: Policy, clock: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    if policy.half_life is None:
        return np.ones(num_tokens), np.zeros(num_tokens, np.int64)
    return growth_table(policy.half_life, clock + 1, num_tokens)


def _frozen(array: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    view = np.ascontiguousarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view
