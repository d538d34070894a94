"""What chapter 01 shows of its measurements: tables and their intervals.

Intervals are percentile intervals of a bootstrap over clusters (modules, services, books, languages, templates): documents of one cluster
share an origin and are not independent, tokens of one document even less. This module measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from statsmodels.stats.proportion import proportion_confint

from moecache import stats
from moecache.experiments import public_routes
from moecache.experiments.reference_controls import NEXT, NONE, RANDOM, SHUFFLED, UNCHANGED

ALL = "all"
NGRAM, XZ, XZ_AFTER = "5-gram", "xz", "xz after training text"


def mean_interval(
    frame: pd.DataFrame, value: str, weight: str, unit: str = "cluster", confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, low, high) of sum of `value` over sum of `weight`, by a bootstrap over units."""
    sums = frame.groupby(unit)[[value, weight]].sum().to_numpy(np.float64)
    counts = stats.draw_counts(len(sums), seed=seed)
    low, high = stats.percentile_interval(stats.weighted_mean_draws(sums[None, :, 0], sums[:, 1], counts)[:, 0], confidence)
    return float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high)


def domains(documents: pd.DataFrame, ngram: pd.DataFrame, xz: pd.DataFrame) -> pd.DataFrame:
    """Losses by domain, and over all documents.

    Parameters
    ----------
    documents : from `reference_model.by_document`.
    ngram, xz : from `baselines.ngram_losses` and `baselines.xz_sizes` of the same documents.

    Returns
    -------
    DataFrame : a row per domain and "all": `domain`, `num_documents`, `num_clusters`, `perplexity` and `bits` (a byte) with `_low` and
        `_high`, `ngram_perplexity`, `ngram_bits`, `xz_bits`, `xz_after_bits`, `gain` (nats a token below the n-gram) with `_low`, `_high`.
    """
    joined = documents.merge(ngram.rename(columns={"loss_nats": "ngram_nats"}), on="document", validate="one_to_one")
    joined = joined.assign(bits=joined["loss_nats"] / math.log(2), gain=joined["ngram_nats"] - joined["loss_nats"])
    rows = []
    for domain in [*dict.fromkeys(documents["domain"]), ALL]:
        part = joined if domain == ALL else pd.DataFrame(joined[joined["domain"] == domain])
        packed = xz if domain == ALL else xz[xz["domain"] == domain]
        rows.append({"domain": domain, **_domain_row(part), **_packed_row(packed)})
    return pd.DataFrame(rows)


def _domain_row(part: pd.DataFrame) -> dict[str, Any]:
    loss, low, high = mean_interval(part, "loss_nats", "num_tokens")
    bits, bits_low, bits_high = mean_interval(part, "bits", "num_bytes")
    gain, gain_low, gain_high = mean_interval(part, "gain", "num_tokens")
    ngram_nats = float(part["ngram_nats"].sum())
    return {
        "num_documents": len(part), "num_clusters": part["cluster"].nunique(),
        "perplexity": math.exp(loss), "perplexity_low": math.exp(low), "perplexity_high": math.exp(high),
        "bits": bits, "bits_low": bits_low, "bits_high": bits_high,
        "ngram_perplexity": math.exp(ngram_nats / part["num_tokens"].sum()),
        "ngram_bits": ngram_nats / math.log(2) / part["num_bytes"].sum(),
        "gain": gain, "gain_low": gain_low, "gain_high": gain_high,
    }  # fmt: skip


def _packed_row(packed: pd.DataFrame) -> dict[str, float]:
    num_bytes = packed["num_bytes"].sum()
    return {
        "xz_bits": float(8 * packed["xz_bytes"].sum() / num_bytes),
        "xz_after_bits": float(8 * packed["xz_after_training_bytes"].sum() / num_bytes),
    }


def domain_table(table: pd.DataFrame) -> pd.DataFrame:
    """`domains` for the page."""
    return pd.DataFrame(
        {
            "domain": table["domain"].str.replace("_", " "),
            "documents (clusters)": [f"{n} ({c})" for n, c in zip(table["num_documents"], table["num_clusters"], strict=True)],
            "perplexity [95 %]": _bracketed(table, "perplexity", 1),
            "of the 5-gram": table["ngram_perplexity"].map("{:.1f}".format),
            "bits a byte": table["bits"].map("{:.2f}".format),
            "of the 5-gram ": table["ngram_bits"].map("{:.2f}".format),
            "of xz": table["xz_bits"].map("{:.2f}".format),
            "of xz after training text": table["xz_after_bits"].map("{:.2f}".format),
        }
    )


def _bracketed(table: pd.DataFrame, name: str, digits: int) -> list[str]:
    rows = zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
    return [f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" for value, low, high in rows]


RIVALS = ((NGRAM, "ngram_bits"), (XZ_AFTER, "xz_after_bits"), (XZ, "xz_bits"))


def bits_long(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """`domains` of several models as a row per (`domain`, `method`) with `bits`, `low`, `high` (NaN where there is no interval)."""
    parts = [table.assign(method=model, low=table["bits_low"], high=table["bits_high"]) for model, table in tables.items()]
    rivals = next(iter(tables.values()))
    for method, column in RIVALS:
        parts.append(rivals.assign(method=method, bits=rivals[column], low=np.nan, high=np.nan))
    return pd.concat(parts, ignore_index=True)[["domain", "method", "bits", "low", "high"]]


def describe_bits(tables: dict[str, pd.DataFrame]) -> str:
    """What the figure of bits a byte shows, for its alternative text."""
    totals = {model: table[table["domain"] == ALL].iloc[0] for model, table in tables.items()}
    rivals = next(iter(totals.values()))
    items = [(model, total["bits"]) for model, total in totals.items()] + [(name, rivals[key]) for name, key in RIVALS]
    return "Bits a byte over all domains: " + ", ".join(f"{name} {bits:.2f}" for name, bits in items)


def by_model(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """`domains` of several models for the page: a row per domain, perplexity and bits a byte of each model."""
    first = next(iter(tables.values()))
    columns = {
        model: [f"{perplexity:.1f} ({bits:.2f})" for perplexity, bits in zip(table["perplexity"], table["bits"], strict=True)]
        for model, table in tables.items()
    }
    return pd.DataFrame({"perplexity (bits a byte)": first["domain"].str.replace("_", " "), **columns})


def together(logs: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Logs of several models as one."""
    return pd.concat(list(logs.values()), ignore_index=True)


def against_ngram(documents: pd.DataFrame, ngram: pd.DataFrame, model: str) -> pd.DataFrame:
    """The planned test: does the model lose less than the n-gram on the same clusters? From `stats.paired_tests`, in nats a token."""
    parts = [documents.assign(policy=model), documents.drop(columns="loss_nats").merge(ngram, on="document").assign(policy=NGRAM)]
    frame = pd.concat(parts, ignore_index=True)
    frame["mean_difference_nats"] = frame["loss_nats"] / frame["num_tokens"]
    columns = ["policy", "document", "cluster", "num_tokens", "mean_difference_nats"]
    return stats.paired_tests(pd.DataFrame(frame, columns=columns), [(NGRAM, model)], unit="cluster")


def sizes(cards: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Sizes of the reference models beside those of the models whose routing geometry they have: a row per size, a column per model."""
    words = {
        "num_layers": "layers, each with experts", "num_experts": "experts a layer", "top_k": "calls a step (top-k)",
        "hidden_size": "hidden", "expert_width": "expert width", "total_parameters": "parameters",
        "active_parameters": "parameters a token uses", "weight_rule": "gate weights", "shared_expert": "shared expert",
        "training_tokens": "training tokens",
    }  # fmt: skip
    geometries = {(card["num_experts"], card["top_k"]) for card in cards}
    public = [model for model in public_routes.IMITATED if (model["num_experts"], model["top_k"]) in geometries]
    columns = {card["model"]: [_counted(card.get(key)) for key in words] for card in (*cards, *public)}
    return pd.DataFrame({"": list(words.values()), **columns})


def _counted(value: float | str | None) -> str:
    if value is None:
        return "not used here"
    if isinstance(value, str):
        return value
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if value >= unit:
            return f"{value / unit:.3g} {word}"
    return f"{value:,.0f}"


def controls(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """What each control costs: `model`, `policy`, `factor` (of the perplexity), `low`, `high`, `difference_nats`, `dz`,
    `smallest_detectable_nats`, `p_holm`; dearest first. From `reference_controls.ablation`; the unit is the cluster."""
    tests = stats.paired_tests(frame, [(name, UNCHANGED) for name in (SHUFFLED, RANDOM, NEXT, NONE)], unit="cluster")
    names = [SHUFFLED, RANDOM, NEXT, NONE]
    columns = ["difference_nats", "dz", "smallest_detectable_nats", "p_holm"]
    table = pd.DataFrame({"model": model, "policy": names, **{name: np.exp(tests[column]) for name, column in _FACTORS}})
    return pd.concat([table, tests[columns]], axis=1).sort_values("factor", ascending=False, kind="stable").reset_index(drop=True)


_FACTORS = (("factor", "difference_nats"), ("low", "low"), ("high", "high"))


def controls_table(table: pd.DataFrame) -> pd.DataFrame:
    """`controls` for the page."""
    return pd.DataFrame(
        {
            "model": table["model"],
            "control": table["policy"],
            "perplexity, times [95 %]": _bracketed(table.rename(columns={"low": "factor_low", "high": "factor_high"}), "factor", 2),
            "difference, nats a token": table["difference_nats"],
            "dz": table["dz"],
            "detectable, nats": table["smallest_detectable_nats"],
            "p (Holm)": ["< 0.001" if p < 0.001 else f"{p:.3f}" for p in table["p_holm"]],
        }
    )


def describe_controls(table: pd.DataFrame) -> str:
    """What the figure of the controls shows, for its alternative text."""
    parts = []
    for model, rows in table.groupby("model", sort=False):
        items = [f"{name} {factor:.3g}" for name, factor in zip(rows["policy"], rows["factor"], strict=True)]
        parts.append(f"{model}: {', '.join(items)}")
    return "Perplexity, times that of the unchanged model. " + "; ".join(parts)


def task_table(tasks: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Share of the held-out questions solved, by model and family, with Wilson's 95 % interval: `model`, `domain`, `num_questions`,
    `num_templates`, `solved`, `low`, `high`, `by_repeating`."""
    rows = []
    for model, frame in tasks.items():
        for domain, part in frame.groupby("domain", sort=False):
            low, high = proportion_confint(int(part["is_right"].sum()), len(part), method="wilson")
            sums = {"solved": part["is_right"].mean(), "low": low, "high": high, "by_repeating": part["is_right_by_repeating"].mean()}
            named = {"model": model, "domain": domain, "num_questions": len(part), "num_templates": part["template"].nunique()}
            rows.append(named | {name: float(value) for name, value in sums.items()})
    return pd.DataFrame(rows)


def task_words(table: pd.DataFrame) -> pd.DataFrame:
    """`task_table` for the page."""
    shares = zip(table["solved"], table["low"], table["high"], strict=True)
    return pd.DataFrame(
        {
            "model": table["model"],
            "family": table["domain"].str.replace("_", " "),
            "questions (templates)": [f"{n} ({t})" for n, t in zip(table["num_questions"], table["num_templates"], strict=True)],
            "solved [95 %]": [f"{solved:.0%} [{low:.0%}, {high:.0%}]" for solved, low, high in shares],
            "by repeating": table["by_repeating"].map("{:.0%}".format),
        }
    )
