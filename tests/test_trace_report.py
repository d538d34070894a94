"""The report of a trace: every number against a count by hand or in plain Python, and every warning both ways."""

import numpy as np
import pytest
from twin import TwinLayer

import moecache as mc
from moecache import cli
from moecache.trace_report import TraceReport

# Two documents of one layer, top-2 of 6 experts.
ROUTES = [[0, 1], [1, 2], [1, 2], [3, 4], [0, 1], [0, 1]]
STARTS = [True, False, False, False, True, False]


def small(routes=ROUTES, starts=STARTS, **fields):
    ids = np.array(routes)[:, None]
    weights = np.broadcast_to(np.float32([0.75, 0.25]), ids.shape)
    return mc.RouterTrace.from_arrays(ids, weights, document_start=starts, **{"num_experts": 6, **fields})


def test_counts_by_hand():
    report = small().report(num_slots=2)
    assert isinstance(report, TraceReport)
    assert (report.num_tokens, report.num_documents, report.document_tokens) == (6, 2, (2, 3.0, 4))
    # Neighbours of one document: 1 of 2, 2 of 2, 0 of 2, 2 of 2.
    assert report.neighbour_overlap.tolist() == [(0.5 + 1 + 0 + 1) / 4]
    assert report.gate_weight_by_rank.tolist() == [0.75, 0.25]
    assert report.distinct_experts.tolist() == [5]
    assert report.working_set.tolist() == [5]
    assert report.calls_per_slot == 6
    # Two slots, empty: {0,1} +2 misses; 2 for 0; hits 1, 2; 3, 4 for both; 0, 1 for both; hits 0, 1.
    assert report.hit_rate_cold.tolist() == [(0 + 1 + 2) / 6]
    assert report.hit_rate_warm.tolist() == [2 / 6]
    assert report.evictions.tolist() == [1 + 2 + 2]
    assert report.cold_share.tolist() == [5 / 7]
    assert report.router_entropy is None
    assert (report.num_recorded, report.num_predicted, report.num_slots) == (0, 0, 2)


def test_replay_against_the_twin():
    trace = mc.synthetic_trace(500, 3, 32, 4, document_tokens=90, has_scores=False)
    report = trace.report()
    assert report.num_slots == 8
    policy = {**mc.FETCH_EVERY_MISS.to_dict(), "top_k": 4}
    for layer in range(3):
        twin = TwinLayer(policy, 32, 8, [])
        for ids, weights in zip(trace.topk_ids[:, layer].tolist(), trace.gate_weights[:, layer], strict=True):
            twin.step(ids, weights)
        hits = [row[0].count(0) for row in twin.rows]
        assert report.hit_rate_cold[layer] == sum(hits[:250]) / 1000
        assert report.hit_rate_warm[layer] == sum(hits[250:]) / 1000
        assert report.evictions[layer] == sum(victim >= 0 for row in twin.rows for victim in row[2])
        windows = [set(trace.topk_ids[:256, layer].ravel().tolist())]
        assert report.working_set[layer] == len(windows[0])
        assert report.distinct_experts[layer] == len(set(trace.topk_ids[:, layer].ravel().tolist()))


def test_neighbours_against_sets():
    trace = mc.synthetic_trace(300, 2, 24, 5, document_tokens=40, has_scores=False)
    shared = [
        [len(set(a) & set(b)) / 5 for a, b in zip(trace.topk_ids[:-1, layer].tolist(), trace.topk_ids[1:, layer].tolist(), strict=True)]
        for layer in range(2)
    ]
    expected = np.array(shared)[:, ~trace.document_start[1:]].mean(axis=1)
    np.testing.assert_allclose(trace.report().neighbour_overlap, expected, rtol=1e-12)


def test_entropy_of_flat_peaked_and_masked_routers():
    uniform, peaked, masked = np.zeros(8), np.array([30.0, *[0] * 7]), np.array([0.0] * 4 + [-np.inf] * 4)
    scores = np.broadcast_to(np.stack([uniform, peaked, masked]), (40, 3, 8))
    ids, weights = np.broadcast_to([0, 1], (40, 3, 2)), np.full((40, 3, 2), 0.5)
    trace = mc.RouterTrace.from_arrays(ids, weights, router_logits=scores)
    assert trace.report().router_entropy == pytest.approx([1, 0, np.log(4) / np.log(8)], abs=1e-5)
    assert trace.compact(4).report().router_entropy is None
    shape = mc.ModelShape(3, 8, 2, scoring="sigmoid")
    assert mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores, shape=shape).report().router_entropy is None


def warned(trace, num_slots=None):
    return {warning.partition(":")[0] for warning in trace.report(num_slots).warnings}


def long_trace(num_tokens=4000):
    return mc.synthetic_trace(num_tokens, 2, 32, 4, document_tokens=400, has_scores=False)


def test_a_good_trace_is_not_warned_about():
    assert long_trace().report().warnings == ()


def test_too_short_to_evict():
    report = long_trace(40).report()
    assert report.warnings[0].startswith("too short to evict: 2 of 2 layers see fewer than 100 evictions at 8 slots (the fewest ")
    assert {"too short to evict", "cold"} <= warned(long_trace(40))


def test_near_empty_eviction():
    """With nearly all experts resident, thousands of tokens evict somebody now and then."""
    assert warned(long_trace(9000), 28) == {"near-empty eviction"}
    assert warned(long_trace(), 32) == {"too short to evict", "near-empty eviction", "cold"}


def test_repeated_documents():
    trace = long_trace(300)
    first = trace.document_slices()[0]
    part = slice(first.start, first.stop)
    twice = mc.RouterTrace.from_arrays(
        np.concatenate([trace.topk_ids, trace.topk_ids[part]]), np.concatenate([trace.gate_weights, trace.gate_weights[part]]),
        document_start=np.concatenate([trace.document_start, trace.document_start[part]]), shape=trace.shape,
    )  # fmt: skip
    number = trace.document_start.sum()
    assert f"repeated documents: 1 have the tokens or routes of an earlier one ({number} = 0); keep one of each" in twice.report().warnings
    assert "repeated documents" not in warned(trace)


def test_documents_of_the_same_tokens_are_repeated_even_with_other_routes():
    same, other, unknown = [5, 6, 7, 8, 5, 6], [5, 6, 5, 6, 9, 9], [-1] * 6
    starts, routes = [True, False, False, False, True, False], [[0, 1], [1, 2], [1, 2], [3, 4], [2, 5], [0, 1]]
    assert "repeated documents" not in warned(small(routes, starts, token_ids=same), 2)
    starts = [True, False, True, False, True, False]
    assert "repeated documents" in warned(small(routes, starts, token_ids=other), 2)
    assert "repeated documents" not in warned(small(routes, starts, token_ids=unknown), 2)


def test_print_and_frame():
    trace = mc.synthetic_trace(600, 3, 64, 4, document_tokens=100)
    report = trace.report()
    told, frame = str(report), report.to_frame()
    assert "600 tokens x 3 MoE layers x top-4 of 64 experts" in told
    assert "scores             of all 64 experts" in told
    assert "at 16 slots        150 calls a slot" in told
    assert f"router entropy     {report.router_entropy.mean():.3f}" in told
    assert told.count("WARNING") == len(report.warnings)
    assert frame["layer"].tolist() == [0, 1, 2]
    assert frame["hit_rate_warm"].tolist() == report.hit_rate_warm.tolist()
    assert "scores             of the best 8 of 64 experts" in str(trace.compact(8).report())
    assert "router_entropy" not in trace.compact(8).report().to_frame()


def test_one_token_alone():
    report = small(ROUTES[:1], STARTS[:1]).report(2)
    assert np.isnan(report.neighbour_overlap).all()
    assert "neighbour overlap  unknown" in str(report)
    assert "cold unknown, warm 0.0%" in str(report)


def test_impossible_slots():
    with pytest.raises(ValueError, match="num_slots=1 is below top-k=2"):
        small().report(1)


def test_on_the_command_line(tmp_path, capsys):
    long_trace(200).save(tmp_path / "trace.safetensors")
    assert cli.main(["trace", "report", str(tmp_path / "trace.safetensors"), "--num-slots", "12"]) == 0
    assert capsys.readouterr().out == f"{long_trace(200).report(12)}\n"
    assert cli.main(["trace", "report", str(tmp_path / "absent")]) == 1
    assert "no trace at" in capsys.readouterr().err
    np.savez(tmp_path / "routes.npz", ids=np.array([[[0, 1]]]), weights=np.float32([[[0.5, 0.5]]]))
    assert cli.main(["trace", "report", str(tmp_path / "routes.npz"), "--num-experts", "9", "--num-slots", "2"]) == 0
    assert "top-2 of 9 experts" in capsys.readouterr().out


def test_real_routes(test_data):
    """Hits of the whole trace at 8 slots of 32, counted independently: 645,603 of 981,120."""
    report = mc.load_trace(test_data / "gptoss20b_mmlu20.npz").report()
    assert report.num_slots == 8
    mean = (report.hit_rate_cold + report.hit_rate_warm).mean() / 2
    assert mean == pytest.approx(645_603 / 981_120, abs=1e-12)
    assert report.warnings == ()
