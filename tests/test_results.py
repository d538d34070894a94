"""The store of results: exact on disk, never an old number for a new question, nothing half-written."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from moecache import results
from moecache.frame_file import DamagedFile, read_frame, write_frame
from moecache.policy import GATE_015, Policy


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Keep this test's own and stored results apart from the real ones."""
    own, stored = tmp_path / "own", tmp_path / "stored"
    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(own))
    monkeypatch.setenv("MOECACHE_RESULTS", "auto")
    monkeypatch.setattr(results, "stored_folder", lambda: stored)
    monkeypatch.setattr(results, "_used", [])
    return own, stored


class Measurement:
    """Counts how often it is asked to measure, and gives another number each time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> pd.DataFrame:
        self.num_calls += 1
        return pd.DataFrame({"zeta": [0.1, 1 / 3], "alpha": [self.num_calls, 7]})


def test_a_table_reads_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    floats = rng.normal(size=200) * 10.0 ** rng.integers(-300, 300, 200)
    frame = pd.DataFrame(
        {
            "wide": np.r_[floats, np.nan, np.inf, -np.inf, -0.0, 5e-324],
            "narrow": rng.normal(size=205).astype(np.float32),
            "count": rng.integers(-(2**62), 2**62, 205),
            "small": rng.integers(0, 255, 205).astype(np.uint8),
            "is_hit": rng.random(205) < 0.5,
            "name": ["nan", "", "a,b", 'quote "', "True", "ü\n1"] + ["x"] * 199,
        }
    )
    write_frame(tmp_path / "table.csv", frame, {"note": 1})
    back, header = read_frame(tmp_path / "table.csv")
    pd.testing.assert_frame_equal(back, frame, check_exact=True)
    assert np.signbit(back["wide"][203])
    assert header["note"] == 1
    assert header["num_rows"] == 205


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (pd.DataFrame({"a": [1]}, index=[5]), "reset_index"),
        (pd.DataFrame({"a": ["x", None]}), "none missing"),
        (pd.DataFrame({"a": pd.to_datetime(["2026-01-01"])}), "dtype"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "different strings"),
    ],
)
def test_a_table_that_would_change_is_refused(tmp_path, frame, told):
    with pytest.raises(ValueError, match=told):
        write_frame(tmp_path / "table.csv", frame, {})
    assert not list(tmp_path.iterdir())


def test_the_same_question_is_measured_once(folders):
    measure = Measurement()
    first = results.load_or_run("test", {"num_slots": 4}, measure)
    second = results.load_or_run("test", {"num_slots": 4}, measure)
    assert (first.is_loaded, second.is_loaded, measure.num_calls) == (False, True, 1)
    pd.testing.assert_frame_equal(first.frame, second.frame, check_exact=True)
    assert list(second.frame) == ["zeta", "alpha"]
    assert second.provenance["machine"]["num_cores"] >= 1
    assert results.used() == (first,)


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {"num_slots": 5, "policy": GATE_015}},
        {"parameters": {"num_slots": 4, "policy": Policy()}},
        {"parameters": {"num_slots": 4, "policy": GATE_015, "seed": 0}},
        {"experiment": "other"},
        {"inputs": {"model": "b"}},
        {"inputs": None},
    ],
)
def test_a_changed_question_has_another_key(change):
    question = {"experiment": "test", "parameters": {"num_slots": 4, "policy": GATE_015}, "inputs": {"model": "a"}}
    assert results.describe(**question)["key"] == results.describe(**question)["key"]
    assert results.describe(**{**question, **change})["key"] != results.describe(**question)["key"]


def test_a_new_kernel_version_has_another_key(monkeypatch):
    before = results.describe("test", {})["key"]
    monkeypatch.setattr("moecache.kernel.KERNEL_VERSION", 10**6)
    assert results.describe("test", {})["key"] != before


def test_the_order_of_parameters_and_the_kind_of_scalar_do_not_matter():
    key = results.describe("test", {"a": 1, "ranks": (0, 1), "x": 0.5})["key"]
    same = {"x": np.float64(0.5), "ranks": np.array([0, 1]), "a": np.int32(1)}
    assert results.describe("test", same)["key"] == key


@pytest.mark.parametrize(
    ("parameters", "told"),
    [({"a": object()}, "parameters.a"), ({"a": {1: 2}}, "strings"), ({"a": [float("nan")]}, r"parameters.a\[0\]")],
)
def test_a_parameter_without_a_plain_form_is_refused(parameters, told):
    with pytest.raises(ValueError, match=told):
        results.describe("test", parameters)


def test_a_measurement_that_fails_leaves_nothing(folders):
    def fail() -> pd.DataFrame:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.load_or_run("test", {}, fail)
    assert not folders[0].exists()
    assert results.load_or_run("test", {}, Measurement()).is_loaded is False


def test_finding_never_measures_and_tells_what_it_found(folders):
    measure = Measurement()
    assert results.find("test", {"a": 1}, measure) is None
    assert not folders[0].exists()
    made = results.load_or_run("test", {"a": 1}, measure)
    found = results.find("test", {"a": 1}, measure)
    assert found is not None
    assert found.is_loaded
    assert found.key == made.key
    assert results.find("test", {"a": 2}, measure) is None


def _flip_a_digit(table, header):
    table.write_text(table.read_text().replace("0.1", "0.2"))


def _cut(table, header):
    table.write_text(table.read_text()[:-3])


@pytest.mark.parametrize(
    "damage",
    [
        _flip_a_digit,
        _cut,
        lambda table, header: table.unlink(),
        lambda table, header: header.unlink(),
        lambda table, header: header.write_text("{"),
    ],
)
def test_damaged_files_are_named_with_the_way_out(folders, damage):
    path = results.load_or_run("test", {}, Measurement()).path
    damage(path, path.with_suffix(".json"))
    with pytest.raises(DamagedFile, match=rf"{path.name} is damaged.*delete"):
        results.load_or_run("test", {}, Measurement())


def test_own_results_are_measured_again_when_the_code_changes(folders, monkeypatch):
    measure = Measurement()
    results.load_or_run("test", {}, measure)
    monkeypatch.setattr(results, "_package_code", lambda: "another")
    assert results.load_or_run("test", {}, measure).is_loaded is False


def test_explaining_code_better_changes_nothing_and_changing_it_does():
    code = 'def f(x):\n    """Say."""\n    return x + 1  # one\n'
    assert results._meaning(code) == results._meaning(code.replace("Say", "Explain").replace("# one", "# more"))
    assert results._meaning(code) != results._meaning(code.replace("+ 1", "+ 2"))
    members = "class Kind:\n    HIT = 0  # resident\n    MISS = 1\n"
    documented = 'class Kind:\n    """Who."""\n\n    HIT = 0\n    """Resident."""\n    MISS = 1\n'
    assert results._meaning(members) == results._meaning(documented)
    assert results._meaning(members) != results._meaning(documented.replace("MISS = 1", "MISS = 2"))


def test_stored_results_are_shown_without_measuring(folders, monkeypatch):
    own, stored = folders
    measure = Measurement()
    results.load_or_run("test", {"a": 1}, measure)
    own.rename(stored)
    monkeypatch.setenv("MOECACHE_RESULTS", "stored")
    monkeypatch.setattr(results, "_package_code", lambda: "later code")
    assert results.load_or_run("test", {"a": 1}, measure).is_loaded
    with pytest.raises(results.MissingResult, match=r'test.*"a": 2.*keep'):
        results.load_or_run("test", {"a": 2}, measure)
    assert measure.num_calls == 1


def test_own_mode_does_not_show_what_others_stored(folders, monkeypatch):
    own, stored = folders
    measure = Measurement()
    results.load_or_run("test", {}, measure)
    own.rename(stored)
    monkeypatch.setenv("MOECACHE_RESULTS", "own")
    assert results.load_or_run("test", {}, measure).is_loaded is False


def test_wrong_words_are_answered_with_the_right_ones(folders, monkeypatch):
    with pytest.raises(ValueError, match="lower-case"):
        results.load_or_run("A b", {}, Measurement())
    with pytest.raises(ValueError, match="DataFrame, got list"):
        results.load_or_run("test", {}, lambda: [1])  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("MOECACHE_RESULTS", "sometimes")
    with pytest.raises(ValueError, match="auto, own, stored"):
        results.load_or_run("test", {}, Measurement())


def test_the_header_says_everything_that_the_key_was_made_from(folders):
    result = results.load_or_run("test", {"policy": GATE_015}, Measurement(), inputs={"texts": "abc"})
    header = json.loads(result.path.with_suffix(".json").read_text())
    question = {name: header[name] for name in ("experiment", "parameters", "inputs")}
    assert results.describe(**question)["key"] == header["key"] == result.key
    assert header["inputs"] == {"texts": "abc"}
