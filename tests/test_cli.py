"""The command line answers what is wrong with what exists, and writes a page only when it is complete."""

from __future__ import annotations

import pytest

from moecache import cli
from moecache.chapters.source import Chapter, Parameter


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with one chapter that is never run."""
    chapter = Chapter(
        "04",
        tmp_path / "notebooks" / "04_which.py",
        "Which?",
        (Parameter("num_slots", 128, "slots a layer"), Parameter("trace_path", "", "a trace of your own")),
        ("SIMULATED",),
        {"quick": {}, "full": {"num_slots": 256}},
        {"quick": 10.0, "full": 10.0},
        False,
    )
    monkeypatch.setattr(cli, "_clone", lambda: tmp_path)
    monkeypatch.setattr("moecache.chapters.source.find_chapters", lambda folder: {"04": chapter})
    return tmp_path


def test_a_wrong_parameter_is_answered_with_names_defaults_types_and_meanings(clone, capsys):
    assert cli.main(["run", "04", "-p", "slots", "64"]) == 1
    told = capsys.readouterr().err
    assert "no parameter 'slots'" in told
    assert "num_slots = 128 (int) slots a layer" in told
    assert "trace_path = '' (str) a trace of your own" in told


@pytest.mark.parametrize("word", ["many", "1.5", "None"])
def test_a_value_of_another_type_is_refused(clone, capsys, word):
    assert cli.main(["run", "04", "-p", "num_slots", word]) == 1
    assert "num_slots is" in capsys.readouterr().err


def test_a_wrong_chapter_is_answered_with_the_chapters(clone, capsys):
    assert cli.main(["run", "17"]) == 1
    assert "no chapter '17'; there are:\n  04  Which?" in capsys.readouterr().err


def test_a_page_without_a_folder_is_refused_before_anything_runs(clone, capsys):
    assert cli.main(["run", "04", "-o", str(clone / "no" / "out.html")]) == 1
    assert "make it first" in capsys.readouterr().err


def test_what_was_typed_reaches_the_run(clone, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("moecache.chapters.own_run.run_with", lambda *given: asked.append(given) or given[3])
    target = clone / "out.html"
    words = ["-p", "num_slots", "64", "-p", "trace_path", "a.csv", "--profile", "full", "-o", str(target)]
    assert cli.main(["run", "04", *words]) == 0
    assert asked[0][1:4] == ({"num_slots": "64", "trace_path": "a.csv"}, "full", target)


def test_chapters_are_listed_with_their_parameters(clone, capsys):
    assert cli.main(["chapters"]) == 0
    assert capsys.readouterr().out.startswith("04  Which?\n  num_slots = 128 (int)")


def test_outside_a_clone_the_way_out_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_ROOT", tmp_path)
    assert cli.main(["study"]) == 1
    assert "needs a clone" in capsys.readouterr().err


def test_an_interruption_ends_with_its_own_status(clone, capsys, monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("moecache.chapters.own_run.run_with", stop)
    assert cli.main(["run", "04"]) == 130


def test_an_unknown_command_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        cli.main(["play"])
    assert "study" in capsys.readouterr().err
