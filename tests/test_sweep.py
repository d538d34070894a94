"""Sweeps: the same rows as single runs, whoever computes them; resumable; refused as a whole when a part cannot run."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time

import joblib
import numpy as np
import pandas as pd
import pytest
from dask.distributed import Client, LocalCluster
from pandas.testing import assert_frame_equal

import moecache as mc

sweep_module = importlib.import_module("moecache.sweep")  # the name in the package is the function
POLICIES = [mc.FETCH_EVERY_MISS, mc.SPEED_FIRST, mc.SUBSTITUTE_EVERY_MISS]
CAPACITIES = [8, 16, 32]


@pytest.fixture(scope="module")
def trace():
    return mc.synthetic_trace(300, 2, 48, 4, document_tokens=60, expert_bytes=2**20)


@pytest.fixture(scope="module")
def here(trace):
    """The sweep in this process, which the others are compared with."""
    return mc.sweep(trace, POLICIES, CAPACITIES, warmup_tokens=50, hardware="pcie4", num_workers=1, progress=False)


def sweep_again(trace, **options):
    return mc.sweep(trace, POLICIES, CAPACITIES, warmup_tokens=50, hardware="pcie4", progress=False, **options)


def test_rows_are_those_of_single_runs(trace, here):
    assert here["policy"].tolist() == [policy.label for policy in POLICIES for _ in CAPACITIES]
    assert here["num_slots"].tolist() == CAPACITIES * 3
    for row, (policy, num_slots) in zip(here.to_dict("records"), [(p, c) for p in POLICIES for c in CAPACITIES], strict=True):
        run = mc.simulate(trace, policy, num_slots)
        expected = run.summary(50) | mc.estimate_seconds(run, "pcie4").summary(50)
        assert {name: row[name] for name in expected} == expected
        assert row["capacity_fraction"] == num_slots / 48


def test_workers_do_not_change_the_table(trace, here):
    assert_frame_equal(sweep_again(trace, num_workers=2), here, check_exact=True)


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_a_back_end_chosen_by_the_user_is_respected(trace, here, backend, monkeypatch):
    used = []
    run_job = joblib.Parallel.__call__
    monkeypatch.setattr(joblib.Parallel, "__call__", lambda self, calls: used.append(type(self._backend)) or run_job(self, calls))
    with joblib.parallel_config(backend=backend, n_jobs=2):
        assert_frame_equal(sweep_again(trace), here, check_exact=True)
    assert {kind.__name__.lower().removesuffix("backend") for kind in used} == {backend}


def test_a_dask_cluster_gives_the_same_table(trace, here, tmp_path):
    trace.save(tmp_path / "0.safetensors")
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster,
        Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        assert_frame_equal(sweep_again(tmp_path / "0.safetensors"), here, check_exact=True)


def test_traces_by_path_and_by_name(trace, here, tmp_path):
    path = tmp_path / "recorded.safetensors"
    trace.save(path)
    frame = mc.sweep({"object": trace, "file": path}, POLICIES[0], 16, num_workers=2, progress=False)
    assert frame["trace"].tolist() == ["object", "file"]
    first, second = frame.drop(columns="trace").to_dict("records")
    assert first == second
    assert mc.sweep(str(path), POLICIES[0], 16, num_workers=1, progress=False)["trace"].tolist() == ["recorded"]
    assert mc.sweep([trace, path], POLICIES[0], 16, num_workers=1, progress=False)["trace"].tolist() == ["0", "recorded"]


def test_slots_may_differ_between_layers_and_hardware_may_be_a_list(trace):
    frame = mc.sweep(trace, mc.Policy(), [8, [8, 16]], hardware=["pcie3", "nvme"], num_workers=1, progress=False)
    assert frame["hardware"].tolist() == ["pcie3", "nvme"] * 2
    assert frame["num_slots"].tolist() == [8, 8, 12, 12]
    assert frame["slots_per_layer"].tolist()[2:] == ["[8, 16]"] * 2
    assert "seconds_per_token" not in mc.sweep(trace, mc.Policy(), 8, num_workers=1, progress=False)


def count_runs(monkeypatch):
    runs, run_job = [], sweep_module.run_job
    monkeypatch.setattr(sweep_module, "run_job", lambda job, options: runs.append(job) or run_job(job, options))
    return runs


def test_finished_combinations_are_not_run_again(trace, here, tmp_path, monkeypatch):
    assert_frame_equal(sweep_again(trace, store=tmp_path, num_workers=2), here, check_exact=True)
    assert len(list(tmp_path.iterdir())) == 9
    runs = count_runs(monkeypatch)
    assert_frame_equal(sweep_again(trace, store=tmp_path, num_workers=1), here, check_exact=True)
    assert not runs
    more = mc.sweep(trace, POLICIES, [*CAPACITIES, 40], warmup_tokens=50, hardware="pcie4", store=tmp_path, num_workers=1, progress=False)
    assert [job.num_slots for job in runs] == [40, 40, 40]
    assert len(more) == 12


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_tokens": 51},
        {"hardware": "pcie5"},
        {"cold_start": "empty"},
        {"documents": "reset"},
        {"exact_prefix_tokens": 3},
        {"cold_start": np.tile(np.arange(47, 39, -1), (2, 1))},
        {"expert_bytes": 7},
        {"prefetch_lead_steps": 2},
    ],
)
def test_a_changed_option_never_meets_an_old_number(trace, tmp_path, monkeypatch, changes):
    options = {"warmup_tokens": 50, "hardware": "pcie4", "store": tmp_path, "num_workers": 1, "progress": False}
    mc.sweep(trace, mc.SPEED_FIRST, 8, **options)
    runs = count_runs(monkeypatch)
    mc.sweep(trace, mc.SPEED_FIRST, 8, **{**options, **changes})
    mc.sweep(trace.tokens(0, 200), mc.SPEED_FIRST, 8, **options)
    monkeypatch.setattr(sweep_module, "KERNEL_VERSION", -1)
    mc.sweep(trace, mc.SPEED_FIRST, 8, **options)
    assert len(runs) == 3


def test_predictions_and_tables_are_part_of_the_key(trace, tmp_path, monkeypatch):
    options = {"store": tmp_path, "num_workers": 1, "progress": False}
    predicting = [dataclasses.replace(trace, predicted_ids=np.full((300, 2, 1), expert, np.int16)) for expert in (3, 4)]
    buddies = [np.full((2, 48, 1), expert) for expert in (3, 4)]
    runs = count_runs(monkeypatch)
    for _ in range(2):
        for traces in predicting:
            mc.sweep(traces, mc.Policy(max_prefetches=1), 8, **options)
        for table in buddies:
            mc.sweep(trace, mc.first_j(1, fallback="buddy"), 8, buddies=table, **options)
    assert len(runs) == 4


def test_a_new_label_is_not_a_new_policy(trace, tmp_path, monkeypatch):
    options = {"store": tmp_path, "num_workers": 1, "progress": False}
    mc.sweep(trace, mc.SPEED_FIRST, 8, **options)
    runs = count_runs(monkeypatch)
    frame = mc.sweep({"renamed": trace}, mc.SPEED_FIRST.replace(label="other"), 8, **options)
    assert not runs
    assert frame[["trace", "policy"]].to_numpy().tolist() == [["renamed", "other"]]


@pytest.mark.parametrize("damage", [b"", b'{"key"', b"[]", b'{"key": {}, "rows": []}', b"\xff\xfe"])
def test_a_damaged_file_counts_as_not_finished(trace, tmp_path, monkeypatch, damage):
    options = {"store": tmp_path, "num_workers": 1, "progress": False}
    first = mc.sweep(trace, mc.SPEED_FIRST, 8, **options)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage)
    runs = count_runs(monkeypatch)
    assert_frame_equal(mc.sweep(trace, mc.SPEED_FIRST, 8, **options), first, check_exact=True)
    assert len(runs) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_interrupted_sweep_goes_on_where_it_stopped(trace, here, tmp_path, monkeypatch, num_workers):
    write = sweep_module.write_result

    def interrupted(store, key, rows):
        if len(list(store.glob("*.json"))) == 4:
            raise KeyboardInterrupt
        write(store, key, rows)

    monkeypatch.setattr(sweep_module, "write_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep_again(trace, store=tmp_path, num_workers=num_workers)
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(sweep_module, "write_result", write)
    runs = count_runs(monkeypatch)
    assert_frame_equal(sweep_again(trace, store=tmp_path, num_workers=1), here, check_exact=True)
    assert len(runs) == 5


PROGRAM = """
import sys, moecache as mc
trace = mc.synthetic_trace(60_000, 4, 64, 4, has_scores=False)
mc.sweep(trace, mc.Policy(), list(range(4, 64)), store=sys.argv[1], num_workers=2, progress=False)
"""


@pytest.mark.long  # starts three processes
def test_control_c_stops_a_sweep_at_once_and_leaves_whole_files(tmp_path):
    # A group of its own, so that workers get the signal too, as they do from a terminal.
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob("*.json")) and child.poll() is None:
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    finished = list(tmp_path.iterdir())
    assert 1 <= len(finished) < 60
    assert all(json.loads(path.read_text())["rows"] for path in finished)


def test_what_cannot_be_replayed_is_refused_before_anything_runs(trace, monkeypatch):
    runs = count_runs(monkeypatch)
    bare = mc.synthetic_trace(50, 2, 48, 4, has_scores=False)
    with pytest.raises(ValueError, match=r"(?s)4 combinations.*trace 'bare': capacities=2 is below.*'speed-first' subst.*wait_ranks"):
        mc.sweep({"bare": bare}, [mc.Policy(), mc.SPEED_FIRST, mc.first_j(6), mc.first_j(7)], [8, 2], num_workers=1, progress=False)
    with pytest.raises(ValueError, match="give expert_bytes"):
        mc.sweep(bare, mc.Policy(), 8, hardware="pcie4", num_workers=1, progress=False)
    with pytest.raises(ValueError, match=r"warmup_tokens=300 is outside 0\.\.299"):
        mc.sweep(trace, mc.Policy(), 8, warmup_tokens=300, num_workers=1, progress=False)
    with pytest.raises(ValueError, match="cold_start='hot' is unknown"):
        mc.sweep(trace, mc.Policy(), 8, cold_start="hot", num_workers=1, progress=False)
    with pytest.raises(FileNotFoundError, match="no trace at"):
        mc.sweep("nowhere.safetensors", mc.Policy(), 8, num_workers=1, progress=False)
    assert not runs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([mc.Policy(), mc.Policy(eviction="fifo", label="fetch every miss"), mc.FETCH_EVERY_MISS], 8), "policy labels must be different"),
        ((mc.Policy(), [8, 8]), "capacities must be different"),
        (([], 8), "nothing to sweep"),
        ((mc.Policy(), []), "nothing to sweep"),
        ((mc.Policy(), 8.0), r"capacities=8\.0 must be integers, slots a layer, or lists of one integer a layer"),
        ((mc.Policy(), [8, 16.5]), r"capacities=\[8, 16\.5\] must be integers"),
        ((mc.Policy(), "8"), r"capacities='8' must be integers"),
        ((mc.Policy(), [[8, 8.5]]), r"capacities=\[\[8, 8\.5\]\] must be integers"),
    ],
)
def test_names_must_be_different(trace, arguments, message):
    with pytest.raises(ValueError, match=message):
        mc.sweep(trace, *arguments, num_workers=1, progress=False)


def test_traces_need_different_names(tmp_path):
    with pytest.raises(ValueError, match="different names"):
        mc.sweep([tmp_path / "a" / "x.npz", tmp_path / "b" / "x.npz"], mc.Policy(), 8)


def test_the_front_keeps_what_nothing_beats():
    frame = pd.DataFrame({"seconds": [3.0, 1.0, 2.0, 2.0, 4.0, 2.0], "hit_rate": [0.9, 0.5, 0.7, 0.6, 0.9, 0.7], "name": list("abcdef")})
    front = mc.pareto_front(frame, minimise="seconds", maximise="hit_rate")
    assert front["name"].tolist() == ["b", "c", "f", "a"]  # c and f are equal; d and e are beaten
    assert mc.pareto_front(frame, minimise=["seconds", "hit_rate"])["name"].tolist() == ["b"]
    assert mc.pareto_front(frame.iloc[:0], maximise=["seconds", "hit_rate"]).empty


def test_the_front_against_its_definition():
    frame = pd.DataFrame(np.random.default_rng(0).integers(0, 12, (200, 2)), columns=["x", "y"])
    expected = [
        i
        for i, row in frame.iterrows()
        if not any(o.x <= row.x and o.y >= row.y and (o.x < row.x or o.y > row.y) for o in frame.itertuples())
    ]
    assert sorted(mc.pareto_front(frame, minimise="x", maximise="y").index) == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"minimise": "x", "maximise": "z"}, r"columns \['z'\] are not in the table"),
        ({"minimise": "x"}, "at least two different"),
        ({"minimise": "x", "maximise": "x"}, "at least two different"),
        ({"minimise": ["x", "gap"]}, r"columns \['gap'\] have missing values"),
    ],
)
def test_columns_that_make_no_front_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        mc.pareto_front(pd.DataFrame({"x": [1.0, 2.0], "gap": [np.nan, 1.0]}), **columns)
