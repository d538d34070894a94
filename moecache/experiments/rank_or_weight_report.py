"""What chapter 07 shows of its measurements: the crossed cells, what is left of rank and weight, bands, misses, single calls.

Losses are nats a *site*: all that a pass adds to the losses of the documents, over its number of sites. Clusters of
documents are drawn whole. This module reads the tidy frames of `rank_or_weight` and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments import contrasts_report
from moecache.experiments.rank_or_weight import BANDS, NEVER_CALLED, WEIGHTS
from moecache.experiments.rank_or_weight_fit_report import explained, left_over
from moecache.stats.resample import FEWEST_UNITS

UNIT = "cluster"
PER_SITE = "loss_per_site_nats"
AGES = ((0, 32), (32, 256), (256, np.inf))  # tokens since the last call


def of_model(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows of one model."""
    return pd.DataFrame(frame[frame["model"] == model]).reset_index(drop=True)


def by_model(frame: pd.DataFrame, function: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """A table of each model, one under the other, with the model in the first column."""
    parts = [function(of_model(frame, model)).assign(model=model) for model in dict.fromkeys(frame["model"])]
    table = pd.concat(parts, ignore_index=True)
    return table[["model", *(name for name in table.columns if name != "model")]]


def per_site(frame: pd.DataFrame, together: str = "model") -> pd.DataFrame:
    """The frame with losses a site: nats a token times the tokens for each site, over all rows that belong together."""
    totals = frame.groupby(together)[["num_tokens", "num_sites"]].transform("sum")
    return frame.assign(**{PER_SITE: frame["mean_difference_nats"] * totals["num_tokens"] / np.maximum(totals["num_sites"], 1)})


def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a cell of one model's injection.

    Returns
    -------
    DataFrame : `rank`, `multiple` (of 1/K), `loss`, `low`, `high` (nats a site), `relative_error2` (mean (e/h)^2 of the sites).
    """
    losses = _losses(per_site(frame))
    second = frame[[name for name in frame.columns if name.startswith("error2_")]].sum(axis=1)
    totals = frame.assign(error2=second).groupby("policy")[["error2", "num_sites"]].sum()
    facts = frame.drop_duplicates("policy").set_index("policy")[["rank", "multiple"]]
    error = (totals["error2"] / totals["num_sites"]).rename("relative_error2")
    return losses.join(facts, on="policy").join(error, on="policy")


def _losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean loss a site of each cell with its interval: `policy`, `loss`, `low`, `high`."""
    paired = stats.pair_documents(frame, UNIT, (PER_SITE,))
    draws = stats.weighted_mean_draws(paired.sums[PER_SITE], paired.num_tokens, stats.draw_counts(paired.num_units))
    low, high = stats.percentile_interval(draws)
    return pd.DataFrame({"policy": paired.policies, "loss": paired.means(PER_SITE), "low": low, "high": high})


def crossed_table(table: pd.DataFrame) -> pd.DataFrame:
    """The cells as the page shows them: ranks down, weights across, mnat a site with intervals."""
    told = table.assign(
        shown=_losses_shown(table),
        length=np.sqrt(table["relative_error2"]) / table["multiple"],
    )
    wide = told.pivot(index="rank", columns="multiple", values="shown")
    lengths = told[told["multiple"] == 1.0].set_index("rank")["length"]
    shown = pd.DataFrame({"rank": wide.index, **{f"q = {multiple:g}/K": wide[multiple].to_numpy() for multiple in wide.columns}})
    return shown.assign(**{"e/h at q = 1/K": lengths.loc[wide.index].to_numpy()})


def _losses_shown(table: pd.DataFrame) -> list[str]:
    return [_interval({"x": row["loss"], "x_low": row["low"], "x_high": row["high"]}, "x") for row in table.to_dict("records")]


def planned_contrasts(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    """The three contrasts fixed beforehand, as weights of cells."""
    ranks, (low, *_, high) = sorted(frame["rank"].unique()), WEIGHTS
    first, last = ranks[0], ranks[-1]

    def cell(rank: int, multiple: float) -> str:
        return f"rank {rank}, {multiple:g}/K"

    weight = {cell(rank, high): 1 / len(ranks) for rank in ranks} | {cell(rank, low): -1 / len(ranks) for rank in ranks}
    identity = {cell(first, q): 1 / len(WEIGHTS) for q in WEIGHTS} | {cell(last, q): -1 / len(WEIGHTS) for q in WEIGHTS}
    return {
        "weight at equal identity": weight,
        "identity at equal weight": identity,
        "interaction": {cell(first, high): 1.0, cell(first, low): -1.0, cell(last, high): -1.0, cell(last, low): 1.0},
    }


def planned(frame: pd.DataFrame) -> pd.DataFrame:
    """Tests of the planned contrasts of one model, nats a site; Holm over the three."""
    return contrasts_report.table_of(per_site(frame), planned_contrasts(frame), PER_SITE)


def regression(frame: pd.DataFrame) -> pd.DataFrame:
    """What is left of rank and of weight at equal e/h, one row each, as the page shows it (mnat a site)."""
    rows = []
    for name, found in left_overs(frame).items():
        rows.append(
            {
                "of": name,
                "raw gap, mnat": _interval(found, "raw"),
                "left at equal e/h": _interval(found, "left"),
                "90 % interval": f"[{1000 * found['left_low_90']:+.3g}, {1000 * found['left_high_90']:+.3g}]",
                "bound": f"±{1000 * found['bound']:.3g}",
                "decision": found["decision"],
            }
        )
    return pd.DataFrame(rows)


def left_overs(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """`left_over` of rank and of weight of one model."""
    ranks = sorted(frame["rank"].unique())
    return {
        f"rank ({ranks[0]} against {ranks[-1]})": left_over(frame, "rank", ranks[0], ranks[-1]),
        f"weight ({WEIGHTS[-1]:g}/K against {WEIGHTS[0]:g}/K)": left_over(frame, "multiple", WEIGHTS[-1], WEIGHTS[0]),
    }


def _interval(found: Any, name: str) -> str:
    middle, low, high = (1000 * found[name + end] for end in ("", "_low", "_high"))
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def power_law(table: pd.DataFrame) -> dict[str, float]:
    """Slope and fit of log loss against log mean (e/h)^2 over the cells whose loss is clear of zero."""
    clear = table[table["low"] > 0.0]
    if len(clear) < 3:
        return {"slope": np.nan, "r2": np.nan, "num_cells": len(clear)}
    x, y = np.log(clear["relative_error2"].to_numpy()), np.log(clear["loss"].to_numpy())
    slope, constant = np.polyfit(x, y, 1)
    return {"slope": float(slope), "r2": float(1 - np.var(y - slope * x - constant) / np.var(y)), "num_cells": len(clear)}


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the kinds of call that some block of documents had too few of."""
    numbers = frame.groupby("policy")["document"].transform("nunique")
    return pd.DataFrame(frame[numbers == frame["document"].nunique()])


def kinds(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a kind of substituted call of one model: `policy`, `family`, `rank`, `loss`, `low`, `high`, mean gate weight and (e/h)^2."""
    parts = []
    for _, rows in frame.groupby("family" if frame["family"].isin(BANDS).all() else "rank", sort=False):
        losses = _losses(per_site(rows))
        totals = rows.groupby("policy")[["gate_weight_sum", "relative_error2_sum", "num_sites"]].sum()
        facts = rows.drop_duplicates("policy").set_index("policy")[["family", "rank"]]
        means = pd.DataFrame(
            {
                "gate_weight": totals["gate_weight_sum"] / totals["num_sites"],
                "relative_error2": totals["relative_error2_sum"] / totals["num_sites"],
                "num_sites": totals["num_sites"],
            }
        )
        parts.append(losses.join(facts, on="policy").join(means, on="policy"))
    return pd.concat(parts, ignore_index=True)


def kinds_table(table: pd.DataFrame) -> pd.DataFrame:
    """`kinds` as the page shows it."""
    return pd.DataFrame(
        {
            "calls": table["policy"],
            "mnat a site": _losses_shown(table),
            "mean gate weight": table["gate_weight"],
            "mean (e/h)²": table["relative_error2"],
            "sites": table["num_sites"],
        }
    )


def band_tests(frame: pd.DataFrame) -> pd.DataFrame:
    """Neighbouring ranks of each band of one model, tested together."""
    contrasts = {}
    for band in frame["family"].unique():
        ranks = sorted(frame.loc[frame["family"] == band, "rank"].unique())
        for first, second in pairwise(ranks):
            contrasts[f"{band}: rank {first} − {second}"] = {f"{band}, rank {first}": 1.0, f"{band}, rank {second}": -1.0}
    return _tested(per_site(frame, "family"), contrasts)


def missed_tests(frame: pd.DataFrame) -> pd.DataFrame:
    """Missed calls against hits of one model, rank by rank, tested together."""
    ranks = sorted(frame["rank"].unique())
    contrasts = {f"rank {rank}: missed − hit": {f"missed, rank {rank}": 1.0, f"hit, rank {rank}": -1.0} for rank in ranks}
    return _tested(per_site(frame, "rank"), contrasts)


def _tested(frame: pd.DataFrame, contrasts: dict[str, dict[str, float]]) -> pd.DataFrame:
    rows = contrasts_report.combined(frame, contrasts, PER_SITE)
    return contrasts_report.in_mnat(contrasts_report.table_of_rows(rows))


def explained_table(sites: pd.DataFrame) -> pd.DataFrame:
    """Out-of-cluster R² of one model's single calls, as the page shows it."""
    found = explained(sites)
    return pd.DataFrame(
        {
            "predictor": found["predictor"],
            "R², %": 100 * found["r2"],
            "95 % interval": [f"[{100 * low:.1f}, {100 * high:.1f}]" for low, high in zip(found["low"], found["high"], strict=True)],
        }
    )


def single_table(sites: pd.DataFrame) -> pd.DataFrame:
    """Mean loss of one model's single calls of rank 0 and of all others, by layer and by age."""
    age = sites["age"].to_numpy()
    groups = {f"layer {layer}": (sites["layer"] == layer).to_numpy() for layer in sorted(sites["layer"].unique())}
    groups |= {f"age {low:g} to {high:g}": (age > low) & (age <= high) for low, high in AGES[:-1]}
    groups |= {f"age above {AGES[-1][0]:g}, or first call": (age > AGES[-1][0]) | (age == NEVER_CALLED)}
    groups |= {"missed": sites["is_miss"].to_numpy(bool), "hit": ~sites["is_miss"].to_numpy(bool)}
    rows = []
    for name, is_in in groups.items():
        row: dict[str, Any] = {"calls": name}
        for which, is_rank in (("rank 0", sites["rank"] == 0), ("ranks 1 and lower", sites["rank"] > 0)):
            found = sites[is_in & is_rank.to_numpy()]
            row |= {f"{which}, mnat": _mean_by_cluster(found), f"{which}, e/h": found["relative_error"].mean()}
        rows.append(row)
    return pd.DataFrame(rows)


def _mean_by_cluster(sites: pd.DataFrame) -> str:
    """Mean loss of sites in mnat with its interval, clusters drawn."""
    codes, names = pd.factorize(sites["cluster"])
    if len(names) < FEWEST_UNITS:
        return "too few"
    counts = stats.draw_counts(len(names))
    sums, numbers = np.bincount(codes, weights=sites["loss_nats"]), np.bincount(codes).astype(np.float64)
    low, high = stats.percentile_interval(stats.weighted_mean_draws(sums[None], numbers, counts)[:, 0])
    return _interval({"x": sums.sum() / numbers.sum(), "x_low": float(low), "x_high": float(high)}, "x")
