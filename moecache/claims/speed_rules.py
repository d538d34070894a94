"""A rule about seconds: how many times as fast as a stock engine, in the same memory?

The rows are (engine, repeat) of one model, precision and cap; a repeat takes the place of a document. Rates are compared repeat by
repeat, in logarithms (`stats.ratios`). An engine that was killed or does not fit has no rate: that is said, not guessed.

No rule knows which claim it serves, where results come from, or any number that is not in its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from moecache.claims.data import Drawing
from moecache.claims.verdict import State, Verdict, counted, side_of
from moecache.stats.ratios import Ratio, paired_ratio

RATE = "tokens_per_second"


def faster_than_stock(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether each engine of `factors` is at least so many times as fast as the engine `stock`."""
    if not bool(frame["is_capped"].all()):
        return Verdict(State.NOT_YET_MEASURED, "The memory was not capped.")
    stock = _rates(frame, parameters["stock"])
    if stock.empty:
        return Verdict(
            State.INCONCLUSIVE, f"{parameters['stock']} {_outcome(frame, parameters['stock'])}: there is no rate to compare with"
        )
    states, told = [], []
    for engine, factor in parameters["factors"].items():
        ratio = _ratio(_rates(frame, engine), stock, drawing)
        if ratio is None:
            told.append(f"*{engine}* {_outcome(frame, engine)}")
            continue
        states.append(side_of(ratio.low, ratio.high, factor))
        told.append(f"*{engine}* {ratio.value:.1f} [{ratio.low:.1f}, {ratio.high:.1f}] times as fast ({factor:g} asked)")
    evidence = f"against {parameters['stock']}: {'; '.join(told)} (n = {counted(stock.size, drawing.unit)})"
    return Verdict(_worst(states), evidence)


def _worst(states: list[State]) -> State:
    """Supported if all are, not supported if one is not."""
    if not states or State.INCONCLUSIVE in states:
        return State.NOT_SUPPORTED if State.NOT_SUPPORTED in states else State.INCONCLUSIVE
    return State.NOT_SUPPORTED if State.NOT_SUPPORTED in states else State.SUPPORTED


def _rates(frame: pd.DataFrame, engine: str) -> pd.Series:
    """Tokens per second by repeat, of those that ran."""
    rows = frame[(frame["engine"] == engine) & frame[RATE].notna()]
    return rows.set_index("repeat")[RATE]


def _ratio(rates: pd.Series, stock: pd.Series, drawing: Drawing) -> Ratio | None:
    shared = rates.index.intersection(stock.index)
    if len(shared) < max(2, drawing.fewest_units):
        return None
    return paired_ratio(rates[shared].to_list(), stock[shared].to_list(), drawing.confidence)


def _outcome(frame: pd.DataFrame, engine: str) -> str:
    outcomes = frame.loc[frame["engine"] == engine, "outcome"]
    without = [str(outcome) for outcome in outcomes if outcome != "ran"]
    if outcomes.empty:
        return "was not measured"
    return max(set(without), key=without.count) if without else "ran in too few repeats"


SPEED_RULES = {faster_than_stock.__name__: faster_than_stock}
