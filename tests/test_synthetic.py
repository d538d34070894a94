"""Synthetic traces: the public figures at the defaults, the same trace from the same arguments, and what each knob moves."""

import numpy as np
import pytest

import moecache as mc
from moecache.cache import rank_order
from moecache.synthetic import CHUNK_TOKENS, mean_entropy

SMALL = {"num_tokens": 1500, "num_layers": 1, "num_experts": 128, "top_k": 4, "document_tokens": 150, "has_scores": False}


def lru_hit_rate(trace, num_slots, first_token=0):
    run = mc.simulate(trace, mc.FETCH_EVERY_MISS, num_slots, keep="summary", warmup_tokens=first_token)
    return run.summary(first_token)["hit_rate"]


def mean_hit_rate(**knobs):
    """Over four seeds, so that a knob is seen through the luck of one draw."""
    return np.mean([lru_hit_rate(mc.synthetic_trace(**{**SMALL, **knobs}, seed=seed), 24, 100) for seed in range(4)])


def test_defaults_meet_the_public_figures_within_two_points():
    trace = mc.synthetic_trace(6000, 3, seed=1)
    assert trace.shape == mc.ModelShape(3, 512, 10)
    assert lru_hit_rate(trace, 64, 500) == pytest.approx(0.67, abs=0.02)
    assert lru_hit_rate(trace, 128, 500) == pytest.approx(0.81, abs=0.02)
    assert mean_entropy(trace.selection_scores) == pytest.approx(0.90, abs=0.02)


def test_the_same_arguments_give_the_same_trace():
    first, second = (mc.synthetic_trace(300, 2, 64, 4, seed=9) for _ in range(2))
    assert np.array_equal(first.selection_scores, second.selection_scores)
    assert np.array_equal(first.topk_ids, second.topk_ids)
    assert np.array_equal(first.gate_weights, second.gate_weights)
    assert not np.array_equal(first.topk_ids, mc.synthetic_trace(300, 2, 64, 4, seed=10).topk_ids)


def test_more_tokens_or_layers_only_add():
    small = mc.synthetic_trace(CHUNK_TOKENS - 30, 1, 64, 4)
    large = mc.synthetic_trace(2 * CHUNK_TOKENS + 7, 3, 64, 4)
    assert np.array_equal(large.selection_scores[: small.num_tokens, :1], small.selection_scores)
    assert np.array_equal(large.document_start[: small.num_tokens], small.document_start)
    without = mc.synthetic_trace(CHUNK_TOKENS - 30, 1, 64, 4, has_scores=False)
    assert without.selection_scores is None
    assert np.array_equal(without.topk_ids, small.topk_ids)


def test_calls_are_the_routers_own_top_k():
    trace = mc.synthetic_trace(200, 2, 40, 5, router_entropy=0.5)
    scores = trace.selection_scores.astype(np.float64)
    expected = np.argsort(-scores, axis=-1, kind="stable")[..., :5]
    assert np.array_equal(np.sort(trace.topk_ids, axis=-1), np.sort(expected, axis=-1))
    weights = np.exp(np.take_along_axis(scores, trace.topk_ids.astype(np.int64), -1))
    np.testing.assert_allclose(trace.gate_weights, weights / weights.sum(-1, keepdims=True), rtol=1e-5)
    assert np.array_equal(rank_order(trace.gate_weights, trace.topk_ids), np.broadcast_to(np.arange(5), (200, 2, 5)))


def test_it_says_that_it_is_synthetic_with_every_parameter(tmp_path):
    trace = mc.synthetic_trace(20, 1, 16, 2, seed=4, persistence=0.5, router_entropy=[0.8], expert_bytes=100)
    trace.save(tmp_path / "trace.safetensors")
    source = mc.load_trace(tmp_path / "trace.safetensors").source
    assert source["kind"] == "synthetic"
    assert (source["seed"], source["persistence"], source["router_entropy"]) == (4, 0.5, [0.8])
    knobs = {"popularity_skew", "num_topics", "topic_strength", "topic_overlap", "hot_fraction", "document_tokens", "generator_version"}
    assert knobs <= set(source)
    assert trace.shape.expert_bytes == 100


@pytest.mark.parametrize(
    ("knob", "colder", "warmer"),
    [
        ("popularity_skew", 0.2, 1.5),
        ("persistence", 0.3, 0.95),
        ("topic_strength", 0.0, 2.5),
    ],
)
def test_a_knob_of_locality_raises_the_hit_rate(knob, colder, warmer):
    assert mean_hit_rate(**{knob: warmer}) > mean_hit_rate(**{knob: colder}) + 0.05


@pytest.mark.parametrize(
    ("colder", "warmer"),
    [
        ({"topic_overlap": 0.0}, {"topic_overlap": 1.0}),  # what one topic warms serves the next
        ({"document_tokens": 10}, {"document_tokens": 400}),
        ({"num_topics": 12}, {"num_topics": 1}),
    ],
)
def test_topics_that_change_cost_hits(colder, warmer):
    strong = {"topic_strength": 3.0, "document_tokens": 30, "popularity_skew": 0.0, "hot_fraction": 0.15}
    assert mean_hit_rate(**{**strong, **warmer}) > mean_hit_rate(**{**strong, **colder}) + 0.02


def test_hot_sets_have_the_size_and_overlap_asked_for():
    trace = mc.synthetic_trace(
        4000,
        1,
        100,
        5,
        num_topics=2,
        topic_strength=50.0,
        hot_fraction=0.2,
        topic_overlap=0.5,
        popularity_skew=0.0,
        document_tokens=500,
        has_scores=False,
    )
    called = [frozenset(trace.topk_ids[part].ravel().tolist()) for part in trace.document_slices() if part.stop - part.start > 200]
    first, second = set(called)  # two topics: each document calls one hot set or the other
    assert len(first) == len(second) == 20
    assert len(first & second) >= 10


def test_entropy_moves_gate_weights_and_not_calls():
    flat, sharp = (mc.synthetic_trace(300, 1, 128, 4, router_entropy=entropy) for entropy in (0.95, 0.6))
    assert mean_entropy(flat.selection_scores) == pytest.approx(0.95, abs=0.01)
    assert mean_entropy(sharp.selection_scores) == pytest.approx(0.6, abs=0.02)
    assert sharp.gate_weights[..., 0].mean() > flat.gate_weights[..., 0].mean() + 0.1
    same = np.sort(flat.topk_ids, axis=-1) == np.sort(sharp.topk_ids, axis=-1)
    assert same.mean() > 0.98  # the rest are ties after rounding


def test_documents_have_the_mean_length_and_start_afresh():
    trace = mc.synthetic_trace(20_000, 1, 8, 2, document_tokens=100, has_scores=False)
    lengths = np.array([part.stop - part.start for part in trace.document_slices()])[:-1]
    assert lengths.mean() == pytest.approx(100, rel=0.1)
    assert lengths.min() >= 50
    assert lengths.max() <= 150
    trace = mc.synthetic_trace(20_000, 1, 64, 4, document_tokens=20, persistence=0.99, topic_strength=0.0, has_scores=False)
    shared = np.array([np.intersect1d(a, b).size for a, b in zip(trace.topk_ids[1:, 0], trace.topk_ids[:-1, 0], strict=True)])
    starts = trace.document_start[1:]
    assert shared[~starts].mean() > shared[starts].mean() + 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0}, "num_tokens=0 must be at least 1"),
        ({"top_k": 20, "num_experts": 16}, "impossible model shape"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"popularity_skew": -0.1}, "popularity_skew=-0.1"),
        ({"popularity_skew": float("nan")}, "popularity_skew=nan"),
        ({"persistence": 1.0}, "persistence=1.0 must be at least 0 and below 1"),
        ({"num_topics": 0}, "num_topics=0"),
        ({"topic_strength": float("inf")}, "topic_strength=inf"),
        ({"topic_overlap": 1.1}, "topic_overlap=1.1"),
        ({"hot_fraction": 2}, "hot_fraction=2"),
        ({"document_tokens": 0}, "document_tokens=0"),
        ({"router_entropy": 1.0}, "router_entropy=1.0 must be above 0 and below 1"),
        ({"router_entropy": [0.9, 0.9, 0.9]}, "one for each of 2 layers"),
    ],
)
def test_a_parameter_out_of_range_is_named_with_its_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        mc.synthetic_trace(**{"num_tokens": 10, "num_layers": 2, **arguments})
