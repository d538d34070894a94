"""The policies of chapter 05, and their rows.

The list is a design: families of miss rules that substitute the same mass in different ways. It was fixed before anything
was measured with it. Weights are in multiples of the uniform weight 1/K, so that one list serves routers of any K.

Two further groups vary *residency* instead: the same two rules with another eviction or with background admission, in the
words of `RESIDENCIES`. They stay out of the list, so that what is said of miss rules is said at one residency.

Policies are measured by `policy_documents`; this module knows only which.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pandas as pd

from moecache.experiments.inputs import DATA
from moecache.experiments.policy_documents import stored_rows
from moecache.policy import Policy, cache_prior, first_j, mass_budget, max_rank, only_rank_substituted, threshold
from moecache.trace import ModelShape

EXPERIMENT, VARIED_EXPERIMENT = "05_mass_hypothesis", "05_varied_residency"
LISTED, VARIED = "listed", "varied"
RESIDENCIES = ("LRU", "decayed count, half-life 128", "LRU, admission at 0.5", "LRU, admitted anyway")


def listed_policies(top_k: int) -> list[tuple[str, Policy]]:
    """The fixed list as (family, policy), for a router that calls `top_k` experts (at least 8)."""
    if top_k < 8:
        raise ValueError(f"top_k={top_k}: the list asks for the first 6 ranks and for the last, which need at least 8")
    half = top_k // 2
    return [
        *(("threshold", _threshold(weight)) for weight in (1.5, 1.2, 1.0, 0.9, 0.8)),
        *(("threshold and first choice", _threshold(weight, first_choice=True)) for weight in (1.5, 1.2)),
        *(("first J", first_j(j, label="first choice" if j == 1 else f"first {j}")) for j in (1, 2, 3, 4, 6)),
        ("last J", Policy(wait_ranks=tuple(range(top_k - half, top_k)), label=f"last {half}")),
        *(("mass budget", mass_budget(budget, label=f"mass budget {budget}")) for budget in (0.1, 0.2, 0.3)),
        *(("squared budget", mass_budget(b / top_k, is_squared=True, label=f"squared budget {b}/K")) for b in (0.1, 0.3)),
        *(("one rank", only_rank_substituted(r, top_k, label=f"only rank {r} substituted")) for r in (0, 1, 2, top_k - 1)),
        ("routing bias", cache_prior(0.2, label="cache prior 0.2")),
        *(("routing bias", max_rank(times * top_k, label=f"among the best {times}K")) for times in (2, 4)),
    ]


def _threshold(weight: float, first_choice: bool = False) -> Policy:
    label = f"weight {weight:.1f}/K" + (" and first choice" if first_choice else "")
    return threshold(weight, first_choice=first_choice, threshold_unit="uniform", label=label)


def list_in_groups(top_k: int) -> dict[str, list[tuple[str, Policy]]]:
    """The list, one group a family: what is stored in one file."""
    policies = listed_policies(top_k)
    return {family: [pair for pair in policies if pair[0] == family] for family in dict.fromkeys(f for f, _ in policies)}


def varied_policies() -> dict[str, list[tuple[str, Policy]]]:
    """Two rules under every residency but the plain one; the family is the rule's label, the label names both."""
    rules = [_threshold(1.5, first_choice=True), _threshold(1.0)]
    changes = (
        lambda rule: rule.replace(eviction="decayed_count", half_life=128),
        lambda rule: rule.replace(admission="background", mass_threshold=0.5),
        Policy.admitted_anyway,
    )
    return {
        residency: [(rule.label, change(rule).replace(label=varied_label(rule.label, residency))) for rule in rules]
        for residency, change in zip(RESIDENCIES[1:], changes, strict=True)
    }


def varied_label(rule: str, residency: str) -> str:
    """How a rule under another residency is called."""
    return f"{rule}; {residency}"


def geometry(model_name: str) -> tuple[int, int]:
    """Experts a layer and K of a reference model, from its configuration."""
    config = json.loads((DATA / "models" / model_name / "config.json").read_text())
    return int(config["num_experts"]), int(config["num_experts_per_tok"])


def rows(
    model_names: Sequence[str], resident_fraction: float, num_documents: int, num_tokens: int, num_warmup_documents: int
) -> pd.DataFrame:
    """Rows of the list and of the varied residencies, of all models; measured where they are not stored.

    Parameters
    ----------
    model_names : reference models.
    resident_fraction : share of a layer's experts that is resident.
    num_documents, num_tokens, num_warmup_documents : as for `policy_documents.stored_rows`.

    Returns
    -------
    DataFrame
        As `policy_documents.measure`, with ``model``, ``regime`` and ``part`` ("listed" or "varied").
    """
    frames = []
    for name in model_names:
        num_experts, top_k = geometry(name)
        settings = (num_documents, num_tokens, num_warmup_documents)
        slots = max(math.ceil(resident_fraction * num_experts), top_k)
        listed = stored_rows(EXPERIMENT, name, slots, list_in_groups(top_k), *settings)
        varied = stored_rows(VARIED_EXPERIMENT, name, slots, varied_policies(), *settings, regime=VARIED)
        frames += [listed.assign(part=LISTED), varied.assign(part=VARIED)]
    return pd.concat(frames, ignore_index=True)


def judged_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that the claims are judged by: the list, at its one residency."""
    return frame[frame["part"] == LISTED].drop(columns="part").reset_index(drop=True)


def shape_of(model_name: str, num_layers: int) -> ModelShape:
    """The shape of a reference model's routing, from its configuration; a quality model speaks of one such shape."""
    num_experts, top_k = geometry(model_name)
    config = json.loads((DATA / "models" / model_name / "config.json").read_text())
    return ModelShape(num_layers, num_experts, top_k, norm_topk_prob=bool(config["norm_topk_prob"]))
