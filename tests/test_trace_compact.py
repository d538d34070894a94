"""Compact traces: the same decisions from fewer bytes, and whatever they cannot show is counted or refused."""

from importlib import import_module

import numpy as np
import pytest
from streams import random_stream

import moecache as mc
from moecache.trace.best import from_keys, sort_keys

NUM_EXPERTS, TOP_K = 20, 3
POLICIES = [
    mc.QUALITY_FIRST,
    mc.SPEED_FIRST,
    mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(),
    mc.mass_budget(0.3),
    mc.cache_prior(0.3, 1),
    mc.max_rank(8),
    mc.GATE_015.replace(fallback="random_resident"),
    mc.FETCH_EVERY_MISS,
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)


def new_trace(seed=3, num_tokens=150):
    """Seed 3 has many equal scores, so that ties at the edge of the best M occur."""
    ids, weights, scores = random_stream(seed, num_tokens, 2, NUM_EXPERTS, TOP_K)
    starts = np.isin(np.arange(num_tokens), [0, 40, 111])
    return mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores, document_start=starts)


TRACE = new_trace()


def wide_trace(num_tokens=120):
    """512 experts, as the largest routers have."""
    return mc.synthetic_trace(num_tokens, 2, 512, 10, document_tokens=60)


def test_keys_order_all_of_float16():
    bits = np.arange(65536, dtype=np.uint16)
    scores = bits.view(np.float16)[~np.isnan(bits.view(np.float16))]
    keys = sort_keys(scores, np.zeros(scores.size, np.int16))
    order = np.argsort(keys, kind="stable")
    assert (np.diff(scores[order].astype(float)) >= 0).all()
    assert (sort_keys(scores, np.full(scores.size, 7)) < keys).all()  # the lower id is the better one
    ids = np.arange(scores.size) % 32767
    back_ids, back = from_keys(sort_keys(scores, ids))
    assert np.array_equal(back_ids, ids)
    assert back.tobytes() == scores.tobytes()


@pytest.mark.parametrize("num_best", [TOP_K, 4, 9, NUM_EXPERTS])
def test_what_a_compact_trace_holds(num_best):
    """Against a sort in plain Python: the top-k and the best of the others, falling, the lower id first."""
    compact = TRACE.compact(num_best)
    assert (compact.num_recorded, TRACE.num_recorded) == (num_best, NUM_EXPERTS)
    for token in (0, 7, 149):
        for layer in range(2):
            scores, own = TRACE.selection_scores[token, layer], set(TRACE.topk_ids[token, layer].tolist())
            by_score = sorted(range(NUM_EXPERTS), key=lambda e: (-float(scores[e]), e))
            kept = own | set([e for e in by_score if e not in own][: num_best - TOP_K])
            expected = [e for e in by_score if e in kept]
            assert compact.recorded_ids[token, layer].tolist() == expected
            assert compact.selection_scores[token, layer].tolist() == scores[expected].tolist()


def test_expanded_scores_mark_what_is_not_recorded():
    compact = TRACE.compact(6)
    found = compact.scores(slice(10, 30))
    is_recorded = np.zeros(found.shape, bool)
    np.put_along_axis(is_recorded, compact.recorded_ids[10:30].astype(int), True, -1)
    assert (found.view(np.int16)[~is_recorded] == -1).all()
    assert np.array_equal(found[is_recorded], TRACE.selection_scores[10:30][is_recorded])
    assert TRACE.scores(slice(10, 30)).base is not None  # all scores: a view, nothing is copied


@every_policy
@pytest.mark.parametrize("documents", ["keep", "reset"])
def test_all_scores_kept_compactly_decide_the_same(policy, documents, monkeypatch):
    module = import_module("moecache.simulate")  # the name in the package is the function
    monkeypatch.setattr(module, "EXPANDED_SCORES", 7 * 2 * NUM_EXPERTS)  # blocks of 7 tokens
    options = {"documents": documents, "exact_prefix_tokens": 2, "warmup_tokens": 50}
    full, compact = (mc.simulate(trace, policy, 6, **options) for trace in (TRACE, TRACE.compact(NUM_EXPERTS)))
    assert compact.decisions.is_equal(full.decisions)
    assert np.array_equal(compact.counts, full.counts)
    assert np.array_equal(compact.warm_counts, full.warm_counts)
    assert compact.mass_sum == full.mass_sum


@pytest.mark.parametrize("policy", [mc.QUALITY_FIRST, mc.max_rank(20), mc.mass_budget(0.1)], ids=lambda policy: policy.label)
def test_64_of_512_scores_decide_the_same(policy):
    trace = wide_trace()
    full, compact = (mc.simulate(t, policy, 128) for t in (trace, trace.compact(64)))
    assert full.summary()["substituted"] > 100
    assert compact.summary()["outside_recorded"] == 0
    assert compact.decisions.is_equal(full.decisions)


def test_a_stand_in_outside_is_fetched_and_counted():
    """One step by hand: of the residents 0..3 only 2 is recorded, so the second stand-in would have to come from outside."""
    scores = np.array([[[0.1, 0.2, 0.3, 0.15, 0.9, 0.8, 0.7, 0.6]]], np.float16)
    trace = mc.RouterTrace.from_arrays([[[4, 5]]], [[[0.6, 0.4]]], selection_scores=scores)
    compact = trace.compact(5)
    assert compact.recorded_ids.tolist() == [[[4, 5, 6, 7, 2]]]
    with pytest.warns(UserWarning, match=r"1 of 2 stand-ins lie outside the best 5 of 8 scores"):
        run = mc.simulate(compact, mc.SUBSTITUTE_EVERY_MISS, 4)
    assert run.decisions.outcome.tolist() == [[[mc.Outcome.SUBSTITUTED, mc.Outcome.FORCED]]]
    assert run.decisions.computed_ids.tolist() == [[[2, 5]]]
    assert (run.summary()["outside_recorded"], run.summary()["forced"]) == (1, 1)
    whole = mc.simulate(trace, mc.SUBSTITUTE_EVERY_MISS, 4).decisions
    assert whole.computed_ids.tolist() == [[[2, 1]]]


def test_a_thousandth_outside_is_not_worth_a_warning(recwarn):
    trace = wide_trace(300)
    run = mc.simulate(trace.compact(40), mc.QUALITY_FIRST, 128)
    outside, substituted = run.summary()["outside_recorded"], run.summary()["substituted"]
    assert 0 < outside <= 0.001 * (outside + substituted)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="record more scores a step"):
        mc.simulate(trace.compact(16), mc.QUALITY_FIRST, 128)


def test_rules_that_read_scores_which_are_not_there():
    compact = TRACE.compact(8)
    with pytest.raises(ValueError, match=r"reads the range of all scores, but the trace holds the best 8 of 20 scores a step"):
        mc.simulate(compact, mc.cache_prior(), 6)
    with pytest.raises(ValueError, match=r"asks for the best 9 experts, but the trace holds the best 8 of 20 scores a step"):
        mc.simulate(compact, mc.max_rank(9), 6)
    assert mc.simulate(compact, mc.max_rank(8), 6).decisions.is_equal(mc.simulate(TRACE, mc.max_rank(8), 6).decisions)
    with pytest.raises(ValueError, match=r"2 combinations cannot be replayed:\n.*range of all scores.*\n.*best 9 experts"):
        mc.sweep(compact, [mc.cache_prior(), mc.max_rank(9), mc.GATE_015], [6], progress=False)


def test_a_sweep_counts_what_lies_outside():
    with pytest.warns(UserWarning, match="lie outside the best 4 of 20"):
        rows = mc.sweep(TRACE.compact(4), [mc.SPEED_FIRST, mc.FETCH_EVERY_MISS], [6], num_workers=1, progress=False)
    assert rows["outside_recorded"][0] > 0
    assert rows["outside_recorded"][1] == 0


@pytest.mark.parametrize("num_best", [0, TOP_K - 1, NUM_EXPERTS + 1])
def test_impossible_numbers_of_scores(num_best):
    with pytest.raises(mc.TraceError, match=rf"num_best={num_best} is outside 3\.\.20"):
        TRACE.compact(num_best)


def test_compacting_further_and_windows():
    twice, once = TRACE.compact(9).compact(5), TRACE.compact(5)
    assert np.array_equal(twice.recorded_ids, once.recorded_ids)
    assert np.array_equal(twice.selection_scores, once.selection_scores)
    with pytest.raises(mc.TraceError, match=r"num_best=6 is outside 3\.\.5"):
        once.compact(6)
    window = once.tokens(20, 31)
    assert np.array_equal(window.recorded_ids, once.recorded_ids[20:31])
    without = mc.RouterTrace.from_arrays(TRACE.topk_ids, TRACE.gate_weights, num_experts=NUM_EXPERTS)
    assert without.scores(slice(0, 3)) is None
    with pytest.raises(mc.TraceError, match="holds no selection scores"):
        without.compact(4)


def test_a_compact_trace_survives_a_file(tmp_path):
    compact = TRACE.compact(7)
    compact.save(tmp_path / "compact.safetensors")
    for memory_map in (False, True):
        found = mc.load_trace(tmp_path / "compact.safetensors", memory_map=memory_map)
        for name in ("recorded_ids", "selection_scores", "topk_ids", "gate_weights", "document_start"):
            assert getattr(found, name).tobytes() == getattr(compact, name).tobytes()


def test_best_scores_that_were_logged_elsewhere_come_in_any_order():
    compact, order = TRACE.compact(7), np.random.default_rng(0).permutation(7)
    found = mc.RouterTrace.from_arrays(
        TRACE.topk_ids, TRACE.gate_weights, router_logits=compact.selection_scores[..., order].astype(float),
        recorded_ids=compact.recorded_ids[..., order], num_experts=NUM_EXPERTS,
    )  # fmt: skip
    assert np.array_equal(found.recorded_ids, compact.recorded_ids)
    assert np.array_equal(found.selection_scores, compact.selection_scores)
    with pytest.raises(mc.TraceError, match="their number is unknown"):
        mc.RouterTrace.from_arrays(
            TRACE.topk_ids, TRACE.gate_weights, selection_scores=compact.selection_scores, recorded_ids=compact.recorded_ids
        )


def spoiled(**changes):
    compact = TRACE.compact(7)
    fields = {"recorded_ids": compact.recorded_ids.copy(), "selection_scores": compact.selection_scores.copy()}
    for name, value in changes.items():
        fields[name][9, 1] = value(fields[name][9, 1]) if callable(value) else value
    return {**vars(compact), **fields}


BAD = {
    "an id out of range": ({"recorded_ids": lambda row: np.where(row == row[6], 20, row)}, r"an expert id outside 0\.\.19: 20"),
    "an expert twice": ({"recorded_ids": lambda row: np.where(row == row[6], row[0], row)}, "the same expert's score recorded twice"),
    "out of order": (
        {"recorded_ids": lambda row: row[::-1], "selection_scores": lambda row: row[::-1]},
        r"recorded scores out of order \(falling, lower id first among equals\)",
    ),
    "NaN": ({"selection_scores": lambda row: np.where(np.arange(7) == 3, np.nan, row)}, r"NaN or \+infinity in float16: nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_impossible_compact_steps_name_token_and_layer(name):
    changes, message = BAD[name]
    with pytest.raises(mc.TraceError, match=f"token 9, layer 1: .*{message}"):
        mc.RouterTrace(**spoiled(**changes))


def test_a_called_expert_without_a_score():
    fields = spoiled()
    others = [e for e in range(NUM_EXPERTS) if e not in fields["recorded_ids"][9, 1]]
    place = fields["recorded_ids"][9, 1].tolist().index(fields["topk_ids"][9, 1, 2])
    fields["recorded_ids"][9, 1, place] = others[0]
    fields["selection_scores"][9, 1] = np.arange(7)[::-1]
    called = fields["topk_ids"][9, 1, 2]
    with pytest.raises(mc.TraceError, match=f"token 9, layer 1: the score of a called expert is not recorded: {called}"):
        mc.RouterTrace(**fields)


def test_wrong_sizes_of_compact_arrays():
    compact = TRACE.compact(7)
    with pytest.raises(mc.TraceError, match=r"recorded_ids is \[150, 2, 2\], expected \[150, 2, 'M'\], M from 3 to 20"):
        mc.RouterTrace(**{**vars(compact), "recorded_ids": compact.recorded_ids[..., :2]})
    with pytest.raises(mc.TraceError, match=r"selection_scores is float16 \[150, 2, 7\], expected float16 \[150, 2, 6\]"):
        mc.RouterTrace(**{**vars(compact), "recorded_ids": compact.recorded_ids[..., :6]})
    with pytest.raises(mc.TraceError, match="but there are no selection_scores"):
        mc.RouterTrace(**{**vars(compact), "selection_scores": None})
