"""The prose of chapter 07: its numbers, its sentences, and what its figures show in words.

This module reads the tidy frames of `rank_or_weight` and measures nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moecache.experiments.rank_or_weight import WEIGHTS
from moecache.experiments.rank_or_weight_report import by_model, cells, left_overs, of_model, planned, power_law


def words(crossed: pd.DataFrame, model: str) -> str:
    """One model's primary results in sentences."""
    frame = of_model(crossed, model)
    tests = planned(frame).to_dict("records")
    told = ", ".join(
        f"{row['comparison']} {1000 * row['difference_nats']:.1f} mnat a site [{1000 * row['low']:.1f}, {1000 * row['high']:.1f}]"
        for row in tests
    )
    law = power_law(cells(frame))
    left = "; ".join(
        f"of {name}, {1000 * found['left']:.1f} of {1000 * found['raw']:.1f} mnat [90 %: {1000 * found['left_low_90']:.1f}, "
        f"{1000 * found['left_high_90']:.1f}; bound ±{1000 * found['bound']:.1f}]: {found['decision']}"
        for name, found in left_overs(frame).items()
    )
    slope = ""
    if not np.isnan(law["slope"]):
        slope = (
            f" Over the {law['num_cells']:.0f} cells that are clear of zero, loss grows as (e/h)² to the power {law['slope']:.2f} "
            f"(R² of logs {law['r2']:.2f})."
        )
    return f"**{model}**: {told}. Left at equal e/h: {left}.{slope}"


def values(crossed: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the chapter's prose."""
    models = list(dict.fromkeys(crossed["model"]))
    tests = by_model(crossed, planned)
    is_above = (tests["low"] > 0.0).groupby(tests["comparison"]).all()
    decisions = [found["decision"] for model in models for found in left_overs(of_model(crossed, model)).values()]
    both = bool(is_above["weight at equal identity"] and is_above["identity at equal weight"])
    return {
        "num_scored": int(crossed["document"].nunique()),
        "num_clusters": int(crossed["cluster"].nunique()),
        "words": "\n\n".join(words(crossed, model) for model in models),
        "both_matter": "both matter" if both else "it is not shown that both matter",
        "multiply": "they multiply" if bool(is_above["interaction"]) else "that they multiply is not shown",
        "num_nothing_left": sum(decision.startswith("nothing") for decision in decisions),
        "num_something_left": sum(decision.startswith("something") for decision in decisions),
        "num_left_overs": len(decisions),
        "sites_a_document": float(crossed["num_sites"].mean()),
    }


def describe(table: pd.DataFrame) -> str:
    """What the figure of the cells shows, for its alternative text."""
    parts = []
    for model in dict.fromkeys(table["model"]):
        rows = table[(table["model"] == model) & (table["multiple"] == WEIGHTS[-1])].sort_values("rank")
        told = ", ".join(f"rank {row['rank']} {1000 * row['loss']:.3g}" for row in rows.to_dict("records"))
        parts.append(f"{model}: {told} mnat a site")
    return f"Loss of injected errors by rank and weight. At the largest weight, {WEIGHTS[-1]:g}/K, " + "; ".join(parts) + "."


def describe_kinds(bands: pd.DataFrame, missed: pd.DataFrame) -> str:
    """What the figure of substituted calls shows, for its alternative text."""
    told = [f"{row['model']} {row['policy']}: {1000 * row['loss']:.3g}" for row in pd.concat([bands, missed]).to_dict("records")]
    return "Loss a substituted call, mnat, in bands of equal weight and of missed calls against hits: " + "; ".join(told) + "."
