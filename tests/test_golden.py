"""Exact numbers: hits on a public trace known from elsewhere, and a committed stream whose decisions may change only on purpose.

`python tests/test_golden.py > tests/golden/decisions.json` writes the decisions anew. Do that only together with a higher
`KERNEL_VERSION`: stored results are found by it, and would otherwise show numbers that the code no longer gives.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import moecache as mc
from moecache.calibrate import buddy_table, predict_previous_token

FOLDER = Path(__file__).parent / "golden"
EXPECTED = FOLDER / "decisions.json"
NUM_SLOTS = 5
COUNTS = (
    "hits", "fetched", "forced", "substituted", "dropped", "low_precision", "cpu", "evictions", "admitted", "arrivals_dropped",
    "not_inserted", "prefetched", "first_choices_substituted",
)  # fmt: skip

# Hits on gpt-oss-20b (24 layers x 32 experts, top-4), empty at the start: computed independently of this package.
KNOWN_HITS = {
    ("lru", 8): 645_603,
    ("lru", 16): 886_786,
    ("decayed_count", 8): 671_849,
    ("decayed_count", 16): 892_477,
    ("plain_count", 8): 625_059,
    ("plain_count", 16): 851_116,
    ("belady", 8): 762_355,
    ("belady", 16): 934_892,
}


@pytest.fixture(scope="module")
def gpt_oss(test_data):
    return mc.load_trace(test_data / "gptoss20b_mmlu20.npz", num_experts=32)


@pytest.mark.parametrize(("eviction", "num_slots"), KNOWN_HITS)
def test_known_hits(gpt_oss, eviction, num_slots):
    policy = mc.Policy(eviction=eviction, half_life=128 if eviction == "decayed_count" else None)
    totals = mc.simulate(gpt_oss, policy, num_slots, cold_start="empty", keep="summary").summary()
    assert totals["calls"] == 981_120
    assert totals["hits"] == KNOWN_HITS[eviction, num_slots]


def golden_policies():
    """The presets, and every member of every enumeration at least once."""
    admitting = mc.FIRST_CHOICE.replace(admission="background", mass_threshold=0.3, admission_delay=3, max_in_flight=2)
    policies = [
        *mc.PRESETS,
        mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(),
        mc.Policy(eviction="decayed_count", half_life=1.7),  # crosses a rescale
        *(mc.GATE_015.replace(eviction=name) for name in ("fifo", "plain_count", "plain_count_forget")),
        mc.SUBSTITUTE_EVERY_MISS.replace(fallback="random_resident", seed=12345),
        admitting.replace(fallback="drop"),
        admitting.replace(counted_calls="served", eviction="plain_count"),
        admitting.replace(stand_ins_count=True),
        mc.threshold(1.1, threshold_unit="uniform"),
        *(mc.GATE_015.replace(eviction=name) for name in ("lfru", "slru", "static", "belady", "belady_bypass")),
        mc.GATE_015.replace(eviction="random", seed=12345),
        *(mc.FIRST_CHOICE.replace(fallback=name) for name in ("buddy", "low_precision", "cpu")),
        mc.Policy(insertion="tinylfu", half_life=50),
        mc.Policy(insertion="cap", insertion_cap=1),
        *(mc.mass_budget(0.3, is_squared=is_squared) for is_squared in (False, True)),
        mc.cache_prior(0.3, 1),
        mc.max_rank(6),
        mc.SPEED_FIRST.replace(max_prefetches=1, account_half_life=9, max_bookings=1),
    ]
    return {policy.label: policy for policy in policies}


def golden_run(policy):
    """Totals and a digest of every decision on the committed stream (1,000 tokens x 1 layer x 16 experts, top-3, many ties)."""
    with np.load(FOLDER / "stream.npz") as stream:
        ids, weights, scores = stream["ids"], stream["weights"], stream["scores"]
    trace = predict_previous_token(mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores))
    cold_start = "first" if policy.eviction == mc.Eviction.STATIC else "empty"
    run = mc.simulate(trace, policy, NUM_SLOTS, cold_start, exact_prefix_tokens=2, buddies=buddy_table(trace, 4))
    log, totals, digest = run.decisions, run.summary(), hashlib.sha256()
    for array in (log.outcome, log.computed_ids, log.evicted_ids, log.arrivals, log.substituted_mass):
        digest.update(np.ascontiguousarray(array).data)
    return {name: totals[name] for name in COUNTS} | {"digest": digest.hexdigest()[:16]}


def all_golden_runs():
    return {"kernel_version": mc.KERNEL_VERSION, "runs": {label: golden_run(policy) for label, policy in golden_policies().items()}}


def test_golden_decisions_belong_to_this_kernel():
    expected = json.loads(EXPECTED.read_text())
    told = "write the decisions of the new kernel: python tests/test_golden.py > tests/golden/decisions.json"
    assert expected["kernel_version"] == mc.KERNEL_VERSION, told
    assert list(expected["runs"]) == list(golden_policies()), told


@pytest.mark.parametrize("label", golden_policies())
def test_golden_decisions(label):
    expected = json.loads(EXPECTED.read_text())["runs"][label]
    told = "decisions changed: if that is meant, raise KERNEL_VERSION and run python tests/test_golden.py > tests/golden/decisions.json"
    assert golden_run(golden_policies()[label]) == expected, told


if __name__ == "__main__":
    print(json.dumps(all_golden_runs(), indent=1))
