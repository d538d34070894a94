"""What chapter 06 shows of its measurement: heavy against light, rank by rank and stand-in by stand-in.

Losses are nats a token, clusters of documents are drawn whole. This module reads the tidy frame of `composition` and
measures nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments import contrasts_report
from moecache.experiments.composition import HEAVY_RANKS, STAND_INS, label_of

UNIT = "cluster"
STAND_IN_WORDS = {"best": "best resident", "random": "random resident", "drop": "nobody (dropped)"}
LEAST_MASS = 0.02  # a step, on both sides
MOST_MASS_GAP = 0.02  # of the larger mass
FACTOR = 1.5


def sides(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (heavy rank, stand-in) of one model.

    Returns
    -------
    DataFrame
        `rank`, `stand_in`, `steps_fraction` (of all steps), `light_calls` (a step), `heavy_mass` and `light_mass` (mean a step),
        `heavy`, `light`, `difference`, `margin` (heavy - 1.5 light) and their `_low`, `_high` (nats a token), `ratio` with
        interval, `dz`, `positive_fraction` (clusters whose difference is above 0), `decision`.
    """
    paired = stats.pair_documents(frame, UNIT, ("mean_difference_nats", "substituted_mass"))
    draws = stats.weighted_mean_draws(paired.sums["mean_difference_nats"], paired.num_tokens, stats.draw_counts(paired.num_units))
    return pd.DataFrame([_row(frame, paired, draws, rank, stand_in) for rank in HEAVY_RANKS for stand_in in STAND_INS])


def _row(frame: pd.DataFrame, paired: stats.PairedUnits, draws: np.ndarray, rank: int, stand_in: str) -> dict[str, Any]:
    labels = [label_of(rank, side, stand_in) for side in ("heavy", "light")]
    heavy, light = (paired.index(label) for label in labels)
    means, masses = paired.means(), paired.means("substituted_mass")
    units = paired.contributions()[heavy] - paired.contributions()[light]
    cells = frame[frame["policy"] == labels[1]]
    row: dict[str, Any] = {
        "rank": rank,
        "stand_in": stand_in,
        "steps_fraction": cells["num_sites"].sum() / cells["num_steps"].sum(),
        "light_calls": (cells["substituted"] + cells["dropped"]).sum() / max(cells["num_sites"].sum(), 1),
        "heavy_mass": masses[heavy],
        "light_mass": masses[light],
        "dz": float(units.mean() / units.std(ddof=1)) if units.std() > 0 else 0.0,
        "positive_fraction": float((units > 0).mean()),
    }
    quantities = {
        "heavy": (means[heavy], draws[:, heavy]),
        "light": (means[light], draws[:, light]),
        "difference": (means[heavy] - means[light], draws[:, heavy] - draws[:, light]),
        "margin": (means[heavy] - FACTOR * means[light], draws[:, heavy] - FACTOR * draws[:, light]),
    }
    for name, (value, drawn) in quantities.items():
        low, high = map(float, stats.percentile_interval(drawn))
        row |= {name: float(value), f"{name}_low": low, f"{name}_high": high}
    return row | _ratio(row, draws[:, heavy], draws[:, light]) | {"decision": decide(row)}


def _ratio(row: dict[str, Any], heavy: np.ndarray, light: np.ndarray) -> dict[str, float]:
    """The ratio of losses; without an interval where the light side is not clear of zero."""
    if row["light_low"] <= 0.0:
        return {"ratio": np.nan, "ratio_low": np.nan, "ratio_high": np.nan}
    low, high = map(float, stats.percentile_interval(np.where(light > 0, heavy / np.where(light > 0, light, 1.0), np.nan)))
    return {"ratio": row["heavy"] / row["light"], "ratio_low": low, "ratio_high": high}


def decide(row: Any) -> str:
    """The decision rule that was fixed beforehand."""
    heaviest = max(row["heavy_mass"], row["light_mass"])
    if min(row["heavy_mass"], row["light_mass"]) < LEAST_MASS:
        return "inconclusive: too little mass"
    if abs(row["heavy_mass"] - row["light_mass"]) > MOST_MASS_GAP * heaviest:
        return "inconclusive: masses differ"
    if row["difference_low"] > 0.0 and row["margin_low"] > 0.0:
        return "heavy costs more"
    return "heavy does not cost more" if row["margin_high"] < 0.0 else "inconclusive"


def tables(frame: pd.DataFrame) -> pd.DataFrame:
    """`sides` of every model, with a column `model`."""
    parts = [sides(part).assign(model=model) for model, part in frame.groupby("model", sort=False)]
    return pd.concat(parts, ignore_index=True)


def shown(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """The table of one model as the page shows it; losses in thousandths of a nat a token."""
    rows = table[table["model"] == model]
    return pd.DataFrame(
        {
            "heavy rank": rows["rank"],
            "stands in": rows["stand_in"].map(STAND_IN_WORDS),
            "mass a step": rows["heavy_mass"],
            "heavy, mnat": _intervals(rows, "heavy", 1000),
            "light, mnat": _intervals(rows, "light", 1000),
            "dz": rows["dz"],
            "ratio": _intervals(rows, "ratio", 1),
            "decision": rows["decision"],
        }
    )


def _intervals(rows: pd.DataFrame, name: str, scale: float) -> list[str]:
    bounds = zip(rows[name], rows[f"{name}_low"], rows[f"{name}_high"], strict=True)
    found = [(scale * middle, scale * low, scale * high) for middle, low, high in bounds]
    return ["–" if np.isnan(row[0]) else f"{row[0]:.3g} [{row[1]:.3g}, {row[2]:.3g}]" for row in found]


def planned(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The planned tests of one model: heavy minus light of each rank with the best resident, Holm over the ranks."""
    rows = pd.DataFrame(frame[frame["model"] == model])
    contrasts = {
        f"rank {rank} − light calls": {label_of(rank, "heavy", "best"): 1.0, label_of(rank, "light", "best"): -1.0} for rank in HEAVY_RANKS
    }
    return contrasts_report.in_mnat(contrasts_report.table_of(rows, contrasts))


def composition_words(table: pd.DataFrame, model: str) -> str:
    """One model's primary comparison in a sentence."""
    row = table[(table["model"] == model) & (table["rank"] == HEAVY_RANKS[0]) & (table["stand_in"] == "best")].iloc[0]
    ratio = "no ratio, since the light side is not clear of zero"
    if not np.isnan(row["ratio"]):
        ratio = f"{row['ratio']:.1f} times as much [{row['ratio_low']:.1f}, {row['ratio_high']:.1f}]"
    return (
        f"**{model}**: at a mass of {row['heavy_mass']:.3f} a step (light side {row['light_mass']:.3f}), one call of rank "
        f"{row['rank']} costs {1000 * row['heavy']:.1f} mnat a token, the {row['light_calls']:.1f} light calls that weigh the same "
        f"{1000 * row['light']:.1f}: "
        f"{1000 * row['difference']:.1f} mnat more [{1000 * row['difference_low']:.1f}, {1000 * row['difference_high']:.1f}], "
        f"{ratio}; dz {row['dz']:.2f}, {row['positive_fraction']:.0%} of the clusters on that side. Decision: {row['decision']}."
    )


def describe(table: pd.DataFrame) -> str:
    """What the figure shows, for its alternative text."""
    parts = []
    for row in table[table["stand_in"] == "best"].to_dict("records"):
        parts.append(f"{row['model']}, rank {row['rank']}: heavy {1000 * row['heavy']:.2g}, light {1000 * row['light']:.2g} mnat a token")
    return "Loss of one heavy call against light calls of equal summed weight. Best resident stands in: " + "; ".join(parts) + "."


def values(frame: pd.DataFrame, table: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the chapter's prose."""
    best = table[table["stand_in"] == "best"]
    controls = table[table["stand_in"] != "best"]
    clear = controls.dropna(subset=["ratio"])
    models = list(dict.fromkeys(table["model"]))
    return {
        "num_scored": int(frame["document"].nunique()),
        "num_clusters": int(frame["cluster"].nunique()),
        "num_models": len(models),
        "words": "\n\n".join(composition_words(table, model) for model in models),
        "least_mass": LEAST_MASS,
        "factor": FACTOR,
        "num_decided": int((best["decision"] == "heavy costs more").sum()),
        "num_judged": len(best),
        "controls_words": "no control has a light side clear of zero"
        if clear.empty
        else f"the ratios of the controls run from {clear['ratio'].min():.1f} to {clear['ratio'].max():.1f}",
    }
