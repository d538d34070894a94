"""The values of chapter 01's prose, from its tables: numbers, and words that depend on them.

A sentence that could come out the other way takes its word from here, so that it follows the data. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from moecache.experiments import public_routes
from moecache.experiments.reference_controls import NEXT, NONE, RANDOM, SHUFFLED
from moecache.experiments.reference_report import ALL

TOKENS_OF_LAST_LOSS = 500_000


def training(card: dict[str, Any], log: pd.DataFrame) -> dict[str, Any]:
    """`total_parameters` and `training_tokens` in millions, `per_parameter`, `num_layers`, `num_experts`, `top_k`, `first_loss`,
    `last_loss` (mean over the last half million tokens)."""
    last = log[log["num_tokens"] > log["num_tokens"].iloc[-1] - TOKENS_OF_LAST_LOSS]
    return {
        **{name: card[name] for name in ("num_layers", "num_experts", "top_k")},
        "total_parameters": card["total_parameters"] / 1e6, "training_tokens": card["training_tokens"] / 1e6,
        "per_parameter": card["training_tokens"] / card["total_parameters"],
        "first_loss": float(log["loss_nats"].iloc[0]), "last_loss": float(last["loss_nats"].mean()),
    }  # fmt: skip


def language(domains: pd.DataFrame, versus: pd.Series) -> dict[str, Any]:
    """Over all domains, and how many were won; `versus`: the row of `against_ngram`."""
    total, each = domains[domains["domain"] == ALL].iloc[0], domains[domains["domain"] != ALL]
    ordered = each.sort_values("perplexity", kind="stable")
    easiest, hardest = ordered.iloc[0], ordered.iloc[-1]
    names = ("num_documents", "num_clusters", "perplexity", "bits", "ngram_bits", "ngram_perplexity", "xz_bits", "xz_after_bits")
    return {
        **{name: total[name] for name in names},
        "num_domains": len(each), "num_better": int((each["gain_low"] > 0).sum()),
        "num_best": int((each["bits"] < each["xz_after_bits"]).sum()),
        "hardest": _words(hardest["domain"]), "hardest_perplexity": hardest["perplexity"],
        "easiest": _words(easiest["domain"]), "easiest_perplexity": easiest["perplexity"],
        "gain": versus["difference_nats"], "gain_low": versus["low"], "gain_high": versus["high"], "gain_dz": versus["dz"],
        "gain_p": "p < 0.001" if versus["p_holm"] < 0.001 else f"p = {versus['p_holm']:.3f}",
        "beats": "better than counting does" if versus["low"] > 0 else "no better than counting does, as far as can be told",
    }  # fmt: skip


def health(by_model: dict[str, pd.DataFrame], main: str) -> dict[str, Any]:
    """How evenly experts are used by the main model (`called_low`: by any), beside what is reported for 512 experts."""
    layers = by_model[main]
    used, router = layers["use_entropy"], layers["router_entropy"]
    return {
        "even_eighth": 1 / 8, "called_low": min(table["called_fraction"].min() for table in by_model.values()),
        "entropy_mean": used.mean(), "entropy_first": used.iloc[0], "entropy_last": used.iloc[-1],
        "router_low": router.min(), "router_high": router.max(),
        "reported_entropy": public_routes.REPORTED_USE_ENTROPY, "reported_first": public_routes.REPORTED_USE_ENTROPY_FIRST_LAYER,
    }  # fmt: skip


def gate_weights(gates: pd.DataFrame, top_k: int) -> dict[str, Any]:
    """First and last rank, and multiples of an even share, here and at public models."""
    by_rank, first = gates.groupby("rank")["gate_weight"].mean(), gates[gates["rank"] == 0]["gate_weight"]
    multiples = [weights[0] * len(weights) for weights in public_routes.GATE_WEIGHTS.values()]
    own = float(by_rank.iloc[0]) * top_k
    return {
        "first_weight": by_rank.iloc[0], "last_weight": by_rank.iloc[-1], "first_multiple": own,
        "first_weight_low": first.min(), "first_weight_high": first.max(),
        "public_multiple_low": min(multiples), "public_multiple_high": max(multiples),
        "standing": "more than" if own > max(multiples) else "less than" if own < min(multiples) else "about as much as",
    }  # fmt: skip


def hot_sets(overlaps: pd.DataFrame) -> dict[str, Any]:
    """`hot_same` and `hot_other`: mean overlap of the hot sets of a domain's two halves, and of two domains; `hot_nearest` and
    `hot_farthest` of all pairs of domains, with `hot_nearest_pair` and `hot_farthest_pair` in words."""
    means = overlaps.groupby(["domain", "other"], sort=False)["overlap"].mean().reset_index()
    is_same = means["domain"] == means["other"]
    others = means[~is_same].sort_values("overlap", kind="stable")
    first, last = others.iloc[0], others.iloc[-1]
    return {
        "hot_same": float(means.loc[is_same, "overlap"].mean()), "hot_other": float(others["overlap"].mean()),
        "hot_farthest": float(first["overlap"]), "hot_nearest": float(last["overlap"]),
        "hot_farthest_pair": _pair(first), "hot_nearest_pair": _pair(last),
    }  # fmt: skip


def _pair(row: pd.Series) -> str:
    return f"{_words(row['domain'])} and {_words(row['other'])}"


def _words(domain: str) -> str:
    return domain.replace("_", " ")


def locality(row: dict[str, Any], layers: pd.DataFrame, targets: pd.DataFrame) -> dict[str, Any]:
    """LRU's hit rates and the overlap of neighbours, beside the public ones.

    Parameters
    ----------
    row : from `reference_report.own_routing`.
    layers, targets : from `reference_model.layers` and `target_slots_by_layer`.
    """
    routing, hits, overlap = public_routes.ROUTING, public_routes.HIT_RATES, layers["neighbour_overlap"]
    at_quarter = hits.loc[hits["resident_fraction"] == 0.25, "hit_rate"]
    low, high = routing["neighbour_overlap"].min(), routing["neighbour_overlap"].max()
    return {
        "quarter_hits": row["lru_quarter"], "quarter_low": row["lru_quarter_low"], "quarter_high": row["lru_quarter_high"],
        "target_slots": row["target_slots"], "target_share": row["target_slots"] / row["num_experts"],
        "target_low": targets["num_slots"].min(), "target_high": targets["num_slots"].max(),
        "overlap": row["neighbour_overlap"], "chance": row["top_k"] / row["num_experts"],
        "overlap_first": overlap.iloc[0], "overlap_last": overlap.iloc[-1],
        "public_overlap_low": low, "public_overlap_high": high,
        "public_quarter_low": at_quarter.min(), "public_quarter_high": at_quarter.max(),
        "position": "inside" if at_quarter.min() <= row["lru_quarter"] <= at_quarter.max() else "outside",
        "locality": "fewer" if row["neighbour_overlap"] < low else "more" if row["neighbour_overlap"] > high else "about as many",
    }  # fmt: skip


def controls(frame: pd.DataFrame, table: pd.DataFrame, smallest_factor: float) -> dict[str, Any]:
    """Factors of the controls; `frame` from `reference_controls.ablation`, `table` from `reference_report.controls`."""
    factors = table.set_index("policy")["factor"]
    return {
        "num_ablation": frame["document"].nunique(), "num_ablation_clusters": frame["cluster"].nunique(),
        "shuffled": factors[SHUFFLED], "random": factors[RANDOM], "next_best": factors[NEXT], "none": factors[NONE],
        "verdict": hurts(table, smallest_factor), "smallest_factor": smallest_factor,
        "random_or_none": "more than" if factors[RANDOM] > factors[NONE] else "less than",
    }  # fmt: skip


def hurts(table: pd.DataFrame, smallest_factor: float) -> str:
    """The verdict over the controls: do shuffled and random experts raise the perplexity at least by this factor, with their intervals?"""
    lowest = float(table.set_index("policy").loc[[SHUFFLED, RANDOM], "low"].min())
    if lowest >= smallest_factor:
        return "matters"
    return "matters, but less than was asked for" if lowest > 1 else "cannot be shown to matter"


def everywhere(tables: dict[str, pd.DataFrame], smallest_factor: float) -> str:
    """In how many of the models the choice of expert matters by `hurts`, in words. `tables`: of `reference_report.controls`."""
    num_found = sum(hurts(table, smallest_factor) == "matters" for table in tables.values())
    if len(tables) == 1:
        return "It is the only model shown in this edition."
    return f"By the same measure it matters in {num_found} of the {len(tables)} models shown."


def ages(main: str, cards: dict[str, dict[str, Any]], domains: dict[str, pd.DataFrame], tables: dict[str, pd.DataFrame]) -> str:
    """A sentence on what training changed, where the main model's first stage is among the models.

    Parameters
    ----------
    main : name of the main model; its first stage is `<main>-early`.
    cards, domains, tables : of each model, `reference_model.card`, `reference_report.domains` and `reference_report.controls`.
    """
    early = f"{main}-early"
    if early not in cards:
        return "This edition shows one age only; the full one shows the main model's first stage beside it."
    young, old = domains[early].set_index("domain"), domains[main].set_index("domain")
    each = [name for name in old.index if name != ALL]
    num_lower = sum(old.loc[name, "perplexity"] < young.loc[name, "perplexity"] for name in each)
    read = [cards[name]["training_tokens"] / 1e6 for name in (early, main)]
    shuffled = [tables[name].set_index("policy").loc[SHUFFLED, "factor"] for name in (early, main)]
    return (
        f"From {read[0]:.1f} to {read[1]:.1f} million tokens the perplexity went from {young.loc[ALL, 'perplexity']:.1f} to "
        f"{old.loc[ALL, 'perplexity']:.1f}; it is lower in {num_lower} of {len(each)} domains. Shuffled experts multiply the "
        f"perplexity by {shuffled[1]:.1f}, where they multiplied that of the first stage by {shuffled[0]:.1f}."
    )


def tasks(table: pd.DataFrame, model: str) -> dict[str, Any]:
    """Share solved of each family, as `solved_<family>`, and in words which families are solved at least half."""
    own = table[table["model"] == model].set_index("domain")["solved"]
    solved, lost = [[_words(name) for name in own.index if (own[name] >= 0.5) == is_solved] for is_solved in (True, False)]
    return {
        **{f"solved_{name}": share for name, share in own.items()},
        "useful": _listed(solved) if solved else "neither of them",
        "lost": f"Less than half is solved of: {_listed(lost)}." if lost else "At least half is solved of each.",
    }


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
