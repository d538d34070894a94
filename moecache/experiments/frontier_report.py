"""What chapter 04 shows of the frontier: curves of loss against waiting, and each family's loss over the plain threshold's.

A family's curve goes through its points in logarithms of both sides, straight between neighbours. At a given number of fetches (or of
substituted calls) a family's loss is divided by the threshold's. Each bootstrap draw of clusters moves loss, fetches and substitutions of
all points together and reads all curves anew; a draw in which a curve does not reach the place says nothing. Where that happens in more
than one draw of twenty, the place lies at the end of the curve, and no ratio is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from moecache import stats
from moecache.stats.paired import DIFFERENCE

UNIT = "cluster"
PLAIN = "threshold"
BOUND = "true contribution"
TARGETS = (0.2, 0.7, 2.4)
SUBSTITUTED_TARGETS = (0.1, 0.2, 0.3)
FEWEST_POINTS = 2
MOST_UNDEFINED = 0.05
FAMILIES = ("threshold", "threshold and first choice", "first J", "mass budget", "squared budget", "random misses", BOUND)
FIRST_COLUMN = "loss over the threshold's"
AXES = {"fetches_per_step": "waited-for fetches a step", "substituted_share": "share of the calls substituted"}


def prepare(*frames: pd.DataFrame) -> pd.DataFrame:
    """Rows of one setting of several experiments together, each policy once, with fetches a step and the share of calls substituted."""
    frame = pd.concat(frames, ignore_index=True)
    frame = frame[frame["family"] != "fetch every miss"].drop_duplicates(["policy", "document"], ignore_index=True)
    return frame.assign(
        fetches_per_step=(frame["fetched"] + frame["forced"]) / frame["steps"],
        substituted_share=(frame["substituted"] + frame["dropped"]) / frame["calls"],
    )


def curves(frame: pd.DataFrame) -> dict[str, list[str]]:
    """The policies of each family, with those that end a curve under another name.

    *First choice* is where a threshold with first choice ends when it is raised; substituting only the last rank is *first K-1*.
    """
    of = frame.drop_duplicates("policy").set_index("policy")["family"]
    found = {family: [str(name) for name in of.index[of == family]] for family in FAMILIES}
    if found["threshold and first choice"] and "first choice" in of.index:
        found["threshold and first choice"].append("first choice")
    alone = [str(name) for name in of.index[of == "one rank"]]
    if found["first J"] and alone:
        found["first J"].append(max(alone, key=lambda name: int(name.split()[2])))
    return {family: names for family, names in found.items() if len(names) >= FEWEST_POINTS}


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a point of a curve: `family`, `policy`, both axes, and the loss in nats a token with its interval."""
    paired = stats.pair_documents(frame, UNIT, (DIFFERENCE, *AXES))
    counts = stats.draw_counts(paired.num_units)
    low, high = stats.percentile_interval(stats.weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, counts))
    means = pd.DataFrame({"loss_nats": paired.means(), "low": low, "high": high, **{axis: paired.means(axis) for axis in AXES}})
    means.index = pd.Index(paired.policies)
    rows = [means.loc[names].assign(family=family).reset_index(names="policy") for family, names in curves(frame).items()]
    return pd.concat(rows, ignore_index=True)


def ratios(frame: pd.DataFrame, axis: str = "fetches_per_step", targets: Sequence[float] = TARGETS) -> pd.DataFrame:
    """Loss of each family over the plain threshold's where both wait (or substitute) equally often.

    Parameters
    ----------
    frame : DataFrame
        From `prepare`, one setting.
    axis : {"fetches_per_step", "substituted_share"}
    targets : sequence of float
        Places on that axis.

    Returns
    -------
    DataFrame : `family`, `target`, `ratio`, `low`, `high`, `smallest_detectable` (deviation from 1, 2.8 standard errors in logarithms),
        `verdict` ("beats", "loses", "undecided", "not reached", "bound").
    """
    paired = stats.pair_documents(frame, UNIT, (DIFFERENCE, axis))
    counts = stats.draw_counts(paired.num_units)
    drawn = [stats.weighted_mean_draws(paired.sums[c], paired.num_tokens, counts) for c in (axis, DIFFERENCE)]
    observed = [paired.means(c)[None] for c in (axis, DIFFERENCE)]
    found = {family: [paired.index(name) for name in names] for family, names in curves(frame).items()}
    rows = []
    for target in targets:
        draws, here = ({family: _read(x, y, at, target) for family, at in found.items()} for x, y in (drawn, observed))
        for family in found:
            if family != PLAIN:
                rows.append((family, target, *_ratio(draws[family] - draws[PLAIN], here[family] - here[PLAIN], family)))
    return pd.DataFrame(rows, columns=["family", "target", "ratio", "low", "high", "smallest_detectable", "verdict"])


def _read(x: np.ndarray, y: np.ndarray, at: Sequence[int], target: float) -> np.ndarray:
    """Log of the loss [D] of the curve through the points `at` where x is `target`, NaN outside; x and y are [D, P]."""
    x, y = x[:, at], y[:, at]
    is_point = (x > 0) & (y > 0)
    log_x = np.where(is_point, np.log(np.where(is_point, x, 1.0)), np.nan)
    log_y = np.where(is_point, np.log(np.where(is_point, y, 1.0)), np.nan)
    order = np.argsort(log_x, axis=1)  # NaN last
    log_x, log_y = (np.take_along_axis(values, order, axis=1) for values in (log_x, log_y))
    above = np.clip((log_x < np.log(target)).sum(axis=1), 1, len(at) - 1)[:, None]
    left, right = (np.take_along_axis(log_x, place, axis=1)[:, 0] for place in (above - 1, above))
    low, high = (np.take_along_axis(log_y, place, axis=1)[:, 0] for place in (above - 1, above))
    is_inside = (left <= np.log(target)) & (np.log(target) <= right)
    width = np.where(is_inside & (right > left), right - left, 1.0)
    return np.where(is_inside, low + (high - low) * (np.log(target) - left) / width, np.nan)


def _ratio(draws: np.ndarray, here: np.ndarray, family: str) -> tuple[float, float, float, float, str]:
    """Ratio, interval, smallest detectable deviation and verdict, from differences of logarithms."""
    if np.isnan(here[0]) or np.isnan(draws).mean() > MOST_UNDEFINED:
        return np.nan, np.nan, np.nan, np.nan, "not reached"
    low, high = np.exp(stats.percentile_interval(draws))
    verdict = "beats" if high < 1 else "loses" if low > 1 else "undecided"
    detectable = float(np.expm1(2.8016 * np.nanstd(draws)))
    return float(np.exp(here[0])), float(low), float(high), detectable, "bound" if family == BOUND else verdict


def ratio_table(found: pd.DataFrame, axis: str = "fetches_per_step") -> pd.DataFrame:
    """The ratios as a page shows them, one row a family."""
    table: dict[str, list[str]] = {FIRST_COLUMN: list(found["family"].unique())}
    for target in found["target"].unique():
        rows = found[found["target"] == target].set_index("family")
        name = f"at {target:g} fetches a step" if axis == "fetches_per_step" else f"at {100 * target:g} % of the calls"
        table[name] = [_cell(rows.loc[family]) for family in table[FIRST_COLUMN]]
    return pd.DataFrame(table)


def _cell(row: pd.Series) -> str:
    if np.isnan(row["ratio"]):
        return "not reached"
    words = "" if row["verdict"] == "bound" else f", {row['verdict']}"
    return f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]{words}"


def threshold_losses(frame: pd.DataFrame, targets: Sequence[float] = TARGETS) -> str:
    """The plain threshold's own loss at the places, in thousandths of a nat: what the ratios multiply."""
    paired = stats.pair_documents(frame, UNIT, (DIFFERENCE, "fetches_per_step"))
    at = [paired.index(name) for name in curves(frame)[PLAIN]]
    read = [np.exp(_read(paired.means("fetches_per_step")[None], paired.means()[None], at, target)[0]) for target in targets]
    return ", ".join(
        f"{1000 * loss:.3g} at {t:g}" if np.isfinite(loss) else f"not reached at {t:g}" for t, loss in zip(targets, read, strict=True)
    )


def detectable(found: pd.DataFrame) -> str:
    """The smallest deviation from 1 that could be seen at each place, for the families that are judged: the median family's."""
    judged = found[(found["family"] != BOUND) & found["ratio"].notna()]
    medians = judged.groupby("target")["smallest_detectable"].median()
    told = ", ".join(f"{100 * value:.0f} % at {target:g}" for target, value in medians.items())
    return f"{told} (median of the families)" if told else "not known: no family reaches a place"


def sentence(found: pd.DataFrame) -> str:
    """Which families beat the threshold, lose to it, and where: the finding in words."""
    judged = found[found["verdict"].isin(("beats", "loses", "undecided"))]
    parts = []
    for verdict, words in (("beats", "lose less than a plain threshold"), ("loses", "lose more"), ("undecided", "cannot be told from it")):
        rows = judged[judged["verdict"] == verdict]
        named = [f"{family} (at {_places(part)})" for family, part in rows.groupby("family", sort=False)]
        if named:
            parts.append(f"{words}: {', '.join(named)}")
    return "; ".join(parts)


def sentences(found: Mapping[str, pd.DataFrame]) -> str:
    """`sentence` for every model."""
    told = {model: sentence(ratios) for model, ratios in found.items()}
    parts = [f"in {model} these {words}." if words else f"in {model} no family reaches a place." for model, words in told.items()]
    return " ".join(parts)


def bound_sentence(found: pd.DataFrame) -> str:
    """How much knowing each call's true contribution would save, in words."""
    rows = found[(found["family"] == BOUND) & found["ratio"].notna()]
    if rows.empty:
        return "The bound does not reach these places."
    told = ", ".join(f"{row.ratio:.2f} [{row.low:.2f}, {row.high:.2f}] at {row.target:g}" for row in rows.itertuples())
    return f"Knowing each call's true contribution would leave these shares of the threshold's loss: {told}."


def _places(rows: pd.DataFrame) -> str:
    return " and ".join(f"{target:g}" for target in rows["target"])


def describe(found: Mapping[str, pd.DataFrame]) -> str:
    """What the figure of the frontier shows, for its alternative text."""
    return f"Loss against waited-for fetches, one curve a family of rules. At equal fetches, {sentences(found)}"


def every_model(measure: Callable[[pd.DataFrame], pd.DataFrame], frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The same table of every model, with `model` in front."""
    tables = [measure(frame) for frame in frames.values()]
    for name, table in zip(frames, tables, strict=True):
        table.insert(0, "model", name)
    return pd.concat(tables, ignore_index=True)
