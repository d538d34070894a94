"""The comparison on a GPU, without one: what engines are told, what is refused and said, and that nothing changes on a processor."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_machine import ACCELERATE, FETCHING, LLAMA, MAPPED, QUALITY, TEXT, FakeMachine

from moecache import results
from moecache.claims import State
from moecache.experiments import (
    stock,
    stock_agreement,
    stock_files,
    stock_place_report,
    stock_places,
    stock_report,
    stock_runs,
    stock_words_report,
)
from moecache.experiments.stock import Options
from moecache.experiments.stock_engines import protocol
from moecache.experiments.stock_files import StockError
from moecache.experiments.stock_places import Place
from moecache.experiments.stock_runs import KILLED, Cell, Choice

ON_GPU = Place("cuda", host_mebibytes=3000)
GPU_TEXT = TEXT._replace(place=ON_GPU)
HALF = Cell(16, 0.5)
ALL = [LLAMA, ACCELERATE, FETCHING, QUALITY]
NOTHING = Options([], [])


@pytest.fixture
def machine(tmp_path, monkeypatch) -> FakeMachine:
    monkeypatch.setattr(stock_places, "why_no_gpu", lambda: None)
    monkeypatch.setattr(stock_places, "why_no_llama_offload", lambda: None)
    return FakeMachine(tmp_path).install(monkeypatch, tmp_path)


def compared(text, names=ALL, cells=(HALF,), options=NOTHING, num_repeats=1):
    return stock.measure(text, list(names), list(cells), options, num_repeats, sweep_tokens=2)


# Nothing changes on a processor


def test_keys_of_a_processors_results_are_those_from_before_there_were_places(monkeypatch):
    """Stored results are found by these parameters and no others."""
    asked = {}

    class Enough(Exception):
        pass

    def load_or_run(experiment, parameters, function, **_):
        asked[experiment] = parameters
        raise Enough

    monkeypatch.setattr(results, "load_or_run", load_or_run)
    options = Options([1, 2], [128])
    text = {"model_name": "reference-64", "hidden_size": 512, "expert_width": 128, "warm_tokens": 4, "measured_tokens": 8,
            "process_mebibytes": 100, "timeout_seconds": 60}  # fmt: skip
    whole = {**text, "engines": [LLAMA, FETCHING], "cells": [[16, 0.5]], "thread_counts": [1, 2], "read_ahead_kib": [128]}
    with pytest.raises(Enough):
        compared(TEXT, [LLAMA, FETCHING], options=options)
    assert asked[stock.SWEEP_EXPERIMENT] == whole | {"sweep_tokens": 2}
    with pytest.raises(Enough):
        compared(TEXT, [LLAMA, FETCHING], options=Options([1], [128]))
    assert asked[stock.EXPERIMENT] == whole | {"thread_counts": [1], "sweep_tokens": 2, "num_repeats": 1}
    with pytest.raises(Enough):
        stock._part(TEXT, stock.ENGINES[LLAMA], HALF, Choice(2, 128), 3)
    run = {"engine": LLAMA, "bits": 16, "resident_fraction": 0.5, "threads": 2, "read_ahead_kib": 128, "repeat": 3}
    assert asked[stock.PART] == text | run
    with pytest.raises(Enough):
        stock.agreement(TEXT, [LLAMA, FETCHING], [HALF], 64)
    assert asked[stock.AGREEMENT_EXPERIMENT] == {
        "model_name": "reference-64", "hidden_size": 512, "expert_width": 128, "modules": ["llama_cpp", "ours"], "num_tokens": 64,
        "bits": [16],
    }  # fmt: skip


def test_commands_and_columns_of_a_processor_are_those_from_before_there_were_places(machine, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    frame, _ = compared(TEXT, [LLAMA, ACCELERATE, MAPPED, QUALITY])
    common = ["--warm-tokens", "4", "--measured-tokens", "8", "--threads"]
    told = {command[2].rpartition(".")[2]: command[5:] for command in machine.commands}
    assert told == {
        "llama_cpp": [*common, "4"],
        "accelerate_offload": [*common, "4"],
        "transformers_mmap": [*common, "4"],
        "ours": [*common, "3", "--policy", "quality-first", "--slots", "29", "--gate-threshold", "0.1875", "--max-in-flight", "2"],
    }
    assert tuple(frame.columns) == stock_runs.COLUMNS
    assert not set(stock_runs.GPU_COLUMNS) & set(stock_runs.COLUMNS)
    assert compared(TEXT._replace(place=Place("cpu", host_mebibytes=1)), [LLAMA, ACCELERATE, MAPPED, QUALITY])[0].equals(frame)
    assert len(machine.commands) == 4  # the cap beside a GPU is no other question on a processor


# On a GPU


def test_every_engine_is_told_where_to_compute_and_how_much_to_place_there(machine):
    compared(GPU_TEXT)
    told = {command[2].rpartition(".")[2]: command[11:] for command in machine.commands}
    assert told["llama_cpp"] == ["--gpu-layers", "-1", "--cpu-expert-layers", "1"]
    assert told["accelerate_offload"] == ["--device", "cuda", "--gpu-expert-layers", "1"]
    assert told["ours"][-4:] == ["--device", "cuda", "--host-mebibytes", "2900"]
    slots = [int(command[command.index("--slots") + 1]) for command in machine.commands if "--slots" in command]
    assert slots == [31, 29]  # as many as on a processor


def test_main_memory_is_capped_alike_for_every_share(machine):
    frame, _ = compared(GPU_TEXT, cells=[Cell(16, 0.5), Cell(16, 1.0)])
    assert set(machine.limits) == {3000 * 2**20}
    assert set(frame["cap_mebibytes"]) == {3000.0}
    assert set(frame["gpu_budget_mebibytes"]) == {10.0 + 64, 10.0 + 128}


@pytest.mark.parametrize(("share", "layers"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.99, 1), (1.0, 2), (1.5, 2)])
def test_whole_layers_are_rounded_down(machine, share, layers):
    assert stock_runs.expert_layers_within(machine.files, Cell(16, share)) == layers


def test_rows_of_a_gpu_say_what_was_placed_there_where_the_engine_does(machine):
    frame, _ = compared(GPU_TEXT)
    assert tuple(frame.columns) == (*stock_runs.COLUMNS, "device", "gpu_budget_mebibytes", "gpu_peak_mebibytes")
    peaks = frame.set_index("engine")["gpu_peak_mebibytes"]
    assert math.isnan(peaks[LLAMA])
    assert set(peaks.drop(LLAMA)) == {256.0}
    machine.killed = {"ours"}
    killed, _ = compared(GPU_TEXT, [ACCELERATE, FETCHING], cells=[Cell(16, 0.75)])
    assert killed.set_index("engine").loc[FETCHING, "outcome"] == KILLED


def test_a_gpu_is_another_question(machine):
    compared(TEXT)
    compared(GPU_TEXT)
    compared(TEXT._replace(place=replace(ON_GPU, host_mebibytes=4000)))
    assert len(machine.commands) == 3 * len(ALL)


def test_what_has_no_form_for_a_gpu_is_left_out_and_named(machine):
    assert [engine.name for engine in stock.engines_named([MAPPED, LLAMA], ON_GPU)] == [LLAMA]
    assert MAPPED not in {engine.name for engine in stock.engines_named([], ON_GPU)}
    assert stock.cells_of([0.5], [0.25], ON_GPU) == [HALF]
    assert stock.cells_of([0.5], [0.25]) == [HALF, Cell(4, 0.25)]
    told = stock_place_report.place_values(GPU_TEXT, [], [0.25])["left_out_words"]
    assert MAPPED in told
    assert "4 bits" in told
    assert stock_place_report.place_values(GPU_TEXT, [LLAMA], [])["left_out_words"] == ""
    with pytest.raises(ValueError, match="transformers_mmap has no form for a GPU"):
        stock_places.place_options("transformers_mmap", ON_GPU, 2, 1, 0)


def test_on_a_gpu_engines_agree_within_rounding(monkeypatch):
    asked = []

    def logits_of(module, files, tokens, place):
        asked.append((module, place.device))
        return np.eye(4, 6, dtype=np.float32) + (1e-3 if place.is_gpu else 0) * np.arange(6, dtype=np.float32)

    monkeypatch.setattr(stock_agreement, "tokens_of", lambda number, document: np.arange(number))
    monkeypatch.setattr(stock_agreement, "files_of", lambda *given: given[3])
    monkeypatch.setattr(stock_agreement, "logits_of", logits_of)
    frame = stock_agreement.measure("m", 512, 128, ["llama_cpp", "ours"], 4, device="cuda")
    assert asked == [("transformers_mmap", "cpu"), ("llama_cpp", "cuda"), ("ours", "cuda")]
    assert not frame["must_be_equal"].any()
    stock_agreement.check(frame)
    assert "their mean KL divergence must be below 0.01 nats" in stock_words_report.agreement_words(frame)


def test_agreement_on_a_gpu_has_a_key_of_its_own(machine, monkeypatch):
    given = {}
    frame = pd.DataFrame([{"engine": "ours", "bits": 16, "mean_kl_nats": 0.0, "is_equal": True, "must_be_equal": False}])
    monkeypatch.setattr(stock_agreement, "measure", lambda **asked: (given.update(asked), frame)[1])
    stock.agreement(GPU_TEXT, ALL, [HALF], 64)
    assert given["device"] == "cuda"
    assert given["modules"] == ["llama_cpp", "accelerate_offload", "ours"]


# What is refused


def interpreter(tmp_path, monkeypatch, says: str, status: int = 0) -> Path:
    """An interpreter that answers every program alike."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho 'a library says this'\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    monkeypatch.setenv(stock_files.PYTHON_VARIABLE, str(path))
    return path


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        ("None False", 0, "built for processors only: install a build of torch for CUDA"),
        ("12.8 False", 0, "sees no GPU: see what `nvidia-smi` says"),
        ("", 1, "torch cannot be imported"),
    ],
)
def test_without_a_gpu_it_is_refused_before_anything_is_made(says, status, expected, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(stock_runs, "files_of", made.append)
    monkeypatch.setattr(stock_agreement, "files_of", made.append)
    monkeypatch.setattr(results, "load_or_run", lambda experiment, asked, function, **_: function())
    monkeypatch.setattr(stock_runs, "check_installed", made.append)
    path = interpreter(tmp_path, monkeypatch, says, status)
    for attempt in (
        lambda: stock.check_place(GPU_TEXT, ALL),
        lambda: compared(GPU_TEXT),
        lambda: compared(GPU_TEXT, options=Options([1, 2], [])),
        lambda: stock.agreement(GPU_TEXT, ALL, [HALF], 8),
    ):
        with pytest.raises(StockError, match=f"device='cuda': .*{path}.*{expected}|device='cuda': {expected}.*{path}"):
            attempt()
    assert not made
    stock.check_place(TEXT, ALL)


def test_a_gpu_is_seen(tmp_path, monkeypatch):
    interpreter(tmp_path, monkeypatch, "12.8 True")
    assert stock_places.why_no_gpu() is None


@pytest.mark.parametrize("says", ["False", ""])
def test_llama_cpp_without_a_gpu_says_how_to_build_it(says, tmp_path, monkeypatch):
    monkeypatch.setattr(stock_places, "why_no_gpu", lambda: None)
    monkeypatch.setattr(stock_runs, "check_installed", lambda _: None)
    interpreter(tmp_path, monkeypatch, says)
    with pytest.raises(StockError, match="CMAKE_ARGS=-DGGML_CUDA=on"):
        stock.check_place(GPU_TEXT, ALL)
    stock.check_place(GPU_TEXT, [ACCELERATE, FETCHING])
    interpreter(tmp_path, monkeypatch, "True")
    stock.check_place(GPU_TEXT, ALL)


def test_the_release_to_build_is_the_extras():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert f"llama-cpp-python=={protocol.LLAMA_CPP_PYTHON}" in project["project"]["optional-dependencies"]["stock"]


def test_other_places_are_refused(machine):
    with pytest.raises(ValueError, match=r"device='cuda:1': .*CUDA_VISIBLE_DEVICES"):
        Place("cuda:1")
    with pytest.raises(ValueError, match="host_mebibytes=100 leaves no main memory beside process_mebibytes=100"):
        stock.check_place(TEXT._replace(place=Place("cuda", 100)), ALL)
    with pytest.raises(StockError, match=r"no stock engine is left .*'llama\.cpp', 'accelerate, disk offload'"):
        stock.check_place(GPU_TEXT, [MAPPED, FETCHING])


# What is said


def test_the_page_of_a_gpu_says_that_nobody_has_checked_it():
    page, other = (stock_place_report.place_values(text, [], [0.25]) for text in (GPU_TEXT, TEXT))
    assert page.keys() == other.keys()
    assert "UNVERIFIED" in page["place_words"]
    assert "2.93 GiB" in page["budget_words"]
    assert "2900 MiB" in page["budget_words"]
    assert other["place_words"] == other["left_out_words"] == ""
    assert "100 MiB for the process" in other["budget_words"]
    assert "`moecache run 11 --profile full -p device cuda" in other["command_words"]
    assert "UNVERIFIED" in other["command_words"]


def test_nothing_is_planned_or_judged_on_a_gpu(machine):
    frame, _ = compared(GPU_TEXT, num_repeats=3)
    tests = stock_report.tests(frame)
    assert tests is not None
    assert set(tests["status"]) == {"exploratory"}
    assert stock_words_report.verdict(frame)["verdict"] == str(State.NOT_YET_MEASURED)
    assert "planned" in set(stock_report.tests(compared(TEXT, num_repeats=3)[0])["status"])  # type: ignore[index]


def test_tables_show_the_gpus_budget_and_peak(machine):
    frame, _ = compared(GPU_TEXT)
    shown = stock_report.shown_rates(stock_report.rates(frame))
    assert shown["cap"].str.endswith("(0.07 GiB)").all()
    assert shown["GPU peak, GiB"].tolist() == pytest.approx([np.nan, 0.25, 0.25, 0.25], nan_ok=True)
    assert shown.shape[1] <= 8


def test_whether_main_memory_holds_all_experts_is_said(machine):
    frame, _ = compared(GPU_TEXT)
    assert "room for all experts" in stock_words_report.spare_words(frame, GPU_TEXT)
    small = GPU_TEXT._replace(place=replace(ON_GPU, host_mebibytes=200))
    assert stock_words_report.spare_words(frame, small) == ""
