"""Chapter 04's measurement on a tiny model: every rule in every setting, paired, complete, and refused when it says nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models

from moecache.experiments import misses_report, misses_that_matter
from moecache.policy import FETCH_EVERY_MISS


def texts(num_documents=7, num_tokens=60):
    generator = np.random.default_rng(1)
    domains = ["code", "prose"]
    return [
        SimpleNamespace(tokens=generator.integers(0, 60, num_tokens), domain=domains[i % 2], cluster=f"c{i // 2}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def frame():
    model = tiny_models.qwen3_next(num_experts=32, top_k=10)
    return misses_that_matter.measure(model, texts(), "tiny", resident_fraction=0.4, lru_hit_rate=0.7, num_warmup_documents=2)


def test_every_rule_reads_every_scored_document(frame):
    num_rules = len(misses_that_matter.miss_rules(10)) + 1
    assert frame.groupby(["regime", "num_slots"])["policy"].nunique().tolist() == [num_rules] * 4
    assert frame.groupby(["regime", "num_slots", "policy"])["document"].nunique().eq(5).all()
    assert set(frame["document"]) == {f"document {i}" for i in range(2, 7)}


def test_calls_add_up_and_fetching_costs_nothing(frame):
    assert (frame[["hits", "fetched", "forced", "substituted", "dropped"]].sum(axis=1) == frame["calls"]).all()
    fetching = frame[frame["family"] == "fetch every miss"]
    assert (fetching["mean_difference_nats"] == 0).all()
    assert (fetching["substituted"] == 0).all()
    assert (frame.loc[frame["policy"] == "substitute every miss", "fetched"] == 0).all()


def test_rules_substitute_the_ranks_they_name(frame):
    first_only = frame[frame["policy"] == "only rank 0 substituted"]
    assert (first_only["substituted"] == first_only["first_choices_substituted"]).all()
    assert first_only["substituted"].sum() > 0
    for rule in ("first choice", "first 3", "only rank 9 substituted", "0.15 rule"):
        assert frame.loc[frame["policy"] == rule, "first_choices_substituted"].sum() == 0


def test_admitted_anyway_brings_every_substituted_expert(frame):
    """Nobody waits, but a copy is under way for every substituted call, so the cache adapts and hits more often."""
    everything = frame[frame["policy"] == "substitute every miss"].groupby("regime")[["hits", "copies", "substituted"]].sum()
    assert everything.loc["stays_out", "copies"] == 0
    assert everything.loc["admitted_anyway", "copies"] == pytest.approx(everything.loc["admitted_anyway", "substituted"], rel=0.05)
    assert everything.loc["admitted_anyway", "hits"] > everything.loc["stays_out", "hits"]
    with pytest.raises(ValueError, match="choose one of stays_out, admitted_anyway"):
        misses_that_matter.in_regime(FETCH_EVERY_MISS, "sideways")


def test_report_has_every_value_of_the_prose(frame):
    table = misses_report.tables(frame)
    values = misses_report.values(frame, table, 2, 0.7)
    assert values["num_scored"] == 5
    assert values["rank0_calls"] < values["gate015_calls"] < 1
    shown = misses_report.regime_table(table, values["slots_first"])
    assert shown.shape == (len(misses_that_matter.miss_rules(10)), 7)
    assert shown["calls, %"].between(0, 100).all()
    assert misses_report.planned_pairs(frame)[0] == ("only rank 0 substituted", "only rank 9 substituted")


def test_a_window_without_evictions_is_refused():
    model = tiny_models.qwen3_next(num_experts=32, top_k=10)
    with pytest.raises(misses_that_matter.TooFewEvictions, match="at least 100"):
        misses_that_matter.measure(model, texts(3, 12), "tiny", num_warmup_documents=1, num_slots=30)
    with pytest.raises(ValueError, match="leaves none of 3 documents"):
        misses_that_matter.measure(model, texts(3), "tiny", num_warmup_documents=3)
