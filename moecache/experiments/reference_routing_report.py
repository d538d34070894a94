"""What chapter 01 shows of routers and caches: tables of the reference models, and of public models beside them.

Nothing is measured here, and no model's losses are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache.experiments import capacity_report, public_routes


def named(use: pd.DataFrame) -> pd.DataFrame:
    """Domains in words."""
    return use.assign(domain=use["domain"].str.replace("_", " "))


def layer_health(by_model: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """`reference_model.layers` of each model for the page: how evenly each layer's experts are used."""
    layers = pd.concat([table.assign(model=name) for name, table in by_model.items()], ignore_index=True)
    return pd.DataFrame(
        {
            "model": layers["model"],
            "layer": layers["layer"],
            "experts called": layers["called_fraction"].map("{:.1%}".format),
            "calls to the busiest eighth": layers["busiest_eighth_fraction"].map("{:.0%}".format),
            "balance (1 = even)": layers["balance"].map("{:.2f}".format),
            "entropy of use": layers["use_entropy"].map("{:.2f}".format),
            "entropy of a token's router": layers["router_entropy"].map("{:.2f}".format),
        }
    )


def check_warm_window(quarter: pd.DataFrame, target: pd.DataFrame) -> None:
    """Refuse a text that is too short to say anything about hit rates; see `capacity_report.check_evictions`.

    Parameters
    ----------
    quarter : from `capacity.by_layer` at one capacity.
    target : from `capacity.target_slots`.
    """
    capacity_report.check_evictions(capacity_report.window_rates(quarter), quarter["num_slots"].unique().tolist())
    capacity_report.check_evictions(target, target["num_slots"].to_list())


def _warm_rates(quarter: pd.DataFrame) -> pd.Series:
    """Hit rate of each layer in the warm window, by layer."""
    warm = quarter[quarter["window"] == "warm"].set_index("layer")
    return warm["hits"] / warm["calls"]


def layer_locality(layers: pd.DataFrame, quarter: pd.DataFrame, target: pd.DataFrame, card: dict[str, Any]) -> pd.DataFrame:
    """For the page: how much neighbouring tokens share in each layer of a model, and what LRU makes of it.

    Parameters
    ----------
    layers : from `reference_model.layers`.
    quarter : from `capacity.by_layer` at a quarter of the experts.
    target : from `reference_model.target_slots_by_layer`.
    card : from `reference_model.card`.
    """
    num_experts, top_k = card["num_experts"], card["top_k"]
    return pd.DataFrame(
        {
            "model": card["model"],
            "layer": layers["layer"],
            "shared with the token before": layers["neighbour_overlap"].map("{:.1%}".format),
            "times chance": (layers["neighbour_overlap"] * num_experts / top_k).map("{:.1f}".format),
            "LRU hits, a quarter resident": _warm_rates(quarter).loc[layers["layer"]].map("{:.1%}".format).to_numpy(),
            "slots for the target": target["num_slots"].to_numpy(),
            "share of the experts": (target["num_slots"] / num_experts).map("{:.0%}".format).to_numpy(),
        }
    )


def beside_public(own: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Routing of the reference models above that of public ones, for the page.

    Parameters
    ----------
    own : a dict per model with the columns of `public_routes.ROUTING`.
    """
    rows = pd.concat([pd.DataFrame(list(own)), public_routes.ROUTING], ignore_index=True)
    shares = zip(rows["neighbour_overlap"], rows["top_k"] / rows["num_experts"], strict=True)
    quarter = zip(rows["lru_quarter"], rows["lru_quarter_low"], rows["lru_quarter_high"], strict=True)
    return pd.DataFrame(
        {
            "model": rows["model"],
            "experts, top-k": [f"{e}, {k}" for e, k in zip(rows["num_experts"], rows["top_k"], strict=True)],
            "experts called": rows["called_fraction"].map("{:.0%}".format),
            "entropy of use (layer 0)": [
                f"{mean:.2f} ({first:.2f})" for mean, first in zip(rows["use_entropy"], rows["use_entropy_first_layer"], strict=True)
            ],
            "calls to the busiest eighth": rows["busiest_eighth_fraction"].map("{:.0%}".format),
            "shared with the token before (chance)": [f"{share:.0%} ({chance:.0%})" for share, chance in shares],
            "LRU hits, a quarter resident (by layer)": [f"{mean:.0%} ({low:.0%} to {high:.0%})" for mean, low, high in quarter],
            "slots for the target": [f"{s / e:.0%}" for s, e in zip(rows["target_slots"], rows["num_experts"], strict=True)],
        }
    )


def own_routing(card: dict[str, Any], layers: pd.DataFrame, quarter: pd.DataFrame, target: pd.DataFrame) -> dict[str, Any]:
    """A row of `beside_public` for a reference model, from `reference_model.card` and `layers`, `capacity.by_layer` and `target_slots`."""
    rates, warm = _warm_rates(quarter), quarter[quarter["window"] == "warm"]
    return {
        **{name: card[name] for name in ("model", "num_experts", "top_k")},
        **{name: float(layers[name].mean()) for name in ("called_fraction", "use_entropy", "busiest_eighth_fraction", "neighbour_overlap")},
        "use_entropy_first_layer": float(layers["use_entropy"].iloc[0]),
        "lru_quarter": float(warm["hits"].sum() / warm["calls"].sum()),
        "lru_quarter_low": float(rates.min()),
        "lru_quarter_high": float(rates.max()),
        "target_slots": int(target["num_slots"].iloc[0]),
    }


def gate_weights(gates: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Mean gate weight by rank: `source`, `rank`, `gate_weight`, the given models (name: table of `reference_model.gates`) first."""
    own = [(name, rank, weight) for name, table in gates.items() for rank, weight in table.groupby("rank")["gate_weight"].mean().items()]
    public = [(name, rank, weight) for name, weights in public_routes.GATE_WEIGHTS.items() for rank, weight in enumerate(weights)]
    return pd.DataFrame([*own, *public], columns=["source", "rank", "gate_weight"])


def hit_rates(by_model: dict[str, pd.DataFrame], num_experts: dict[str, int]) -> pd.DataFrame:
    """LRU hit rates of the reference models and of public ones: `source`, `kind` ("own", "replayed" or "reported"), `resident_fraction`,
    `hit_rate`, `low`, `high`. From `capacity.by_document` of each model."""
    parts = []
    for name, documents in by_model.items():
        rates = capacity_report.hit_rates(documents)
        parts.append(rates.assign(source=name, kind="own", resident_fraction=rates["num_slots"] / num_experts[name]))
    columns = ["source", "kind", "resident_fraction", "hit_rate", "low", "high"]
    return pd.concat([*parts, public_routes.HIT_RATES.assign(low=np.nan, high=np.nan)], ignore_index=True)[columns]


def describe_hit_rates(rates: pd.DataFrame) -> str:
    """What the figure of hit rates shows, for its alternative text."""
    at_quarter = rates[rates["resident_fraction"] == 0.25]
    items = [f"{source} {rate:.0%}" for source, rate in zip(at_quarter["source"], at_quarter["hit_rate"], strict=True)]
    return "LRU hit rate by share of experts resident, rising with it; at a quarter: " + ", ".join(items)
