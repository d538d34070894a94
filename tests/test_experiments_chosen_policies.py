"""Chapter 10's measurement on a tiny model: the design is complete, its corners are the presets, and contrasts add up."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models

from moecache import figures, stats
from moecache.chapters.source import find_chapters
from moecache.experiments import chosen_policies, chosen_policies_report, contrasts_report, paired_runs
from moecache.experiments import chosen_policies_seconds_report as saved
from moecache.figures import chosen
from moecache.policy import FIRST_CHOICE, GATE_015, QUALITY_FIRST, SPEED_FIRST

NUM_SLOTS = 12
ROOT = Path(__file__).resolve().parents[1]


def texts(num_documents=7, num_tokens=60):
    generator = np.random.default_rng(1)
    domains = ["code", "prose"]
    return [
        SimpleNamespace(tokens=generator.integers(0, 60, num_tokens), domain=domains[i % 2], cluster=f"c{i}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def reading():
    return paired_runs.read(tiny_models.qwen3_next(num_experts=32, top_k=10), texts(), 2)


@pytest.fixture(scope="module")
def frame(reading):
    frames = [chosen_policies.measure(reading, NUM_SLOTS, rule) for rule in chosen_policies.RULES]
    return paired_runs.all_rows(lambda name: frames[int(name)], ["0", "1"]).assign(model="tiny", regime=chosen_policies.REGIME)


def test_corners_are_the_presets():
    found = {cell.policy.label: cell.policy for cell in chosen_policies.cells(10)}
    assert len(found) == 12
    for preset in (GATE_015, FIRST_CHOICE, QUALITY_FIRST, SPEED_FIRST):
        assert found[preset.label] == preset


def test_thresholds_follow_the_number_of_calls():
    assert {cell.policy.gate_threshold for cell in chosen_policies.cells(8, ["0.15 rule"])} == {1.5 / 8}
    assert {cell.policy.gate_threshold for cell in chosen_policies.cells(8, ["first choice"])} == {np.inf}


def test_every_policy_reads_every_scored_document(frame):
    assert frame.groupby("policy")["document"].nunique().eq(5).all()
    assert frame["policy"].nunique() == 12
    assert (frame[["hits", "fetched", "forced", "substituted", "dropped"]].sum(axis=1) == frame["calls"]).all()


def test_only_admission_copies(frame):
    copies = frame.groupby("admission")["copies"].sum()
    assert copies["none"] == 0
    assert 0 < copies["at 0.5"] < copies["anyway"]


def test_parts_add_up_to_both_changes(frame):
    found = chosen_policies_report.effects(frame).set_index(["rule", "part"])["effect"]
    for rule in chosen_policies.RULES:
        parts = found.loc[rule]
        assert parts["eviction alone"] + parts["admission alone"] + parts["interaction"] == pytest.approx(parts["both changes"])
        assert parts["eviction alone"] + parts["admission, once decayed"] == pytest.approx(parts["both changes"])


def test_a_contrast_of_two_policies_is_their_paired_test(frame):
    """The general way through contrasts gives what the plain paired test of two policies gives."""
    plain = stats.paired_tests(frame, [("quality-first", "0.15 rule")], unit="cluster").iloc[0]
    contrast = contrasts_report.table_of(frame, {"both": {"quality-first": 1, "0.15 rule": -1}}).iloc[0]
    names = ["difference_nats", "low", "high", "dz", "smallest_detectable_nats", "p_holm"]
    assert contrast[names].to_list() == pytest.approx(plain[names].to_list())
    with pytest.raises(ValueError, match="no policy is labelled 'slow-first'"):
        contrasts_report.table_of(frame, {"both": {"slow-first": 1}})


def test_capacities_are_three_and_fetching_moves_less_at_more_slots(reading):
    table = chosen_policies.capacities(reading, 0.5, 0.75)
    lru = table[table["eviction"] == "LRU"].sort_values("num_slots")
    assert sorted(table["place"].unique()) == [0, 1, 2]
    assert lru["fetches"].is_monotonic_decreasing
    assert lru.set_index("place").loc[1, "hit_rate"] >= 0.75
    assert np.allclose(table["fetches"], table["top_k"] * (1 - table["hit_rate"]))


def test_report_shows_every_policy(frame, reading):
    at = chosen_policies.capacities(reading, 12 / 32, 0.75).assign(model="tiny")
    shown = chosen_policies_report.shown(chosen_policies_report.costs(frame), "tiny", NUM_SLOTS, at)
    assert len(shown) == 14
    assert shown["policy"].head(2).tolist() == ["fetch every miss, LRU", "fetch every miss, decayed count"]
    values = chosen_policies_report.values(frame, at)
    assert values["num_scored"] == 5
    assert values["quality_both_mnat"] == pytest.approx(1000 * (np.log1p(values["quality_chosen"]) - np.log1p(values["quality_bare"])))


def test_figures_show_one_panel_a_rule_and_capacity(frame):
    drawn = chosen.two_by_two(chosen_policies_report.costs(frame))
    assert len(drawn.axes) == 2
    found = chosen_policies_report.effects(frame)
    forest = chosen.effect_forest(found.assign(setting="tiny"))
    assert [label.get_text() for label in forest.axes[0].get_yticklabels()][-1] == "both changes"
    assert figures.KINDS[0] in forest.axes[-1].get_title(loc="right")


def test_another_order_keeps_the_losses_with_their_documents(reading):
    turned = reading.reordered([0, 1, 6, 5, 4, 3, 2])
    assert turned.documents[2] is reading.documents[6]
    assert np.array_equal(turned.exact_losses[2], reading.exact_losses[6], equal_nan=True)
    with pytest.raises(ValueError, match="beginning with"):
        reading.reordered([2, 1, 0, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="leaves none of 2 documents"):
        paired_runs.read(reading.model, texts(2), 2)


# Seconds that chapter 09 measured


def timed_blocks(models=("tiny",)):
    """Two blocks a policy and link: fetching every miss takes 4 ms a token, the chosen policies 2, the bare rules 2.5."""
    seconds = {"fetch every miss": 4e-3, "quality-first": 2e-3, "speed-first": 2e-3, "0.15 rule": 2.5e-3, "first choice": 2.5e-3}
    rows = [
        {"model": model, "link": link, "policy": policy, "block": block, "num_tokens": 5, "seconds": 5 * each, "hit": 30, "fetched": 5,
         "forced": 5, "substituted": 10, "seconds_waiting": 1e-3}
        for model in models for link in ("disk", "0.5 GB/s") for policy, each in seconds.items() for block in range(3)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_seconds_are_told_against_fetching_and_the_bare_rule():
    blocks = timed_blocks()
    shown = saved.table(blocks, "tiny")
    assert shown["link"].tolist() == ["disk", "disk", "0.5 GB/s", "0.5 GB/s"]
    assert shown["policy"].tolist() == ["quality-first", "speed-first"] * 2
    assert set(shown["times as fast as fetching [95 %]"]) == {"2.00 [2.00, 2.00]"}
    assert set(shown["time / bare rule's [95 %]"]) == {"0.80 [0.80, 0.80]"}
    assert shown["ms a token"].tolist() == pytest.approx([2.0] * 4)
    assert shown["fetched, %"].tolist() == pytest.approx([20.0] * 4)
    assert shown["waiting, %"].tolist() == pytest.approx([10.0] * 4)
    story = saved.story(timed_blocks(("tiny", "other")), ["tiny", "other"])
    assert story.count("quality-first is 2.00 [2.00, 2.00] times as fast as fetching every miss") == 2
    assert "the bare first choice rule" in story


def test_without_seconds_the_story_says_where_they_come_from(monkeypatch):
    monkeypatch.setattr(saved.seconds_per_token, "kept", lambda *_: None)
    asked = {"num_layers": 2, "hidden_size": 512, "expert_width": 64, "warm_tokens": 1, "measured_tokens": 2, "gigabytes_per_second": [1.0]}
    blocks = saved.kept_blocks(["reference-512"], 0.25, asked)
    assert blocks.empty
    assert "moecache run 09" in saved.story(blocks, ["reference-512"])
    monkeypatch.setattr(saved.seconds_per_token, "kept", lambda question, _: SimpleNamespace(frame=timed_blocks([question.model_name])))
    assert saved.kept_blocks(["a", "b"], 0.25, asked)["model"].unique().tolist() == ["a", "b"]


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_chapter_10_asks_for_the_seconds_that_chapter_09_measures(profile):
    chapters = find_chapters(ROOT / "notebooks")
    measured, shown = (chapters[number].values(profile) for number in ("09", "10"))
    same = {"num_layers": "timed_layers", "hidden_size": "timed_hidden_size", "expert_width": "timed_expert_width",
            "warm_tokens": "timed_warm_tokens", "measured_tokens": "timed_tokens", "gigabytes_per_second": "timed_gigabytes_per_second",
            "resident_fraction": "resident_fraction", "model_names": "model_names"}  # fmt: skip
    assert {name: measured[name] for name in same} == {name: shown[other] for name, other in same.items()}
