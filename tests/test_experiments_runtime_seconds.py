"""Seconds of offloaded models: what is counted agrees with what was decided, formulas are their definitions, a bench prints whole lines."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import moecache as mc
from moecache.cost import estimate_seconds
from moecache.experiments import runtime_against_accelerate as accelerate
from moecache.experiments import runtime_curve as measures
from moecache.experiments.memory_cap import CappedRun
from moecache.experiments.runtime_checkpoint import MADE_FROM, Geometry, TimedCheckpoint, timed_checkpoint
from moecache.experiments.runtime_decoding import Decoder
from moecache.experiments.runtime_reads import PlainReader, compared_reads, demand_groups
from moecache.experiments.runtime_seconds import ALL_HITS, DISK, Plan, Timed, timed_on_disk, timed_on_links
from moecache.experiments.stock_engines.protocol import Measured
from moecache.hardware import Hardware
from moecache.stores.packed_file import PackedStore
from moecache.stores.store import open_store

TINY = Geometry(hidden_size=128, expert_width=16)
POLICIES = (mc.FETCH_EVERY_MISS, mc.GATE_015, mc.QUALITY_FIRST)
PLAN = Plan(num_slots=64, warm_tokens=10, num_blocks=4, block_tokens=6, policies=POLICIES)
CALLS_A_BLOCK = 6 * 2 * 10
SLOW_LINK = 2e8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TimedCheckpoint:
    return timed_checkpoint(TINY, tmp_path_factory.mktemp("widened"), progress=False)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4096, PLAN.num_tokens)


@pytest.fixture(scope="module")
def disk(checkpoint: TimedCheckpoint, text: np.ndarray) -> Timed:
    return timed_on_disk(checkpoint.packed, text, PLAN, progress=False)


@pytest.fixture(scope="module")
def links(checkpoint: TimedCheckpoint, text: np.ndarray) -> Timed:
    return timed_on_links(checkpoint.packed, text, {"slow": SLOW_LINK, "fast": 1e12}, PLAN, progress=False)


def test_a_checkpoint_of_other_weights_is_refused(checkpoint, tmp_path):
    assert timed_checkpoint(TINY, checkpoint.fused.parent, progress=False) == checkpoint
    (tmp_path / TINY.folder_name).mkdir()
    (tmp_path / TINY.folder_name / MADE_FROM).write_text("{}")
    with pytest.raises(ValueError, match="made from other weights; remove it"):
        timed_checkpoint(TINY, tmp_path, progress=False)


def test_every_policy_has_a_row_a_block_and_all_its_calls(disk, links):
    for timed, names in ((disk, [DISK]), (links, ["slow", "fast"])):
        labels = [policy.label for policy in POLICIES] + [ALL_HITS]
        expected = {(link, label, block) for link in names for label in labels for block in range(PLAN.num_blocks)}
        rows = timed.blocks
        assert len(rows) == len(expected)
        assert set(zip(rows["link"], rows["policy"], rows["block"], strict=True)) == expected
        assert (rows[["hit", "fetched", "forced", "substituted"]].sum(axis=1) == CALLS_A_BLOCK).all()
        parts = rows[[f"seconds_{name}" for name in ("waiting", "experts", "routing", "overhead", "dense")]].sum(axis=1)
        assert (parts <= rows["seconds"] * 1.000001).all()


def test_a_block_decoded_again_hits_always_and_changes_nothing(disk):
    again = disk.blocks[disk.blocks["policy"] == ALL_HITS]
    assert (again["hit"] == CALLS_A_BLOCK).all()
    assert not again[["bytes_demand", "bytes_background", "fetch_seconds"]].to_numpy().any()
    assert (disk.blocks.loc[disk.blocks["policy"] == mc.FETCH_EVERY_MISS.label, "fetched"] > 0).all()


def test_timed_blocks_decide_as_the_recorded_pass_and_the_simulator_did(disk, links):
    block_bytes = disk.recorded[mc.FETCH_EVERY_MISS.label].trace.shape.expert_bytes
    for timed in (disk, links):
        assert measures.predicted(timed)["is_log_equal"].all()
        for label, kept in timed.recorded.items():
            outcome = kept.decisions.outcome[PLAN.warm_tokens :].reshape(PLAN.num_blocks, -1)
            fetched = (outcome == int(mc.Outcome.FETCHED)).sum(axis=1)
            for _, own in timed.blocks[timed.blocks["policy"] == label].groupby("link"):
                own = own.sort_values("block")
                assert own["fetched"].tolist() == fetched.tolist()
                assert (own["hit"] == (outcome == int(mc.Outcome.HIT)).sum(axis=1)).all()
                assert own["fetch_bytes"].tolist() == (own["bytes_demand"]).tolist() == (fetched * block_bytes).tolist()


def test_the_plain_reader_reads_what_the_runtime_fetched(disk):
    fetching = disk.blocks[disk.blocks["policy"] == mc.FETCH_EVERY_MISS.label].sort_values("block")
    assert disk.reads["num_bytes"].tolist() == fetching["bytes_demand"].tolist()
    assert disk.reads["fetch_seconds"].tolist() == fetching["fetch_seconds"].tolist()
    assert disk.reads["is_plain_first"].tolist() == [False, True, False, True]
    assert disk.sustained_bytes_per_second > 0


def test_groups_are_the_calls_that_were_waited_for(disk):
    log = disk.recorded[mc.GATE_015.label].decisions
    slow = []
    for token in range(5, 20):
        for layer in range(2):
            row = zip(log.outcome[token, layer], log.computed_ids[token, layer], strict=True)
            slow.append([(layer, int(expert)) for became, expert in row if became in (mc.Outcome.FETCHED, mc.Outcome.FORCED)])
    assert demand_groups(log, 5, 20) == [group for group in slow if group]


def test_a_plain_reader_says_that_a_file_ends_early(checkpoint, tmp_path):
    reader = PlainReader(checkpoint.packed, is_direct=False, num_readers=2)
    assert reader.read([[(0, 0), (1, 511)], [(0, 7)]])[0] == 3 * reader.header.layout.block_bytes
    reader.header = type(reader.header)(reader.header.layout, 9, 512)
    with pytest.raises(OSError, match="pack the checkpoint again"):
        reader.read([[(8, 500)]])
    reader.close()


def test_reads_over_a_link_take_as_long_as_the_link_does(links):
    fetching = links.blocks[(links.blocks["policy"] == mc.FETCH_EVERY_MISS.label) & (links.blocks["link"] == "slow")]
    assert (fetching["fetch_seconds"] >= fetching["fetch_bytes"] / SLOW_LINK).all()
    assert links.blocks["late_fraction"].between(0, 1).all()


def test_a_policy_that_forgets_cannot_be_decoded_again(checkpoint, text):
    store = open_store(checkpoint.packed)
    for policy, num_tokens in ((mc.FETCH_EVERY_MISS, 30), (mc.SUBSTITUTE_EVERY_MISS, 4)):
        decoder = Decoder(checkpoint.packed, store, policy, 16, text)
        decoder.read(num_tokens, will_repeat=True)
        with pytest.raises(ValueError, match="at most 1 tokens"):
            decoder.read_again()
        decoder.read(1)
        with pytest.raises(ValueError, match="will_repeat=True"):
            decoder.read_again()
        decoder.close()
    store.close()


def test_plans_and_texts_that_cannot_be_are_refused(checkpoint, text):
    with pytest.raises(ValueError, match="must begin with 'fetch every miss'"):
        Plan(policies=(mc.GATE_015,))
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        Plan(num_blocks=1)
    with pytest.raises(ValueError, match=f"the text has 5 tokens, the plan reads {PLAN.num_tokens}"):
        timed_on_disk(checkpoint.packed, text[:5], PLAN, progress=False)
    with pytest.raises(ValueError, match="bytes of main memory"):
        timed_on_links(checkpoint.packed, text, {}, Plan(num_slots=10**9), progress=False)


def test_seconds_and_ratios_are_sums_over_blocks(disk):
    table = measures.by_policy(disk).set_index("policy")
    rate = disk.reads["num_bytes"].sum() / disk.reads["plain_seconds"].sum()
    totals = disk.blocks.groupby("policy")[["seconds", "num_tokens", "bytes_demand"]].sum()
    seconds, demand = totals["seconds"] / totals["num_tokens"], totals["bytes_demand"] / totals["num_tokens"]
    for label, row in table.iterrows():
        assert row["seconds_per_token"] == pytest.approx(seconds[label])
        assert row["ratio"] == pytest.approx(seconds[mc.FETCH_EVERY_MISS.label] / seconds[label])
        assert row["bound_seconds"] == pytest.approx(demand[label] / rate + seconds[ALL_HITS])
        assert row["bound_ratio"] == pytest.approx(row["seconds_per_token"] / row["bound_seconds"])
        assert row["seconds_per_token_low"] <= row["seconds_per_token"] <= row["seconds_per_token_high"]
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert table.loc[ALL_HITS, "bound_ratio"] == pytest.approx(1) == table.loc[ALL_HITS, "bound_ratio_median"]


def test_the_formula_of_the_curve_is_the_simulators_wait(links):
    log, shape = links.recorded[mc.FETCH_EVERY_MISS.label].decisions, links.recorded[mc.FETCH_EVERY_MISS.label].trace.shape
    machine = Hardware("made up", 1e9, 2e-5, layer_seconds=1e-4, expert_seconds=3e-6)
    estimate = estimate_seconds(log, machine, shape.expert_bytes)
    expected = estimate.blocking_seconds[PLAN.warm_tokens :].mean()
    assert measures.unhidden_wait(log, machine, shape.expert_bytes, PLAN.warm_tokens) == pytest.approx(expected)
    assert expected > 0
    points = measures.curve(links)
    floor = links.blocks[links.blocks["policy"] == ALL_HITS].groupby("link")["seconds"].sum() / (PLAN.num_blocks * PLAN.block_tokens)
    assert points["floor_seconds"].tolist() == pytest.approx([floor[link] for link in points["link"]])
    assert points["calculated_ratio"].tolist() == pytest.approx((1 + points["wait_seconds"] / points["floor_seconds"]).tolist())
    assert mc.FETCH_EVERY_MISS.label not in set(points["policy"])


def test_predictions_use_the_floor_in_place(links):
    rows = measures.predicted(links).set_index(["link", "policy"])
    points = measures.curve(links).groupby("link")[["wait_seconds", "floor_seconds"]].first()
    for link in ("slow", "fast"):
        row = rows.loc[(link, mc.FETCH_EVERY_MISS.label)]
        assert row["predicted_seconds"] == pytest.approx(points.loc[link].sum())
        assert row["error_fraction"] == pytest.approx(row["predicted_seconds"] / row["seconds_per_token"] - 1)
    assert np.isfinite(rows["error_fraction_median"]).all()


def test_a_crossing_lies_on_the_line_between_its_neighbours_in_logarithms():
    rates = np.array([1e9, 4e9, 1.6e10])
    frame = {"link_bytes_per_second": rates, "policy": "p", "ratio": [5.0, 1.25, 1.1], "calculated_ratio": [2.4, 2.0, 1.0]}
    found = measures.crossings(pd.DataFrame(frame)[::-1], 2.5).iloc[0]
    assert found["bytes_per_second"] == pytest.approx(2e9)
    assert np.isnan(found["calculated_bytes_per_second"])


def test_reads_are_compared_by_their_sums():
    reads = pd.DataFrame(
        {"num_groups": 1, "num_bytes": [10, 30], "fetch_seconds": [1.0, 3.0], "plain_seconds": [1.0, 1.0], "is_plain_first": [True, False]}
    )
    found = compared_reads(reads)
    assert (found["ratio"], found["ratio_plain_first"]) == (0.5, 1.0)
    assert (found["fetch_bytes_per_second"], found["plain_bytes_per_second"]) == (10.0, 20.0)
    assert found["ratio_plain_second"] == pytest.approx(1 / 3) == pytest.approx(found["ratio_low"])


def fake_run(logits: np.ndarray, killed: str = "") -> Callable[..., CappedRun]:
    """Stands for a process: it writes logits and answers as an engine does, or is killed where the command names `killed`."""

    def run(command: list[str], limit_bytes: int, timeout_seconds: float, env: dict[str, str]) -> CappedRun:
        assert limit_bytes == 7
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"
        assert np.load(command[4]).size == 5
        if killed and command[2].endswith(killed):
            return CappedRun(-9, True, 7, 6, "", "one\nlast words", 1.0)
        engine, threads = command[2].rpartition(".")[2], int(command[command.index("--threads") + 1])
        np.save(command[command.index("--logits") + 1], logits + (0.5 if engine == "ours" else 0.0))
        told = Measured(engine, command[3], {}, {}, threads, 1.0, [9.0], [1.0, 1.0, 4.0], read_bytes=12)
        return CappedRun(0, False, 7, 6, "noise\n" + json.dumps(asdict(told)), "", 1.0)

    return run


def test_engines_take_turns_and_their_logits_are_compared(checkpoint, text, monkeypatch):
    logits = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    options = {"cap_bytes": 7, "num_slots": 32, "warm_tokens": 2, "measured_tokens": 3, "threads": (1, 4), "progress": False}
    monkeypatch.setattr(accelerate, "run_capped", fake_run(logits))
    runs, agreement = accelerate.timed_under_cap(checkpoint, text, **options)
    assert runs[["round", "engine", "threads"]].values.tolist() == [
        [0, "ours", 1],
        [0, "accelerate", 1],
        [1, "ours", 1],
        [1, "accelerate", 4],
    ]
    assert set(runs["outcome"]) == {"ran"}
    assert runs.loc[0, ["seconds_per_token", "median_seconds", "read_bytes_per_token"]].tolist() == [2.0, 1.0, 4.0]
    assert agreement.loc[0, "largest_difference"] == pytest.approx(0.5)
    assert agreement.loc[0, ["same_argmax_share", "mean_kl_nats"]].tolist() == pytest.approx([1.0, 0.0], abs=1e-12)  # a shift of all logits


def test_an_engine_that_the_cap_kills_has_no_number(checkpoint, text, monkeypatch):
    options = {"cap_bytes": 7, "warm_tokens": 2, "measured_tokens": 3, "threads": (1,), "progress": False}
    monkeypatch.setattr(accelerate, "run_capped", fake_run(np.ones((3, 5), np.float32), killed="accelerate_offload"))
    runs, agreement = accelerate.timed_under_cap(checkpoint, text, **options)
    assert runs["outcome"].tolist() == ["ran", "killed by the cap"]
    assert runs.loc[1, "detail"] == "one\nlast words"
    assert np.isnan(runs.loc[1, "seconds_per_token"])
    assert agreement.empty
    assert accelerate.against(runs).empty
    with pytest.raises(ValueError, match="engine='vllm' is unknown"):
        accelerate.timed_under_cap(checkpoint, text, engines=("vllm",), **options)


def test_why_accelerate_cannot_run_is_said(monkeypatch):
    monkeypatch.setattr(accelerate, "why_no_cap", lambda: None)
    monkeypatch.setenv(accelerate.PYTHON_VARIABLE, "/bin/false")
    assert "/bin/false cannot import accelerate" in (accelerate.why_not() or "")
    monkeypatch.setattr(accelerate, "why_no_cap", lambda: "not root")
    assert accelerate.why_not() == "not root"


def test_ratios_against_accelerate_are_by_round_and_of_the_best():
    runs = pd.DataFrame(
        [
            {"round": 0, "engine": "ours", "threads": 1, "outcome": "ran", "seconds_per_token": 2.0, "median_seconds": 1.0},
            {"round": 0, "engine": "accelerate", "threads": 1, "outcome": "ran", "seconds_per_token": 30.0, "median_seconds": 20.0},
            {"round": 1, "engine": "ours", "threads": 1, "outcome": "ran", "seconds_per_token": 1.0, "median_seconds": 1.0},
            {"round": 1, "engine": "accelerate", "threads": 4, "outcome": "killed by the cap"},
        ]
    )
    found = accelerate.against(runs)
    assert found[["round", "threads", "ratio", "ratio_median", "ratio_to_best"]].values.tolist() == [[0, 1, 15.0, 20.0, 30.0]]


def test_the_bench_prints_whole_lines(checkpoint, monkeypatch, capsys):
    path = Path(__file__).parent / "bench" / "bench_runtime.py"
    spec = importlib.util.spec_from_file_location("bench_runtime", path)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "timed_checkpoint", lambda geometry: checkpoint)
    monkeypatch.setattr(bench, "timed_text", lambda n: np.random.default_rng(1).integers(0, 4096, n))
    monkeypatch.setattr(bench.accelerate, "why_not", lambda: "not here")
    monkeypatch.setattr(sys, "argv", ["bench_runtime.py", "--quick"])
    bench.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    heads = [line for line in lines if "table" not in line]
    assert [line["part"] for line in heads] == ["disk", "links", "accelerate"]
    assert all(line["machine"]["cpu"] and line["versions"]["torch"] and line["torch_threads"] == 1 for line in heads)
    tables = {(line["part"], line["table"]) for line in lines if "table" in line}
    assert {("disk", "reads"), ("disk", "targets"), ("links", "crossings"), ("links", "targets"), ("accelerate", "skipped")} <= tables
    assert {line["policy"] for line in lines if line.get("table") == "predicted"} == {policy.label for policy in mc.PRESETS}


def test_a_packed_store_is_read_past_the_cache_where_the_disk_allows_it(checkpoint):
    store = PackedStore(checkpoint.packed, check="never")
    reader = PlainReader(checkpoint.packed, store.is_direct)
    groups = [[(0, 1), (1, 2)]]
    assert reader.read(groups)[0] == 2 * store.layout.block_bytes
    reader.close()
    store.close()
