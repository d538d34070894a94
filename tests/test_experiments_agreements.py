"""Chapter 91's measurement: what agrees is counted, and what does not agree is found and said."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import moecache as mc
from moecache.experiments import agreements, agreements_replay, tiny_families
from moecache.experiments import agreements_report as report
from moecache.families import family_of, model_shape
from moecache.reference.loading import load_model

LABELS = [mc.FETCH_EVERY_MISS.label, mc.SPEED_FIRST.label]


@pytest.fixture(scope="module")
def case():
    return agreements.case_of("olmoe", 26, 0.25)


@pytest.fixture(scope="module")
def frame():
    return agreements.measure("olmoe", LABELS, 26, 0.25)


def test_everything_is_compared_and_agrees(frame):
    counted = frame.groupby("comparison").size()
    assert set(counted.index) == set(agreements.COMPARISONS)
    assert counted[agreements.FETCHED_RUNTIME] == 1
    assert counted.drop([agreements.FETCHED_EMULATOR, agreements.FETCHED_RUNTIME]).eq(len(LABELS)).all()
    assert report.disagreements(frame).empty
    assert frame["num_calls"].eq(26 * 3 * 3).all()


def test_there_is_something_to_disagree_about(frame):
    few = frame[~frame["comparison"].isin([agreements.RESIDENT_EMULATOR, agreements.RESIDENT_RUNTIME])]
    assert few["num_misses"].gt(30).all()
    assert frame.loc[frame["comparison"] == agreements.RESIDENT_RUNTIME, "num_misses"].eq(0).all()


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_families_are_what_they_are_called(family):
    model = tiny_families.tiny_model(family)
    assert model.config.model_type == family
    assert family_of(model) is not None
    shape = model_shape(model)
    assert (shape.num_experts, shape.top_k) == (tiny_families.NUM_EXPERTS, tiny_families.TOP_K)
    again = tiny_families.tiny_model(family)
    assert all(bool((one == other).all()) for one, other in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_every_family_agrees_under_every_preset(family):
    frame = agreements.measure(family, [policy.label for policy in mc.PRESETS], 60, 0.25)
    assert report.disagreements(frame).empty


def test_a_simulator_that_decides_otherwise_is_found(case, monkeypatch):
    monkeypatch.setattr(agreements, "simulate", lambda trace, policy, num_slots: mc.simulate(trace, policy, num_slots + 1))
    frame = pd.DataFrame(agreements._stepped_rows(case, mc.SPEED_FIRST))
    assert report.disagreements(frame)["comparison"].tolist() == [agreements.RUNTIME_REPLAY]
    assert "do NOT agree: 3. replay of the runtime (olmoe, speed-first)" in report.values(frame)["verdict"]
    assert report.by_model(frame)["agrees"].tolist() == ["no"]


def test_a_trace_that_lost_something_on_disk_is_found(case, monkeypatch):
    right = agreements.replay_in_new_process

    def other_slots(traces, policies, num_slots, folder):
        return right(traces, policies, num_slots + 1, folder)

    monkeypatch.setattr(agreements, "replay_in_new_process", other_slots)
    frame = pd.DataFrame(agreements._replay_rows(case, [mc.FETCH_EVERY_MISS]))
    assert (frame["differing"] > 20).all()
    assert len(report.disagreements(frame)) == 1


def test_a_runtime_that_computes_otherwise_is_found(case, monkeypatch):
    def wrong(one, other):
        return float(np.abs(one - other).max()) + np.finfo(np.float32).tiny

    monkeypatch.setattr(agreements, "_largest", wrong)
    frame = agreements.compare(case, [mc.FETCH_EVERY_MISS])
    exact = [name for name in agreements.COMPARISONS if name not in (agreements.REPLAY, agreements.RUNTIME_REPLAY, agreements.ORDER)]
    assert report.disagreements(frame)["comparison"].tolist() == exact


def test_differences_are_counted_by_calls_arrivals_and_masses():
    model, text = tiny_families.tiny_model("olmoe"), np.arange(30)
    one = mc.emulate(model, text, mc.SPEED_FIRST, 5).decisions
    assert agreements.num_differing(one, one) == 0
    outcome, mass = one.outcome.copy(), one.substituted_mass.copy()
    outcome[3, 1, 2] ^= 1
    mass[7, 0] += 0.25
    other = mc.DecisionLog(outcome, one.computed_ids, one.evicted_ids, one.arrivals[1:], mass)
    assert agreements.num_differing(one, other) == 3
    assert not one.is_equal(other)


def test_the_replaying_process_says_why_it_failed(case, tmp_path):
    trace = mc.record(case.model, case.texts)
    with pytest.raises(RuntimeError, match=r"failed: [\s\S]*num_slots"):
        agreements_replay.replay_in_new_process([trace], [mc.FETCH_EVERY_MISS], 1, tmp_path)


def test_the_page_counts_what_was_compared(frame):
    table = report.summary(frame)
    assert table["comparison"].tolist() == list(agreements.COMPARISONS)
    assert table["calls"].sum() == frame["num_calls"].sum()
    values = report.values(frame)
    assert values["verdict"] == f"All {len(frame)} comparisons agree."
    assert values["largest_exact"] == 0.0
    assert (values["families"], values["trained"]) == ("olmoe", "none")
    assert values["num_policies"] == 2


def test_a_reference_model_reads_held_out_text():
    case = agreements.case_of("reference-64", 12, 0.25)
    assert [text.size for text in case.texts] == [8, 4]
    assert case.num_slots == 16
    assert model_shape(case.model) == model_shape(load_model("reference-64"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: agreements.measure("olmoe", ["no such rule"], 26, 0.25), "no such rule.*choose among fetch every miss"),
        (lambda: agreements.case_of("olmoe", 3, 0.25), "num_tokens=3"),
        (lambda: tiny_families.tiny_model("bert"), "bert.*choose one of qwen3_next"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
