"""Which calls an experiment names: the designs of planned interventions, drawn beforehand on a recorded trace.

A comparison of two kinds of call is fair when both are named equally often in every document and layer, and blind
when the draw does not know the losses. Every builder here takes what is eligible and returns marks of the same shape:
calls [T, L, K] in rank order, or steps [T, L]. Where several kinds are compared, all get the same number of sites in
each document and layer: the smallest number that any of them has there.

- `draw_alike` draws dense sites of one kind or of several that are compared.
- `in_band` marks the calls of one rank with a gate weight between two bounds.
- `pair_by_weight` pairs each call of one kind with one of another kind and the same weight.
- `match_in_step` names one heavy call of a step, or several light ones of the same step and of equal weight.
- `spaced_calls` names single calls far enough apart to be told apart by their losses.
- `missed_calls` and `call_ages` say what a simulated cache and the past know of each call.
- `realised_sites` says what a run made of the plan.

The last token of a document is never a site: nothing after it is scored. Models are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moecache.kernel import Outcome
from moecache.policy import FETCH_EVERY_MISS
from moecache.run import Run
from moecache.simulate import simulate
from moecache.stand_ins import NEVER, ages
from moecache.trace import RouterTrace

Marks = NDArray[np.bool_]


def draw_alike(eligible: Sequence[Marks], document_start: Marks, most: int, seed: int = 0) -> list[Marks]:
    """Draw equally many sites of each kind in every document and layer.

    Parameters
    ----------
    eligible : sequence of bool [T, L] or [T, L, K]
        What may be named, one array a kind.
    document_start : bool [T]
        The first token of each document.
    most : int
        Sites of a kind in one document and layer at most; fewer where a kind has fewer.
    seed : int
        Of the draw. Equal arguments give equal sites.

    Returns
    -------
    list of bool arrays, one a kind

    Raises
    ------
    ValueError
        If `most` is below 1, or nothing is eligible for some kind.
    """
    if most < 1:
        raise ValueError(f"most={most} sites must be at least 1 in each document and layer")
    generator = np.random.default_rng(seed)
    scored = not_last(document_start)
    kinds = [marks & scored.reshape(-1, *[1] * (marks.ndim - 1)) for marks in eligible]
    empty = [place for place, marks in enumerate(kinds) if not marks.any()]
    if empty:
        raise ValueError(f"kind {empty[0]} of {len(kinds)} has no eligible call: use a wider band, or more documents")
    drawn = [np.zeros_like(marks) for marks in kinds]
    for start, stop in document_bounds(document_start):
        for layer in range(kinds[0].shape[1]):
            found = [np.argwhere(marks[start:stop, layer]) for marks in kinds]
            number = min(most, *(len(places) for places in found))
            for marks, places in zip(drawn, found, strict=True):
                chosen = places[generator.permutation(len(places))[:number]]
                marks[(start + chosen[:, 0], layer, *chosen[:, 1:].T)] = True
    return drawn


def document_bounds(document_start: Marks) -> list[tuple[int, int]]:
    """First token of each document and of what follows it."""
    starts = np.flatnonzero(document_start).tolist()
    return list(zip(starts, [*starts[1:], document_start.size], strict=True))


def not_last(document_start: Marks) -> Marks:
    """Marks [T] of the tokens that another token of their document follows."""
    return ~np.concatenate([document_start[1:], [True]])


def random_tokens(document_start: Marks, fraction: float, seed: int = 0) -> Marks:
    """Marks [T] of the same number of random tokens, this fraction of them, in documents of equal length.

    Raises
    ------
    ValueError
        If the fraction does not lie between 0 and 1.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction={fraction} of the tokens must be above 0 and at most 1")
    generator, scored = np.random.default_rng(seed), not_last(document_start)
    marks = np.zeros_like(document_start)
    for start, stop in document_bounds(document_start):
        places = start + np.flatnonzero(scored[start:stop])
        marks[generator.permutation(places)[: round(fraction * places.size)]] = True
    return marks


def in_band(gate_weights: NDArray[np.floating], rank: int, low: float, high: float) -> Marks:
    """Marks [T, L, K] of the calls of one rank with low <= gate weight < high."""
    is_rank = np.arange(gate_weights.shape[-1]) == rank
    return (gate_weights >= low) & (gate_weights < high) & is_rank


def of_ranks(gate_weights: NDArray[np.floating], *ranks: int) -> Marks:
    """Marks [T, L, K] of all calls of these ranks."""
    return np.broadcast_to(np.isin(np.arange(gate_weights.shape[-1]), ranks), gate_weights.shape).copy()


def missed_calls(trace: RouterTrace, num_slots: int | Sequence[int], cold_start: str = "first") -> Marks:
    """Marks [T, L, K] of the calls that miss when every miss is waited for (LRU)."""
    decisions = simulate(trace, FETCH_EVERY_MISS, num_slots, cold_start=cold_start).decisions
    assert decisions is not None
    return decisions.outcome != Outcome.HIT


def call_ages(trace: RouterTrace) -> NDArray[np.float32]:
    """Tokens [T, L, K] since each call's expert was last called in its layer, infinite at its first call."""
    found = [ages(trace.topk_ids[:, layer], 0, np.full(trace.shape.num_experts, NEVER)) for layer in range(trace.shape.num_layers)]
    return np.stack(found, axis=1)


def match_in_step(gate_weights: NDArray[np.floating], rank: int, gap: int = 3, tolerance: float = 0.04) -> tuple[Marks, Marks]:
    """At each step where it is possible: one heavy call, and at least two light calls of equal weight.

    Parameters
    ----------
    gate_weights : ndarray [T, L, K] float
        In rank order.
    rank : int
        Of the heavy call.
    gap : int
        Light calls have ranks of at least rank + gap.
    tolerance : float
        The light calls' summed weight differs from the heavy call's by at most this fraction of it.

    Returns
    -------
    heavy, light : bool [T, L, K]
        Steps without a matching set are marked in neither. Of several sets the one with the most calls is taken, of
        these the one nearest in weight.

    Raises
    ------
    ValueError
        If no two ranks lie so far below the heavy one.
    """
    top_k = gate_weights.shape[-1]
    lights = range(rank + gap, top_k)
    if not 0 <= rank < top_k or len(lights) < 2:
        raise ValueError(
            f"rank {rank} of {top_k} has {len(lights)} ranks at least {gap} below it: two are needed; use a smaller gap or rank"
        )
    sets = [chosen for size in range(2, len(lights) + 1) for chosen in combinations(lights, size)]
    members = np.zeros((len(sets), top_k), bool)
    for place, chosen in enumerate(sets):
        members[place, list(chosen)] = True
    heavy = np.zeros(gate_weights.shape, bool)
    light = np.zeros(gate_weights.shape, bool)
    for layer in range(gate_weights.shape[1]):
        weights = gate_weights[:, layer].astype(np.float64)
        distance = np.abs(weights @ members.T.astype(np.float64) / weights[:, rank, None] - 1.0)
        preference = np.where(distance <= tolerance, members.sum(axis=1) + 1.0 - distance, -1.0)
        best = preference.argmax(axis=1)
        is_matched = preference.max(axis=1) > 0
        heavy[is_matched, layer, rank] = True
        light[is_matched, layer] = members[best[is_matched]]
    return heavy, light


def pair_by_weight(
    first: Marks, second: Marks, gate_weights: NDArray[np.floating], document_start: Marks, most: int, tolerance: float = 0.1, seed: int = 0
) -> tuple[Marks, Marks]:
    """Pair calls of two kinds in the same document and layer by their gate weight.

    Parameters
    ----------
    first, second : bool [T, L, K]
        The eligible calls of each kind.
    gate_weights : ndarray [T, L, K] float
    document_start : bool [T]
    most : int
        Pairs in one document and layer at most.
    tolerance : float
        The weights of a pair differ by at most this fraction of the first one's.
    seed : int

    Returns
    -------
    first, second : bool [T, L, K]
        Equally many of each. Random calls of the first kind each take the nearest of the second that is still free.
    """
    generator, scored = np.random.default_rng(seed), not_last(document_start)[:, None, None]
    kinds = (first & scored, second & scored)
    drawn = (np.zeros_like(first), np.zeros_like(second))
    for start, stop in document_bounds(document_start):
        for layer in range(first.shape[1]):
            here = gate_weights[start:stop, layer].astype(np.float64)
            places = [np.argwhere(marks[start:stop, layer]) for marks in kinds]
            wanted, free = (here[tuple(found.T)] for found in places)
            for place in generator.permutation(len(wanted)):
                if drawn[0][start:stop, layer].sum() == most or not len(free):
                    break
                nearest = np.abs(free - wanted[place]).argmin()
                if abs(free[nearest] - wanted[place]) <= tolerance * wanted[place]:
                    free[nearest] = np.inf
                    for marks, found, which in zip(drawn, places, (place, nearest), strict=True):
                        marks[start + found[which, 0], layer, found[which, 1]] = True
    return drawn


def spaced_calls(document_start: Marks, call_shape: tuple[int, int, int], spacing: int, ranks: Sequence[int], seed: int = 0) -> Marks:
    """One call every `spacing` tokens, of a random layer and a random one of these ranks, from a random offset.

    Parameters
    ----------
    document_start : bool [T]
    call_shape : tuple of int
        T, L, K.
    spacing : int
        Tokens from one site to the next in a document; a site's loss is counted until the next one.
    ranks : sequence of int
        A rank listed twice is drawn twice as often.
    seed : int

    Returns
    -------
    bool [T, L, K]
        The last `spacing` tokens of a document hold no site, so that every site's window is complete.

    Raises
    ------
    ValueError
        If the spacing is below 1, or no document is longer than it.
    """
    if spacing < 1:
        raise ValueError(f"spacing={spacing} tokens must be at least 1")
    generator, marks = np.random.default_rng(seed), np.zeros(call_shape, bool)
    for start, stop in document_bounds(document_start):
        places = np.arange(start + generator.integers(spacing), stop - spacing, spacing)
        layers = generator.integers(call_shape[1], size=places.size)
        marks[places, layers, np.asarray(ranks)[generator.integers(len(ranks), size=places.size)]] = True
    if not marks.any():
        raise ValueError(f"no document is long enough for a site and {spacing} tokens after it")
    return marks


def realised_sites(run: Run) -> pd.DataFrame:
    """What an intervention made of its plan, one row a rank.

    Parameters
    ----------
    run : Run
        From `moecache.intervene`.

    Returns
    -------
    DataFrame
        `rank`, `num_named`, `num_replaced` (substituted or dropped; the others found nobody to stand in),
        `mean_gate_weight` of the replaced calls and their `mass` (mean a step).

    Raises
    ------
    ValueError
        If the run is no intervention on calls.
    """
    if run.instrument != "intervention" or "is_named" not in run.extra or run.decisions is None:
        raise ValueError(f"a run of moecache.intervene is needed, got one of the {run.instrument} without named calls")
    is_replaced = np.isin(run.decisions.outcome, (Outcome.SUBSTITUTED, Outcome.DROPPED))
    mass = np.where(is_replaced, run.extra["gate_weights"], 0.0).sum(axis=(0, 1), dtype=np.float64)
    number = is_replaced.sum(axis=(0, 1))
    return pd.DataFrame(
        {
            "rank": np.arange(run.shape.top_k),
            "num_named": run.extra["is_named"].sum(axis=(0, 1)),
            "num_replaced": number,
            "mean_gate_weight": np.where(number > 0, mass / np.maximum(number, 1), np.nan),
            "mass": mass / (run.num_tokens * run.shape.num_layers),
        }
    )
