"""From misses to seconds: times are the cost model's, ratios and crossings follow from them, predictors are as accurate as they say."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import moecache as mc
from moecache.cost import estimate_seconds
from moecache.experiments import seconds, seconds_copies
from moecache.experiments import seconds_report as report
from moecache.experiments import seconds_words as words
from moecache.figures import seconds as drawn
from moecache.figures import seconds_copies as drawn_copies
from moecache.hardware import Hardware
from moecache.synthetic import synthetic_trace

MACHINES = ["pcie4", "sata"]
SETTING = seconds.Setting(0.25, 0.25, 48)
KIN = [
    ("fetch every miss", mc.FETCH_EVERY_MISS),
    ("threshold and first choice", mc.GATE_015),
    ("threshold and first choice", mc.QUALITY_FIRST),
    ("substitute every miss", mc.SUBSTITUTE_EVERY_MISS),
]


@pytest.fixture(scope="module")
def traces() -> dict[str, mc.RouterTrace]:
    recorded = synthetic_trace(320, 2, 128, 8, document_tokens=40)
    return {"recorded": recorded, "synthetic": synthetic_trace(160, 3, 128, 8, document_tokens=40, seed=1)}


@pytest.fixture(scope="module")
def times(traces: dict[str, mc.RouterTrace]) -> pd.DataFrame:
    return seconds.by_policy(traces, KIN, MACHINES, [6.0, 1.69], SETTING)


@pytest.fixture(scope="module")
def corners(traces: dict[str, mc.RouterTrace]) -> pd.DataFrame:
    return seconds_copies.by_corner(traces, MACHINES, 6.0, 0.5, SETTING)


@pytest.fixture(scope="module")
def prefetch(traces: dict[str, mc.RouterTrace]) -> pd.DataFrame:
    bases = [mc.FETCH_EVERY_MISS, mc.QUALITY_FIRST]
    return seconds_copies.by_predictor(traces, bases, MACHINES, 6.0, [0.5, 1.0], [1, 8], SETTING)


def test_a_time_is_the_cost_models_scaled_to_one_number_of_layers(traces, times):
    trace = traces["recorded"]
    run = mc.simulate(trace, mc.QUALITY_FIRST, 32)
    expected = estimate_seconds(run, "pcie4", round(1.69 * 2**20)).summary(SETTING.start(trace))["seconds_per_token"]
    row = report.where(times, trace="recorded", policy="quality-first", hardware="pcie4", expert_mebibytes=1.69).iloc[0]
    assert row["ms_per_token"] == pytest.approx(1000 * 48 / 2 * expected)
    assert row["hit_rate"] == pytest.approx(run.summary(SETTING.start(trace))["hit_rate"])


def test_the_parts_of_a_time_add_up_and_only_copies_stall(times):
    parts = times[["compute_ms", "waiting_ms", "stall_ms"]].sum(axis=1)
    assert np.allclose(parts, times["ms_per_token"])
    stalls = times.groupby("policy")["stall_ms"].max()
    assert stalls["fetch every miss"] == stalls["0.15 rule"] == 0
    assert stalls["quality-first"] > 0
    floor = times[times["policy"] == "substitute every miss"]
    assert (floor["waiting_ms"] == 0).all()
    assert (
        report.value_at(times, "ms_per_token", trace="recorded", policy="0.15 rule", hardware="sata", expert_mebibytes=6.0)
        > floor["ms_per_token"].min()
    )


def test_the_units_of_a_trace_add_up_to_its_warm_window(traces, times):
    units = seconds.by_unit(traces["recorded"], KIN[:2], ["pcie4"], 6.0, SETTING)
    rows = report.where(units, policy="fetch every miss")
    mean = 1000 * 48 / 2 * rows["seconds"].sum() / rows["num_tokens"].sum()
    place = {"trace": "recorded", "policy": "fetch every miss", "hardware": "pcie4", "expert_mebibytes": 6.0}
    assert mean == pytest.approx(report.value_at(times, "ms_per_token", **place))


def test_a_faster_link_never_slows_fetching_and_its_own_rate_changes_nothing(traces, times):
    own = Hardware.profile("pcie4").link_bytes_per_second / 1e9
    curve = seconds.by_link_rate(traces, KIN, "pcie4", [1, own, 64], [6.0], SETTING)
    rows = report.where(curve, trace="recorded", policy="fetch every miss").sort_values("gigabytes_per_second")
    assert rows["ms_per_token"].is_monotonic_decreasing
    place = {"trace": "recorded", "policy": "fetch every miss", "hardware": "pcie4", "expert_mebibytes": 6.0}
    assert rows["ms_per_token"].iloc[1] == pytest.approx(report.value_at(times, "ms_per_token", **place))
    rated = report.with_speed_up(curve, ["trace", "gigabytes_per_second", "expert_mebibytes"])
    assert report.value_at(rated, "speed_up", trace="recorded", policy="fetch every miss", gigabytes_per_second=64) == 1
    panels = words.link_panels({"GPU": rated}, [("GPU", 6.0)])
    lines = drawn.speed_up_by_link_rate(panels, 2.5).axes[0].lines
    assert [line.get_label() for line in lines[: len(KIN)]] == [policy.label for _, policy in KIN]


def test_a_crossing_lies_between_its_neighbours():
    assert report.crossing([0.0, 1.0, 2.0], [3.0, 1.0, 0.0], 2.0) == pytest.approx(0.5)
    assert report.crossing([1.0, 4.0], [3.0, 1.0], 2.0, is_log=True) == pytest.approx(2.0)
    assert report.crossing([2.0, 0.0, 1.0], [0.0, 3.0, 2.0], 2.0) == pytest.approx(1.0)
    assert report.crossing([0.0, 1.0], [0.0, 1.0], 1.0) == 1.0
    assert np.isnan(report.crossing([0.0, 1.0], [0.0, 1.0], 2.0))


def test_words_for_a_crossing_say_on_which_side_it_holds():
    def curve(speed_ups):
        columns = {"trace": "recorded", "policy": "a", "expert_mebibytes": 6.0, "gigabytes_per_second": [1.0, 4.0], "speed_up": speed_ups}
        return pd.DataFrame(columns)

    said = [words.up_to_rate(curve(pair), "recorded", "a", 6.0, 2.0) for pair in ([3, 1], [1, 3], [3, 4], [1, 1.5])]
    assert said == ["up to about 2 GB/s", "from about 2 GB/s", "at every rate tried", "at no rate tried"]


def test_comparisons_are_ratios_of_the_same_documents():
    rows = [("a", "pcie4", unit, 10, 0.5 * (unit + 1)) for unit in range(4)] + [
        ("b", "pcie4", unit, 10, 1.0 * (unit + 1)) for unit in range(4)
    ]
    units = pd.DataFrame(rows, columns=["policy", "hardware", "unit", "num_tokens", "seconds"])
    units.loc[0, "seconds"] = 0.4
    found = report.compare(units, [("a", "b")], ["pcie4"]).iloc[0]
    assert found["speed_up"] == pytest.approx((2.0**3 * 2.5) ** 0.25)
    assert 1.999 <= found["low"] < found["speed_up"] < found["high"] <= 2.501
    swapped = report.compare(units, [("b", "a")], ["pcie4"]).iloc[0]
    assert swapped["speed_up"] == pytest.approx(1 / found["speed_up"])


def test_a_pair_changes_places_only_when_the_order_turns():
    rows = [
        ("a", "as given", 1.0, 10.0), ("b", "as given", 1.0, 20.0), ("c", "as given", 1.0, 20.1),
        ("a", "x", 2.0, 30.0), ("b", "x", 2.0, 20.0), ("c", "x", 2.0, 10.0),
        ("a", "y", 2.0, 10.0), ("b", "y", 2.0, 10.05), ("c", "y", 2.0, 10.05),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["policy", "constant", "factor", "ms_per_token"]).assign(hardware="pcie4")
    swaps = report.order_changes(frame)
    assert swaps["num_pairs"].to_list() == [2, 2]  # b and c had no order worth keeping
    assert swaps["num_changed"].to_list() == [2, 0]
    said = words.swap_values(swaps)
    assert (said["most_swapped"], said["swap_constant"], said["num_unchanged"], said["num_changes"]) == (2, "x", 1, 2)


def test_sensitivity_starts_from_the_time_as_given(traces, times):
    answers = seconds.sensitivity(traces["recorded"], KIN[:1], ["pcie4"], 6.0, [0.5, 2.0], SETTING)
    place = {"trace": "recorded", "policy": "fetch every miss", "hardware": "pcie4", "expert_mebibytes": 6.0}
    assert report.value_at(answers, "ms_per_token", constant="as given") == report.value_at(times, "ms_per_token", **place)
    bars = report.elasticities(answers, ["fetch every miss"], 2.0)
    assert report.value_at(bars, "elasticity", constant="link_bytes_per_second") < 0
    assert len(drawn.elasticity_bars(bars).axes[0].patches) == len(bars)


def test_the_front_holds_what_nothing_beats():
    columns = {"hardware": "pcie4", "policy": ["a", "b", "c"], "ms_per_token": [1.0, 2.0, 3.0], "substituted_mass": [0.3, 0.1, 0.2]}
    assert report.with_front(pd.DataFrame(columns))["is_front"].to_list() == [True, True, False]


def test_every_rung_is_a_policy_of_its_own():
    labels = [policy.label for _, policy in seconds.rungs()]
    assert len(set(labels)) == len(labels)
    assert {family for family, _ in [*seconds.rungs(), *seconds.compared()]} <= set(drawn.STYLES)
    assert all(policy.mass_threshold == 0.5 for _, policy in seconds.rungs() if policy.label.endswith("admitting"))


def test_corners_differ_in_one_thing_at_a_time(corners):
    assert len(seconds_copies.corners(0.5)) == 8
    assert (corners.loc[~corners["is_admitting"], "copies_per_step"] == 0).all()
    assert (corners.loc[corners["is_admitting"], "copies_per_step"] > 0).all()
    table = words.admission_table(corners, "recorded", MACHINES)
    assert table["rule"].to_list() == ["0.15 rule", "0.15 rule", "first choice", "first choice"]
    said = words.admission_values(corners, MACHINES)
    before, after = (report.where(corners, trace="recorded", hardware="sata", is_admitting=flag, **words.CORNER) for flag in (False, True))
    assert said["admit_change_sata"] == pytest.approx(after["ms_per_token"].iloc[0] / before["ms_per_token"].iloc[0] - 1)
    assert said["admit_hit"] == after["hit_rate"].iloc[0]


def test_a_higher_threshold_copies_less_and_substitutes_more(traces, corners):
    admission = seconds_copies.by_admission(traces, MACHINES, 6.0, [0.0, 0.5, 2.0], [1, 4], SETTING)
    ratios = words.admission_ratios(admission, corners, "recorded")
    rows = report.where(ratios, hardware="sata", delay_tokens=1).sort_values("mass_threshold")
    assert rows["mass_threshold"].to_list() == [0.0, 0.5, 2.0]
    assert rows["copies_per_step"].is_monotonic_decreasing
    assert rows["substituted_mass"].is_monotonic_increasing
    preset = report.where(corners, trace="recorded", hardware="sata", is_admitting=True, **words.CORNER)
    assert rows["ms_per_token"].iloc[1] == preset["ms_per_token"].iloc[0]
    said = words.delay_values(ratios, 0.5, "sata")
    assert (said["delay_first"], said["delay_last"]) == (1, 4)
    assert words.delay_table(ratios, 0.5, MACHINES)["delay, tokens"].to_list() == [1, 4]
    assert len(drawn_copies.time_by_threshold(rows).axes) == 2


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_a_predictor_is_as_accurate_as_it_says(traces, accuracy):
    trace = traces["recorded"]
    predicted = seconds_copies.predict_with_accuracy(trace, accuracy)
    assert seconds_copies.accuracy_of(predicted) == pytest.approx(accuracy, abs=0.03)
    assert predicted.predicted_ids is not None
    ordered = np.sort(predicted.predicted_ids, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()


def test_a_wrong_prediction_is_one_of_the_best_that_were_not_called(traces):
    trace = traces["recorded"]
    predicted = seconds_copies.predict_with_accuracy(trace, 0.0).predicted_ids
    assert predicted is not None
    scores, top_k = trace.selection_scores.astype(np.float32), trace.shape.top_k
    bound = np.sort(scores, axis=-1)[..., -2 * top_k]
    assert (np.take_along_axis(scores, predicted.astype(np.int64), -1) >= bound[..., None]).all()
    with pytest.raises(ValueError, match=r"accuracy=1\.2 is outside 0\.\.1"):
        seconds_copies.predict_with_accuracy(trace, 1.2)
    with pytest.raises(ValueError, match="needs the scores of all experts"):
        seconds_copies.predict_with_accuracy(synthetic_trace(8, 1, 16, 2, has_scores=False), 0.5)


def test_a_perfect_prediction_leaves_no_miss_and_its_waste_is_counted(prefetch):
    rows = report.where(prefetch, trace="recorded", policy="fetch every miss", hardware="pcie4")
    perfect = report.where(rows, predictor="accuracy 1", max_prefetches=8).iloc[0]
    assert perfect["hit_rate"] == 1.0
    assert perfect["waiting_ms"] == 0.0
    half = report.where(rows, predictor="accuracy 0.5", max_prefetches=8).iloc[0]
    assert half["wasted_mebibytes"] > perfect["wasted_mebibytes"]
    total = half["useful_mebibytes"] + half["wasted_mebibytes"]
    assert total == pytest.approx(6.0 * 48 * half["prefetches_per_step"])
    without = report.where(rows, predictor="none").iloc[0]
    assert without["ms_per_token"] == without["ms_without"] == half["ms_without"]


def test_where_prefetching_starts_to_pay(prefetch):
    even = report.break_even(prefetch, 8)
    assert len(even) == 4
    assert set(report.break_even(prefetch, 1)["trace"]) == {"recorded", "synthetic"}
    columns = {"trace": "recorded", "policy": "a", "hardware": "b", "max_prefetches": 4, "ms_without": 1.0}
    made = pd.DataFrame({**columns, "predictor": ["accuracy 0", "accuracy 1"], "accuracy": [0.0, 1.0], "ms_per_token": [1.5, 0.5]})
    assert report.break_even(made, 4)["accuracy"].to_list() == [0.5]
    assert report.break_even(made.assign(ms_per_token=[0.9, 0.8]), 4)["accuracy"].to_list() == [0.0]
    never = made.assign(ms_per_token=[1.9, 1.1])
    assert words.break_even_table(never, 4)["b"].to_list() == ["never"]


def test_the_prefetch_tables_and_figure_show_what_was_measured(prefetch):
    lines, points = words.prefetch_panels(prefetch, "recorded", [("fetch every miss", 8)], MACHINES)
    assert len(lines) == 4
    assert np.allclose(lines["ratio"], lines["ms_per_token"] / lines["ms_without"])
    assert set(points["predictor"]) == {"previous token"}
    figure = drawn_copies.time_by_accuracy(lines, points)
    assert len(figure.axes[0].lines) == 2 + 2 + 1
    table = words.prefetch_table(prefetch, "recorded", "fetch every miss", "pcie4", 8)
    assert table["predictor"].to_list() == ["none", "previous token", "accuracy 0.5", "accuracy 1"]
    said = words.prefetch_values(prefetch, MACHINES, 8)
    assert said["hit_with"] > said["hit_without"]
    assert said["previous_copies"] == 0  # under LRU what was called a token ago is resident


def test_the_stale_gate_has_a_point_where_a_trace_brings_predictions(traces, prefetch):
    assert "no predictions of its own" in words.stale_story(prefetch, MACHINES, 8)
    foreseen = {"recorded": seconds_copies.predict_with_accuracy(traces["recorded"], 0.8)}
    rows = seconds_copies.by_predictor(foreseen, [mc.FETCH_EVERY_MISS], ["sata"], 6.0, [0.5], [8], SETTING)
    gate = report.where(rows, predictor="stale gate").iloc[0]
    said = words.stale_story(rows, MACHINES, 8)
    assert f"{gate['accuracy']:.0%} are called" in said
    assert f"to {gate['hit_rate']:.1%}" in said
    assert f"{gate['ms_per_token'] / gate['ms_without'] - 1:+.0%} on sata" in said


def test_bars_and_points_draw_the_rows(times):
    rows = report.where(times, trace="recorded", expert_mebibytes=6.0)
    figure = drawn.time_parts(rows)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [policy.label for _, policy in KIN]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["PCIe 4.0 x16, GPU", "SATA disk, CPU"]
    fronts = report.with_front(rows).assign(is_admitting=False)
    assert drawn.time_by_mass(fronts, names=["0.15 rule"]).axes[0].get_yscale() == "log"
    assert sum(words.front_values(fronts, MACHINES).values()) > 0
    table = words.machine_table(times, "recorded", 6.0)
    assert table["policy"].to_list() == [policy.label for _, policy in KIN]
    assert table["sata"].iloc[0] == report.value_at(rows, "ms_per_token", policy="fetch every miss", hardware="sata")
    assert words.machines([Hardware.profile("sata")], [6.0, 1.69])["machine"].to_list() == ["sata"]


def test_what_was_not_measured_is_refused(times):
    with pytest.raises(ValueError, match=r"no row with {'policy': 'nobody'}"):
        report.where(times, policy="nobody")
    with pytest.raises(ValueError, match=r"\d+ rows with {'policy': '0.15 rule'}: one is needed"):
        report.value_at(times, "ms_per_token", policy="0.15 rule")


def test_facts_of_the_traces(traces):
    facts = seconds.describe(traces, SETTING)
    assert facts["trace"].to_list() == ["recorded", "synthetic"]
    assert facts["num_slots"].to_list() == [32, 32]
    assert facts["first_warm_token"].iloc[0] == SETTING.start(traces["recorded"])


def test_without_a_file_the_reference_model_is_recorded_with_scores(monkeypatch):
    import tiny_models

    from moecache import reference

    texts = [np.arange(1, 9, dtype=np.int32) + shift for shift in range(2)]
    monkeypatch.setattr(reference, "held_out_documents", lambda **_: [SimpleNamespace(tokens=text) for text in texts])
    monkeypatch.setattr(reference, "load_model", lambda name: tiny_models.qwen3_next().eval())
    for opened in (seconds.open_traces, seconds.open_recorded):
        opened.cache_clear()
    traces = seconds.open_traces("", 2, 8, 4)
    for opened in (seconds.open_traces, seconds.open_recorded):
        opened.cache_clear()
    assert traces["recorded"].document_start.tolist() == [token % 8 == 0 for token in range(16)]
    assert traces["recorded"].selection_scores is not None
    assert traces["recorded"].predicted_ids is not None
    assert traces["synthetic"].shape.num_layers == 48
