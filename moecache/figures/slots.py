"""What lay in the slots before and after each step of one layer, told from a decision log.

A decision log says who was fetched and who was evicted, not who is where. Together with the residents at its
start it determines the slots at every step: first the arrivals of the step land, then each fetch takes its
victim's slot (a free one where it evicted nobody), in rank order. This module replays just that; it decides
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moecache.kernel import Landing, Outcome
from moecache.trace import DecisionLog

NOBODY = -1
NOT_INSERTED = -2


@dataclass(frozen=True)
class CallView:
    """One call of a step.

    Attributes
    ----------
    rank, expert : int
    gate_weight : float
    outcome : Outcome
    computed_by : int
        The expert that computed it, -1 if none.
    evicted : int
        Whom its fetch evicted, -1 nobody.
    slot : int
        The slot of the expert that computed it, -1 if none.
    is_copy_asked : bool
        Whether a background copy of the called expert was asked for in this step.
    """

    rank: int
    expert: int
    gate_weight: float
    outcome: Outcome
    computed_by: int
    evicted: int
    slot: int
    is_copy_asked: bool


@dataclass(frozen=True)
class StepView:
    """One token at one layer: the slots, the calls, the slots again.

    Attributes
    ----------
    token : int
        Place in the log.
    before, after : tuple of int
        The expert in each slot when the calls are looked up and after the step, -1 free; arrivals have
        landed.
    landed : dict of int to int
        For each slot that an arrival took at the start of the step, whom it evicted (-1 nobody).
    calls : tuple of CallView
        In rank order.
    """

    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    landed: dict[int, int]
    calls: tuple[CallView, ...]


def slot_history(
    log: DecisionLog,
    topk_ids: np.ndarray,
    gate_weights: np.ndarray,
    residents: Sequence[int],
    layer: int = 0,
    first_clock: int = 0,
) -> list[StepView]:
    """Tell every step of one layer.

    Parameters
    ----------
    log : DecisionLog
        Of T tokens.
    topk_ids : int array [T,L,K]
        The calls, in rank order.
    gate_weights : float array [T,L,K]
        In rank order.
    residents : sequence of int
        The expert in each of the C slots before the first token, -1 free.
    layer : int
    first_clock : int
        The layer's clock at the first token: 0 for a new cache.

    Returns
    -------
    list of StepView
        One for each token.

    Raises
    ------
    ValueError
        If the log evicts an expert that is not resident, that is, if log and residents do not belong
        together.
    """
    if topk_ids.shape != log.outcome.shape or gate_weights.shape != log.outcome.shape:
        raise ValueError(
            f"the log is of shape {log.outcome.shape}, but the calls are {topk_ids.shape} "
            f"and the gate weights {gate_weights.shape}: all three must be [T,L,K] of the same run"
        )
    arrivals = log.arrivals[log.arrivals[:, 2] == layer]
    slots, history = [int(expert) for expert in residents], []
    for token in range(topk_ids.shape[0]):
        clock = first_clock + token
        landed = _land(slots, arrivals[arrivals[:, 1] == clock])
        before = tuple(slots)
        asked = set(arrivals[arrivals[:, 0] == clock, 3].tolist())
        step = (part[token, layer] for part in (topk_ids, gate_weights, log.outcome, log.computed_ids, log.evicted_ids))
        calls = _serve(slots, list(zip(*(part.tolist() for part in step), strict=True)), asked)
        history.append(StepView(token, before, tuple(slots), landed, calls))
    return history


def _land(slots: list[int], arrivals: np.ndarray) -> dict[int, int]:
    landed = {}
    for _, _, _, expert, victim, _, reason in arrivals.tolist():
        if reason == Landing.LANDED:
            landed[_put(slots, expert, victim)] = victim
    return landed


def _serve(slots: list[int], calls: list[tuple], asked: set[int]) -> tuple[CallView, ...]:
    for expert, _, outcome, _, evicted in calls:
        if outcome in (Outcome.FETCHED, Outcome.FORCED) and evicted != NOT_INSERTED:
            _put(slots, expert, evicted)
    where = {expert: slot for slot, expert in enumerate(slots)}
    return tuple(
        CallView(rank, expert, weight, Outcome(outcome), computed, evicted, where.get(computed, NOBODY), expert in asked)
        for rank, (expert, weight, outcome, computed, evicted) in enumerate(calls)
    )


def _put(slots: list[int], expert: int, victim: int) -> int:
    """Put an expert into its victim's slot, or the first free one; return the slot."""
    if victim not in slots:
        what = "a free slot" if victim == NOBODY else f"expert {victim} as victim"
        raise ValueError(
            f"the log names {what} for expert {expert}, but the slots hold {slots}: give the residents at the log's first token"
        )
    slot = slots.index(victim)
    slots[slot] = expert
    return slot
