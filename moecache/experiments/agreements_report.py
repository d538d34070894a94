"""What chapter 91 shows of its measurement: how much was compared, and where it did not agree.

This module measures nothing.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from moecache.experiments.agreements import COMPARISONS
from moecache.experiments.tiny_families import FAMILIES


def disagreements(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that do not agree: more decisions differ than may, or logits lie further apart."""
    return frame[(frame["differing"] > frame["allowed"]) | (frame["largest_difference"] > frame["bound"])]


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each comparison that was made, over all models.

    Returns
    -------
    DataFrame : `comparison`, `models`, `policies`, `tokens` (of all models together), `calls` and `misses` (over models and policies),
        `decisions that differ` (with how many may, where any may), `largest logit difference` (or "-"), in the order of `COMPARISONS`.
    """
    found = [_row(name, frame[frame["comparison"] == name]) for name in COMPARISONS if (frame["comparison"] == name).any()]
    return pd.DataFrame(found)


def by_model(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, over all comparisons and policies.

    Returns
    -------
    DataFrame : `model`, `layers`, `slots` (the fewest), `tokens`, `calls`, `decisions that differ`, `largest logit difference`,
        `agrees`.
    """
    failed = set(disagreements(frame)["model"])
    rows = []
    for model, part in frame.groupby("model", sort=False):
        rows.append(
            {
                "model": model,
                "layers": int(part["num_layers"].iloc[0]),
                "slots": int(part["num_slots"].min()),
                "tokens": int(part["num_tokens"].iloc[0]),
                "calls": int(part["num_calls"].sum()),
                "decisions that differ": _differing(part),
                "largest logit difference": _largest(part),
                "agrees": "no" if model in failed else "yes",
            }
        )
    return pd.DataFrame(rows)


def values(frame: pd.DataFrame) -> dict[str, Any]:
    """The numbers and words of the prose."""
    failed = disagreements(frame)
    exact = frame[(frame["bound"] == 0) & (frame["allowed"] == 0)]
    order = frame[frame["comparison"] == COMPARISONS[-1]]
    models = list(dict.fromkeys(frame["model"]))
    families = [model for model in models if model in FAMILIES]
    trained = [model for model in models if model not in FAMILIES]
    return {
        "num_comparisons": len(frame),
        "num_calls": int(frame["num_calls"].sum()),
        "num_misses": int(frame["num_misses"].sum()),
        "num_policies": frame["policy"].nunique(),
        "num_families": len(families),
        "families": ", ".join(families) or "none",
        "trained": " and ".join(trained) or "none",
        "verdict": _verdict(frame, failed),
        "num_exact": len(exact),
        "largest_exact": float(exact["largest_difference"].max()),
        "order_steps": int(order["differing"].sum()),
        "order_allowed": int(order["allowed"].sum()),
        "order_largest": float(order["largest_difference"].max()),
        "order_bound": float(order["bound"].max()),
    }


def _row(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    return {
        "comparison": name,
        "models": rows["model"].nunique(),
        "policies": rows["policy"].nunique(),
        "tokens": int(rows.drop_duplicates("model")["num_tokens"].sum()),
        "calls": int(rows["num_calls"].sum()),
        "misses": int(rows["num_misses"].sum()),
        "decisions that differ": _differing(rows),
        "largest logit difference": _largest(rows),
    }


def _differing(rows: pd.DataFrame) -> str:
    differing, allowed = int(rows["differing"].sum()), int(rows["allowed"].sum())
    return f"{differing} (near ties: {allowed})" if allowed else str(differing)


def _largest(rows: pd.DataFrame) -> str:
    largest = rows["largest_difference"].max()
    return "-" if pd.isna(largest) else "0" if largest == 0 else f"{largest:.1e}"


def _verdict(frame: pd.DataFrame, failed: pd.DataFrame) -> str:
    if failed.empty:
        return f"All {len(frame)} comparisons agree."
    listed = [f"{row.comparison} ({row.model}, {row.policy})" for row in failed.itertuples()]
    return f"{len(failed)} of {len(frame)} comparisons do NOT agree: {'; '.join(listed)}."
