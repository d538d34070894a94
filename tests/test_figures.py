"""The figures: what they show is what they were given, and nothing is left behind."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure
from paired_frames import SyntheticPolicy, paired_frame

from moecache import figures, stats
from moecache.cache import ExpertCache
from moecache.figures.style import new_figure, shared_panels, spread, styled, two_and_five
from moecache.kernel import Outcome
from moecache.policy import Policy
from moecache.trace import DecisionLog, ModelShape

POLICIES = {
    "fetch every miss": SyntheticPolicy("fetch every miss", 0.0, 0.0, 0.0),
    "substitute every miss": SyntheticPolicy("substitute every miss", 0.9, 0.40, 0.39, 0.04),
    "only first choices": SyntheticPolicy("one rank", 0.6, 0.05, 0.03, 0.03),
    "0.15 rule": SyntheticPolicy("threshold and first choice", 0.115, 0.33, 0.37),
    "first choice": SyntheticPolicy("first J", 0.118, 0.331, 0.373),
    "random resident": SyntheticPolicy("control", 0.117, 0.332, 0.372),
    "threshold 0.10": SyntheticPolicy("threshold", 0.033, 0.25, 0.304),
    "threshold 0.08": SyntheticPolicy("threshold", 0.0005, 0.10, 0.131),
}


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return stats.policy_table(paired_frame(POLICIES), num_draws=500)


@pytest.fixture
def capacities() -> pd.DataFrame:
    pairs = itertools.product(("lru", "decayed_count", "belady"), (32, 64, 128, 256, 320))
    return pd.DataFrame([{"eviction": e, "num_slots": n, "hit_rate": n / 400 + len(e) / 100} for e, n in pairs])


def _texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def _tiny_run(seed: int, num_tokens: int = 60) -> tuple[ExpertCache, DecisionLog, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = ModelShape(num_layers=2, num_experts=9, top_k=3)
    logits = rng.normal(size=(num_tokens, 2, 9)).astype(np.float16)
    ids = np.argsort(-logits.astype(np.float32), axis=-1)[..., :3]
    weights = np.exp(np.take_along_axis(logits.astype(np.float32), ids, -1))
    weights /= weights.sum(-1, keepdims=True)
    policy = Policy(wait_ranks=(0,), eviction="lru", admission="background", mass_threshold=0.4, admission_delay=2)
    cache = ExpertCache(shape, policy, 4, cold_start="empty" if seed % 2 else "first")
    log = cache.decide(ids, weights, logits)
    assert log is not None
    return cache, log, ids, weights


@pytest.mark.parametrize("seed", range(4))
def test_the_told_slots_are_those_of_the_cache(seed: int) -> None:
    cache, log, ids, weights = _tiny_run(seed)
    start = [-1] * 4 if seed % 2 else list(range(4))
    for layer in range(2):
        history = figures.slot_history(log, ids, weights, start, layer)
        assert list(history[-1].after) == cache.state.expert_in_slot[layer].tolist()
        assert any(step.landed for step in history)
        for step in history:
            for call in step.calls:
                is_resident = call.expert in step.before
                assert is_resident == (call.outcome == Outcome.HIT)
                if call.outcome == Outcome.SUBSTITUTED:
                    assert call.computed_by in step.before
                    assert step.after[call.slot] == call.computed_by


def test_residents_that_do_not_belong_to_the_log_are_refused() -> None:
    _, log, ids, weights = _tiny_run(0)
    with pytest.raises(ValueError, match="give the residents at the log's first token"):
        figures.slot_history(log, ids, weights, [5, 6, 7, 8])
    with pytest.raises(ValueError, match=r"must be \[T,L,K\] of the same run"):
        figures.slot_history(log, ids[:5], weights[:5], range(4))


def test_a_step_picture_names_what_happened_to_each_call() -> None:
    shape = ModelShape(num_layers=1, num_experts=8, top_k=3)
    ids = np.array([[[0, 4, 1]], [[6, 4, 7]]])
    weights = np.array([[[0.6, 0.3, 0.1]], [[0.55, 0.35, 0.1]]], np.float32)
    scores = np.array([[[9, 0, 5, 1, 8, 0, 0, 0]], [[0, 0, 5, 1, 8, 0, 9, 2]]], np.float16)
    policy = Policy(wait_ranks=(0,), admission="background", mass_threshold=0.3)
    log = ExpertCache(shape, policy, 4).decide(ids, weights, scores)
    assert log is not None
    figure = figures.step_picture(log, ids, weights, range(4))
    texts = _texts(figure)
    assert {"Token 0", "Token 1", "hit", "E2 stands in,\ncopy asked for", "SIMULATED"} <= set(texts)
    assert "for E2" in texts  # E4 landed in E2's slot: never called, and the lower id of E2 and E3
    assert "fetched, E3 out" in texts
    one = figures.step_picture(log, ids, weights, range(4), steps=[1], name="expert {}".format)
    assert "Token 0" not in _texts(one)
    assert "expert 6   0.55" in _texts(one)
    assert "Its first call" in _texts(figures.step_picture(log, ids, weights, range(4), steps=[1], titles=["Its first call"]))
    for steps, message in (([2], "step 2 does not exist"), ([], "0 steps were asked for")):
        with pytest.raises(ValueError, match=message):
            figures.step_picture(log, ids, weights, range(4), steps=steps)


def test_the_forest_shows_each_policy_at_its_increase_dearest_on_top(table: pd.DataFrame) -> None:
    figure = figures.forest(table)
    costs = figure.axes[0]
    labels = [tick.get_text() for tick in costs.get_yticklabels()]
    expected = table[table["increase"] != 0].sort_values("increase")
    assert labels == list(expected["policy"])
    drawn = [bar.lines[0].get_xdata()[0] for bar in costs.containers]
    assert sorted(drawn) == pytest.approx(sorted(100 * expected["increase"]))
    row = expected.set_index("policy").loc["only first choices"]
    assert f"+{100 * row['increase']:.1f} %" in _texts(figure)


def test_an_interval_that_reaches_zero_is_drawn_not_cut_off(table: pd.DataFrame) -> None:
    assert table.set_index("policy").loc["threshold 0.08", "low"] < 0
    costs = figures.forest(table).axes[0]
    assert costs.get_xscale() == "symlog"
    assert costs.get_xlim()[0] < 100 * table["low"].min()
    clear = table[table["low"] > 0]
    assert figures.forest(clear).axes[0].get_xscale() == "log"


def test_two_regimes_share_the_lines_and_three_are_refused(table: pd.DataFrame) -> None:
    both = [table.assign(regime=regime) for regime in ("admitted_anyway", "stays_out", "third")]
    figure = figures.forest(pd.concat(both[:2]))
    assert len(figure.axes[0].get_yticklabels()) == len(table) - 1
    assert len(figure.axes[0].containers) == 2 * (len(table) - 1)
    with pytest.raises(ValueError, match="3 regimes"):
        figures.forest(pd.concat(both))


def test_points_by_mass_are_where_the_table_says_and_open_for_first_choices(table: pd.DataFrame) -> None:
    axes = figures.increase_by_mass(table).axes[0]
    points = {}
    for bar in axes.containers:
        line = bar.lines[0]
        points[round(100 * line.get_xdata()[0])] = (line.get_ydata()[0], line.get_markerfacecolor())
    for row in table[table["substituted_mass"] > 0].to_dict("records"):
        increase, face = points[round(100 * row["substituted_mass"])]
        if row["policy"] in ("only first choices", "substitute every miss"):
            assert (increase, face) == (pytest.approx(100 * row["increase"]), "white")
        elif row["policy"].startswith("threshold"):
            assert (increase, face) == (pytest.approx(100 * row["increase"]), "#0072B2")


def test_labels_of_neighbouring_points_do_not_overlap(table: pd.DataFrame) -> None:
    figure = figures.increase_by_mass(table)
    figure.draw_without_rendering()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert len(boxes) == 7
    heights = sorted((box.y0 + box.y1) / 2 for box in boxes)
    assert min(np.diff(heights)) > 0.8 * boxes[0].height


def test_spread_moves_labels_as_little_as_it_can() -> None:
    assert spread([0.0, 5.0, 9.0], 2.0) == [0.0, 5.0, 9.0]
    assert spread([4.0, 4.0], 2.0) == [3.0, 5.0]
    np.testing.assert_allclose(spread([0.0, 1.0, 1.5, 9.0], 2.0), [-7 / 6, 5 / 6, 17 / 6, 9.0])


def test_words_that_panels_share_stand_once_between_the_panels_and_the_legend() -> None:
    figure = new_figure(4.0)
    panels = shared_panels(figure, 2, 2, x="Below all", y="Left of all", sharex=True)
    for axes in panels.flat:
        axes.plot([0, 1], [0, 1], label="line")
    legend = figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center")
    assert [_texts(figure).count(words) for words in ("Below all", "Left of all", "line")] == [1, 1, 1]
    figure.draw_without_rendering()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    below, left = (
        next(text for text in figure.findobj(matplotlib.text.Text) if text.get_text() == words).get_window_extent(renderer)
        for words in ("Below all", "Left of all")
    )
    drawn = [axes.get_tightbbox(renderer) for axes in panels.flat]
    assert legend.get_window_extent(renderer).y1 < below.y0 < below.y1 < min(box.y0 for box in drawn)
    assert left.x1 < min(box.x0 for box in drawn)


def test_shared_words_are_centred_on_the_panels_however_long_the_names_of_their_ticks_are() -> None:
    @styled
    def draw() -> Figure:
        figure = new_figure(3.0)
        panels = shared_panels(figure, 1, 2, x="Below both", sharey=True)[0]
        panels[0].set_yticks([0], ["a very long name of a policy that takes much of the width"])
        return figure

    figure = draw()
    figure.draw_without_rendering()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    (words,) = (text for text in figure.findobj(matplotlib.text.Text) if text.get_text() == "Below both")
    box, panels = words.get_window_extent(renderer), [axes.get_window_extent(renderer) for axes in figure.axes]
    assert box.x0 + box.x1 == pytest.approx(panels[0].x0 + panels[1].x1, abs=2.0)


def test_minor_ticks_are_labelled_at_two_and_five_only() -> None:
    labels = [two_and_five(value, None) for value in (0.02, 0.03, 0.05, 0.9, 2.0, 4.0, 500.0)]
    assert labels == ["0.02", "", "0.05", "", "2", "", "500"]


def test_hit_rates_are_drawn_per_eviction_and_ticks_that_collide_stay_bare(capacities: pd.DataFrame) -> None:
    figure = figures.hit_rate_by_capacity(capacities, num_experts=512)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines) == ["LRU", "decayed count", "Belady"]
    np.testing.assert_allclose(lines["LRU"].get_ydata(), capacities[capacities["eviction"] == "lru"]["hit_rate"])
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert labels == ["32\n6.25 %", "64\n12.5 %", "128\n25 %", "256\n50 %", "320\n62.5 %"]
    two = pd.concat([capacities.assign(source=name) for name in ("ours", "theirs")])
    panels = figures.hit_rate_by_capacity(two).axes
    assert [panel.get_title("left") for panel in panels] == ["ours", "theirs"]
    assert [tick.get_text() for tick in panels[0].get_xticklabels()][-2:] == ["256", ""]


def test_gate_weights_are_drawn_per_model() -> None:
    weights = {"ours": [0.5, 0.3, 0.2], "theirs": [0.6, 0.4]}
    frame = pd.DataFrame([{"source": s, "rank": r, "gate_weight": w} for s, row in weights.items() for r, w in enumerate(row)])
    lines = figures.gate_weight_by_rank(frame, highlight="ours").axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == list(weights.values())
    assert lines[0].get_linewidth() > lines[1].get_linewidth()


def test_experts_are_ordered_by_the_domain_that_uses_them_most() -> None:
    counts = {"code": [1, 90, 9, 0], "scripture": [60, 0, 20, 20]}
    frame = pd.DataFrame([{"domain": d, "expert": e, "calls": c} for d, row in counts.items() for e, c in enumerate(row) if c])
    figure = figures.expert_use(frame, title="Layer 0")
    drawn = figure.axes[0].collections[0].get_array()
    # Columns: expert 1 (code), then 0, 2, 3 (scripture); use over the even spread of a quarter, as powers of two.
    expected = np.array([[3.6, 1 / 8, 0.36, 1 / 8], [1 / 8, 2.4, 0.8, 0.8]])
    np.testing.assert_allclose(np.asarray(drawn).reshape(2, 4), np.log2(expected))


def test_every_figure_says_what_kind_of_numbers_it_shows(table: pd.DataFrame, capacities: pd.DataFrame) -> None:
    assert "ESTIMATED, QUICK RUN" in _texts(figures.forest(table, kind="ESTIMATED", is_quick=True))
    assert "MEASURED" in _texts(figures.increase_by_mass(table))
    assert "SIMULATED" in _texts(figures.hit_rate_by_capacity(capacities))
    with pytest.raises(ValueError, match=r"kind is 'GUESSED'.*MEASURED, SIMULATED, ESTIMATED"):
        figures.forest(table, kind="GUESSED")


def test_nothing_global_is_left_behind(table: pd.DataFrame) -> None:
    before = dict(matplotlib.rcParams)
    figures.forest(table)
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


def test_what_cannot_be_drawn_is_answered_with_what_is_wrong(table: pd.DataFrame, capacities: pd.DataFrame) -> None:
    cases = [
        (lambda: figures.forest(table.drop(columns="low")), "lacks low"),
        (lambda: figures.forest(table[:0]), "no rows"),
        (lambda: figures.forest(table[table["increase"] == 0]), "nothing to draw"),
        (lambda: figures.forest(table.assign(family="magic")), "no colour is kept for family 'magic'; known are 'fetch"),
        (lambda: figures.hit_rate_by_capacity(capacities.assign(eviction="mru")), "eviction 'mru'; known are 'lru'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_families_differ_in_colour_and_in_marker() -> None:
    looks = figures.FAMILY_STYLES.values()
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(looks)
