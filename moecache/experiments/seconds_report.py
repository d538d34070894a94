"""Tables and tests of the chapter on seconds, from the frames that `seconds` and `seconds_copies` measure.

A simulated time is exact for its constants, so no interval says how true it is. What intervals say here is how much the answer depends
on the *text*: the unit is the document. How much it depends on the *constants* is asked by changing them one by one: by how much each
moves the time, and whether any of them changes which policy is faster.

This module replays and times nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from moecache import stats
from moecache.pareto import pareto_front

SAME_TIME = 0.01  # policies whose times differ by less than this share have no order worth keeping
FETCHING = "fetch every miss"


def where(frame: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows that hold these values in these columns.

    Raises
    ------
    ValueError : no row does.
    """
    found = frame
    for name, value in values.items():
        found = pd.DataFrame(found[found[name] == value])
    if found.empty:
        raise ValueError(f"no row with {values}: name what was measured, such as {frame.iloc[0][list(values)].to_dict()}")
    return found.reset_index(drop=True)


def value_at(frame: pd.DataFrame, column: str, **values: object) -> float:
    """The one number of a column where the other columns hold these values.

    Raises
    ------
    ValueError : there is no such row, or more than one.
    """
    found = where(frame, **values)[column].to_list()
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows with {values}: one is needed to read {column!r}")
    return float(found[0])


def with_speed_up(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The frame with `speed_up`: how many times faster than fetching every miss, within equal values of `keys`."""
    base = where(frame, policy=FETCHING).set_index(list(keys))["ms_per_token"].rename("fetching_ms")
    joined = frame.join(base, on=list(keys))
    return joined.assign(speed_up=joined["fetching_ms"] / joined["ms_per_token"]).drop(columns="fetching_ms")


def crossing(places: Sequence[float], heights: Sequence[float], level: float, is_log: bool = False) -> float:
    """Where a line through points first crosses a level, by linear interpolation (of the logarithm of the place); NaN if nowhere."""
    x = np.log(np.asarray(places, np.float64)) if is_log else np.asarray(places, np.float64)
    order = np.argsort(x)
    x, above = x[order], np.asarray(heights, np.float64)[order] - level
    for i in range(x.size - 1):
        if above[i] == 0 or above[i] * above[i + 1] < 0:
            found = x[i] - above[i] * (x[i + 1] - x[i]) / (above[i + 1] - above[i]) if above[i] else x[i]
            return float(np.exp(found) if is_log else found)
    return float(np.exp(x[-1]) if is_log else x[-1]) if x.size and above[-1] == 0 else float("nan")


def break_even(frame: pd.DataFrame, max_prefetches: int) -> pd.DataFrame:
    """The accuracy from which prefetching costs no time, per trace, policy and machine.

    Parameters
    ----------
    frame : of `seconds_copies.by_predictor`; only predictors of a given accuracy count.

    Returns
    -------
    DataFrame : `trace`, `policy`, `hardware`, `accuracy` (NaN: at no accuracy), `ratio_at_best` (time with a perfect predictor / without).
    """
    is_asked = frame["predictor"].str.startswith("accuracy") & (frame["max_prefetches"] == max_prefetches)
    keys, rows = ["trace", "policy", "hardware"], []
    for values, group in pd.DataFrame(frame[is_asked]).sort_values("accuracy").groupby(keys, sort=False):
        ratios = (group["ms_per_token"] / group["ms_without"]).to_numpy()
        accuracy = crossing(group["accuracy"].to_list(), ratios.tolist(), 1.0)
        is_always = bool((ratios <= 1).all())
        rows.append((*values, float(group["accuracy"].min()) if is_always else accuracy, float(ratios[-1])))  # type: ignore[misc]
    return pd.DataFrame(rows, columns=[*keys, "accuracy", "ratio_at_best"])


def compare(units: pd.DataFrame, pairs: Sequence[tuple[str, str]], hardware: Sequence[str]) -> pd.DataFrame:
    """Paired t-tests of log seconds per token over documents, all corrected together by Holm's method.

    Parameters
    ----------
    units : from `seconds.by_unit`.
    pairs : (policy, against) labels.

    Returns
    -------
    DataFrame : `hardware`, `policy`, `against`, `speed_up` (geometric mean of the documents' ratios, above 1 = the first is faster),
        `low`, `high` (95 %, bootstrap over documents), `dz`, `p_holm`.
    """
    asked = [(machine, policy, against) for machine in hardware for policy, against in pairs]
    paired = pd.DataFrame(
        {
            "policy": units["policy"] + "@" + units["hardware"],
            "document": units["unit"],
            "num_tokens": 1,  # every document counts once: its log seconds per token are one number
            "mean_difference_nats": np.log(units["seconds"].to_numpy() / units["num_tokens"].to_numpy()),
        }
    )
    table = stats.paired_tests(paired, [(f"{against}@{machine}", f"{policy}@{machine}") for machine, policy, against in asked])
    names = pd.DataFrame(asked, columns=["hardware", "policy", "against"])
    names = names.assign(speed_up=np.exp(table["difference_nats"]), low=np.exp(table["low"]), high=np.exp(table["high"]))
    return names.assign(dz=table["dz"], p_holm=table["p_holm"])


def order_changes(sensitivity: pd.DataFrame) -> pd.DataFrame:
    """How many pairs of policies change places when a constant does.

    A pair counts as ordered when its times differ by at least a hundredth, and as changed when the other one is then faster by at least
    a hundredth.

    Parameters
    ----------
    sensitivity : from `seconds.sensitivity`.

    Returns
    -------
    DataFrame : `hardware`, `constant`, `factor`, `num_pairs`, `num_changed`.
    """
    rows = []
    for machine, group in sensitivity.groupby("hardware", sort=False):
        base = where(group, constant="as given").set_index("policy")["ms_per_token"]
        for (constant, factor), changed in group[group["constant"] != "as given"].groupby(["constant", "factor"], sort=False):
            times = changed.set_index("policy")["ms_per_token"]
            pairs = [(a, b) for a, b in combinations(base.index, 2) if abs(np.log(base[a] / base[b])) >= SAME_TIME]
            swapped = [np.log(times[a] / times[b]) * np.sign(np.log(base[a] / base[b])) <= -SAME_TIME for a, b in pairs]
            rows.append((machine, constant, factor, len(pairs), int(np.sum(swapped))))
    return pd.DataFrame(rows, columns=["hardware", "constant", "factor", "num_pairs", "num_changed"])


def with_front(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `is_front`: no other policy of the same machine is both faster and substitutes less gate mass."""
    parts = []
    for _, group in frame.groupby("hardware", sort=False):
        best = pareto_front(group, minimise=["ms_per_token", "substituted_mass"])
        parts.append(group.assign(is_front=group["policy"].isin(best["policy"])))
    return pd.concat(parts, ignore_index=True)


def elasticities(sensitivity: pd.DataFrame, policies: Sequence[str], factor: float) -> pd.DataFrame:
    """The rows of a factor for some policies: `policy`, `hardware`, `constant`, `elasticity` of the time."""
    is_asked = sensitivity["policy"].isin(list(policies)) & (sensitivity["factor"] == factor) & (sensitivity["constant"] != "as given")
    return pd.DataFrame(sensitivity.loc[is_asked, ["policy", "hardware", "constant", "elasticity"]]).reset_index(drop=True)
