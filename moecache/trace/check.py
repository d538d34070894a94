"""Whether arrays are a possible trace: dtypes, lengths, ranges, order, duplicates, NaN, block by block.

Every error names the token and the layer. This module changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moecache.trace.best import sort_keys
from moecache.trace.blocks import token_blocks
from moecache.trace.shape import ModelShape, TraceError

if TYPE_CHECKING:
    from moecache.trace import RouterTrace

WEIGHT_SUM_TOLERANCE = 0.003


def check_trace(trace: RouterTrace) -> None:
    """Refuse a trace that cannot be.

    Raises
    ------
    TraceError : what is wrong, with token and layer.
    """
    _check_arrays(trace)
    shape, scores, recorded = trace.shape, trace.selection_scores, trace.recorded_ids
    for block in token_blocks(0, trace.num_tokens, shape.num_layers * trace.num_recorded):
        _check_steps(trace.topk_ids[block], trace.gate_weights[block], shape.num_experts, block.start)
        if trace.predicted_ids is not None:
            check_ids(trace.predicted_ids[block], shape.num_experts, block.start, lowest=-1)
        if scores is not None:
            _check_scores(scores[block], block.start)
        if scores is not None and recorded is not None:
            _check_recorded(trace.topk_ids[block], recorded[block], scores[block], shape.num_experts, block.start)


def fail_at(is_wrong: np.ndarray, values: np.ndarray, what: str, first_token: int = 0) -> None:
    """Raise for the first step [T,L,..] that is wrong, if there is one."""
    if is_wrong.any():
        place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
        raise TraceError(f"{what}: {values[place]}", (place[0] + first_token, place[1]))


def check_ids(ids: np.ndarray, num_experts: int, first_token: int = 0, lowest: int = 0) -> None:
    """Refuse expert ids [T,L,..] out of lowest..E-1; -1 is nobody, where it is allowed."""
    if ids.size and (ids.min() < lowest or ids.max() >= num_experts):
        what = f"{'an expert' if lowest == 0 else 'a predicted'} id outside {lowest}..{num_experts - 1}"
        fail_at((ids < lowest) | (ids >= num_experts), ids, what, first_token)


def _check_arrays(trace: RouterTrace) -> None:
    num_tokens = trace.topk_ids.shape[0] if trace.topk_ids.ndim else 0
    for name, (array, dtype, size) in _expected(trace, num_tokens, trace.shape).items():
        if array.dtype != dtype or array.shape != size:
            raise TraceError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(size)}")
    if num_tokens == 0:
        raise TraceError("the trace has no tokens")
    if not trace.document_start[0]:
        raise TraceError("document_start is False at token 0, which must start a document")
    predicted = trace.predicted_ids
    if predicted is not None and (predicted.dtype != np.int16 or predicted.ndim != 3 or predicted.shape[:2] != trace.topk_ids.shape[:2]):
        size = list(trace.topk_ids.shape[:2])
        raise TraceError(f"predicted_ids is {predicted.dtype} {list(predicted.shape)}, expected int16 [{size[0]}, {size[1]}, any]")


def _expected(trace: RouterTrace, num_tokens: int, shape: ModelShape) -> dict[str, tuple[np.ndarray, type, tuple[int, ...]]]:
    """Each array with the dtype and size that the shape asks for."""
    steps = (num_tokens, shape.num_layers)
    expected = {
        "topk_ids": (trace.topk_ids, np.int16, (*steps, shape.top_k)),
        "gate_weights": (trace.gate_weights, np.float32, (*steps, shape.top_k)),
        "token_ids": (trace.token_ids, np.int32, (num_tokens,)),
        "document_start": (trace.document_start, np.bool_, (num_tokens,)),
    }
    scores, recorded = trace.selection_scores, trace.recorded_ids
    if recorded is not None and scores is None:
        raise TraceError("recorded_ids say whose scores are recorded, but there are no selection_scores")
    if scores is not None:
        num_scores = shape.num_experts
        if recorded is not None:
            num_scores = recorded.shape[-1] if recorded.ndim == 3 else 0
            if not shape.top_k <= num_scores <= shape.num_experts:
                raise TraceError(
                    f"recorded_ids is {list(recorded.shape)}, expected {[*steps, 'M']}, M from {shape.top_k} to {shape.num_experts}"
                )
            expected["recorded_ids"] = (recorded, np.int16, (*steps, num_scores))
        expected["selection_scores"] = (scores, np.float16, (*steps, num_scores))
    return expected


def _check_steps(ids: np.ndarray, weights: np.ndarray, num_experts: int, first: int) -> None:
    check_ids(ids, num_experts, first)
    ordered = np.sort(ids, axis=-1)
    fail_at(ordered[..., 1:] == ordered[..., :-1], ordered[..., 1:], "the same expert called twice", first)
    fail_at(~np.isfinite(weights) | (weights < 0), weights, "a gate weight that is negative or not finite", first)
    sums = weights.sum(axis=-1, dtype=np.float64)
    fail_at(np.abs(sums - 1) > WEIGHT_SUM_TOLERANCE, sums, "gate weights that do not sum to 1 (divide them by their sum)", first)
    falls = weights[..., 1:] > weights[..., :-1]
    ties = (weights[..., 1:] == weights[..., :-1]) & (ids[..., 1:] < ids[..., :-1])
    fail_at(falls | ties, weights[..., 1:], "calls out of rank order (weight falling, lower id first among equals)", first)


def _check_scores(scores: np.ndarray, first: int) -> None:
    bits = scores.view(np.int16)  # ten times faster than float16 arithmetic, which NumPy does one by one
    fail_at((bits >= 0x7C00) | ((bits > -0x400) & (bits < 0)), scores, "a selection score that is NaN or +infinity in float16", first)
    if bits.size and bits.min() == -0x8000:
        fail_at(bits == -0x8000, scores, "a selection score of -0.0, which would sort below 0.0 (round with to_recorded)", first)


def _check_recorded(topk_ids: np.ndarray, recorded: np.ndarray, scores: np.ndarray, num_experts: int, first: int) -> None:
    check_ids(recorded, num_experts, first)
    ordered = np.sort(recorded, axis=-1)
    fail_at(ordered[..., 1:] == ordered[..., :-1], ordered[..., 1:], "the same expert's score recorded twice", first)
    keys = sort_keys(scores, recorded)
    what = "recorded scores out of order (falling, lower id first among equals)"
    fail_at(keys[..., 1:] >= keys[..., :-1], scores[..., 1:], what, first)
    is_recorded = np.zeros((*recorded.shape[:2], num_experts), bool)
    np.put_along_axis(is_recorded, recorded.astype(np.int64), True, -1)
    is_missing = ~np.take_along_axis(is_recorded, topk_ids.astype(np.int64), -1)
    fail_at(is_missing, topk_ids, "the score of a called expert is not recorded", first)
