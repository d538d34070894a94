"""Background admission: what it gains after a change of topic, what it moves, and what the same bytes buy elsewhere.

An expert whose unserved calls have summed to a gate weight is copied into the cache without anyone waiting. This module lists the compared
policies in groups and measures one group at a time:

- `orders`: both bare rules, and both with admission, in two orders of the same documents (see `topic_changes`);
- `thresholds`: more mass thresholds, from 0 (every substituted expert is admitted) upwards;
- `curve`: plain gate-weight thresholds without admission, the alternative use of the same bytes;
- `delays`, `accounts`: later landings, accounts that decay, and at most one copy asked for a step;
- `caps`: a plain cap (everything is admitted, at most one copy a step) and TinyLFU, which inserts a fetched expert only if it was called
  more often than its victim. TinyLFU filters what a fetch inserts; landings are not filtered;
- `evictions`: the same admission under decayed counts.

Planned before the full run: the 0.15 rule under LRU, its domain changing at every document; mean difference of token losses of a document,
two-sided t-tests, Holm's correction over four:

- admitted at 0.5 minus not admitted, tokens 0 to 47 and tokens 48 to 239 of a document;
- admitted at 0.5 minus the threshold rule at an equal number of experts moved a step (fetches and copies together), in the same two spans.
  The threshold rule there is a mixture of the two neighbouring points of its curve, linear in the logarithm of what they move. Loss is
  convex in it, so the mixture is a little dearer than the curve: that favours the admission.

Everything else is exploratory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moecache.experiments.chosen_policies import BARE, HALF_LIFE, REGIME, scaled
from moecache.experiments.paired_runs import Reading, fetching_rows, quarter_slots, read_reference
from moecache.experiments.topic_changes import INTERLEAVED, SPANS, in_order, measure
from moecache.policy import FETCH_EVERY_MISS, Policy, threshold

Sweep = Mapping[str, Sequence[float]]
ADMIT_AT = 0.5


def admitting(policy: Policy, mass_threshold: float, words: str = "", **fields: Any) -> Policy:
    """The policy with background admission, named after its mass threshold and `words`."""
    label = f"{policy.label}, admit at {mass_threshold:g}{words}"
    return policy.replace(admission="background", mass_threshold=mass_threshold, **fields, label=label)


def rules(top_k: int) -> list[Policy]:
    """The bare rules for a router that calls `top_k` experts: the 0.15 rule, then the first-choice rule."""
    return [scaled(policy, top_k) for policy in BARE.values()]


def gate_label(gate_threshold: float) -> str:
    """The name of a point of the threshold curve, by its gate weight at ten calls."""
    return f"gate weight {gate_threshold:g}"


def group(name: str, top_k: int, sweep: Sweep) -> list[Policy]:
    """The policies of one group.

    Parameters
    ----------
    name : see the module's text.
    top_k : K of the router; gate thresholds are given for ten calls and scaled.
    sweep : what is varied: `order_thresholds`, `mass_thresholds`, `gate_thresholds`, `delays_tokens`, `account_half_lives_tokens`,
        `half_lives_tokens`.

    Raises
    ------
    ValueError : no such group; the groups are named.
    """
    gate, *_ = both = rules(top_k)
    groups = {
        "orders": [*both, *(admitting(rule, mass) for rule in both for mass in sweep["order_thresholds"])],
        "thresholds": [admitting(rule, mass) for rule in both for mass in sweep["mass_thresholds"]],
        "curve": [threshold(weight * 10 / top_k, label=gate_label(weight)) for weight in sweep["gate_thresholds"]],
        "delays": [admitting(gate, ADMIT_AT, f", delay {int(n)}", admission_delay=int(n)) for n in sweep["delays_tokens"]],
        "accounts": [
            *(admitting(gate, ADMIT_AT, f", decay {n:g}", account_half_life=n) for n in sweep["account_half_lives_tokens"]),
            admitting(gate, ADMIT_AT, ", one a step", max_bookings=1),
        ],
        "caps": [
            admitting(gate, 0.0, ", one a step", max_bookings=1),
            gate.replace(insertion="tinylfu", half_life=HALF_LIFE, label=f"{gate.label}, TinyLFU"),
        ],
        "evictions": [
            policy
            for n in sweep["half_lives_tokens"]
            for bare in [gate.replace(eviction="decayed_count", half_life=n, label=f"{gate.label}, half-life {n:g}")]
            for policy in (bare, admitting(bare, ADMIT_AT))
        ],
    }
    if name not in groups:
        raise ValueError(f"there is no group {name!r}; choose one of {', '.join(groups)}")
    return groups[name]


def measure_reference(
    model: str,
    group_name: str,
    sweep: Sweep,
    num_documents: int,
    num_tokens: int,
    num_warmup_documents: int,
    domains: Sequence[str],
    resident_fraction: float,
    order: str = INTERLEAVED,
) -> pd.DataFrame:
    """One group of policies on a reference model in one order, with the columns that name the setting."""
    reading = read_reference(model, num_documents, num_tokens, num_warmup_documents, tuple(domains))
    return measure_group(reading, group_name, sweep, resident_fraction, order).assign(model=model)


def measure_group(reading: Reading, group_name: str, sweep: Sweep, resident_fraction: float, order: str = INTERLEAVED) -> pd.DataFrame:
    """One group of policies in one order. The group `orders` begins with fetching every miss.

    Raises
    ------
    TooFewEvictions : LRU hardly evicts at this capacity.
    """
    num_slots = quarter_slots(reading.shape, resident_fraction)
    rows = measure(reading, group(group_name, reading.shape.top_k, sweep), num_slots, order)
    if group_name == "orders":
        fetching = fetching_rows(in_order(reading, order), [FETCH_EVERY_MISS], num_slots, SPANS).assign(order=order)
        rows = pd.concat([fetching, rows], ignore_index=True)
    return rows.assign(regime=REGIME)
