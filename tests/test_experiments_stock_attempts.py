"""The attempts to close a gap to a stock engine: what is run, in which order, what is kept, and what is said."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from fake_machine import SHAPE, TEXT, FakeMachine

import moecache as mc
from moecache.experiments import stock_attempts, stock_runs
from moecache.experiments.stock import STOCK, Options
from moecache.experiments.stock_attempts import attempts, measure
from moecache.experiments.stock_attempts_report import shown, words
from moecache.experiments.stock_runs import COLUMNS, RAN, Cell

SMALL = Cell(16, 0.4)
SWEPT = pd.DataFrame(columns=list(COLUMNS))
TEXT_WITH_ROOM = TEXT._replace(process_mebibytes=stock_attempts.LEAN_MEBIBYTES + 20)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> FakeMachine:
    fake = FakeMachine(tmp_path).install(monkeypatch, tmp_path)
    monkeypatch.setattr(stock_attempts, "files_of", lambda *_: fake.files)
    return fake


def run(repeats=2):
    return measure(TEXT_WITH_ROOM, [SMALL], SWEPT, Options([], []), repeats)


def test_every_repeat_begins_with_the_stock_engine_and_makes_every_attempt(machine):
    frame = run()
    names = [one.name for one in attempts(mc.GATE_015)]
    assert frame["attempt"].tolist() == [STOCK, *names] * 2
    assert machine.programs() == ["llama_cpp", *["ours"] * len(names)] * 2
    assert frame["repeat"].tolist() == [1] * (len(names) + 1) + [2] * (len(names) + 1)
    assert frame["outcome"].eq(RAN).all()


def test_each_attempt_is_what_its_name_says(machine):
    frame = run(repeats=1).set_index("attempt")
    asked = [command for command, program in zip(machine.commands, machine.programs(), strict=True) if program == "ours"]
    policies = [mc.Policy.from_dict(json.loads(command[command.index("--fields") + 1])) for command in asked]
    threads = [int(command[command.index("--threads") + 1]) for command in asked]
    assert threads == [1, 2, 2, 2, 2, 2]
    assert [policy.eviction.name for policy in policies] == ["LRU"] * 3 + ["DECAYED_COUNT"] * 3
    assert [policy.max_prefetches for policy in policies] == [0, 0, 0, 0, stock_attempts.NUM_PREFETCHES, 0]
    assert [policy.label for policy in policies] == ["fetch every miss"] * 5 + ["0.15 rule"]
    slots = frame["slots"].tolist()[1:]
    spare_slots = 20 // SHAPE.num_layers  # 20 MiB more, blocks of 1 MiB
    assert slots[2] - slots[1] == spare_slots
    assert slots[4] < slots[3]  # what is predicted needs blocks of its own
    assert len(set(machine.limits)) == 1  # the cap is the same for all


def test_an_interrupted_run_goes_on_and_a_finished_one_is_not_repeated(machine):
    machine.stops_after = 5
    with pytest.raises(KeyboardInterrupt):
        run()
    machine.stops_after = 10**9
    run()
    assert len(machine.commands) == 14
    run()
    assert len(machine.commands) == 14


def test_another_choice_for_the_stock_engine_is_another_measurement(machine):
    first = measure(TEXT_WITH_ROOM, [SMALL], SWEPT, Options([2], []), 1)
    again = measure(TEXT_WITH_ROOM, [SMALL], SWEPT, Options([4], []), 1)
    assert (first["threads"].iloc[0], again["threads"].iloc[0]) == (2, 4)


def test_tables_and_words_say_times_and_where_the_time_goes(machine):
    frame = run().assign(waiting_ms=30.0, experts_ms=8.0, dense_ms=4.0, routing_ms=0.2, overhead_ms=0.1)
    frame.loc[frame["attempt"] == STOCK, "tokens_per_second"] = 5.0
    table = shown(frame)
    assert table["attempt"].tolist()[:3] == [STOCK, "as compared", "+ two threads compute"]
    assert table[f"times {STOCK}"].tolist() == pytest.approx([1.0] + [8.0] * 6)
    assert table["waits, products, rest, ms"].iloc[1] == "30, 8, 4"
    assert table["hits"].iloc[1] == "75%"
    told = words(frame)
    assert "8 times as many tokens as llama.cpp" in told
    assert "42 ms a token 30 are waits for reads, 8 products of experts" in told
    assert words(frame.assign(tokens_per_second=np.nan)) == ""


def test_an_engine_killed_by_the_cap_has_no_rate(machine):
    machine.killed = {"ours"}
    frame = run(repeats=1)
    assert frame["outcome"].tolist() == [RAN, *[stock_runs.KILLED] * 6]
    assert frame["tokens_per_second"].isna().tolist() == [False, *[True] * 6]
    assert words(frame) == ""
    assert shown(frame)["attempt"].iloc[1] == f"as compared ({stock_runs.KILLED})"
