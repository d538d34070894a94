"""Rates and sums over a decision log, and the perplexity increase.

A *call* is one token, layer and rank: the denominator of every rate. A *step* is one token at one layer: `substituted_mass` is the mean
over steps, between 0 and 1. Nothing here knows which policy made the decisions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moecache.kernel import Landing, Outcome
from moecache.kernel.codes import (
    ADMITTED,
    ARRIVALS_DROPPED,
    EVICTIONS,
    FETCHED,
    FIRST_SUBSTITUTED,
    FORCED,
    NOT_EVICTING,
    NOT_INSERTED,
    NUM_COUNTS,
    NUM_OUTCOMES,
    OUTSIDE_RECORDED,
    PREFETCH_KIND,
    PREFETCH_USEFUL,
    PREFETCH_WASTED,
    PREFETCHED,
)
from moecache.trace import DecisionLog


def count_calls(log: DecisionLog, start: int = 0, stop: int | None = None) -> np.ndarray:
    """The kernel's counters, computed from a log.

    Parameters
    ----------
    log : DecisionLog of T tokens at L layers.
    start, stop : the window of tokens; arrivals count where they land.

    Returns
    -------
    [L,17] int64 : as the kernel's, except for what a log does not show and is 0 here: copies booked, prefetches that proved useful or
        wasted, and stand-ins outside the recorded scores.

    Raises
    ------
    ValueError : arrivals at other clocks than the log's tokens have.
    """
    check_clocks(log)
    stop = log.outcome.shape[0] if stop is None else stop
    outcome, num_layers = log.outcome[start:stop], log.outcome.shape[1]
    counts = np.zeros((num_layers, NUM_COUNTS), np.int64)
    for code in range(NUM_OUTCOMES):
        counts[:, code] = (outcome == code).sum(axis=(0, 2))
    rows = log.arrivals[(log.arrivals[:, 1] >= start) & (log.arrivals[:, 1] < stop)]
    landed = rows[rows[:, 6] == Landing.LANDED]
    is_prefetch = landed[:, 5] == PREFETCH_KIND
    counts[:, ADMITTED] = np.bincount(landed[~is_prefetch, 2], minlength=num_layers)
    counts[:, PREFETCHED] = np.bincount(landed[is_prefetch, 2], minlength=num_layers)
    counts[:, NOT_INSERTED] = (log.evicted_ids[start:stop] == NOT_EVICTING).sum(axis=(0, 2))
    refused = rows[(rows[:, 6] != Landing.LANDED) & (rows[:, 6] != Landing.CANCELLED)]
    counts[:, ARRIVALS_DROPPED] = np.bincount(refused[:, 2], minlength=num_layers)
    evicting = landed[landed[:, 4] >= 0]
    counts[:, EVICTIONS] = (log.evicted_ids[start:stop] >= 0).sum(axis=(0, 2)) + np.bincount(evicting[:, 2], minlength=num_layers)
    counts[:, FIRST_SUBSTITUTED] = (outcome[..., 0] > FORCED).sum(axis=0)
    return counts


def check_clocks(log: DecisionLog) -> None:
    """Refuse a log whose arrivals do not belong to its tokens, the first of which has clock 0.

    Raises
    ------
    ValueError : with the clocks and the number of tokens.
    """
    asked, landed, num_tokens = log.arrivals[:, 0], log.arrivals[:, 1], log.outcome.shape[0]
    if landed.size and not (asked.min() >= 0 and landed.max() < num_tokens and (asked <= landed).all()):
        raise ValueError(
            f"arrivals at clocks {asked.min()}..{landed.max()} do not belong to a log of {num_tokens} tokens that starts at clock 0; "
            "subtract the clock of the log's first token from their first two columns"
        )


def count_transfers(log: DecisionLog) -> int:
    """Experts moved: fetches and arrived copies, where one transfer serves all that ask for the same expert while it is under way.

    A background copy is under way from the step that asks for it until it arrives (landed or dropped). Fetches of its expert in between,
    and prefetches up to its arrival, wait for that copy instead of a second one. Copies that were cancelled, or had not arrived at the
    log's end, are no transfers. `moecache.cost` counts alike.

    Raises
    ------
    ValueError : arrivals at other clocks than the log's tokens have.
    """
    check_clocks(log)
    token, layer, rank = np.nonzero((log.outcome == FETCHED) | (log.outcome == FORCED))
    arrived = log.arrivals[log.arrivals[:, 6] != Landing.CANCELLED]
    is_prefetch = arrived[:, 5] == PREFETCH_KIND
    prefetches, copies = np.unique(arrived[is_prefetch][:, 1:4], axis=0), arrived[~is_prefetch]  # who is predicted twice is moved once
    fetched = _block(layer, log.computed_ids[token, layer, rank])
    shared = _num_under_way(copies, fetched, token)
    # A prefetch lands after the copies of its step, and was known before them.
    shared += _num_under_way(copies, _block(prefetches[:, 1], prefetches[:, 2]), prefetches[:, 0] - 1)
    return token.size + len(copies) + len(prefetches) - shared


def _block(layer: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """One number for a layer and an expert."""
    return (layer.astype(np.int64) << 16) | expert.astype(np.int64)


def _num_under_way(copies: np.ndarray, blocks: np.ndarray, tokens: np.ndarray) -> int:
    """How many of the blocks, each wanted at its token, had been asked for by then and arrive later."""
    if not len(copies) or not len(blocks):
        return 0
    span = max(int(copies[:, 1].max()), int(tokens.max())) + 2
    order = np.lexsort((copies[:, 0], _block(copies[:, 2], copies[:, 3])))
    copies = copies[order]
    asked = _block(copies[:, 2], copies[:, 3]) * span + copies[:, 0]
    last = np.searchsorted(asked, blocks * span + tokens, side="right") - 1  # the last copy of the block that was asked for by then
    candidate = copies[np.maximum(last, 0)]
    is_same = (last >= 0) & (_block(candidate[:, 2], candidate[:, 3]) == blocks)
    return int((is_same & (candidate[:, 1] > tokens)).sum())


def summarise(counts: np.ndarray, mass_sum: float, num_tokens: int) -> dict[str, float | int]:
    """Named totals and rates.

    Parameters
    ----------
    counts : [L,17] int64, as made by the kernel or `count_calls`.
    mass_sum : substituted gate mass summed over tokens and layers.
    num_tokens : T of the window.

    Returns
    -------
    dict : totals (calls, hits, fetched, forced, substituted, dropped, low_precision, cpu, evictions, admitted, ...), rates per call,
        `fetches_per_token` (over all layers), `fetches_per_step`, `copies_per_step`, `substituted_mass` (mean a step).
    """
    total = counts.sum(axis=0)
    names = {outcome: outcome.name.lower() for outcome in Outcome} | {Outcome.HIT: "hits"}
    result: dict[str, float | int] = {"tokens": num_tokens, "calls": int(total[:NUM_OUTCOMES].sum())}
    result |= {name: int(total[outcome]) for outcome, name in names.items()}
    result |= {
        "evictions": int(total[EVICTIONS]),
        "admitted": int(total[ADMITTED]),
        "arrivals_dropped": int(total[ARRIVALS_DROPPED]),
        "first_choices_substituted": int(total[FIRST_SUBSTITUTED]),
        "not_inserted": int(total[NOT_INSERTED]),
        "prefetched": int(total[PREFETCHED]),
        "prefetch_useful": int(total[PREFETCH_USEFUL]),
        "prefetch_wasted": int(total[PREFETCH_WASTED]),
        "outside_recorded": int(total[OUTSIDE_RECORDED]),
    }
    calls, steps = max(result["calls"], 1), max(num_tokens * counts.shape[0], 1)
    fetches = result["fetched"] + result["forced"]
    return result | {
        "hit_rate": result["hits"] / calls,
        "substitution_rate": (result["substituted"] + result["dropped"]) / calls,
        "substituted_mass": float(mass_sum) / steps,
        "fetches_per_token": fetches / max(num_tokens, 1),
        "fetches_per_step": fetches / steps,
        "copies_per_step": (result["admitted"] + result["arrivals_dropped"]) / steps,
        "fewest_evictions_a_layer": int(counts[:, EVICTIONS].min()),
    }


def token_frame(log: DecisionLog, document_start: np.ndarray, loss_nats: np.ndarray | None) -> pd.DataFrame:
    """One row a token: document, token loss, calls by outcome over all layers, mean substituted mass, evictions, copies that arrived."""
    num_tokens = log.outcome.shape[0]
    columns: dict[str, np.ndarray] = {"token": np.arange(num_tokens), "document": np.cumsum(document_start) - 1}
    if loss_nats is not None:
        columns["loss_nats"] = loss_nats
    for outcome in Outcome:
        columns[outcome.name.lower()] = (log.outcome == outcome).sum(axis=(1, 2))
    columns["first_choices_substituted"] = (log.outcome[..., 0] > FORCED).sum(axis=1)
    columns["substituted_mass"] = log.substituted_mass.mean(axis=1, dtype=np.float64)
    landed = log.arrivals[log.arrivals[:, 6] == Landing.LANDED]
    arrived = log.arrivals[log.arrivals[:, 6] != Landing.CANCELLED]  # landed or dropped: both were moved
    columns["copies"] = np.bincount(arrived[:, 1], minlength=num_tokens)[:num_tokens]
    evicting = np.bincount(landed[landed[:, 4] >= 0, 1], minlength=num_tokens)[:num_tokens]
    columns["evictions"] = (log.evicted_ids >= 0).sum(axis=(1, 2)) + evicting
    return pd.DataFrame(columns).rename(columns={"hit": "hits"})


def perplexity_increase(loss_nats: Any, exact_loss_nats: Any) -> float:
    """exp(mean paired difference of token losses) - 1, over tokens where both are known.

    Parameters
    ----------
    loss_nats, exact_loss_nats : [T] token losses of the same tokens, or runs that hold them; NaN where there is none (a document's
        first token).

    Returns
    -------
    float : as a fraction, 0.05 = 5 %.

    Raises
    ------
    ValueError : arrays of different length, or no token with both losses.
    """
    loss, exact = _losses(loss_nats), _losses(exact_loss_nats)
    if loss.shape != exact.shape:
        raise ValueError(f"losses of {loss.shape} and {exact.shape} tokens cannot be paired; score the same text twice")
    difference = (loss - exact)[~np.isnan(loss) & ~np.isnan(exact)]
    if difference.size == 0:
        raise ValueError("no token has both losses, so there is nothing to compare")
    return float(np.expm1(difference.mean()))


def _losses(of: Any) -> np.ndarray:
    """[T] float64 from losses or from a run."""
    losses = getattr(of, "loss_nats", of)
    if losses is None:
        raise ValueError("this run has no token losses: the simulator runs no model; use moecache.emulate")
    return np.asarray(losses, np.float64)
