"""What chapter 08 shows of its measurement: admission by distance from a topic change, its bytes, and the values of its prose.

This module reads the rows of `admission`; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments import contrasts_report
from moecache.experiments.admission import ADMIT_AT
from moecache.experiments.chosen_policies import RULES
from moecache.experiments.contrasts_report import UNIT, Contrast, combined, table_of_rows
from moecache.experiments.paired_runs import Span, moved, span_name
from moecache.experiments.topic_changes import BINS, IN_RUNS, INTERLEAVED, PRIMARY, changed_documents
from moecache.policy import FETCH_EVERY_MISS

GATE, FIRST = RULES
ADMITTED = {rule: f"{rule}, admit at {ADMIT_AT:g}" for rule in RULES}
EQUAL_BYTES = "threshold at equal bytes"


def span_words(span: Span) -> str:
    """A span as an axis names it."""
    first, last = span_name(span).split("_")
    return f"{first}+" if last == "end" else f"{first}-{last}"


def one(frame: pd.DataFrame, model: str, order: str = INTERLEAVED) -> pd.DataFrame:
    """The rows of one model in one order, without fetching every miss."""
    rows = frame[(frame["model"] == model) & (frame["order"] == order)]
    return rows[rows["policy"] != FETCH_EVERY_MISS.label].reset_index(drop=True)


def at_equal_bytes(rows: pd.DataFrame, policy: str) -> tuple[dict[str, float], str]:
    """The mixture of two points of the threshold curve that moves as many experts a step as a policy does.

    Returns
    -------
    dict : weights by label, which sum to 1; linear in the logarithm of what is moved.
    str : "" or, where the policy lies beyond the curve, which end of it was taken.
    """
    what = moved(rows)["moved"]
    curve = what[what.index.str.startswith("gate weight")].sort_values()
    at = float(np.interp(np.log(what[policy]), np.log(curve), np.arange(len(curve), dtype=float)))
    below, weight = int(at), at - int(at)
    note = ""
    if not curve.iloc[0] <= what[policy] <= curve.iloc[-1]:
        end = f"{curve.index[below]}, which moves {curve.iloc[below]:.2f}"
        note = f"{policy} moves {what[policy]:.2f} a step, beyond the curve: compared with {end}"
    weights = {curve.index[below]: 1.0 - weight} | ({curve.index[below + 1]: weight} if weight else {})
    return weights, note


def against_threshold(rows: pd.DataFrame, policy: str) -> Contrast:
    """A policy minus the threshold rule at equal bytes."""
    return {policy: 1.0} | {label: -weight for label, weight in at_equal_bytes(rows, policy)[0].items()}


def planned_tests(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The four planned comparisons of one model, corrected together."""
    rows = one(frame, model)
    admitted = ADMITTED[GATE]
    asked = {f"{admitted} − not admitted": {admitted: 1, GATE: -1}, f"{admitted} − {EQUAL_BYTES}": against_threshold(rows, admitted)}
    parts = [
        combined(rows, {f"{name}, tokens {span_words(span)}": contrast}, f"nats_{span_name(span)}")
        for name, contrast in asked.items()
        for span in PRIMARY
    ]
    # Every document has as many tokens in a span as any other: documents, not tokens, are averaged.
    return table_of_rows(pd.concat(parts, ignore_index=True).assign(num_tokens=1))


def by_distance(rows: pd.DataFrame, contrasts: Mapping[str, Contrast], spans: Sequence[Span] = BINS) -> pd.DataFrame:
    """Each contrast in each span: `line`, `span`, `effect`, `low`, `high` (nats)."""
    parts = []
    for span in spans:
        found = table_of_rows(combined(rows, contrasts, f"nats_{span_name(span)}").assign(num_tokens=1))
        part = found.rename(columns={"difference_nats": "effect"})[["effect", "low", "high"]]
        parts.append(part.assign(line=list(contrasts), span=span_words(span)))
    return pd.concat(parts, ignore_index=True)


def admission_by_distance(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """What admission at 0.5 changes, by distance, for both rules in both orders."""
    contrasts = {rule: {ADMITTED[rule]: 1, rule: -1} for rule in RULES}
    parts = []
    for order, words in ((INTERLEAVED, "domain changes"), (IN_RUNS, "same domain")):
        rows = one(frame, model, order)
        kept = rows[rows["document"].isin(changed_documents(frame[frame["model"] == model]))] if order == IN_RUNS else rows
        part = by_distance(kept.reset_index(drop=True), contrasts)
        parts.append(part.assign(line=part["line"] + ", " + words))
    return pd.concat(parts, ignore_index=True)


def in_both_orders(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The documents that see a change in one order only, policies named "label (order)"."""
    rows = frame[(frame["model"] == model) & (frame["policy"] != FETCH_EVERY_MISS.label)]
    has_both = rows.groupby("policy")["order"].transform("nunique") == 2
    rows = rows[has_both & rows["document"].isin(changed_documents(rows[has_both]))]
    return rows.assign(policy=rows["policy"] + " (" + rows["order"] + ")").reset_index(drop=True)


def change_by_distance(frame: pd.DataFrame, model: str, spans: Sequence[Span] = BINS) -> pd.DataFrame:
    """What a change of domain costs each rule, with and without admission, by distance: interleaved minus in runs."""
    both = in_both_orders(frame, model)
    labels = [*RULES, *ADMITTED.values()]
    return by_distance(both, {label: {f"{label} ({INTERLEAVED})": 1, f"{label} ({IN_RUNS})": -1} for label in labels}, spans)


def frontier(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """One row a policy of the interleaved order: increase with interval, mass, what it moves, and its `kind` for the figure."""
    rows = one(frame, model)
    table = stats.policy_table(rows.assign(family=""), unit=UNIT).set_index("policy").join(moved(rows)).reset_index()
    return table.assign(kind=[_kind(label) for label in table["policy"]])


def _kind(label: str) -> str:
    if label.startswith("gate weight"):
        return "threshold curve"
    if label in RULES:
        return "bare rule"
    if "TinyLFU" in label or label.endswith("admit at 0, one a step"):
        return "caps"
    if "half-life" in label:
        return "decayed count"
    return f"{FIRST} and admission" if label.startswith(FIRST) else f"{GATE} and admission"


def shown(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """Every policy as a page shows it, with its change against its bare rule and against the threshold rule at equal bytes."""
    rows, table = one(frame, model), frontier(frame, model)
    table = table[~table["policy"].str.startswith("gate weight")]
    compared = {label: _bare_of(label) for label in table["policy"]}
    against = {label: {label: 1.0, bare: -1.0} for label, bare in compared.items() if bare}
    found = contrasts_report.table_of(rows, against).set_index("comparison") if against else pd.DataFrame()
    equal = contrasts_report.table_of(rows, {label: against_threshold(rows, label) for label in table["policy"]})
    changes = [_mnat(found.loc[label]) if compared[label] and label in found.index else "" for label in table["policy"]]
    return pd.DataFrame(
        {
            "policy": table["policy"],
            "increase, %": 100 * table["increase"],
            "mass": table["substituted_mass"],
            "fetches": table["fetches"],
            "copies": table["copies"],
            "against not admitting": changes,
            "against threshold, equal bytes": [_mnat(row) for _, row in equal.iterrows()],
        }
    )


def _bare_of(label: str) -> str:
    """The policy that a variant is compared with: itself without what follows its rule (and half-life); "" for a bare rule."""
    parts = label.split(", ")
    bare = ", ".join(parts[:2]) if len(parts) > 2 and parts[1].startswith("half-life") else parts[0]
    return "" if bare == label or label.split(", ")[-1].startswith("half-life") else bare


def _mnat(row: Any) -> str:
    return f"{1000 * row['difference_nats']:+.1f} [{1000 * row['low']:+.1f}, {1000 * row['high']:+.1f}]"


def hit_rates(frame: pd.DataFrame, model: str) -> dict[str, float]:
    """Share of calls that hit when every miss is fetched, by order."""
    rows = frame[(frame["model"] == model) & (frame["policy"] == FETCH_EVERY_MISS.label)]
    totals = rows.groupby("order")[["hits", "calls"]].sum()
    return {str(order): float(total["hits"] / total["calls"]) for order, total in totals.iterrows()}


def one_for_claim(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that the claim about topic changes is judged on: the interleaved order, the policies that were read in both."""
    both = frame.groupby(["model", "policy"])["order"].transform("nunique") == 2
    return frame[both & (frame["order"] == INTERLEAVED)].reset_index(drop=True)


def distance_words(table: pd.DataFrame) -> str:
    """Each line of a figure by distance, in a sentence of thousandths of a nat."""
    parts = []
    for line, rows in table.groupby("line", sort=False):
        numbers = ", ".join(f"{span} {1000 * effect:+.0f}" for span, effect in zip(rows["span"], rows["effect"], strict=True))
        parts.append(f"{line}: {numbers}")
    return "; ".join(parts) + "."


def frontier_words(frame: pd.DataFrame, model: str) -> str:
    """Where the admission lies against the threshold curve, in a sentence."""
    table: Any = frontier(frame, model).set_index("policy")
    named = [*table.index[table["kind"] == "threshold curve"], GATE, ADMITTED[GATE], FIRST, ADMITTED[FIRST]]
    return ", ".join(f"{name} {table.loc[name, 'increase']:.1%} at {table.loc[name, 'moved']:.2f}" for name in named) + "."


def other_models(frame: pd.DataFrame, models: Sequence[str]) -> str:
    """The planned comparisons of the other models, in prose."""
    sentences = []
    for model in models:
        tests = planned_tests(frame, model)
        rows = zip(tests["comparison"], tests.iterrows(), strict=True)
        parts = [f"{name} {_mnat(row)} (p = {row['p_holm']:.2g})" for name, (_, row) in rows]
        sentences.append(f"The same four comparisons for {model}: " + "; ".join(parts) + ".")
    return " ".join(sentences) if sentences else "(One model was read.)"


def values(frame: pd.DataFrame, model: str) -> dict[str, Any]:
    """The numbers of the chapter's prose."""
    rows, of_model = one(frame, model), frame[frame["model"] == model]
    hits = hit_rates(frame, model)
    return {
        "model": model,
        "num_slots": int(rows["num_slots"].iloc[0]),
        "num_scored": int(rows["document"].nunique()),
        "num_clusters": int(rows["cluster"].nunique()),
        "num_changed": len(changed_documents(of_model)),
        "hit_interleaved": hits[INTERLEAVED],
        "hit_in_runs": hits[IN_RUNS],
        **_cost_values(rows, frontier(frame, model)),
        **_test_values(frame, model),
        **_change_values(frame, model),
    }


def _cost_values(rows: pd.DataFrame, frontier_of_model: pd.DataFrame) -> dict[str, Any]:
    """What the 0.15 rule costs and moves with and without admission, over whole documents."""
    table: Any = frontier_of_model.set_index("policy")
    admitted = ADMITTED[GATE]
    contrasts = {rule: {ADMITTED[rule]: 1, rule: -1} for rule in RULES}
    whole: Any = contrasts_report.table_of(rows, contrasts).set_index("comparison")
    best = table[table["kind"] == f"{GATE} and admission"]["increase"].idxmin()
    return {
        "bare_increase": table.loc[GATE, "increase"],
        "admitted_increase": table.loc[admitted, "increase"],
        "bare_mass": table.loc[GATE, "substituted_mass"],
        "admitted_mass": table.loc[admitted, "substituted_mass"],
        "mass_change": table.loc[admitted, "substituted_mass"] / table.loc[GATE, "substituted_mass"] - 1,
        "whole_gate": _mnat(whole.loc[GATE]),
        "whole_first": _mnat(whole.loc[FIRST]),
        "bare_moved": table.loc[GATE, "moved"],
        "admitted_moved": table.loc[admitted, "moved"],
        "admitted_copies": table.loc[admitted, "copies"],
        "best_variant": str(best),
        "best_increase": table.loc[best, "increase"],
    }


def _test_values(frame: pd.DataFrame, model: str) -> dict[str, Any]:
    """The planned comparisons, and what the equal bytes were."""
    tests = planned_tests(frame, model)
    weights, note = at_equal_bytes(one(frame, model), ADMITTED[GATE])
    return {
        **{name: _mnat(tests.iloc[i]) for i, name in enumerate(("near_gate", "far_gate", "near_equal", "far_equal"))},
        "smallest_near": 1000 * tests["smallest_detectable_nats"].iloc[0],
        "smallest_far": 1000 * tests["smallest_detectable_nats"].iloc[1],
        "equal_words": " and ".join(f"{100 * weight:.0f} % {label}" for label, weight in weights.items()),
        "equal_note": f"({note}.)" if note else "",
    }


def _change_values(frame: pd.DataFrame, model: str) -> dict[str, str]:
    """What a change of domain costs the 0.15 rule, near and far, and with admission."""
    spans = (*PRIMARY, BINS[-1])
    found = change_by_distance(frame, model, spans).rename(columns={"effect": "difference_nats"})
    changes: Any = found.set_index(["line", "span"])
    near, far, later = (span_words(span) for span in spans)
    return {
        "change_near": _mnat(changes.loc[(GATE, near)]),
        "change_far": _mnat(changes.loc[(GATE, far)]),
        "change_later": _mnat(changes.loc[(GATE, later)]),
        "change_near_admitted": _mnat(changes.loc[(ADMITTED[GATE], near)]),
    }
