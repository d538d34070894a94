"""What chapter 04 shows by rank: the loss of each rank alone, of protecting first or last ranks, and who carries it; controls; two ages.

The rules by rank are read in one setting, *admitted anyway*, where all meet nearly the same misses. This module measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments.frontier_report import UNIT
from moecache.stats.paired import DIFFERENCE

ALONE, FIRST, LAST = "only this rank is substituted", "the first ranks are waited for", "the last ranks are waited for"
EVERYTHING = "substitute every miss"


def place_of(policy: str, top_k: int) -> list[tuple[str, int]]:
    """The series and places at which a rule stands in the figure by rank; none for other rules."""
    if policy == EVERYTHING:
        return [(FIRST, 0), (LAST, 0)]
    if policy == "first choice":
        return [(FIRST, 1)]
    if policy.startswith("only rank "):
        rank = int(policy.split()[2])
        ends = [(LAST, top_k - 1)] if rank == 0 else [(FIRST, top_k - 1)] if rank == top_k - 1 else []
        return [(ALONE, rank), *ends]
    for series, word in ((FIRST, "first "), (LAST, "last ")):
        if policy.startswith(word) and policy.removeprefix(word).isdigit():
            return [(series, int(policy.removeprefix(word)))]
    return []


def top_k_of(frame: pd.DataFrame) -> int:
    """Calls a step of the rows' model."""
    row = frame.iloc[0]
    return round(row["calls"] / row["steps"])


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a place of the figure by rank: `series`, `rank`, `policy`, `loss_nats`, `low`, `high`."""
    paired = stats.pair_documents(frame, UNIT)
    low, high = stats.percentile_interval(_draws(paired))
    losses = pd.DataFrame({"loss_nats": paired.means(), "low": low, "high": high}, index=pd.Index(paired.policies))
    top_k = top_k_of(frame)
    rows = [
        {"series": series, "rank": rank, "policy": policy, **losses.loc[policy].to_dict()}
        for policy in paired.policies
        for series, rank in place_of(policy, top_k)
    ]
    return pd.DataFrame(rows)


def describe(frame: pd.DataFrame) -> str:
    """What the figure by rank shows in one model, for its alternative text."""
    places = points(frame).sort_values(["series", "rank"])
    parts = []
    for series, rows in places.groupby("series", sort=False):
        parts.append(
            f"{series}: " + ", ".join(f"{rank} {1000 * loss:.3g}" for rank, loss in zip(rows["rank"], rows["loss_nats"], strict=True))
        )
    return "Loss in thousandths of a nat by rank. " + "; ".join(parts) + "."


def _draws(paired: stats.PairedUnits) -> np.ndarray:
    counts = stats.draw_counts(paired.num_units)
    return stats.weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, counts)


def alone_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Each rank substituted alone: calls, gate mass and loss, and its share of both sums over the ranks."""
    places = [(policy, dict(place_of(policy, top_k_of(frame))).get(ALONE)) for policy in frame["policy"].unique()]
    ranks = sorted((rank, policy) for policy, rank in places if rank is not None)
    rows = frame[frame["policy"].isin([policy for _, policy in ranks])]
    paired = stats.pair_documents(rows, UNIT, (DIFFERENCE, "substituted_mass"))
    at = [paired.index(policy) for _, policy in ranks]
    draws = _draws(paired)[:, at]
    loss, (low, high) = paired.means()[at], stats.percentile_interval(draws)
    share_low, share_high = stats.percentile_interval(draws / draws.sum(axis=1, keepdims=True))
    totals = rows.groupby("policy")[["substituted", "calls", "num_tokens"]].sum().loc[[policy for _, policy in ranks]]
    calls = totals["substituted"] / totals["calls"]
    return pd.DataFrame(
        {
            "rank": [rank for rank, _ in ranks],
            "calls, %": (100 * calls).to_numpy(),
            "share of these, %": (100 * calls / calls.sum()).to_numpy(),
            "gate mass, %": 100 * paired.means("substituted_mass")[at],
            "loss, mnat a token": [f"{1000 * m:.3g} [{1000 * a:.3g}, {1000 * b:.3g}]" for m, a, b in zip(loss, low, high, strict=True)],
            "a substituted call, mnat": 1000 * loss * (totals["num_tokens"] / totals["substituted"]).to_numpy(),
            "share of the loss, %": _percents(loss / loss.sum(), share_low, share_high),
        }
    )


def _percents(middle: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[str]:
    return [f"{100 * m:.3g} [{100 * a:.3g}, {100 * b:.3g}]" for m, a, b in zip(middle, low, high, strict=True)]


def concentration(frame: pd.DataFrame, rest: str = "first choice") -> dict[str, Any]:
    """The first choices' share of the substituted calls and of the loss, when all other misses are the rest."""
    paired = stats.pair_documents(frame, UNIT)
    heavy, others = (paired.index(name) for name in ("only rank 0 substituted", rest))
    draws, means = _draws(paired), paired.means()
    low, high = stats.percentile_interval(draws[:, heavy] / (draws[:, heavy] + draws[:, others]))
    counts = frame.groupby("policy")[["substituted", "calls"]].sum()
    substituted = counts["substituted"] / counts["calls"]
    few, many = float(substituted["only rank 0 substituted"]), float(substituted[rest])
    return {
        "heavy_share_of_calls": few / (few + many),
        "heavy_share_of_loss": float(means[heavy] / (means[heavy] + means[others])),
        "heavy_share_low": float(low),
        "heavy_share_high": float(high),
    }


def heavy_others(frames: Mapping[str, pd.DataFrame]) -> str:
    """The same shares in further models, in words."""
    found = {name: concentration(frame) for name, frame in frames.items()}
    return " ".join(
        f"In {name}: {f['heavy_share_of_calls']:.1%} of the calls, {f['heavy_share_of_loss']:.1%} of the loss "
        f"({f['heavy_share_low']:.1%} to {f['heavy_share_high']:.1%})."
        for name, f in found.items()
    )


def matched_pairs(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Pairs of (does not protect, protects): the same number of ranks substituted, the heaviest or the lightest."""
    top_k = top_k_of(frame)
    found = {place: policy for policy in frame["policy"].unique() for place in place_of(policy, top_k)}
    waited = sorted({rank for series, rank in found if series == LAST and rank > 0})
    return [(found[LAST, rank], found[FIRST, rank]) for rank in waited if (FIRST, rank) in found]


def matched_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Protecting heavy ranks against substituting fewer, at a matched number of ranks."""
    pairs = matched_pairs(frame)
    tests = stats.paired_tests(frame, pairs, unit=UNIT)
    shares = frame.groupby("policy")[["substituted", "calls"]].sum()
    calls = shares["substituted"] / shares["calls"]
    bounds = zip(tests["difference_nats"], tests["low"], tests["high"], strict=True)
    return pd.DataFrame(
        {
            "without protection": [worse for worse, _ in pairs],
            "calls, %": [100 * calls[worse] for worse, _ in pairs],
            "with protection": [better for _, better in pairs],
            "calls, % ": [100 * calls[better] for _, better in pairs],
            "more loss, mnat a token": [f"{1000 * m:.3g} [{1000 * a:.3g}, {1000 * b:.3g}]" for m, a, b in bounds],
            "dz": tests["dz"],
            "smallest detectable": 1000 * tests["smallest_detectable_nats"],
        }
    )


def controls_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What the best resident is worth: the same rules with other fallbacks, as extra loss over the best resident's."""
    controls = list(frame.loc[frame["family"] == "control", "policy"].unique())
    pairs = [(policy, policy.split(", ")[0]) for policy in controls]
    tests = stats.paired_tests(frame, pairs, unit=UNIT)
    increases = stats.perplexity_increases(frame, UNIT).set_index("policy")
    bounds = zip(tests["difference_nats"], tests["low"], tests["high"], strict=True)
    return pd.DataFrame(
        {
            "rule": [rule for _, rule in pairs],
            "instead of the best resident": [policy.split(", ", 1)[1] for policy, _ in pairs],
            "increase, %": [100 * increases.loc[policy, "increase"] for policy, _ in pairs],
            "best resident: increase, %": [100 * increases.loc[rule, "increase"] for _, rule in pairs],
            "more loss, mnat a token": [f"{1000 * m:.3g} [{1000 * a:.3g}, {1000 * b:.3g}]" for m, a, b in bounds],
        }
    )


def increases_side_by_side(sides: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Perplexity increase of the same rules in several settings, one column each."""
    columns: dict[str, list[str]] = {}
    order: list[str] = []
    for name, frame in sides.items():
        found = stats.perplexity_increases(frame, UNIT).set_index("policy")
        order = order or [str(policy) for policy in found.sort_values("increase", ascending=False).index]
        columns[name] = _percents(*(found.loc[order, c].to_numpy() for c in ("increase", "low", "high")))
    return pd.DataFrame({"rule": order, **columns})
