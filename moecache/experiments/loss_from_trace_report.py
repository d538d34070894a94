"""What chapter 13 shows of its judged policies: tables, sentences and the values of its prose. It measures and fits nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments import loss_from_trace_judged as judging
from moecache.experiments.loss_from_trace_judged import Fits, Judged


def form_table(fits: Mapping[str, Fits]) -> pd.DataFrame:
    """How far off each form is on families that the fit had not seen, within the fitted half."""
    rows = []
    for model, fit in fits.items():
        errors = fit.mass.errors | fit.chosen.errors
        rows.append({"model": model, **{form: f"x {np.exp(error):.2f}" for form, error in errors.items()}, "chosen": fit.chosen.form})
    return pd.DataFrame(rows).set_index("model").T.reset_index(names="form")


def points(judged: Mapping[str, Sequence[Judged]]) -> pd.DataFrame:
    """All judged policies as the figure draws them."""
    tables = [
        one.table.assign(model=model, mass_increase=np.expm1(one.table["mass_nats"])) for model, ones in judged.items() for one in ones
    ]
    return pd.concat(tables, ignore_index=True)


def order_table(judged: Mapping[str, Sequence[Judged]]) -> pd.DataFrame:
    """The planned coefficients, as a page shows them."""
    parts = [(model, judging.order_rows(one)) for model, ones in judged.items() for one in ones]
    shown = [_named(model, stats.shown(rows).drop(columns=["test", "effect size"])) for model, rows in parts if rows is not None]
    if not shown:
        return pd.DataFrame(
            [{"question": "spearman of estimate and loss", "answer": "not judged: too few policies with a loss clear of zero"}]
        )
    return pd.concat(shown, ignore_index=True)


def _named(model: str, table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([pd.DataFrame({"model": [model] * len(table)}), table], axis=1)


def error_table(judged: Mapping[str, Sequence[Judged]]) -> pd.DataFrame:
    """Errors and calibration of each novelty."""
    parts = []
    for model, ones in judged.items():
        table = judging.summary(ones)
        percent = {c: [f"{100 * v:.0f} %" for v in table[c]] for c in ("median error", "median error, mass alone", "inside the interval")}
        parts.append(_named(model, table.assign(**percent)))
    return pd.concat(parts, ignore_index=True)


def decision_table(judged: Mapping[str, Sequence[Judged]]) -> pd.DataFrame:
    """The plan's three decisions for each novelty and model."""
    rows = [
        {"model": model, "novelty": novelty, "useful": useful, "better than mass": better, "honest interval": honest}
        for model, ones in judged.items()
        for novelty, (useful, better, honest) in judging.decisions(ones).items()
    ]
    return pd.DataFrame(rows)


def weight_table(fits: Mapping[str, Fits]) -> pd.DataFrame:
    """Fitted weights of the rank groups, mean over layers, as multiples of that of the last group; the powers beside them."""
    rows = []
    for model, fit in fits.items():
        weights = np.exp(np.log(fit.chosen.fitted.weights).reshape(-1, 4).mean(axis=0))
        values = dict(zip(("rank 0", "rank 1", "ranks 2, 3", "ranks 4 and up"), weights / weights[-1], strict=True))
        powers = fit.chosen.fitted
        rows.append({"model": model, **values, "power of the sum": powers.powers[0], "power of the age": powers.age_powers[0]})
    return pd.DataFrame(rows)


def seen_table(seen: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Median and largest deviation of what the trace shows from what the emulated model's routing was."""
    rows = []
    for model, table in seen.items():
        ratios = table.drop(columns="policy")
        rows += [
            {"model": model, "in": column, "median, trace / log": ratios[column].median(), "furthest from 1": _furthest(ratios[column])}
            for column in ratios.columns
        ]
    return pd.DataFrame(rows)


def _furthest(ratios: pd.Series) -> float:
    known = ratios.dropna().to_numpy()
    return float(known[np.abs(np.log(np.maximum(known, 1e-9))).argmax()])


def best_table(emulated: pd.DataFrame, swept: pd.DataFrame) -> pd.DataFrame:
    """The best policies by the estimate: what was estimated and what was measured."""
    best = pd.DataFrame(emulated[emulated["is_best"]])
    labels = best["policy"].str.rsplit(" @ ", n=1).str[0]
    estimates = labels.map(swept.set_index("policy")["estimated_increase"]).to_numpy()
    bounds = zip(best["increase"], best["low"], best["high"], strict=True)
    return pd.DataFrame(
        {
            "policy": labels.to_numpy(),
            "ms a token": 1e3 * best["seconds"].to_numpy(),
            "estimated, %": 100 * estimates,
            "measured, %": [f"{100 * at:.2f} [{100 * low:.2f}, {100 * high:.2f}]" for at, low, high in bounds],
            "front, %": 100 * best["front_increase"].to_numpy(),
            "confirmed": np.where(best["is_confirmed"], "yes", "no"),
        }
    )


def sentence(judged: Mapping[str, Sequence[Judged]]) -> str:
    """Typical errors in words."""
    parts = []
    for model, ones in judged.items():
        for line in judging.summary(ones).to_dict("records"):
            error, of_mass = (100 * line[column] for column in ("median error", "median error, mass alone"))
            parts.append(f"{model}, {line['novelty']}: {error:.0f} % (mass alone {of_mass:.0f} %)")
    return "Median errors: " + "; ".join(parts) + "."


def values(
    fits: Mapping[str, Fits], judged: Mapping[str, Sequence[Judged]], emulated: Mapping[str, pd.DataFrame], seen: Mapping[str, pd.DataFrame]
) -> dict[str, Any]:
    """What the prose names, of the first model, and the decisions over all."""
    model = next(iter(fits))
    table, best = points({model: judged[model]}), emulated[model][emulated[model]["is_best"]]
    decided = decision_table(judged)
    found: dict[str, Any] = {
        "model": model,
        "models": " and ".join(fits),
        "form": fits[model].chosen.form,
        "power": float(fits[model].chosen.fitted.powers[0]),
        "num_left_out": len(fits[model].chosen.left_out),
        "num_judged": len(table),
        "num_unclear": int((~table["is_clear"]).sum()),
        "num_clusters": judged[model][0].num_clusters,
        "num_best": len(best),
        "num_confirmed": int(best["is_confirmed"].sum()),
        "trace_shift": float(seen[model]["estimate"].median()),
    }
    for column, name in (("useful", "useful"), ("better than mass", "better"), ("honest interval", "honest")):
        found[f"num_{name}"] = int((decided[column] == "yes").sum())
    return found | {"num_decisions": len(decided)}


def at_capacity(rows: pd.DataFrame, front_rows: pd.DataFrame, num_slots: int, labels: Sequence[str]) -> pd.DataFrame:
    """Everything that was emulated at one capacity, and whether the best are confirmed."""
    here = pd.DataFrame(rows[rows["num_slots"] == num_slots])
    return judging.confirmed(pd.concat([here, front_rows], ignore_index=True), labels)


def stacked(of_model: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The tables of all models below one another, with ``model``."""
    return pd.concat([table.assign(model=model) for model, table in of_model.items()], ignore_index=True)


def front_words(emulated: Mapping[str, pd.DataFrame]) -> str:
    """How many of the best were confirmed, in words."""
    parts = []
    for model, table in emulated.items():
        best = table[table["is_best"]]
        parts.append(f"{model}: {int(best['is_confirmed'].sum())} of {len(best)} confirmed")
    return "; ".join(parts) + "."
