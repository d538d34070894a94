"""Designs: equal numbers in every document and layer, matched weights, and what a run made of its plan."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from tiny_models import documents, qwen3_next

import moecache as mc
from moecache import designs

LENGTHS = (40, 30, 25)
STARTS = np.concatenate([np.arange(length) == 0 for length in LENGTHS])
NUM_TOKENS, NUM_LAYERS, TOP_K = sum(LENGTHS), 3, 8
BOUNDS = designs.document_bounds(STARTS)


@pytest.fixture(scope="module")
def weights():
    """Gate weights [T, L, K] in rank order."""
    drawn = np.random.default_rng(0).dirichlet(np.full(TOP_K, 3.0), (NUM_TOKENS, NUM_LAYERS)).astype(np.float32)
    return -np.sort(-drawn, axis=-1)


@pytest.fixture(scope="module")
def trace():
    return mc.record(qwen3_next(), documents(lengths=LENGTHS))


def sites_by_document(marks):
    return np.array([[marks[start:stop, layer].sum() for layer in range(marks.shape[1])] for start, stop in BOUNDS])


def test_kinds_are_drawn_equally_often_in_every_document_and_layer(weights):
    eligible = [designs.in_band(weights, rank, 0.1, 0.18) for rank in (1, 2, 3)]
    drawn = designs.draw_alike(eligible, STARTS, most=6, seed=3)
    numbers = [sites_by_document(marks) for marks in drawn]
    fewest = np.min([sites_by_document(marks & designs.not_last(STARTS)[:, None, None]) for marks in eligible], axis=0)
    for rank, marks, number in zip((1, 2, 3), drawn, numbers, strict=True):
        assert not (marks & ~eligible[rank - 1]).any()
        assert np.array_equal(number, np.minimum(fewest, 6))
        assert not marks[[stop - 1 for _, stop in BOUNDS]].any()
        assert marks.any(axis=(0, 1)).tolist() == [place == rank for place in range(TOP_K)]
    again, other = (designs.draw_alike(eligible, STARTS, most=6, seed=seed) for seed in (3, 4))
    assert np.array_equal(again, drawn)
    assert not np.array_equal(other, drawn)


def test_steps_are_drawn_as_calls_are():
    (drawn,) = designs.draw_alike([np.ones((NUM_TOKENS, NUM_LAYERS), bool)], STARTS, most=5)
    assert (sites_by_document(drawn) == 5).all()


def test_random_tokens_are_a_fraction_of_each_document():
    marks = designs.random_tokens(STARTS, 0.25)
    assert [marks[start:stop].sum() for start, stop in BOUNDS] == [round(0.25 * (length - 1)) for length in LENGTHS]
    assert not marks[[stop - 1 for _, stop in BOUNDS]].any()


@pytest.mark.parametrize(("rank", "gap"), [(0, 3), (1, 3), (2, 3), (0, 5)])
def test_matching_in_a_step_against_trying_every_set(weights, rank, gap):
    heavy, light = designs.match_in_step(weights, rank, gap)
    num_matched = 0
    for token in range(NUM_TOKENS):
        for layer in range(NUM_LAYERS):
            row = weights[token, layer].astype(np.float64)
            fitting = [
                (len(chosen), -abs(row[list(chosen)].sum() / row[rank] - 1), chosen)
                for size in range(2, TOP_K)
                for chosen in combinations(range(rank + gap, TOP_K), size)
                if abs(row[list(chosen)].sum() / row[rank] - 1) <= 0.04
            ]
            best = max(fitting, default=(0, 0, ()))
            assert np.flatnonzero(light[token, layer]).tolist() == list(best[2])
            assert np.flatnonzero(heavy[token, layer]).tolist() == [rank] * bool(fitting)
            num_matched += bool(fitting)
    assert num_matched > 10


def test_pairs_have_equal_weights_in_the_same_document_and_layer(weights):
    is_first = np.random.default_rng(5).random(weights.shape) < 0.4
    eligible = [designs.of_ranks(weights, 2) & kind for kind in (is_first, ~is_first)]
    pairs = designs.pair_by_weight(*eligible, weights, STARTS, most=7, tolerance=0.05)
    numbers = [sites_by_document(marks) for marks in pairs]
    assert np.array_equal(*numbers)
    assert numbers[0].max() == 7
    assert not any((marks & ~allowed).any() for marks, allowed in zip(pairs, eligible, strict=True))
    for start, stop in BOUNDS:
        for layer in range(NUM_LAYERS):
            sides = [np.sort(weights[start:stop, layer][marks[start:stop, layer]]) for marks in pairs]
            np.testing.assert_allclose(sides[1], sides[0], rtol=0.11)
    assert not designs.pair_by_weight(*eligible, weights, STARTS, most=7, tolerance=0.0)[0].any()


def test_spaced_calls_leave_whole_windows():
    marks = designs.spaced_calls(STARTS, (NUM_TOKENS, NUM_LAYERS, TOP_K), 8, ranks=(0, 0, 5), seed=1)
    assert set(np.unique(np.argwhere(marks)[:, 2])) == {0, 5}
    for start, stop in BOUNDS:
        tokens = np.flatnonzero(marks[start:stop].any(axis=(1, 2)))
        assert (marks[start:stop].sum(axis=(1, 2)) <= 1).all()
        assert (np.diff(tokens) == 8).all()
        assert tokens.size > 1
        assert tokens[-1] + 8 < stop - start


def test_misses_and_ages_are_those_of_the_running_model(trace):
    run = mc.intervene(qwen3_next(), documents(lengths=LENGTHS), np.zeros(trace.topk_ids.shape, bool), 6)
    assert np.array_equal(designs.missed_calls(trace, 6), run.decisions.outcome == mc.Outcome.FETCHED)
    assert np.array_equal(designs.call_ages(trace), run.extra["ages"])


def test_realised_sites_count_and_weigh_what_was_replaced(trace):
    model, texts = qwen3_next(), documents(lengths=LENGTHS)
    named = designs.of_ranks(trace.gate_weights, 0, 2) & designs.random_tokens(STARTS, 0.5)[:, None, None]
    run = mc.intervene(model, texts, named, 6)
    table = designs.realised_sites(run)
    assert table["num_named"].tolist() == [named[..., 0].sum(), 0, named[..., 2].sum(), 0]
    assert table["num_replaced"].sum() == run.summary()["substituted"]
    assert table["mass"].sum() == pytest.approx(run.summary()["substituted_mass"], rel=1e-5)
    assert np.isnan(table["mean_gate_weight"][1])
    assert table["mean_gate_weight"][0] > table["mean_gate_weight"][2] > 0
    with pytest.raises(ValueError, match="emulator"):
        designs.realised_sites(mc.emulate(model, texts, mc.GATE_015, 6))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda w: designs.draw_alike([designs.in_band(w, 0, 2.0, 3.0)], STARTS, 5), "no eligible call"),
        (lambda w: designs.draw_alike([w > 0], STARTS, 0), "at least 1"),
        (lambda w: designs.random_tokens(STARTS, 0.0), "above 0"),
        (lambda w: designs.match_in_step(w, 4, 3), "two are needed"),
        (lambda w: designs.spaced_calls(STARTS, w.shape, 100, (0,)), "long enough"),
        (lambda w: designs.spaced_calls(STARTS, w.shape, 0, (0,)), "at least 1"),
    ],
)
def test_refused_designs(weights, call, told):
    with pytest.raises(ValueError, match=told):
        call(weights)
