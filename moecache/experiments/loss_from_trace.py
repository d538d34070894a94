"""What chapter 13 fits and judges: policies that the emulator measured, and the same policies seen through a recorded trace alone.

- *Fitted*: the list of chapter 05, at one capacity, under LRU, without admission.
- *Judged*: some of its rules at other capacities, under another eviction, with background admission; and the list itself, each family
  by a model that never saw it. What was measured comes from the emulator; what the model is given comes from the simulator, which replays
  the exact model's trace (`trace_rows`).
- *The front*: a thousand policies, rules times residencies, simulated, timed and estimated (`sweep_rows`).

This module knows which policies and rows; what is concluded from them is `loss_from_trace_judged`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache import results
from moecache.cost import estimate_seconds
from moecache.experiments import inputs, mass_hypothesis
from moecache.experiments.policy_documents import stored_rows
from moecache.policy import Policy, cache_prior, first_j, mass_budget, max_rank, threshold
from moecache.quality.model import QualityModel
from moecache.quality.sums import cell_columns
from moecache.quality_rows import quality_rows
from moecache.reference.traces import record_held_out
from moecache.simulate import simulate
from moecache.sweep import sweep
from moecache.trace import RouterTrace

FAMILY, CAPACITY, EVICTION, ADMISSION = "family left out", "other capacity", "other eviction", "background admission"
NOVELTIES = (FAMILY, CAPACITY, EVICTION, ADMISSION)
DECAYED, ADMITTED = mass_hypothesis.RESIDENCIES[1], mass_hypothesis.RESIDENCIES[2]
FRONT = "front"
_SIGNIFICANT = 6


@dataclass(frozen=True)
class Text:
    """Which documents are read, by every policy."""

    num_documents: int
    num_tokens: int
    num_warmup_documents: int

    @property
    def settings(self) -> tuple[int, int, int]:
        """As `stored_rows` takes them."""
        return self.num_documents, self.num_tokens, self.num_warmup_documents


@dataclass(frozen=True)
class Machine:
    """What seconds are simulated on: a profile, the size of an expert, and the layers that a token's time is scaled to."""

    hardware: str
    expert_bytes: int
    scaled_layers: int


def judged_rules(top_k: int, number: int) -> list[tuple[str, Policy]]:
    """Rules of the list, of all families that wait for the heavier calls; chapter 05 varies the residency of the first two."""
    labels = ["weight 1.5/K and first choice", "weight 1.0/K", "first choice", "weight 1.2/K", "first 3", "mass budget 0.3", "weight 1.5/K"]
    listed = {policy.label: (family, policy) for family, policy in mass_hypothesis.listed_policies(top_k)}
    return [listed[label] for label in labels[:number]]


def measured(model_name: str, slots: Mapping[str, int], num_rules: int, text: Text) -> pd.DataFrame:
    """Rows of the emulator: the list, and the judged rules, with ``novelty``.

    Parameters
    ----------
    model_name : a reference model.
    slots : slots a layer by name: "fitted", "half" and "twice".
    num_rules : how many judged rules.
    text : which documents.

    Returns
    -------
    DataFrame
        As `policy_documents.measure`, with ``novelty`` and ``family`` that of the rule.
    """
    _, top_k = mass_hypothesis.geometry(model_name)
    base, rules = slots["fitted"], judged_rules(top_k, num_rules)
    frames = [stored_rows(mass_hypothesis.EXPERIMENT, model_name, base, mass_hypothesis.list_in_groups(top_k), *text.settings)]
    frames[0]["novelty"] = FAMILY
    for name in ("half", "twice"):
        groups = {f"{name} the slots": rules}
        rows = stored_rows("13_other_capacity", model_name, slots[name], groups, *text.settings, layer_error=False)
        frames.append(rows.assign(novelty=CAPACITY))
    varied = mass_hypothesis.varied_policies()
    stored = stored_rows(mass_hypothesis.VARIED_EXPERIMENT, model_name, base, varied, *text.settings, regime=mass_hypothesis.VARIED)
    is_decayed = stored["policy"].str.endswith(DECAYED)
    frames.append(stored.assign(novelty=np.where(is_decayed, EVICTION, ADMISSION)))
    if more := _more_varied(rules[2:]):
        settings: dict[str, Any] = {"regime": mass_hypothesis.VARIED, "layer_error": False}
        rows = stored_rows("13_varied_residency", model_name, base, more, *text.settings, **settings)
        frames.append(rows.assign(novelty=np.where(rows["policy"].str.endswith(DECAYED), EVICTION, ADMISSION)))
    return pd.concat(frames, ignore_index=True)


def _more_varied(rules: Sequence[tuple[str, Policy]]) -> dict[str, list[tuple[str, Policy]]]:
    """The rules that chapter 05 does not vary, under its other eviction and its admission."""
    changes = {
        DECAYED: {"eviction": "decayed_count", "half_life": 128},
        ADMITTED: {"admission": "background", "mass_threshold": 0.5},
    }
    return {
        residency: [(f, rule.replace(**fields, label=mass_hypothesis.varied_label(rule.label, residency))) for f, rule in rules]
        for residency, fields in changes.items()
        if rules
    }


def measured_front(model_name: str, num_slots: int, policies: Sequence[tuple[str, Policy]], text: Text) -> pd.DataFrame:
    """Rows of the emulator for policies that the estimate calls best, under their numbers, one file each."""
    groups = {policy.label: [(family, policy)] for family, policy in policies}
    rows = stored_rows("13_front", model_name, num_slots, groups, *text.settings, regime=FRONT, layer_error=False)
    return rows.assign(novelty=FRONT)


def all_policies(model_name: str, num_rules: int) -> dict[str, list[tuple[str, str, Policy]]]:
    """Policies of `measured` as (slots by name, family, policy), in groups that are simulated together."""
    _, top_k = mass_hypothesis.geometry(model_name)
    rules = judged_rules(top_k, num_rules)
    varied = [pair for group in mass_hypothesis.varied_policies().values() for pair in group]
    more = [pair for group in _more_varied(rules[2:]).values() for pair in group]
    return {
        "listed": [("fitted", *pair) for pair in mass_hypothesis.listed_policies(top_k)],
        "capacity": [(name, *pair) for name in ("half", "twice") for pair in rules],
        "varied": [("fitted", *pair) for pair in [*varied, *more]],
    }


def trace_rows(
    model_name: str, slots: Mapping[str, int], groups: Mapping[str, Sequence[tuple[str, str, Policy]]], text: Text, machine: Machine
) -> pd.DataFrame:
    """What a simulator sees of the policies in the exact model's trace: one row a (policy, document), stored by group.

    Returns
    -------
    DataFrame
        As `quality_rows`, with ``num_slots`` and ``seconds`` (simulated, mean a token, scaled to the machine's layers).
    """
    frames = []
    for name, policies in groups.items():
        parameters = {
            "model": model_name,
            "policies": [[slots[place], policy.label, policy] for place, _, policy in policies],
            "text": list(text.settings),
            "machine": [machine.hardware, machine.expert_bytes, machine.scaled_layers],
        }

        def run(policies: Sequence[tuple[str, str, Policy]] = policies) -> pd.DataFrame:
            trace = recorded(model_name, text.num_documents, text.num_tokens)
            rows = [_seen(trace, policy, slots[place], text.num_warmup_documents, machine) for place, _, policy in policies]
            return pd.concat(rows, ignore_index=True)

        found = results.load_or_run(f"13_seen_in_the_trace_{name}", parameters, run, inputs=inputs.reference_inputs(model_name))
        frames.append(found.frame)
    return pd.concat(frames, ignore_index=True)


@lru_cache(maxsize=1)
def recorded(model_name: str, num_documents: int, num_tokens: int) -> RouterTrace:
    """The exact model's trace of its first held-out documents."""
    return record_held_out(model_name, num_documents, num_tokens=num_tokens)


def _seen(trace: RouterTrace, policy: Policy, num_slots: int, num_warmup_documents: int, machine: Machine) -> pd.DataFrame:
    run = simulate(trace, policy, num_slots)
    rows = quality_rows(run, trace, num_warmup_documents=num_warmup_documents)
    seconds = estimate_seconds(run, machine.hardware, machine.expert_bytes).seconds * machine.scaled_layers / trace.shape.num_layers
    document = np.cumsum(trace.document_start) - 1
    rows["seconds"] = (np.bincount(document, seconds) / np.bincount(document))[num_warmup_documents:]
    described = ["seconds", "substituted_mass", *(f"{k}_{c}" for k in ("squared", "log_age") for c in cell_columns(trace.shape.num_layers))]
    rounded = {c: [float(f"{value:.{_SIGNIFICANT}g}") for value in rows[c]] for c in described}
    return rows.assign(**rounded, num_slots=num_slots)


def candidates(top_k: int, number: int) -> list[tuple[str, Policy]]:
    """Rules times residencies, `number` of them spread evenly over the whole: (family, policy), labelled by what they are."""
    every = [
        _candidate(family, rule, words, fields) for (family, rule), (words, fields) in itertools.product(_rules(top_k), _residencies())
    ]
    if not 1 <= number <= len(every):
        raise ValueError(f"num_policies={number} must be 1 to {len(every)}, the rules times the residencies that are kept here")
    return [every[i] for i in np.linspace(0, len(every) - 1, number).round().astype(int)]


def _candidate(family: str, rule: Policy, words: str, fields: dict[str, Any]) -> tuple[str, Policy]:
    return family, rule.replace(**fields, label=f"{rule.label}; {words}")


def _rules(top_k: int) -> list[tuple[str, Policy]]:
    """About seventy rules of six families."""
    uniform: dict[str, Any] = {"threshold_unit": "uniform"}
    weights = np.round(np.arange(0.5, 2.001, 0.05), 2).tolist()
    protected = [weight for weight in weights if weight > 1.2]
    return [
        *(("threshold", threshold(w, **uniform, label=f"weight {w:.2f}/K")) for w in weights),
        *(
            ("threshold and first choice", threshold(w, first_choice=True, **uniform, label=f"weight {w:.2f}/K and first choice"))
            for w in protected
        ),
        *(("first J", first_j(j, label=f"first {j}")) for j in range(1, top_k)),
        *(("mass budget", mass_budget(b, label=f"mass budget {b}")) for b in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)),
        *(("squared budget", mass_budget(b / top_k, is_squared=True, label=f"squared budget {b}/K")) for b in (0.03, 0.1, 0.2, 0.3, 0.5)),
        *(("routing bias", cache_prior(b, label=f"cache prior {b}")) for b in (0.05, 0.1, 0.2, 0.3)),
        *(("routing bias", max_rank(times * top_k, label=f"among the best {times}K")) for times in (2, 3, 4)),
    ]


def _residencies() -> list[tuple[str, dict[str, Any]]]:
    """Evictions times admissions."""
    evictions: list[tuple[str, dict[str, Any]]] = [
        ("LRU", {}),
        *((f"half-life {h}", {"eviction": "decayed_count", "half_life": h}) for h in (64, 128, 256)),
    ]
    admissions: list[tuple[str, dict[str, Any]]] = [
        ("none admitted", {}),
        *((f"admitted at {m}", {"admission": "background", "mass_threshold": m}) for m in (0.0, 0.5, 1.0)),
    ]
    return [(f"{e}, {a}", ef | af) for (e, ef), (a, af) in itertools.product(evictions, admissions)]


def sweep_rows(
    model_name: str, num_slots: int, fit: Any, number: int, num_sweep_documents: int, text: Text, machine: Machine, asked: Mapping[str, Any]
) -> pd.DataFrame:
    """Simulate, time and estimate `number` policies on the first documents of the trace.

    Parameters
    ----------
    fit : function without arguments that gives the QualityModel; called only where nothing is stored.
    asked : what else the estimates depend on (how the model was fitted), for the key.

    Returns
    -------
    DataFrame
        ``policy``, ``seconds`` (scaled), ``estimated_increase`` with its interval, ``substituted_mass``, ``fetches_per_step``.
    """
    _, top_k = mass_hypothesis.geometry(model_name)
    policies = [policy for _, policy in candidates(top_k, number)]
    parameters = {
        "model": model_name,
        "num_slots": num_slots,
        "policies": [[policy.label, policy] for policy in policies],
        "num_sweep_documents": num_sweep_documents,
        "text": list(text.settings),
        "machine": [machine.hardware, machine.expert_bytes, machine.scaled_layers],
        **asked,
    }

    def run() -> pd.DataFrame:
        whole = recorded(model_name, text.num_documents, text.num_tokens)
        trace = whole.tokens(0, num_sweep_documents * text.num_tokens)
        return _swept(trace, policies, num_slots, fit(), text.num_warmup_documents * text.num_tokens, machine)

    return results.load_or_run("13_sweep", parameters, run, inputs=inputs.reference_inputs(model_name)).frame


def _swept(
    trace: RouterTrace, policies: Sequence[Policy], num_slots: int, model: QualityModel, warmup_tokens: int, machine: Machine
) -> pd.DataFrame:
    options: dict[str, Any] = {"hardware": machine.hardware, "expert_bytes": machine.expert_bytes, "warmup_tokens": warmup_tokens}
    table = sweep(trace, policies, num_slots, quality=model, num_workers=1, progress=False, **options)
    table["seconds"] = table["seconds_per_token"] * machine.scaled_layers / trace.shape.num_layers
    kept = ["estimated_increase", "estimated_increase_low", "estimated_increase_high", "substituted_mass", "fetches_per_step", "seconds"]
    return pd.DataFrame(table[["policy", *kept]])
