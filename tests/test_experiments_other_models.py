"""The planned comparisons in several models: each model has a question of its own, and rows say what its frame says."""

import pytest

import moecache as mc
from moecache import results
from moecache.experiments import capacity, other_models, seconds
from moecache.synthetic import synthetic_trace

TEXT = {"num_documents": 7, "num_tokens": 40}
NAMES = ["many", "few"]


@pytest.fixture(autouse=True)
def models(monkeypatch, tmp_path) -> dict[str, mc.RouterTrace]:
    """Two made-up models of different geometry."""
    traces = {
        "many": synthetic_trace(400, 2, 128, 8, document_tokens=40),
        "few": synthetic_trace(400, 2, 32, 4, document_tokens=40, seed=1),
    }
    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(tmp_path))
    monkeypatch.setenv("MOECACHE_RESULTS", "own")
    monkeypatch.setattr(capacity, "reference_inputs", lambda name: {"model": name})
    monkeypatch.setattr(capacity, "open_trace", lambda *asked: traces[asked[-1]])
    monkeypatch.setattr(seconds, "open_recorded", lambda *asked: traces[asked[-1]])
    return traces


def test_hits_of_two_models(models):
    pair = capacity.policies(["lru", "decayed_count"], [32])
    frames = other_models.hits_by_model(NAMES, TEXT, pair, [0.125, 0.25], 100, [0.25, 0.5])
    table = other_models.hits_table(frames, pair[1].label)
    assert table[["model", "slots"]].to_numpy().tolist() == [["many", 16], ["many", 32], ["few", 8], ["few", 16]]
    start = capacity.warm_start(models["few"], 100)
    rates = [100 * mc.simulate(models["few"], policy, 16, warmup_tokens=start).summary(start)["hit_rate"] for policy in pair]
    row = table.iloc[3]
    assert [row["LRU"], row["decayed count (32)"]] == pytest.approx(rates)
    assert row["low"] <= row["gain"] <= row["high"]
    assert row["gain"] == pytest.approx(rates[1] - rates[0])
    assert set(table["verdict"]) <= {"hits more often than LRU", "hits less often than LRU", "cannot be told apart from LRU"}


def test_each_model_has_a_key_of_its_own():
    pair = capacity.policies(["lru"], [])
    first = other_models.hits_by_model(NAMES, TEXT, pair, [0.25], 100)
    asked = {result.key for result in results.used() if result.experiment == "02_model"}
    assert len(asked) >= len(NAMES)
    again = other_models.hits_by_model(NAMES[::-1], TEXT, pair, [0.25], 100)
    assert {result.key for result in results.used() if result.experiment == "02_model"} == asked
    assert all(again[name].equals(first[name]) for name in NAMES)


def test_shares_of_the_others_leave_the_question_about_the_first_alone():
    def keys(**more):
        before = len(results.used())
        other_models.hits_by_model(NAMES, TEXT, capacity.policies(["lru", "decayed_count"], [16]), [0.25], 100, **more)
        return [result.key for result in results.used()[before:]]

    plain, other = keys(), keys(other_fractions=[0.5])
    assert len(plain) == 2
    assert len(other) == 1  # the first model's answer was used before
    assert other[0] not in plain


def test_shares_that_one_step_fills_are_refused():
    with pytest.raises(ValueError, match=r"0.125 of the 32 experts of few is no more than the 4 that a step calls.*other_fractions"):
        other_models.hits_by_model(NAMES, TEXT, capacity.policies(["lru"], []), [0.125], 100)


def test_seconds_of_two_models():
    kin = [("fetch every miss", mc.FETCH_EVERY_MISS), ("substitute every miss", mc.SUBSTITUTE_EVERY_MISS)]
    setting = seconds.Setting(0.25, 0.25, 48)
    frames = other_models.seconds_by_model(NAMES, TEXT, kin, ["pcie4", "sata"], 6.0, setting)
    table = other_models.seconds_table(frames, "substitute every miss", "fetch every miss", ["pcie4", "sata"])
    assert table[["model", "hardware"]].to_numpy().tolist() == [[name, machine] for name in NAMES for machine in ("pcie4", "sata")]
    assert (table["low"] > 1).all()
    assert (table["speed_up"].iloc[[1, 3]].to_numpy() > table["speed_up"].iloc[[0, 2]].to_numpy()).all()
