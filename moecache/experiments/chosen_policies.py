"""The two chosen policies taken apart: each is a miss rule with another eviction and with background admission.

Quality-first is the 0.15 rule, speed-first the first-choice rule; both evict by a decayed count (half-life 128 tokens) and admit an
expert in the background once the gate weight of its unserved calls reaches 0.5. The bare rules evict the least recently used and admit
nothing. So the chosen policy and its bare rule differ twice, and only the 2 x 2 of eviction and admission says which change brought
what.

A third admission stands beside the two: every substituted expert is *admitted anyway* (resident from the next token on, without anyone
waiting). Then all rules meet nearly the same misses, and the rules alone are compared.

Planned before the full run, at the first capacity of each model, per document:

- quality-first minus the 0.15 rule, and speed-first minus the first-choice rule: mean difference of token losses, two-sided, Holm over all;
- the part of the eviction (decayed count minus LRU, nothing admitted), of the admission (admitted at 0.5 minus nothing, under LRU), and
  their interaction.

Everything else is exploratory. The seconds that the policies save are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from moecache.experiments.capacity_slots import slots_for_hit_rate
from moecache.experiments.misses_that_matter import check_evictions
from moecache.experiments.paired_runs import Reading, carry_out, document_rows, quarter_slots, read_reference
from moecache.policy import FETCH_EVERY_MISS, FIRST_CHOICE, GATE_015, QUALITY_FIRST, SPEED_FIRST, Policy
from moecache.record import record
from moecache.simulate import simulate

BARE = {"0.15 rule": GATE_015, "first choice": FIRST_CHOICE}
CHOSEN = {"0.15 rule": QUALITY_FIRST, "first choice": SPEED_FIRST}
RULES = tuple(BARE)
EVICTIONS = ("LRU", "decayed count")
ADMISSIONS = ("none", "at 0.5", "anyway")
HALF_LIFE = QUALITY_FIRST.half_life
FETCHING = {"LRU": FETCH_EVERY_MISS, "decayed count": Policy(eviction="decayed_count", half_life=HALF_LIFE, label="fetch every miss")}


@dataclass(frozen=True)
class Cell:
    """One policy of the design, by what it is made of."""

    rule: str
    eviction: str
    admission: str
    policy: Policy


def scaled(policy: Policy, top_k: int) -> Policy:
    """The policy with its gate threshold at the same multiple of the uniform weight as at ten calls; the label stays.

    0.15 at top-10 is one and a half times the uniform weight 1/K. Mass thresholds are not scaled: an account of 0.5 is gate weight
    summed over tokens, whatever K.
    """
    assert policy.gate_threshold is not None
    return policy.replace(gate_threshold=policy.gate_threshold * 10 / top_k, label=policy.label)


def label_of(rule: str, eviction: str, admission: str) -> str:
    """The name of a cell: the bare rule's and the chosen policy's own, or what the cell is made of."""
    if (eviction, admission) == ("decayed count", "at 0.5"):
        return CHOSEN[rule].label
    parts = [
        rule,
        *([eviction] if eviction != "LRU" else []),
        *({"at 0.5": ["admit at 0.5"], "anyway": ["admit anyway"]}.get(admission, [])),
    ]
    return ", ".join(parts)


def cells(top_k: int, rules: Sequence[str] = RULES) -> list[Cell]:
    """The design for a router that calls `top_k` experts: every rule with every eviction and admission."""
    return [
        Cell(rule, eviction, admission, _policy(rule, eviction, admission, top_k))
        for rule in rules
        for eviction in EVICTIONS
        for admission in ADMISSIONS
    ]


def _policy(rule: str, eviction: str, admission: str, top_k: int) -> Policy:
    policy = scaled(BARE[rule], top_k)
    if eviction == "decayed count":
        policy = policy.replace(eviction="decayed_count", half_life=HALF_LIFE)
    if admission == "at 0.5":
        policy = policy.replace(admission="background", mass_threshold=QUALITY_FIRST.mass_threshold)
    elif admission == "anyway":
        policy = policy.admitted_anyway()
    return policy.replace(label=label_of(rule, eviction, admission))


def capacities(reading: Reading, resident_fraction: float, lru_hit_rate: float) -> pd.DataFrame:
    """The compared capacities, and what fetching every miss moves at each.

    Parameters
    ----------
    reading : Reading
    resident_fraction : share of a layer's experts resident at the first capacity.
    lru_hit_rate : the second is the fewest slots where LRU hits this share of the calls; the third is half the first.

    Returns
    -------
    DataFrame : one row per (capacity, eviction): `place` (0 first, 1 by hit rate, 2 half), num_slots, num_experts, top_k, eviction,
        hit_rate, fetches (a step), all after the warm-up. A capacity that coincides with an earlier one is left out.

    Raises
    ------
    TooFewEvictions : LRU hardly evicts at one of them.
    """
    trace = record(reading.model, [document.tokens for document in reading.documents])
    shape, start = trace.shape, reading.warmup_tokens
    first = quarter_slots(shape, resident_fraction)
    wanted = [first, slots_for_hit_rate(trace, lru_hit_rate, start), max(first // 2, shape.top_k)]
    rows = []
    for place, num_slots in enumerate(wanted):
        if num_slots in wanted[:place]:
            continue
        for eviction, policy in FETCHING.items():
            run = simulate(trace, policy, num_slots, keep="summary", warmup_tokens=start)
            if eviction == "LRU":
                check_evictions(run, start)
            found = run.summary(start)
            facts = (place, num_slots, shape.num_experts, shape.top_k, eviction, found["hit_rate"], found["fetches_per_step"])
            rows.append(facts)
    return pd.DataFrame(rows, columns=["place", "num_slots", "num_experts", "top_k", "eviction", "hit_rate", "fetches"])


def measure(reading: Reading, num_slots: int, rule: str) -> pd.DataFrame:
    """Emulate the six policies of one rule at one capacity.

    Returns
    -------
    DataFrame : as `document_rows`, with `rule`, `eviction` and `admission`.
    """
    frames = []
    for cell in cells(reading.shape.top_k, [rule]):
        rows = document_rows(carry_out(reading, cell.policy, num_slots), reading)
        frames.append(rows.assign(rule=cell.rule, eviction=cell.eviction, admission=cell.admission))
    return pd.concat(frames, ignore_index=True)


def capacities_of_reference(
    model: str, num_documents: int, num_tokens: int, num_warmup_documents: int, resident_fraction: float, lru_hit_rate: float
) -> pd.DataFrame:
    """`capacities` of a reference model on its held-out documents."""
    return capacities(read_reference(model, num_documents, num_tokens, num_warmup_documents), resident_fraction, lru_hit_rate)


def measure_reference(
    model: str, num_documents: int, num_tokens: int, num_warmup_documents: int, num_slots: int, rule: str
) -> pd.DataFrame:
    """`measure` on a reference model, with the columns that name the setting."""
    rows = measure(read_reference(model, num_documents, num_tokens, num_warmup_documents), num_slots, rule)
    return rows.assign(model=model, regime=REGIME)


REGIME = "each policy's own admission"
