"""Capacity and eviction: what is counted is what the simulator decides, and what is concluded follows from the counts."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import moecache as mc
from moecache.experiments import capacity, capacity_crossover, capacity_slots, one_step
from moecache.experiments import capacity_report as report
from moecache.figures import capacity as drawn
from moecache.figures import hit_rate_by_capacity
from moecache.synthetic import synthetic_trace

FRACTIONS = [0.125, 0.25, 0.5]
WARMUP = 100
HALF_LIFE = 32


@pytest.fixture(scope="module")
def trace() -> mc.RouterTrace:
    return synthetic_trace(900, 2, 64, 4, document_tokens=100, has_scores=False)


@pytest.fixture(scope="module")
def compared() -> list[mc.Policy]:
    return capacity.policies(["lru", "fifo", "plain_count", "decayed_count"], [HALF_LIFE])


@pytest.fixture(scope="module")
def documents(trace: mc.RouterTrace, compared: list[mc.Policy]) -> pd.DataFrame:
    return capacity.by_document(trace, compared, FRACTIONS, WARMUP)


@pytest.fixture(scope="module")
def layers(trace: mc.RouterTrace, compared: list[mc.Policy]) -> pd.DataFrame:
    return capacity.by_layer(trace, compared, FRACTIONS, WARMUP)


def cut(num_tokens: int, starts: list[int]) -> mc.RouterTrace:
    """A trace of one layer whose documents start at these tokens."""
    ids = np.tile([[[0, 1]]], (num_tokens, 1, 1))
    is_start = np.isin(np.arange(num_tokens), starts)
    return mc.RouterTrace.from_arrays(ids, np.full(ids.shape, 0.5), document_start=is_start, num_experts=8)


def test_policies_are_named_by_eviction_and_half_life():
    found = capacity.policies(["lru", "plain_count", "decayed_count"], [8, 128])
    assert [policy.label for policy in found] == ["LRU", "plain count", "decayed count (8)", "decayed count (128)"]
    assert all(policy.waits_for_every_miss for policy in found)
    assert found[0].label == report.LRU


def test_shares_become_slots_between_top_k_and_all_experts():
    assert capacity.slots_of([0.25, 0.0625, 0.01, 1.0], 512, 10) == [10, 32, 128, 512]
    with pytest.raises(ValueError, match=r"capacity fraction 1\.5 must lie above 0 and at most 1"):
        capacity.slots_of([0.5, 1.5], 512, 10)


def test_the_warm_window_starts_with_a_document():
    trace = cut(30, [0, 12, 20])
    assert [capacity.warm_start(trace, tokens) for tokens in (0, 1, 12, 13)] == [0, 12, 12, 20]
    assert capacity.warm_start(cut(30, [0]), 7) == 7
    with pytest.raises(ValueError, match="warmup_tokens=21 leaves none of the trace's 3 documents"):
        capacity.warm_start(trace, 21)
    with pytest.raises(ValueError, match="warmup_tokens=30 leaves none"):
        capacity.warm_start(cut(30, [0]), 30)


def test_a_trace_of_one_document_is_compared_by_blocks():
    starts, units = capacity.unit_starts(cut(110, [0]), 10)
    assert units == "blocks"
    assert starts.tolist() == list(range(10, 110, 10))
    assert capacity.unit_starts(cut(110, [0, 20, 40, 60]), 20)[0].tolist() == [20, 40, 60]


def test_documents_and_layers_add_up_to_the_same_hits(documents: pd.DataFrame, layers: pd.DataFrame):
    warm = layers[layers["window"] == "warm"]
    keys = ["policy", "num_slots"]
    pd.testing.assert_frame_equal(documents.groupby(keys)[["calls", "hits"]].sum(), warm.groupby(keys)[["calls", "hits"]].sum())


def test_cold_and_warm_add_up_to_the_whole_run(trace: mc.RouterTrace, layers: pd.DataFrame):
    run = mc.simulate(trace, mc.FETCH_EVERY_MISS, 16)
    ours = layers[(layers["policy"] == "LRU") & (layers["num_slots"] == 16)]
    assert ours["hits"].sum() == run.summary()["hits"]
    assert ours["evictions"].sum() == run.summary()["evictions"]
    assert ours["calls"].sum() == run.summary()["calls"]
    warm = run.summary(capacity.warm_start(trace, WARMUP))
    rate = report.rate_at(report.window_rates(layers), "LRU", 16, "warm")
    assert rate == pytest.approx(warm["hit_rate"])


def test_intervals_hold_the_rate_and_more_slots_hit_more(documents: pd.DataFrame):
    rates = report.hit_rates(documents)
    assert ((rates["low"] < rates["hit_rate"]) & (rates["hit_rate"] < rates["high"])).all()
    for _, rows in rates.groupby("policy"):
        assert rows.sort_values("num_slots")["hit_rate"].is_monotonic_increasing


def test_comparisons_are_paired_by_document(documents: pd.DataFrame):
    tests = report.compare(documents, [("FIFO", "LRU"), ("plain count", "LRU")], [8, 16])
    rates = report.hit_rates(documents)
    for row in tests.to_dict("records"):
        expected = report.rate_at(rates, row["policy"], row["num_slots"]) - report.rate_at(rates, "LRU", row["num_slots"])
        assert row["difference"] == pytest.approx(expected)
        assert row["low"] <= row["difference"] <= row["high"]
    swapped = report.compare(documents, [("LRU", "FIFO")], [8])
    assert swapped["difference"].iloc[0] == pytest.approx(-tests["difference"].iloc[0])


def test_gains_carry_the_half_life_and_name_the_best(documents: pd.DataFrame):
    gains = report.gains(documents, [capacity.label("decayed_count", HALF_LIFE)], [8, 16])
    assert gains["half_life_tokens"].to_list() == [HALF_LIFE, HALF_LIFE]
    best = report.best_half_life(gains, 16)
    assert best["best_half_life"] == HALF_LIFE
    assert best["best_gain"] == pytest.approx(100 * gains["difference"].iloc[1])


def test_lru_needs_no_fewer_slots_than_found(trace: mc.RouterTrace):
    start = capacity.warm_start(trace, WARMUP)
    target = capacity_slots.target_slots(trace, [0.8], WARMUP).iloc[0]
    assert target["hit_rate"] >= 0.8
    fewer = mc.simulate(trace, mc.FETCH_EVERY_MISS, int(target["num_slots"]) - 1).summary(start)
    assert fewer["hit_rate"] < 0.8
    assert target["resident_fraction"] == target["num_slots"] / 64
    assert capacity_slots.slots_for_hit_rate(trace, 2.0, WARMUP) == 64


def test_lru_is_worth_its_own_slots(trace: mc.RouterTrace, compared: list[mc.Policy]):
    worth = capacity_slots.worth_in_slots(trace, compared, [16], WARMUP)
    assert report.rate_at(worth, "LRU", 16, "lru_slots") == 16
    assert report.rate_at(worth, "FIFO", 16, "lru_slots") <= 16


def test_the_replay_of_single_calls_turns_the_trap_into_three_times_the_misses():
    trap = one_step.make_trace(one_step.TRAP)
    row = capacity.sequential_misses(trap, [mc.FETCH_EVERY_MISS], [4], 0).iloc[0]
    assert (row["misses"], row["sequential_misses"], row["inflation"]) == (2, 6, 3.0)


def test_an_inverted_ranking_is_one_where_the_winner_is_not_among_the_best():
    rows = [(4, "a", 10, 20), (4, "b", 10, 15), (8, "a", 5, 9), (8, "b", 6, 7), (16, "a", 1, 2), (16, "b", 2, 3)]
    misses = pd.DataFrame(rows, columns=["num_slots", "policy", "misses", "sequential_misses"])
    assert report.inverted_rankings(misses) == 1


def test_too_few_evictions_stop_the_chapter(layers: pd.DataFrame):
    windows = report.window_rates(layers)
    report.check_evictions(windows, [8])
    short = windows.assign(fewest_evictions=99)
    with pytest.raises(report.TooFewEvictions, match=r"with LRU and 8 slots some layer evicts only 99 times.*at least 100"):
        report.check_evictions(short, [8])
    report.check_evictions(short, [])


def test_neighbours_share_experts_inside_documents_only():
    ids = np.array([[[0, 1]], [[1, 2]], [[3, 4]], [[4, 3]]])
    weights = np.full(ids.shape, 0.5)
    one = mc.RouterTrace.from_arrays(ids, weights, num_experts=8)
    assert capacity.describe(one, 0)["neighbour_overlap"].item() == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    two = mc.RouterTrace.from_arrays(ids, weights, num_experts=8, document_start=[True, False, True, False])
    assert capacity.describe(two, 0)["neighbour_overlap"].item() == pytest.approx((0.5 + 1.0) / 2)


def test_facts_name_the_model_and_the_windows(trace: mc.RouterTrace):
    facts = capacity.describe(trace, WARMUP).iloc[0]
    assert (facts["num_tokens"], facts["num_layers"], facts["num_experts"], facts["top_k"]) == (900, 2, 64, 4)
    assert facts["units"] == "documents"
    assert facts["num_units"] == trace.document_start[facts["first_warm_token"] :].sum()


def test_published_rates_are_shown_for_their_own_geometry_only():
    rates = pd.DataFrame({"policy": ["LRU", "FIFO"], "num_slots": [64, 64], "hit_rate": [0.5, 0.4]})
    assert report.beside_public(rates, 512, 10) == "LRU hits at 64 slots 50.0% here and 67.0% in llama.cpp PR 27861."
    assert len(report.public_rates(32, 4)) == 0
    assert "no published hit rate for 32 experts, top-4" in report.beside_public(rates, 32, 4)


def test_words_follow_the_interval():
    assert report.verdict(0.01, 0.02) == "hits more often than"
    assert report.verdict(-0.02, -0.01) == "hits less often than"
    assert report.verdict(-0.01, 0.02) == "cannot be told apart from"
    tests = pd.DataFrame({"num_slots": [8, 8, 16], "policy": ["a", "b", "a"], "difference": [-0.1, 0.2, 0.3]})
    assert report.extreme(tests, 8, is_best=True) == "b"
    assert report.extreme(tests[tests["policy"] == "b"], 8, is_best=False) == "LRU"


def test_a_number_that_was_not_measured_is_refused(documents: pd.DataFrame):
    with pytest.raises(ValueError, match="there are 0 rows for policy 'LRU' at 7 slots"):
        report.rate_at(report.hit_rates(documents), "LRU", 7)


def test_a_trace_file_is_part_of_the_key(tmp_path, trace: mc.RouterTrace):
    path = tmp_path / "trace.safetensors"
    trace.save(path)
    parameters, inputs = capacity.key_of(str(path), 0, 16, 1000)
    assert parameters == {"num_experts": 0}
    assert len(inputs["trace"]) == 64
    assert capacity.open_trace(str(path)).num_tokens == 900
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        capacity.key_of(str(tmp_path / "absent.npz"), 0, 16, 1000)


def test_without_a_file_the_reference_model_reads_its_held_out_text(monkeypatch):
    import tiny_models

    from moecache import reference

    texts = [np.arange(1, 9, dtype=np.int32) + shift for shift in range(3)]
    asked = {}

    def held_out_documents(**settings):
        asked.update(settings)
        return [SimpleNamespace(tokens=text) for text in texts]

    model = tiny_models.qwen3_next().eval()
    monkeypatch.setattr(reference, "held_out_documents", held_out_documents)
    monkeypatch.setattr(reference, "load_model", lambda name: model)
    capacity.open_trace.cache_clear()
    recorded = capacity.open_trace("", 0, 3, 8)
    capacity.open_trace.cache_clear()
    assert asked["num_documents"] == 3
    assert asked["num_tokens"] == 8
    assert recorded.document_start.tolist() == [token % 8 == 0 for token in range(24)]
    assert np.array_equal(recorded.topk_ids[8:16], mc.record(model, texts[1]).topk_ids)
    assert recorded.selection_scores is None


def test_every_figure_draws_what_was_measured(
    trace: mc.RouterTrace, compared: list[mc.Policy], documents: pd.DataFrame, layers: pd.DataFrame
):
    names = [policy.label for policy in compared]
    gains = report.gains(documents, [names[3]], [8, 16])
    never = report.gains(documents, ["plain count"], [8, 16])
    figure = drawn.gain_by_half_life(gains, never, source="synthetic")
    assert isinstance(figure, Figure)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["8 slots", "16 slots"]
    by_layer = report.layer_rates(layers, names, 16)
    assert len(drawn.hit_rate_by_layer(by_layer).axes[0].lines) == 4
    misses = capacity.sequential_misses(trace, compared[:2], [4, 8], WARMUP)
    heights = drawn.inflation_by_capacity(misses).axes[0].lines[0].get_ydata()
    assert np.allclose(heights, misses[misses["policy"] == "LRU"]["inflation"])
    with pytest.raises(ValueError, match="the frame lacks difference, low, high"):
        drawn.gain_by_half_life(documents)


def test_published_points_join_the_legend_below(documents: pd.DataFrame):
    points = pd.DataFrame({"source": ["somebody"], "num_slots": [16], "hit_rate": [0.5]})
    figure = drawn.add_public_points(hit_rate_by_capacity(report.hit_rates(documents)), points)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[-1] == "LRU, somebody"
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_a_static_cache_is_calibrated_on_the_text_before_the_warm_window(trace: mc.RouterTrace):
    start = capacity.warm_start(trace, WARMUP)
    (policy,) = capacity.policies(["static"], [])
    run = capacity.replay(trace, policy, 16, start, warmup_tokens=start)
    counts = np.bincount(trace.topk_ids[:start, 0].ravel(), minlength=64)
    residents = set(np.argsort(-counts, kind="stable")[:16].tolist())
    assert run.decisions is not None
    is_hit = run.decisions.outcome[:, 0] == mc.Outcome.HIT
    assert np.array_equal(is_hit, np.isin(trace.topk_ids[:, 0], list(residents)))
    with pytest.raises(ValueError, match="calibrated on the tokens before the warm window"):
        capacity.replay(trace, policy, 16, 0)


def test_the_gap_to_the_best_is_split_into_bypass_and_future(trace: mc.RouterTrace):
    compared = capacity.policies(["lru", "belady", "belady_bypass"], [])
    assert [policy.label for policy in compared] == ["LRU", "Belady", "Belady with bypass"]
    documents = capacity.by_document(trace, compared, [0.125, 0.25], WARMUP)
    split = report.gap_split(documents, "Belady", "Belady with bypass")
    assert split["policy"].to_list() == ["LRU", "LRU"]
    assert np.allclose(split["unavoidable"] + split["bypass"] + split["future"], split["miss_rate"])
    assert (split[["unavoidable", "bypass", "future"]] > 0).all(axis=None)
    rates = report.hit_rates(documents)
    forced, best, lru = (1 - report.rate_at(rates, name, 8) for name in ("Belady", "Belady with bypass", "LRU"))
    assert split["bypass_share"].iloc[0] == pytest.approx((forced - best) / (lru - best))
    panels = drawn.gap_parts(split).axes
    assert [axes.get_xlabel() for axes in panels] == ["Misses (of the calls) at 8 slots", "Misses (of the calls) at 16 slots"]


def test_the_map_is_the_difference_of_two_replays(trace: mc.RouterTrace):
    found = capacity_crossover.hit_rate_map(trace, [HALF_LIFE], [0.25], WARMUP)
    start = capacity.warm_start(trace, WARMUP)
    decayed = mc.simulate(trace, mc.Policy(eviction="decayed_count", half_life=HALF_LIFE), 16).summary(start)["hit_rate"]
    lru = mc.simulate(trace, mc.FETCH_EVERY_MISS, 16).summary(start)["hit_rate"]
    assert found["half_life_tokens"].to_list() == [HALF_LIFE, 0.0]
    assert found["gain"].iloc[0] == pytest.approx(decayed - lru)


def test_a_memory_longer_than_its_topics_loses_to_recency():
    maps = capacity_crossover.synthetic_maps([(128, 2.0)], 1500, 1, [8, 512], [0.125])
    gains = maps.set_index("half_life_tokens")["gain"]
    assert gains[8] > 0 > gains[512]
    values = report.map_values(maps, maps)
    assert (values["short_topic"], values["long_memory"]) == (128, 512)
    assert values["worst_loss"] == pytest.approx(-100 * gains[512])
    figure = drawn.gain_maps(report.map_panels(maps.drop(columns=["topic_tokens", "topic_strength"]), maps, "own"))
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["own", "topics of 128 tokens"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["8", "512", "never"]
    assert len(figure.axes[0].texts) == 3


def test_percentages_are_written_out():
    table = report.in_percent(pd.DataFrame({"rate": [0.125, np.nan], "n": [1, 2]}), ["rate"])
    assert table["rate"].to_list() == ["12.5%", ""]
    assert table["n"].to_list() == [1, 2]
