"""The simulator: totals, windows, documents, and what it refuses."""

import re
import subprocess
import sys

import numpy as np
import pytest
from streams import random_stream

import moecache as mc
from moecache.metrics import count_transfers
from moecache.simulate import exact_prefix

NUM_TOKENS = 120
STARTS = np.isin(np.arange(NUM_TOKENS), [0, 40, 47])
POLICIES = [mc.QUALITY_FIRST, mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(), mc.GATE_015, mc.FETCH_EVERY_MISS]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)


def new_trace(seed=6):
    ids, weights, scores = random_stream(seed, NUM_TOKENS, 2, 16, 3)
    shape = mc.ModelShape(2, 16, 3, expert_bytes=100)
    return mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores, document_start=STARTS, shape=shape)


TRACE = new_trace()


def decided(policy, trace=TRACE, is_exact=None, num_slots=5):
    arrays = trace.topk_ids, trace.gate_weights, trace.selection_scores
    return mc.ExpertCache(trace.shape, policy, num_slots).decide(*arrays, is_exact=is_exact)


@every_policy
def test_run_holds_what_was_decided(policy):
    run = mc.simulate(TRACE, policy, 5)
    assert run.decisions.is_equal(decided(policy))
    assert (run.instrument, run.policy, run.shape, run.cold_start) == ("simulator", policy, TRACE.shape, "first")
    assert run.num_slots.tolist() == [5, 5]
    assert run.num_tokens == NUM_TOKENS
    assert (run.loss_nats, run.seconds) == (None, None)
    assert {"moecache", "versions", "machine", "date"} <= set(run.provenance)
    totals = run.summary()
    assert totals["calls"] == NUM_TOKENS * 2 * 3
    assert run.bytes_moved == 100 * count_transfers(run.decisions)
    assert run.layer_hit_rates().mean() == pytest.approx(totals["hit_rate"])


@every_policy
@pytest.mark.parametrize("documents", ["keep", "reset"])
def test_totals_alone_are_the_same(policy, documents):
    options = {"documents": documents, "exact_prefix_tokens": 3, "warmup_tokens": 50}
    kept, totals = (mc.simulate(TRACE, policy, 5, keep=keep, **options) for keep in ("log", "summary"))
    assert totals.decisions is None
    assert np.array_equal(kept.counts, totals.counts)
    for first_token in (0, 50):
        assert totals.summary(first_token) == pytest.approx(kept.summary(first_token), rel=1e-5)
    with pytest.raises(ValueError, match=r"only totals were kept, from tokens 0 and 50; use keep='log'"):
        totals.summary(51)
    with pytest.raises(ValueError, match="only totals were kept; run with keep='log'"):
        totals.frame()


@every_policy
def test_windows_of_a_log(policy):
    run = mc.simulate(TRACE, policy, 5)
    frame, window = run.frame(), run.summary(70)
    assert window["tokens"] == NUM_TOKENS - 70
    for name in ("hits", "fetched", "forced", "substituted", "dropped", "evictions", "first_choices_substituted"):
        assert window[name] == frame[name][70:].sum(), name
    assert window["substituted_mass"] == pytest.approx(frame["substituted_mass"][70:].mean())
    assert frame["document"].tolist() == (np.cumsum(STARTS) - 1).tolist()
    for first_token in (-1, NUM_TOKENS):
        with pytest.raises(ValueError, match=rf"first_token={first_token} is outside 0\.\.119"):
            run.summary(first_token)


@every_policy
def test_reset_documents_are_runs_of_their_own(policy):
    run = mc.simulate(TRACE, policy, 5, documents="reset")
    for part in TRACE.document_slices():
        alone = mc.simulate(TRACE.tokens(part.start, part.stop), policy, 5).decisions
        for name in ("outcome", "computed_ids", "evicted_ids", "substituted_mass"):
            assert np.array_equal(getattr(run.decisions, name)[part], getattr(alone, name)), name
        landed = run.decisions.arrivals[run.decisions.arrivals[:, 6] != mc.Landing.CANCELLED]
        own = landed[(landed[:, 1] >= part.start) & (landed[:, 1] < part.stop)]
        own[:, :2] -= part.start
        assert np.array_equal(own[np.lexsort(own.T)], alone.arrivals[np.lexsort(alone.arrivals.T)])


def test_reset_logs_the_copies_it_cancels():
    policy = mc.SUBSTITUTE_EVERY_MISS.replace(admission="background", mass_threshold=0, admission_delay=30)
    run = mc.simulate(TRACE, policy, 5, documents="reset")
    cancelled = run.decisions.arrivals[run.decisions.arrivals[:, 6] == mc.Landing.CANCELLED]
    assert set(cancelled[:, 1]) == {39, 46}
    assert (cancelled[:, 4] == -2).all()


def test_exact_prefix():
    assert exact_prefix(STARTS, 0).sum() == 0
    assert np.flatnonzero(exact_prefix(STARTS, 3)).tolist() == [0, 1, 2, 40, 41, 42, 47, 48, 49]
    assert np.flatnonzero(exact_prefix(STARTS, 8)).tolist() == [*range(8), *range(40, 55)]
    run = mc.simulate(TRACE, mc.SUBSTITUTE_EVERY_MISS, 5, exact_prefix_tokens=8)
    assert run.decisions.is_equal(decided(mc.SUBSTITUTE_EVERY_MISS, is_exact=exact_prefix(STARTS, 8)))
    assert (run.decisions.computed_ids[40:55] == TRACE.topk_ids[40:55]).all()


def test_cold_starts():
    profile = [[9, 8, 7, 6, 5], [0, 2, 4, 6, 8]]
    run = mc.simulate(TRACE, mc.FETCH_EVERY_MISS, 5, profile)
    first = run.decisions
    assert run.cold_start == "profile"
    hits = np.isin(TRACE.topk_ids[0, 0], profile[0])
    assert (first.outcome[0, 0] == mc.Outcome.HIT).tolist() == hits.tolist()
    drawn = [mc.simulate(TRACE, mc.FETCH_EVERY_MISS, 5, "random", seed=seed).decisions for seed in (0, 0, 1)]
    assert drawn[0].is_equal(drawn[1])
    assert not drawn[0].is_equal(drawn[2])
    assert (mc.simulate(TRACE, mc.FETCH_EVERY_MISS, 5, "empty").decisions.evicted_ids[0] == -1).all()


@pytest.mark.parametrize("num_slots", [4, 8])
def test_sequential_replay_of_a_decayed_count(num_slots):
    """The half-life is told in tokens: a call is 1/K of one. Against a loop over calls with sets and dicts."""
    policy = mc.Policy(eviction="decayed_count", half_life=7)
    run = mc.simulate(TRACE, policy, num_slots, "empty", replay="sequential", warmup_tokens=10)
    hits = 0
    for layer in range(2):
        residents, calls = set(), {}
        for clock, expert in enumerate(TRACE.topk_ids[:, layer].ravel().tolist()):
            hits += expert in residents
            if expert not in residents and len(residents) == num_slots:
                score = {e: (sum(0.5 ** ((clock - c) / 21) for c in calls[e]), calls[e][-1]) for e in residents}
                residents.remove(min(residents, key=lambda e: (*score[e], e)))
            residents.add(expert)
            calls.setdefault(expert, []).append(clock)
    assert run.summary()["hits"] == hits == run.frame()["hits"].sum()
    assert run.replay == "sequential"
    assert run.num_tokens == run.summary()["tokens"] == run.decisions.outcome.shape[0] == NUM_TOKENS
    assert run.summary()["fetches_per_token"] == pytest.approx((NUM_TOKENS * 6 - hits) / NUM_TOKENS)
    assert np.array_equal(run.decisions.computed_ids, TRACE.topk_ids)
    totals = mc.simulate(TRACE, policy, num_slots, "empty", keep="summary", replay="sequential", warmup_tokens=10)
    assert totals.summary(10) == pytest.approx(run.summary(10))
    assert run.policy == policy


BAD_OPTIONS = [
    ({"documents": "forget"}, r"documents='forget' is unknown; choose one of keep, reset"),
    ({"keep": "all"}, r"keep='all' is unknown; choose one of log, summary"),
    ({"replay": "serial"}, r"replay='serial' is unknown; choose one of atomic, sequential"),
    ({"replay": "sequential", "policy": mc.GATE_015}, r"a diagnostic for policies that wait for every miss, not '0\.15 rule'"),
    ({"replay": "sequential", "policy": mc.Policy(max_prefetches=2)}, r"max_prefetches=2 counts within a step.*use replay='atomic'"),
    ({"replay": "sequential", "policy": mc.Policy(insertion="cap", insertion_cap=1)}, r"insertion_cap=1 counts within a step"),
    ({"warmup_tokens": 120}, r"warmup_tokens=120 is outside 0\.\.119"),
    ({"warmup_tokens": -1}, r"warmup_tokens=-1 is outside"),
    ({"exact_prefix_tokens": -1}, r"exact_prefix_tokens=-1 must be 0 or more"),
    ({"num_slots": 2}, r"num_slots=2 is below top-k=3"),
    ({"num_slots": 17}, r"num_slots=17 exceeds the 16 experts"),
    ({"num_slots": 2, "replay": "sequential"}, r"num_slots=2 is below top-k=3"),
    ({"cold_start": "warm"}, r"cold_start='warm' is unknown"),
    ({"policy": mc.first_j(4)}, r"names rank 3, but top-3 has ranks 0\.\.2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_OPTIONS)
def test_options_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        mc.simulate(**{"trace": TRACE, "policy": mc.FETCH_EVERY_MISS, "num_slots": 5, **changes})


def test_a_run_and_a_trace_in_a_line():
    assert repr(TRACE) == "RouterTrace(120 tokens, 3 documents, 2 layers, top-3 of 16 experts, 16 scores a step)"
    run = mc.simulate(TRACE, mc.GATE_015, 5)
    assert re.fullmatch(r"Run\(simulator, '0\.15 rule', 5 slots, 120 tokens x 2 layers, hit rate \d\d\.\d%\)", repr(run))
    assert "4..6 slots" in repr(mc.simulate(TRACE, mc.GATE_015, [4, 6]))


def test_a_trace_without_scores():
    trace = mc.RouterTrace.from_arrays(TRACE.topk_ids, TRACE.gate_weights, num_experts=16)
    with pytest.raises(ValueError, match=r"'0\.15 rule' substitutes by selection score, but no selection scores are given"):
        mc.simulate(trace, mc.GATE_015, 5)
    assert mc.simulate(trace, mc.FETCH_EVERY_MISS, 5).summary()["hits"] == mc.simulate(TRACE, mc.FETCH_EVERY_MISS, 5).summary()["hits"]
    assert mc.simulate(trace, mc.FETCH_EVERY_MISS, 5).bytes_moved is None


def test_simulating_needs_no_torch(tmp_path):
    TRACE.save(tmp_path / "trace.safetensors")
    code = (
        "import sys, moecache as mc; trace = mc.load_trace(sys.argv[1]);"
        "run = mc.simulate(trace, mc.QUALITY_FIRST, 5); run.summary(); run.frame();"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "trace.safetensors")], check=True)
