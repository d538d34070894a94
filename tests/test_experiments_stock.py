"""The comparison with stock engines, without any engine: order, resumption, what is chosen, how runs end, and what is said about them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fake_machine import FETCHING, LLAMA, MAPPED, QUALITY, RULE, TEXT, FakeMachine

from moecache import claims, results
from moecache.cache import CapacityError
from moecache.claims import State
from moecache.experiments import read_ahead, stock, stock_files, stock_report, stock_runs, stock_words_report
from moecache.experiments.memory_cap import CappedRun
from moecache.experiments.stock import ENGINES, Options
from moecache.experiments.stock_files import StockError
from moecache.experiments.stock_runs import KILLED, RAN, TOO_SMALL, Cell, Choice
from moecache.figures.stock import rates_by_cap

SMALL, WHOLE = Cell(16, 0.2), Cell(16, 1.0)
NOTHING = Options([], [])


@pytest.fixture
def machine(tmp_path, monkeypatch) -> FakeMachine:
    return FakeMachine(tmp_path).install(monkeypatch, tmp_path)


def compared(names, cells=(SMALL, WHOLE), options=NOTHING, num_repeats=3):
    return stock.measure(TEXT, list(names), list(cells), options, num_repeats, sweep_tokens=2)


# The order


def test_every_engine_runs_once_in_each_cell_and_repeat_and_none_always_first():
    engines = stock.engines_named([LLAMA, MAPPED, FETCHING])
    order = stock.schedule(engines, [SMALL, WHOLE, Cell(4, 0.4)], 3)
    assert len(order) == len(set(order)) == 3 * (3 + 3 + 2)  # transformers has no 4-bit experts
    firsts = [next(engine.name for r, cell, engine in order if (r, cell) == (repeat, SMALL)) for repeat in (1, 2, 3)]
    assert sorted(firsts) == sorted([LLAMA, MAPPED, FETCHING])
    assert [repeat for repeat, _, _ in order] == sorted(repeat for repeat, _, _ in order)


def test_no_repeat_reads_the_text_of_the_sweep(machine):
    repeats = {repeat for repeat, _, _ in stock.schedule(stock.engines_named([]), [SMALL], 4)}
    assert stock.SWEEP_REPEAT not in repeats


def test_unknown_engines_are_answered_with_the_list():
    with pytest.raises(ValueError, match=r"no engine 'vllm'; there are 'llama\.cpp', "):
        stock.engines_named(["vllm"])
    assert [engine.name for engine in stock.engines_named([])] == list(ENGINES)


# Going on


def test_an_interrupted_comparison_goes_on_where_it_stopped(machine):
    machine.stops_after = 4
    with pytest.raises(KeyboardInterrupt):
        compared([MAPPED, FETCHING])
    machine.stops_after = 10**9
    frame, _ = compared([MAPPED, FETCHING])
    assert len(machine.commands) == len(frame) == 12  # none twice
    again, _ = compared([MAPPED, FETCHING])
    assert len(machine.commands) == 12
    pd.testing.assert_frame_equal(again, frame)


def test_further_repeats_cost_only_themselves_and_parts_are_not_listed(machine):
    compared([MAPPED, FETCHING], [SMALL], num_repeats=2)
    frame, _ = compared([MAPPED, FETCHING], [SMALL], num_repeats=3)
    assert len(machine.commands) == len(frame) == 6
    assert {result.experiment for result in results.used()} == {stock.EXPERIMENT}


# What is chosen


def test_the_best_of_threads_and_then_of_read_ahead_is_kept(machine):
    options = Options((1, 2, 4, 8), (128, 8192))
    frame, swept = compared([LLAMA, MAPPED, FETCHING], [SMALL], options)
    assert list(swept.loc[swept["engine"] == LLAMA, "asked_threads"]) == [1, 2, 4, 8, 4]
    assert list(swept.loc[swept["engine"] == LLAMA, "asked_read_ahead_kib"]) == [128] * 4 + [8192]
    assert list(swept.loc[swept["engine"] == MAPPED, "asked_read_ahead_kib"]) == [128, 8192]
    assert FETCHING not in set(swept["engine"])  # it neither maps files nor has a choice of threads
    assert set(frame.loc[frame["engine"] == LLAMA, "threads"]) == {4}
    assert set(swept["repeat"]) == {0}


def test_what_the_sweep_killed_is_run_with_the_first_choice(machine):
    machine.killed = {"llama_cpp"}
    frame, _ = compared([LLAMA, FETCHING], [SMALL], Options((2, 4), (128, 8192)))
    rows = frame[frame["engine"] == LLAMA]
    assert set(rows["outcome"]) == {KILLED}
    assert set(rows["asked_threads"]) == {2}
    assert rows["tokens_per_second"].isna().all()


def test_where_nothing_is_to_be_chosen_nothing_is_swept(machine):
    _, swept = compared([LLAMA, FETCHING], [SMALL], Options([4], [128]), num_repeats=1)
    assert swept.empty
    llama, own = machine.commands
    assert llama[llama.index("--threads") + 1] == "4"
    assert own[0] == llama[0]


def test_a_sweep_with_nothing_to_choose_is_refused():
    with pytest.raises(ValueError, match="nothing to sweep"):
        stock.sweep(TEXT, [ENGINES[FETCHING]], [SMALL], Options((), (128, 8192)), 2)


def test_own_runtime_leaves_a_core_to_its_readers(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert stock_runs.num_threads(ENGINES[FETCHING], Choice()) == 3
    assert stock_runs.num_threads(ENGINES[MAPPED], Choice()) == 4
    assert stock_runs.num_threads(ENGINES[LLAMA], Choice(threads=8)) == 8


# One run


def test_all_engines_get_the_same_cap_and_own_slots_lie_within_it(machine):
    frame, _ = compared([LLAMA, FETCHING, QUALITY], [Cell(16, 0.5)], num_repeats=1)
    experts = 2 * 64 * 2**20
    assert set(machine.limits) == {10 * 2**20 + experts // 2 + 100 * 2**20}
    assert set(frame["cap_mebibytes"]) == {174.0}
    slots = {command[command.index("--policy") + 1]: int(command[command.index("--slots") + 1]) for command in machine.commands[1:]}
    assert slots == {"fetch every miss": 31, "quality-first": 29}  # 64 blocks, less 2 reserved, less 2 a layer for copies under way
    thresholds = [float(c[c.index("--gate-threshold") + 1]) for c in machine.commands if "--gate-threshold" in c]
    assert thresholds == [pytest.approx(0.15 * 10 / 8)]


def test_a_policy_that_does_not_fit_is_said_and_not_started(machine):
    tight = Cell(16, 0.15)  # 19 blocks: no eight slots in each of two layers beside reserved blocks and copies under way
    frame, _ = compared([LLAMA, QUALITY], [tight], num_repeats=1)
    row = frame[frame["engine"] == QUALITY].iloc[0]
    assert row["outcome"] == TOO_SMALL
    assert machine.programs() == ["llama_cpp"]
    with pytest.raises(CapacityError):
        stock_runs.own_options(machine.files, ENGINES[QUALITY], tight)


def test_a_row_holds_what_the_engine_and_the_system_said(machine):
    row = stock_runs.run_once(TEXT, ENGINES[FETCHING], Cell(16, 0.5), Choice(), 1)
    assert tuple(row) == stock_runs.COLUMNS
    assert row["tokens_per_second"] == pytest.approx(40.0)
    assert row["median_ms"] == pytest.approx(25.0)
    assert row["hit_rate"] == 0.75
    assert row["read_mebibytes_per_token"] == 1.0
    assert row["faults_per_token"] == 10.0
    assert row["rss_mebibytes"] == 1024.0
    assert not row["is_fitting"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (CappedRun(0, False, 1, 1, "", "", 1.0), RAN),
        (CappedRun(-9, True, 1, 1, "", "", 1.0), KILLED),
        (CappedRun(-9, False, 1, 1, "", "", 61.2, is_timed_out=True), "stopped after 61 s"),
    ],
)
def test_how_a_run_ended(run, expected):
    assert stock_runs.outcome_of(run, ENGINES[LLAMA]) == expected


def test_a_failure_of_another_kind_is_no_result():
    run = CappedRun(1, False, 1, 1, "", "Traceback\nValueError: the file is no model", 1.0)
    with pytest.raises(StockError, match=r"llama\.cpp ended with status 1:(.|\n)*no model"):
        stock_runs.outcome_of(run, ENGINES[LLAMA])
    killed_by_someone = replace(run, returncode=-9)
    with pytest.raises(StockError):
        stock_runs.outcome_of(killed_by_someone, ENGINES[LLAMA])


def test_a_missing_package_is_named_with_the_way_out(monkeypatch):
    engine = ENGINES[LLAMA]._replace(package="no_such_package_of_ours")
    with pytest.raises(StockError, match=r"no_such_package_of_ours cannot be imported .*pip install 'moecache\[stock\]'"):
        stock_runs.check_installed([engine])
    stock_runs.check_installed([ENGINES[FETCHING]])


def test_without_a_cap_runs_are_marked_and_nothing_is_concluded(machine, monkeypatch):
    monkeypatch.setattr(stock_runs, "why_no_cap", lambda: "not root")
    monkeypatch.setattr(stock_words_report, "why_no_cap", lambda: "not root")
    frame, _ = compared([LLAMA, FETCHING, RULE], [SMALL])
    assert machine.limits == [None] * 9
    assert not frame["is_capped"].any()
    assert "not capped on this page" in stock_words_report.cap_words(frame)
    assert "not root" in stock_words_report.cap_words(frame)
    assert "not a finding" in stock_words_report.meaning(frame)
    assert stock_words_report.verdict(frame)["verdict"] == str(State.NOT_YET_MEASURED)


def test_read_ahead_is_set_and_given_back(tmp_path, monkeypatch):
    setting = tmp_path / "read_ahead_kb"
    setting.write_text("8192")
    monkeypatch.setattr(read_ahead, "setting_of", lambda _: setting)

    def fail_inside():
        with read_ahead.read_ahead(tmp_path, 128) as held:
            assert (held, setting.read_text()) == (128, "128")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert setting.read_text() == "8192"
    with read_ahead.read_ahead(tmp_path, None) as held:
        assert held == 8192
    monkeypatch.setattr(read_ahead, "setting_of", lambda _: None)
    with read_ahead.read_ahead(tmp_path, 128) as held:
        assert held == read_ahead.UNKNOWN


def test_texts_and_bits_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="1001 tokens are asked for"):
        stock_files.tokens_of(1001, 0)
    with pytest.raises(ValueError, match=r"bits=8: engines are compared in 16 and 4 bits"):
        stock_files.files_of("reference-64", 512, 128, 8, "ours")


# Tables and words


def world(rates: dict[str, float], cell: Cell = SMALL, spread: float = 0.03, num_repeats: int = 3) -> pd.DataFrame:
    """Rows of a comparison with these rates; 0 = killed. Repeats differ by common factors and by `spread`."""
    rng = np.random.default_rng(1)
    rows = []
    for repeat in range(1, num_repeats + 1):
        for engine, rate in rates.items():
            speed = rate * (1 + 0.2 * repeat) * np.exp(rng.normal(0, spread)) if rate else np.nan
            rows.append(
                {"model": "reference-64", **cell._asdict(), "cell": cell.words, "is_fitting": cell.resident_fraction >= 1, "engine": engine,
                 "repeat": repeat, "outcome": RAN if rate else KILLED, "tokens_per_second": speed, "is_capped": True,
                 "experts_mebibytes": 1000.0, "cap_mebibytes": 500.0,
                 "peak_mebibytes": 500.0, "rss_mebibytes": 400.0, "read_mebibytes_per_token": 100.0, "hit_rate": np.nan, "threads": 4,
                 "read_ahead_kib": 128, "flags": '{"mmap": true}'}
            )  # fmt: skip
    return pd.DataFrame(rows)


CLEAR = {LLAMA: 4.0, MAPPED: 2.0, FETCHING: 30.0, RULE: 50.0, QUALITY: 45.0}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (CLEAR, State.SUPPORTED),
        (CLEAR | {FETCHING: 12.0}, State.NOT_SUPPORTED),
        (CLEAR | {QUALITY: 20.0}, State.NOT_SUPPORTED),
        (CLEAR | {FETCHING: 20.5}, State.INCONCLUSIVE),  # about five times
        (CLEAR | {QUALITY: 0.0}, State.SUPPORTED),  # a policy that does not run is not judged
        (CLEAR | {LLAMA: 0.0}, State.INCONCLUSIVE),
    ],
)
def test_the_verdict_follows_the_ratios(rates, expected):
    assert claims.verdict_on("j", world(rates)).state is expected


def test_where_everything_fits_nothing_is_judged():
    assert claims.verdict_on("j", world(CLEAR, WHOLE)).state is State.NOT_YET_MEASURED
    both = pd.concat([world(CLEAR), world(CLEAR | {FETCHING: 2.0}, WHOLE)])
    assert claims.verdict_on("j", both).state is State.SUPPORTED


def test_two_repeats_decide_nothing():
    verdict = claims.verdict_on("j", world(CLEAR, num_repeats=2))
    assert verdict.state is State.INCONCLUSIVE


def test_the_evidence_names_ratio_interval_n_and_what_did_not_run():
    told = stock_words_report.verdict(world(CLEAR | {QUALITY: 0.0}))
    assert "*moecache, fetch every miss* 7." in told["evidence"]
    assert "*moecache, quality-first* killed by the cap" in told["evidence"]
    assert "n = 3 repeats" in told["evidence"]


def test_planned_tests_are_corrected_together_and_the_others_have_no_p():
    table = stock_report.tests(pd.concat([world(CLEAR), world(CLEAR, WHOLE)]))
    assert table is not None
    planned = table[table["status"] == "planned"]
    assert len(planned) == 3
    assert planned["test"].str.endswith("Holm over 3").all()
    assert table.loc[table["status"] != "planned", "p"].isna().all()
    assert len(table) == 6
    without_llama = world({MAPPED: 2.0, FETCHING: 30.0})
    assert stock_report.baseline_of(without_llama) == MAPPED
    assert set(stock_report.tests(without_llama)["status"]) == {"exploratory"}  # type: ignore[index]
    assert stock_report.tests(world({MAPPED: 2.0, FETCHING: 30.0}, num_repeats=1)) is None


def test_rates_are_geometric_means_and_ended_runs_are_told():
    frame = world(CLEAR | {MAPPED: 0.0})
    table = stock_report.rates(frame).set_index("engine")
    ran = frame.loc[frame["engine"] == LLAMA, "tokens_per_second"]
    assert table.loc[LLAMA, "rate"] == pytest.approx(np.exp(np.log(ran).mean()))
    assert table.loc[LLAMA, "low"] < table.loc[LLAMA, "rate"] < table.loc[LLAMA, "high"]
    assert (table.loc[MAPPED, "outcome"], table.loc[MAPPED, "n"]) == (KILLED, 0)
    one_killed = frame.copy()
    one_killed.loc[one_killed.index[0], ["outcome", "tokens_per_second"]] = [KILLED, np.nan]
    summary = stock_report.rates(one_killed).iloc[0]
    assert (summary["outcome"], summary["n"]) == (f"{KILLED} in 1 of 3", 2)
    assert np.isnan(summary["low"])
    shown = stock_report.shown_rates(stock_report.rates(one_killed))
    assert shown.loc[1, "tokens/s [95 %]"] == KILLED
    assert shown.loc[0, "set"] == "4 threads, read-ahead 128 KiB"
    assert shown.loc[2, "set"] == "4 threads"
    assert shown.shape[1] <= 8


def test_the_order_is_the_same_or_the_swaps_are_named():
    assert "same in all 3 repeats" in stock_report.order_words(world(CLEAR))
    swapped = world(CLEAR)
    is_turned = (swapped["repeat"] == 2) & (swapped["engine"] == MAPPED)
    swapped.loc[is_turned, "tokens_per_second"] = 100.0
    assert f"{LLAMA} and {MAPPED} ({SMALL.words})" in stock_report.order_words(swapped)
    near = world({LLAMA: 4.0, MAPPED: 4.1}, spread=0.02)
    assert "same in all" in stock_report.order_words(near)
    assert "one repeat" in stock_report.order_words(world(CLEAR, num_repeats=1))


def test_words_follow_the_rows():
    both = pd.concat([world(CLEAR), world({LLAMA: 100.0, FETCHING: 80.0}, WHOLE)])
    assert stock_words_report.fitting_words(both).startswith("Where all experts fit, llama.cpp is 1.2")
    assert "was not compared" in stock_words_report.fitting_words(world(CLEAR))
    assert "100 MiB at" in stock_words_report.disk_words(both)
    assert "*fetch every miss* 7." in stock_words_report.meaning(both)
    assert "not run on this page" in stock_words_report.meaning(world({MAPPED: 2.0, FETCHING: 30.0}))
    assert "from moecache, 0.15 rule" in stock_words_report.alternative(stock_report.rates(world(CLEAR)))
    assert stock_words_report.spare_words(both, TEXT) == ""  # 800 MiB are left out
    assert SMALL.words in stock_words_report.spare_words(both, TEXT._replace(process_mebibytes=800))
    assert WHOLE.words not in stock_words_report.spare_words(both, TEXT._replace(process_mebibytes=800))
    assert "nothing was tuned" in stock_words_report.sweep_words(pd.DataFrame())
    assert list(stock_report.flags_table(world(CLEAR))["flags"]) == ["mmap=True"] * 5
    by_cap = world(CLEAR)
    by_cap["flags"] = [json.dumps({"policy": "p", "slots": number}) for number in range(len(by_cap))]
    assert list(stock_report.flags_table(by_cap)["flags"]) == ["policy=p"] * 5  # slots differ from cap to cap and are not shown


def test_costs_come_from_the_preferred_chapter_and_what_is_missing_is_named():
    def stored(policy_losses, slots):
        rows = [
            {"model": "reference-64", "regime": "stays_out", "num_slots": slots, "policy": policy, "document": f"d{i}", "cluster": f"c{i}",
             "num_tokens": 100, "mean_difference_nats": loss + 0.001 * i}
            for policy, loss in policy_losses.items() for i in range(5)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    preferred = stored({"0.15 rule": 0.02, "quality-first": 0.01}, 16)
    elsewhere = stored({"0.15 rule": 0.5}, 32)
    anyway = stored({"0.15 rule": 0.6}, 16).assign(regime="admitted_anyway")
    first = pd.concat([elsewhere, anyway, preferred])
    costs = stock_words_report.quality([first, elsewhere, pd.DataFrame()], stock_words_report.POLICIES).set_index("policy")
    assert costs.loc["0.15 rule", "increase"] == pytest.approx(np.expm1(0.022))
    assert costs.loc["0.15 rule", "slots"] == 16
    told = stock_words_report.quality_words(costs.reset_index())
    assert "Not stored yet: speed-first" in told
    assert "dearest is 0.15 rule" in told
    nothing = stock_words_report.quality([pd.DataFrame()], stock_words_report.POLICIES)
    assert stock_words_report.quality_words(nothing) == "Not stored yet: 0.15 rule, quality-first, speed-first."
    assert stock_words_report.quality_table(costs.reset_index()).shape == (2, 5)


def test_the_figure_has_a_panel_for_each_cap_and_marks_what_was_killed():
    frame = pd.concat([world(CLEAR | {MAPPED: 0.0}), world(CLEAR, WHOLE), world({LLAMA: 9.0, FETCHING: 60.0}, Cell(4, 0.4))])
    figure = rates_by_cap(stock_report.rates(frame))
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [SMALL.words, WHOLE.words, Cell(4, 0.4).words]
    assert any(KILLED in text.get_text() for text in shown[0].texts)
    assert not any(KILLED in text.get_text() for text in shown[1].texts)
    with pytest.raises(ValueError, match="nothing to draw"):
        rates_by_cap(stock_report.rates(world({LLAMA: 0.0})))


def agreeing(**changes) -> pd.DataFrame:
    """Rows of `stock_agreement.measure` for engines that agree."""
    same = {"bits": 16, "num_tokens": 64, "max_kl_nats": 0.0, "same_top_fraction": 1.0, "mean_reference_logit": 1.0}
    ours = {**same, "engine": "ours", "mean_kl_nats": 0.0, "max_difference": 0.0, "is_equal": True, "must_be_equal": True}
    llama = {**same, "engine": "llama_cpp", "mean_kl_nats": 0.002, "max_difference": 0.1, "is_equal": False, "must_be_equal": False}
    return pd.DataFrame([ours, llama | changes])


def test_engines_that_compute_another_model_are_not_timed(machine, monkeypatch):
    answers = [agreeing(), agreeing(mean_kl_nats=0.3)]
    asked = []
    monkeypatch.setattr(stock.stock_agreement, "measure", lambda **given: (asked.append(given), answers[len(asked) - 1])[1])
    found = stock.agreement(TEXT, [LLAMA, FETCHING, RULE], [SMALL, Cell(4, 0.4)], 64)
    assert asked[0]["modules"] == ["llama_cpp", "ours"]  # a program once, whatever its policies
    assert asked[0]["bits"] == [16, 4]
    table = stock_words_report.agreement_table(found)
    assert list(table["engine"]) == [FETCHING, LLAMA]
    assert list(table["logits"]) == ["equal", "differ by up to 0.1"]
    assert "64 tokens" in stock_words_report.agreement_words(found)
    with pytest.raises(stock.stock_agreement.DisagreementError, match="llama_cpp"):
        stock.agreement(TEXT, [LLAMA, FETCHING], [SMALL], 64)


def test_our_runtime_compiles_before_memory_is_counted(monkeypatch, tmp_path):
    asked = []

    def run(command, limit, *_, **__):
        asked.append((command[2].rpartition(".")[2], limit))
        return CappedRun(0, False, limit, 0, "", "", 1.0)

    fake = FakeMachine(tmp_path)
    monkeypatch.setattr(stock_runs, "run_capped", run)
    monkeypatch.setattr(stock_runs, "files_of", lambda *_: fake.files)
    monkeypatch.setattr(stock_runs, "tokens_of", lambda n, document: np.zeros(n, np.int32))
    stock_runs.compile_ahead(TEXT, [ENGINES[LLAMA]])
    assert asked == []
    stock_runs.compile_ahead(TEXT, [ENGINES[LLAMA], ENGINES[FETCHING]])
    assert asked == [("ours", None)]


def test_the_factor_of_the_read_ahead_is_that_of_the_smallest_cap():
    row = {"engine": LLAMA, "bits": 16, "outcome": RAN}
    rates = {(0.2, 128): (5.0, 6.0), (0.2, 8192): (1.0, 1.5), (0.4, 128): (9.0,), (0.4, 8192): (1.0,)}
    swept = pd.DataFrame(
        [
            {**row, "resident_fraction": cap, "asked_read_ahead_kib": kib, "tokens_per_second": rate}
            for (cap, kib), found in rates.items()
            for rate in found
        ]
    )
    assert stock_words_report.read_ahead_factor(swept) == "4"
    assert "unknown" in stock_words_report.read_ahead_factor(swept[swept["asked_read_ahead_kib"] == 128])
    assert "unknown" in stock_words_report.read_ahead_factor(swept.iloc[:0])
