"""What a policy may learn beforehand from a text it is not judged on: who is called most, and who is called with whom.

Calibrate on documents that are disjoint from those of the experiment, or the result knows its own answers. Also here, because it needs the
trace only: what Belady's policies know (`future_calls`), and the simplest prediction for prefetching.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moecache.kernel.eviction import NEVER
from moecache.trace import RouterTrace


def most_called(trace: RouterTrace) -> np.ndarray:
    """Experts of each layer by number of calls, most called first, the lower id first among equals.

    Parameters
    ----------
    trace : RouterTrace of a calibration text, disjoint from the one that the profile is used on.

    Returns
    -------
    [L,E] int64 : a profile for `cold_start`, for the static policy or to start warm.
    """
    counts = [np.bincount(trace.topk_ids[:, layer].ravel(), minlength=trace.shape.num_experts) for layer in range(trace.shape.num_layers)]
    return np.argsort(-np.stack(counts), axis=1, kind="stable")


def buddy_table(trace: RouterTrace, num_buddies: int = 16) -> np.ndarray:
    """Each expert's best stand-ins by co-activation: q(j|i) = M(i,j) / sum over j' of M(i,j'), M counting tokens that call both.

    Parameters
    ----------
    trace : RouterTrace, disjoint from the one the table is used on.
    num_buddies : H, length of each list.

    Returns
    -------
    [L,E,H] int16 : best first (the lower id among equals), -1 where fewer experts were called together.

    Raises
    ------
    ValueError : `num_buddies` outside 1..E-1.
    """
    shape = trace.shape
    if not 1 <= num_buddies < shape.num_experts:
        raise ValueError(f"num_buddies={num_buddies} is outside 1..{shape.num_experts - 1}")
    table = np.empty((shape.num_layers, shape.num_experts, num_buddies), np.int16)
    for layer in range(shape.num_layers):
        is_called = np.zeros((trace.num_tokens, shape.num_experts), np.float32)
        np.put_along_axis(is_called, trace.topk_ids[:, layer].astype(np.int64), 1, axis=1)
        together = is_called.T @ is_called
        np.fill_diagonal(together, 0)
        order = np.argsort(-together, axis=1, kind="stable")[:, :num_buddies]
        table[layer] = np.where(np.take_along_axis(together, order, axis=1) > 0, order, -1)
    return table


def predict_previous_token(trace: RouterTrace) -> RouterTrace:
    """The trace with `predicted_ids` = what the token before called (nothing at a document's start).

    Parameters
    ----------
    trace : RouterTrace.

    Returns
    -------
    RouterTrace : the same arrays, and `predicted_ids` [T,L,K] int16, best first, -1 = nothing.
    """
    predicted = np.full_like(trace.topk_ids, -1)
    predicted[1:] = trace.topk_ids[:-1]
    predicted[trace.document_start] = -1
    return replace(trace, predicted_ids=predicted)


def future_calls(topk_ids: np.ndarray, num_experts: int, starts: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """When each call's expert is called next, and when each expert is called first from given tokens on.

    Parameters
    ----------
    topk_ids : [T,L,K] int.
    num_experts : E.
    starts : tokens at which a cache starts.

    Returns
    -------
    next_use [T,L,K] int64, and for each start [L,E] int64; a call that never comes is at `NEVER`.
    """
    num_tokens, num_layers, _ = topk_ids.shape
    upcoming = np.full((num_layers, num_experts), NEVER, np.int64)
    next_use, first_use = np.empty(topk_ids.shape, np.int64), {}
    wanted, layers = {int(start) for start in starts}, np.arange(num_layers)[:, None]
    for token in range(num_tokens - 1, -1, -1):
        ids = topk_ids[token].astype(np.int64)
        next_use[token] = upcoming[layers, ids]
        upcoming[layers, ids] = token
        if token in wanted:
            first_use[token] = upcoming.copy()
    return next_use, first_use
