"""A rule about seconds per token: is each chosen policy at least so many times as fast as another?

The rows are (link, policy, block of tokens) of one model: all policies decode the same blocks in turns. A ratio is that of the seconds of
all blocks; its interval draws blocks again, the same for both sides. One link decides; what was measured on the others is told beside it.

No rule knows which claim it serves, where results come from, or any number that is not in its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moecache.claims.data import Drawing
from moecache.claims.verdict import State, Verdict, counted, side_of, worst_of
from moecache.stats import draw_counts, percentile_interval


def saves_time(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether every policy of `chosen` is more than `factor` times as fast as the policy `against` on the link `decides`."""
    chosen, against = parameters["chosen"], parameters["against"]
    if absent := [label for label in (*chosen, against) if label not in set(frame["policy"])]:
        return Verdict(State.NOT_YET_MEASURED, f"The stored seconds hold no {', '.join(f'*{label}*' for label in absent)}.")
    links = {str(link): rows for link, rows in frame.groupby("link", sort=False)}
    deciding = links.pop(parameters["decides"], None)
    if deciding is None:
        return Verdict(State.NOT_YET_MEASURED, f"Seconds were not measured on the {parameters['decides']}.")
    states, told = [], []
    for label in chosen:
        ratio, low, high = _times_as_fast(deciding, label, against, drawing)
        states.append(side_of(low, high, parameters["factor"]))
        told.append(f"*{label}* {ratio:.2f} [{low:.2f}, {high:.2f}]")
    elsewhere = [f"{link} {_beside(rows, chosen, against, drawing)}" for link, rows in links.items()]
    beside = f"; over emulated links: {', '.join(elsewhere)}" if elsewhere else ""
    evidence = f"Times as fast as *{against}* on the {parameters['decides']}: {', '.join(told)}{beside}"
    return Verdict(worst_of(states), f"{evidence} (n = {counted(deciding['block'].nunique(), drawing.unit)})")


def _times_as_fast(rows: pd.DataFrame, label: str, against: str, drawing: Drawing) -> tuple[float, float, float]:
    """Seconds of `against` over seconds of `label` on the same blocks, with its interval."""
    seconds = rows.pivot_table(index="block", columns="policy", values="seconds")[[against, label]].to_numpy()
    counts = draw_counts(len(seconds), drawing.num_draws, drawing.seed)
    sums = counts @ seconds
    low, high = percentile_interval(sums[:, 0] / sums[:, 1], drawing.confidence)
    theirs, mine = np.sum(seconds, axis=0)
    return float(theirs / mine), float(low), float(high)


def _beside(rows: pd.DataFrame, chosen: list[str], against: str, drawing: Drawing) -> str:
    return " and ".join(f"{_times_as_fast(rows, label, against, drawing)[0]:.2f}" for label in chosen)


TIME_RULES = {saves_time.__name__: saves_time}
