"""Near ties: steps in which rounding alone could have turned a decision.

Decisions are made on scores rounded to float16. Two computations of the same logits (all tokens at once, or one at a
time; a CPU, or a GPU) differ in the last bits, and may so fall on different sides of a rounding. Nothing comes of it
unless two *competing* numbers lie closer together than the rounding. A step is a near tie when one of these holds:

- the border of the top-k: the lowest score inside and the highest outside are within one float16 step;
- the order of ranks, or the gate threshold: two neighbouring gate weights, or a gate weight and the threshold, are
  within 2^-10 of each other, relatively (the step of float16);
- the stand-ins: two chosen by score, or the last one chosen and the next expert below it, are within one float16 step.

The expert below the last stand-in need not be resident, so the count is an upper bound; it says how many decisions
*could* differ on another machine, not how many do. Mass accounts are sums over many tokens and are not looked at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moecache.kernel import Fallback, Outcome

FLOAT16_STEP = 2.0**-10


def near_ties(
    selection_scores: NDArray[np.float32],
    topk_ids: NDArray[np.int16],
    gate_weights: NDArray[np.float32],
    outcome: NDArray[np.uint8],
    computed_ids: NDArray[np.int16],
    fallback: Fallback,
    gate_threshold: float,
) -> NDArray[np.bool_]:
    """Which steps of one layer are near ties.

    Parameters
    ----------
    selection_scores : ndarray [T, E] float32
        Already rounded to float16.
    topk_ids, gate_weights : ndarray [T, K]
        The router's calls in rank order.
    outcome, computed_ids : ndarray [T, K]
        What was decided about them.
    fallback : Fallback
        Stand-ins are looked at where they are chosen by score.
    gate_threshold : float
        The gate weight from which on misses are waited for (0 or infinity: none).

    Returns
    -------
    ndarray [T] bool
    """
    ids = topk_ids.astype(np.int64)
    inside = np.take_along_axis(selection_scores, ids, axis=1)
    outside = selection_scores.copy()
    np.put_along_axis(outside, ids, -np.inf, axis=1)
    is_near = _within_step(inside.min(axis=1), outside.max(axis=1))
    is_near |= _is_close(gate_weights[:, :-1], gate_weights[:, 1:]).any(axis=1)
    is_near |= _is_close(gate_weights, np.float32(gate_threshold)).any(axis=1)
    if fallback == Fallback.SUBSTITUTE:
        is_substituted = outcome == Outcome.SUBSTITUTED
        rows = np.flatnonzero(is_substituted.any(axis=1))
        is_near[rows] |= _near_stand_ins(outside[rows], is_substituted[rows], computed_ids[rows].astype(np.int64))
    return is_near


def _near_stand_ins(outside: NDArray[np.float32], is_substituted: NDArray[np.bool_], computed_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether stand-ins [n] compete closely; `outside` [n, E] holds -inf at the top-k and is overwritten."""
    scores = np.take_along_axis(outside, np.maximum(computed_ids, 0), axis=1)
    chosen = -np.sort(-np.where(is_substituted, scores, -np.inf), axis=1)
    last = np.where(is_substituted, scores, np.inf).min(axis=1)
    row, call = np.nonzero(is_substituted)
    outside[row, computed_ids[row, call]] = -np.inf
    below = np.where(outside <= last[:, None], outside, -np.inf).max(axis=1, initial=-np.inf)
    return _within_step(chosen[:, :-1], chosen[:, 1:]).any(axis=1) | _within_step(last, below)


def _within_step(higher: NDArray[np.float32], lower: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether two scores lie within one float16 step of the higher one; -inf lies within none."""
    step = np.spacing(np.where(np.isfinite(higher), np.abs(higher), 0).astype(np.float16)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.isfinite(lower) & (higher - lower <= step)


def _is_close(weights: NDArray[np.float32], others: NDArray[np.float32] | np.float32) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        return np.isfinite(others) & (np.abs(weights - others) <= FLOAT16_STEP * weights)
