"""Curves of loss against waited-for bytes, where two of them cross, and who has the lowest loss at a given number of bytes.

A contender's policies are points: what they wait for, and what they lose. Between two neighbouring points its curve is a straight line
in logarithms of both. As a quantity of a single document the same line is a weighted sum of the two points' losses (the weights are the
derivatives of the interpolated loss), so that it can be paired, drawn and tested like a policy:

    L(y) = L_a^(1-t) L_b^t,    t = log(y / y_a) / log(y_b / y_a),    weights (1-t) L / L_a and t L / L_b

Where a loss is not above 0 it has no logarithm, and the two losses are mixed by 1-t and t. Nobody needs to wait for as much as he may:
below the first point that waits, a point that waits for nothing counts; beyond the last, the last; and no point of a curve counts for
more than a cheaper one of the same contender.

This module reads tidy frames and knows neither models nor policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments.contrasts_report import UNIT, Contrast, combined
from moecache.experiments.paired_runs import moved
from moecache.stats.paired import DIFFERENCE

NOBODY = "nobody"


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a policy of one cell.

    Parameters
    ----------
    rows : DataFrame
        Rows of one model and one cell, all policies with the same documents.

    Returns
    -------
    DataFrame : `policy`, `contender`, `family`, `rule`, `slots`, `fetches` and `copies` (a step), `waited_kb` and `moved_kb` (thousands of
        bytes a token, over all layers), `loss`, `low`, `high` (nats a token, the interval over clusters).
    """
    made_of = rows.drop_duplicates("policy").set_index("policy")
    unit = made_of["num_layers"] * made_of["expert_bytes"] / 1000
    table = stats.policy_table(rows, unit=UNIT).set_index("policy")
    what = moved(rows)
    table[["loss", "low", "high"]] = np.log1p(table[["increase", "low", "high"]])
    table = table.assign(waited_kb=what["fetches"] * unit, moved_kb=what["moved"] * unit, **{n: what[n] for n in ("fetches", "copies")})
    return table.join(made_of[["contender", "rule", "slots"]]).reset_index()


def curve_at(curve: pd.DataFrame, waited_kb: float) -> tuple[float, Contrast] | None:
    """Loss and weights of one contender that may wait for `waited_kb` thousands of bytes a token; None if it needs more.

    Parameters
    ----------
    curve : DataFrame
        Its `points`.
    waited_kb : 0 or more.
    """
    within = curve[curve["waited_kb"] <= waited_kb]
    if within.empty:
        return None
    best = within.sort_values("loss").iloc[0]
    found = float(best["loss"]), {str(best["policy"]): 1.0}
    above = curve[curve["waited_kb"] > waited_kb]
    last = within.sort_values("waited_kb").iloc[-1]
    if above.empty or last["waited_kb"] == 0:
        return found
    between = _between(last, above.sort_values("waited_kb").iloc[0], waited_kb)
    return between if between[0] < found[0] else found


def line_at(curve: pd.DataFrame, waited_kb: float) -> tuple[float, Contrast]:
    """Loss and weights of the line through a contender's points at `waited_kb`; the end of the curve where it does not reach."""
    ordered = curve.sort_values("waited_kb")
    below, above = ordered[ordered["waited_kb"] <= waited_kb], ordered[ordered["waited_kb"] > waited_kb]
    if below.empty or above.empty:
        end = (above if below.empty else below).iloc[0 if below.empty else -1]
        return float(end["loss"]), {str(end["policy"]): 1.0}
    return _between(below.iloc[-1], above.iloc[0], waited_kb)


def _between(below: pd.Series, above: pd.Series, waited_kb: float) -> tuple[float, Contrast]:
    """The line between two points, in logarithms where they exist."""
    share = math.log(waited_kb / below["waited_kb"]) / math.log(above["waited_kb"] / below["waited_kb"])
    first, second = float(below["loss"]), float(above["loss"])
    loss, weights = (1 - share) * first + share * second, (1 - share, share)
    if min(first, second) > 0:
        loss = first ** (1 - share) * second**share
        weights = (1 - share) * loss / first, share * loss / second
    return loss, {str(below["policy"]): weights[0], str(above["policy"]): weights[1]}


def intervals(rows: pd.DataFrame, contrasts: Mapping[str, Contrast]) -> pd.DataFrame:
    """95 % intervals `low` and `high` of contrasts, by name; drawn over clusters, without a test."""
    paired = stats.pair_documents(combined(rows, contrasts), UNIT)
    draws = stats.weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, stats.draw_counts(paired.num_units))
    low, high = stats.percentile_interval(draws)
    return pd.DataFrame({"low": low, "high": high}, index=list(paired.policies))


def levels_of(table: pd.DataFrame, num_levels: int = 48) -> np.ndarray:
    """Waited-for bytes at which winners are looked for: nothing, and from the least to the most that any point waits for."""
    waited = table.loc[table["waited_kb"] > 0, "waited_kb"]
    return np.concatenate([[0.0], np.geomspace(waited.min(), 1.001 * waited.max(), num_levels)])


def winners(rows: pd.DataFrame, table: pd.DataFrame, levels: np.ndarray) -> pd.DataFrame:
    """Who has the lowest loss of one cell at each level, and whether the next best family is told apart from it.

    Parameters
    ----------
    rows, table : of one cell, see `points`.
    levels : thousands of bytes a token, rising.

    Returns
    -------
    DataFrame : `waited_kb`, `contender`, `family`, `loss` (nats), `second` (family), `is_clear` (the 95 % interval of the difference lies
        off 0). A level at which no contender can run is named `nobody`.
    """
    curves = {str(name): curve for name, curve in table.groupby("contender", sort=False)}
    family = table.drop_duplicates("contender").set_index("contender")["family"]
    found: list[dict[str, Any]] = []
    against: dict[str, Contrast] = {}
    for place, level in enumerate(levels):
        at = {name: value for name, curve in curves.items() if (value := curve_at(curve, level)) is not None}
        ranked = sorted(at, key=lambda name: (at[name][0], curves[name]["moved_kb"].min()))
        first = ranked[0] if ranked else NOBODY
        others = [name for name in ranked if family[name] != family[first]]
        second = family[others[0]] if others else NOBODY
        loss, won = at[first][0] if ranked else math.nan, family[first] if ranked else NOBODY
        found.append({"waited_kb": level, "contender": first, "family": won, "loss": loss, "second": second})
        if others and at[others[0]][0] != loss:
            against[str(place)] = _difference(at[first][1], at[others[0]][1])
    result = pd.DataFrame(found).assign(is_clear=False)
    if against:
        bounds = intervals(rows, against)
        is_clear = (bounds["low"] > 0) | (bounds["high"] < 0)
        result.loc[[int(place) for place in bounds.index], "is_clear"] = is_clear.to_numpy()
    return result


def _difference(first: Contrast, second: Contrast) -> Contrast:
    """The weights of one curve minus another."""
    return {name: first.get(name, 0.0) - second.get(name, 0.0) for name in [*first, *(n for n in second if n not in first)]}


def bands(found: pd.DataFrame) -> pd.DataFrame:
    """`winners` of one cell as bands: `family`, `contender`, `from_kb`, `to_kb`, `clear_fraction` (of its levels that are told apart).

    A band begins where its winner takes over: half way (in logarithms) between two levels. The first begins at 0.
    """
    number = (found["contender"] != found["contender"].shift()).cumsum()
    rows = []
    for _, band in found.groupby(number):
        place = int(band.index[0])
        start = 0.0 if place == 0 else _edge(found["waited_kb"].iloc[place - 1], found["waited_kb"].iloc[place])
        facts = band.iloc[0]
        rows.append((facts["family"], facts["contender"], start, float(band["is_clear"].mean())))
    table = pd.DataFrame(rows, columns=["family", "contender", "from_kb", "clear_fraction"])
    ends = [*table["from_kb"].iloc[1:], float(found["waited_kb"].iloc[-1])]
    return table.assign(to_kb=ends)


def _edge(below: float, above: float) -> float:
    return math.sqrt(below * above) if below > 0 else above
