"""Compact traces: of each step's E selection scores only the best M, with the ids they belong to.

A stand-in is sought among the best experts outside the top-k, and the resident one is nearly always near the top. So a trace keeps, for
each step, the scores of the router's own top-k and of the best M - K others, in falling order (the lower id first among equals): 4 bytes
for each of M instead of 2 for each of E. What is not kept is not guessed: a replay marks it with the bits of one NaN, `NOT_RECORDED`, and a
stand-in that would have to come from there is fetched after all and counted apart.

Which policy may be replayed on a compact trace is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moecache.kernel.fallback import NOT_RECORDED
from moecache.trace.blocks import token_blocks
from moecache.trace.shape import TraceError

if TYPE_CHECKING:
    from moecache.trace import RouterTrace

LOWEST = -(2**31)


def sort_keys(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[..] int32 that order float16 scores as numbers, and among equals put the lower id above (-0.0 sorts below 0.0)."""
    bits = scores.view(np.int16).astype(np.int32)
    return ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | (0xFFFF - ids.astype(np.int32))


def from_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids (int16) and scores (float16) that `sort_keys` was given."""
    image = keys >> 16
    bits = (image ^ ((image >> 15) & 0x7FFF)).astype(np.int16)
    return (0xFFFF - (keys & 0xFFFF)).astype(np.int16), bits.view(np.float16)


def best_scores(trace: RouterTrace, num_best: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T,L,M] int16 and scores [T,L,M] float16: the router's own top-k and the best of the others, in falling order.

    Raises
    ------
    TraceError : a trace without scores, or M outside top-k .. what the trace holds.
    """
    shape = trace.shape
    if trace.selection_scores is None:
        raise TraceError("the trace holds no selection scores, so there are no best ones; record them")
    if not shape.top_k <= num_best <= trace.num_recorded:
        raise TraceError(f"num_best={num_best} is outside {shape.top_k}..{trace.num_recorded}, from top-k to the scores that are recorded")
    ids = np.empty((trace.num_tokens, shape.num_layers, num_best), np.int16)
    scores = np.empty(ids.shape, np.float16)
    for block in token_blocks(0, trace.num_tokens, shape.num_layers * shape.num_experts):
        ids[block], scores[block] = from_keys(_best_keys(full_scores(trace, block), trace.topk_ids[block], num_best))
    return ids, scores


def _best_keys(scores: np.ndarray, topk_ids: np.ndarray, num_best: int) -> np.ndarray:
    keys = sort_keys(scores, np.arange(scores.shape[-1]))
    called = topk_ids.astype(np.int64)
    own = np.take_along_axis(keys, called, -1)
    np.put_along_axis(keys, called, LOWEST, -1)
    num_others = num_best - called.shape[-1]
    others = np.partition(keys, keys.shape[-1] - num_others - 1, -1)[..., keys.shape[-1] - num_others :]
    return -np.sort(-np.concatenate([own, others], -1), -1)


def full_scores(trace: RouterTrace, block: slice) -> np.ndarray:
    """Scores [t,L,E] float16 of a block of tokens; where the trace holds the best M only, the others have the bits NOT_RECORDED."""
    scores, ids = trace.selection_scores, trace.recorded_ids
    assert scores is not None
    if ids is None:
        return scores[block]
    rows, num_experts = ids[block], trace.shape.num_experts
    bits = np.full((*rows.shape[:2], num_experts), NOT_RECORDED, np.int16)
    first = np.arange(0, bits.size, num_experts).reshape(*rows.shape[:2], 1)
    bits.reshape(-1)[first + rows] = scores[block].view(np.int16)
    return bits.view(np.float16)


def in_falling_order(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and scores [..,M] in the order in which a compact trace holds them."""
    order = np.argsort(-sort_keys(scores, ids).astype(np.int64), -1, kind="stable")
    return np.take_along_axis(ids, order, -1), np.take_along_axis(scores, order, -1)
