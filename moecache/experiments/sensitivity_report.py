"""What chapter 92 shows of its measurement: one row for each setting of each choice, and which of them are inert.

This module measures nothing.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from moecache.experiments.contrasts_report import combined, table_of_rows
from moecache.experiments.paired_runs import span_name
from moecache.experiments.sensitivity import DEFAULT, PROMPT_TOKENS, SPANS
from moecache.stats.paired import DIFFERENCE

INERT = "inert"
ROUNDING_NATS = 1e-6  # what the order of a sum of float32 weights can move


def changes(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (model, rule, choice, setting), against the run that differs in that choice only.

    Returns
    -------
    DataFrame : `model`, `rule`, `choice`, `setting`, `against`, `effect`, `low`, `high`, `smallest` (detectable; all nats a token),
        `changed_fraction` (of the calls), `is_inert` (no decision changed, and no loss beyond rounding), `num_units`.
    """
    parts = [_changes_of(rows) for _, rows in frame.groupby(["model", "rule"], sort=False)]
    return pd.concat(parts, ignore_index=True)


def _changes_of(rows: pd.DataFrame) -> pd.DataFrame:
    switched = rows[rows["choice"] != DEFAULT]
    listed = switched.drop_duplicates("policy")[["model", "rule", "choice", "setting", "against", "policy"]].reset_index(drop=True)
    contrasts = [
        combined(rows, {policy: {policy: 1.0, against: -1.0}}, _judged_on(choice))
        for policy, against, choice in listed[["policy", "against", "choice"]].itertuples(index=False)
    ]
    found = table_of_rows(pd.concat(contrasts, ignore_index=True))
    changed = switched.groupby("policy")["changed_fraction"].mean().loc[listed["policy"]].to_numpy()
    return listed.assign(
        effect=found["difference_nats"],
        low=found["low"],
        high=found["high"],
        smallest=found["smallest_detectable_nats"],
        changed_fraction=changed,
        is_inert=(changed == 0) & (found[["low", "high"]].abs().max(axis=1) < ROUNDING_NATS),
        num_units=found.attrs["num_units"],
    )


def _judged_on(choice: str) -> str:
    """A prompt that is waited for costs nothing by itself: only what follows it is judged."""
    return f"nats_{span_name(SPANS[1])}" if choice == "prompt" else DIFFERENCE


def shown(table: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows of one model as a page shows them, a column for each rule."""
    rows = table[table["model"] == model]
    first, *others = (rows[rows["rule"] == rule] for rule in rows["rule"].unique())
    page = pd.DataFrame({"choice": first["choice"], "setting": first["setting"], "calls changed, %": 100 * first["changed_fraction"]})
    page[f"{first['rule'].iloc[0]}, mnat [95 %]"] = [_words(row) for _, row in first.iterrows()]
    page["smallest detectable"] = 1000 * first["smallest"]
    for other in others:
        words = {(row["choice"], row["setting"]): _words(row) for _, row in other.iterrows()}
        page[f"{other['rule'].iloc[0]}, mnat [95 %]"] = [words.get(at, "") for at in zip(first["choice"], first["setting"], strict=True)]
    return page.assign(choice=page["choice"].where(~page["choice"].duplicated(), ""))


def _words(row: pd.Series) -> str:
    if row["is_inert"]:
        return INERT
    return f"{1000 * row['effect']:+.1f} [{1000 * row['low']:+.1f}, {1000 * row['high']:+.1f}]"


def alternative(table: pd.DataFrame) -> str:
    """The figure in words: every setting with its change."""
    parts = [
        f"{row.setting} ({row.rule}) " + (INERT if row.is_inert else f"{1000 * row.effect:+.0f}")  # type: ignore[attr-defined]
        for row in table.itertuples()
    ]
    return "; ".join(parts) + "."


def values(frame: pd.DataFrame, table: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the chapter's prose: those of the first model and rule, and the verdict over all its settings."""
    model, rule = frame["model"].iloc[0], frame["rule"].iloc[0]
    rows = table[(table["model"] == model) & (table["rule"] == rule)]
    ordered = rows.sort_values("effect", ascending=False)
    clear = rows[(rows["low"] > 0) | (rows["high"] < 0)]
    unclear = rows[(rows["low"] <= 0) & (rows["high"] >= 0) & ~rows["is_inert"]]
    base = frame[(frame["model"] == model) & (frame["rule"] == rule) & (frame["policy"] == DEFAULT)]
    inert = table[table["is_inert"]]
    return {
        "model": str(model),
        "rule": str(rule),
        "num_slots": int(base["num_slots"].iloc[0]),
        "num_scored": int(base["document"].nunique()),
        "num_units": int(rows["num_units"].iloc[0]),
        "default_mnat": 1000 * float((base[DIFFERENCE] * base["num_tokens"]).sum() / base["num_tokens"].sum()),
        "prompt_tokens": PROMPT_TOKENS,
        "num_settings": len(rows),
        "num_clear": len(clear),
        "dearest": f"{ordered['setting'].iloc[0]} ({_words(ordered.iloc[0])})",
        "cheapest": f"{ordered['setting'].iloc[-1]} ({_words(ordered.iloc[-1])})",
        "clear_words": "; ".join(f"{row['setting']} {_words(row)}" for _, row in clear.iterrows()) or "none",
        "unclear_words": "; ".join(f"{row['setting']} {_words(row)}" for _, row in unclear.iterrows()) or "none",
        "inert_words": "; ".join(f"{row['setting']} ({row['model']}, {row['rule']})" for _, row in inert.iterrows()) or "none",
        "largest_rounding": float(1000 * rows.loc[rows["choice"] == "router logits", "effect"].abs().max()),
    }
