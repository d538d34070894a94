"""Chapter 09: what is asked follows the model, frames belong together, the page's numbers follow from them, the cap's absence is told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import moecache as mc
from moecache import results
from moecache.cost import estimate_seconds
from moecache.experiments import runtime_curve, seconds_per_token, seconds_under_cap
from moecache.experiments import seconds_per_token_report as report
from moecache.experiments.runtime_decoding import Recorded
from moecache.experiments.runtime_seconds import ALL_HITS, DISK, LATENCY_SECONDS, Plan, Timed
from moecache.figures import seconds_per_token as drawn
from moecache.hardware import Hardware
from moecache.simulate import simulate
from moecache.synthetic import synthetic_trace

PLAN = Plan(num_slots=32, warm_tokens=20, num_blocks=6, block_tokens=4)
LAYER, EXPERT, MIB = 2e-3, 2e-4, 2**20
QUESTION = seconds_per_token.Question("reference-512", 2, 512, 64, 0.25, 24, 48, (0.5, 4.0))
COUNTED = ["num_preempted", "num_stalls", "num_late", "bytes_background"]


def machine_of(link: str, rate: float) -> Hardware:
    return Hardware(link, rate, 0.0 if link == DISK else LATENCY_SECONDS, layer_seconds=LAYER, expert_seconds=EXPERT)


def rows_of(run: mc.Run, link: str, rate: float) -> list[dict]:
    """A row a block, its seconds the cost model's; after fetch-every-miss's the same block with hits only."""
    seconds, rows = estimate_seconds(run, machine_of(link, rate), MIB).seconds, []
    assert run.decisions is not None
    for block in range(PLAN.num_blocks):
        first = PLAN.warm_tokens + block * PLAN.block_tokens
        part = slice(first, first + PLAN.block_tokens)
        outcomes = run.decisions.outcome[part]
        counts = {outcome.name.lower(): int((outcomes == outcome).sum()) for outcome in mc.Outcome}
        demand = (counts["fetched"] + counts["forced"]) * MIB
        row = {"link": link, "link_bytes_per_second": np.nan if link == DISK else rate, "late_fraction": np.nan if link == DISK else 0.0}
        row |= {"policy": run.policy.label, "block": block, "num_tokens": PLAN.block_tokens, **dict.fromkeys(COUNTED, 0)}
        row |= {name: counts[name] for name in ("hit", "fetched", "forced", "substituted")} | {"seconds": seconds[part].sum()}
        row |= {"seconds_experts": outcomes.size * EXPERT, "seconds_dense": PLAN.block_tokens * 2 * LAYER}
        row |= dict.fromkeys(("seconds_waiting", "seconds_routing", "seconds_overhead"), 0.0)
        rows.append(row | {"bytes_demand": demand, "fetch_bytes": demand, "fetch_seconds": demand / rate})
        if run.policy == mc.FETCH_EVERY_MISS:
            nothing = dict.fromkeys(("fetched", "forced", "substituted", "bytes_demand", "fetch_bytes", "fetch_seconds"), 0)
            floor = PLAN.block_tokens * 2 * (LAYER + 8 * EXPERT)
            rows.append(row | {"policy": ALL_HITS, "seconds": floor, "hit": outcomes.size} | nothing)
    return rows


def made_up(links: dict[str, float]) -> Timed:
    """As if a clock had agreed with the cost model; the plain reader is faster by a tenth."""
    trace = synthetic_trace(PLAN.num_tokens, 2, 128, 8, document_tokens=22)
    trace = replace(trace, shape=replace(trace.shape, expert_bytes=MIB))
    runs = [simulate(trace, policy, PLAN.num_slots) for policy in PLAN.policies]
    blocks = pd.DataFrame([row for link, rate in links.items() for run in runs for row in rows_of(run, link, rate)])
    own = blocks[blocks["policy"] == mc.FETCH_EVERY_MISS.label].reset_index(drop=True)
    reads = pd.DataFrame({"block": own["block"], "num_groups": 8, "num_bytes": own["fetch_bytes"], "plain_seconds": own["fetch_seconds"]})
    reads = reads.assign(fetch_seconds=own["fetch_seconds"] / 0.9, is_plain_first=own["block"] % 2 == 1)
    recorded = {run.policy.label: Recorded(trace, run.decisions) for run in runs if run.decisions is not None}
    return Timed(blocks, reads if DISK in links else pd.DataFrame(), recorded, PLAN)


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    disk, links = made_up({DISK: 1e9}), made_up({"0.2 GB/s": 2e8, "0.5 GB/s": 5e8, "4 GB/s": 4e9})
    shape = disk.recorded[PLAN.policies[0].label].trace.shape
    facts = {"num_layers": shape.num_layers, "num_experts": shape.num_experts, "top_k": shape.top_k, "expert_bytes": MIB}
    facts |= {"packed_bytes": 9e9, "warm_tokens": PLAN.warm_tokens, "block_tokens": PLAN.block_tokens, "num_blocks": PLAN.num_blocks}
    facts |= {"num_policies": len(PLAN.policies)}
    found = seconds_per_token.frames_of(disk, links) | {"facts": pd.DataFrame([facts])}
    return {name: frame.assign(model="made up", num_slots=PLAN.num_slots) for name, frame in found.items()}


def test_a_plan_follows_the_model():
    large = QUESTION.plan()
    assert (large.num_slots, large.block_tokens, large.num_blocks) == (128, 12, 4)
    assert large.policies == mc.PRESETS
    small = replace(QUESTION, model_name="reference-64").plan()
    assert (small.num_slots, small.block_tokens, small.num_blocks) == (16, 2, 24)
    assert [policy.label for policy in small.policies] == [policy.label for policy in mc.PRESETS]
    assert {policy.label: policy.gate_threshold for policy in small.policies}["quality-first"] == pytest.approx(1.5 / 8)


def test_all_frames_come_from_one_measurement_and_are_found_again(tmp_path, monkeypatch):
    calls = []

    def measured(question):
        calls.append(question)
        return {name: pd.DataFrame({"which": [name]}) for name in seconds_per_token.FRAMES}

    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(tmp_path))
    monkeypatch.setenv("MOECACHE_RESULTS", "own")
    monkeypatch.setattr(seconds_per_token, "measured", measured)
    assert seconds_per_token.kept(QUESTION, "blocks") is None
    for name in seconds_per_token.FRAMES:
        assert seconds_per_token.answer(QUESTION, name).frame["which"].tolist() == [name]
    assert set(calls) == {QUESTION}
    calls.clear()
    found = seconds_per_token.kept(QUESTION, "blocks")
    assert found is not None
    assert found.frame["which"].tolist() == ["blocks"]
    assert seconds_per_token.kept(replace(QUESTION, warm_tokens=25), "blocks") is None
    assert not calls
    with pytest.raises(ValueError, match="frame 'times' is unknown"):
        seconds_per_token.answer(QUESTION, "times")


def test_disk_then_links_are_timed_on_the_same_text(monkeypatch, frames):
    seen = []

    def timed(links):
        return lambda packed, text, *rest, **_: seen.append((packed, text.tolist())) or made_up(links)

    checkpoint = seconds_per_token.TimedCheckpoint(QUESTION.geometry, Path("fused"), Path("packed"))
    monkeypatch.setattr(seconds_per_token, "timed_checkpoint", lambda *_, **__: checkpoint)
    monkeypatch.setattr(seconds_per_token, "held_out_documents", lambda *_, **__: [])
    monkeypatch.setattr(seconds_per_token, "timed_text", lambda num_tokens, _: np.arange(num_tokens))
    monkeypatch.setattr(seconds_per_token, "timed_on_disk", timed({DISK: 1e9}))
    monkeypatch.setattr(seconds_per_token, "timed_on_links", timed({"0.5 GB/s": 5e8}))
    monkeypatch.setattr(seconds_per_token, "facts_of", lambda *_: frames["facts"].drop(columns=["model", "num_slots"]))
    found = seconds_per_token.measured.__wrapped__(QUESTION)
    assert set(found) == set(seconds_per_token.FRAMES)
    assert all((frame["model"] == "reference-512").all() and (frame["num_slots"] == 128).all() for frame in found.values())
    assert seen[0] == seen[1] == (Path("packed"), list(range(QUESTION.plan().num_tokens)))


def test_where_the_clock_agrees_with_the_cost_model_there_is_no_error(frames):
    assert frames["predicted"]["is_log_equal"].all()
    assert np.allclose(frames["predicted"]["error_fraction"], 0.0, atol=1e-9)
    waiting = frames["curve"][frames["curve"]["policy"] == ALL_HITS]
    assert np.allclose(waiting["ratio"], waiting["calculated_ratio"])


def test_the_formula_goes_through_the_links_and_falls_with_the_rate(frames):
    formula, links = frames["formula"], frames["curve"][frames["curve"]["policy"] == ALL_HITS].set_index("link")
    assert formula["ratio"].is_monotonic_decreasing
    assert formula["bytes_per_second"].min() == pytest.approx(1e8)
    for link in ("0.2 GB/s", "0.5 GB/s"):
        rate = links.loc[link, "link_bytes_per_second"]
        between = np.interp(np.log(rate), np.log(formula["bytes_per_second"]), formula["ratio"])
        assert between == pytest.approx(links.loc[link, "ratio"], rel=0.02)


def test_tables_fit_a_page_and_name_every_policy_and_link(frames):
    policies = frames["policies"]
    table = report.seconds_table(policies, DISK)
    assert table["policy"].tolist() == list(dict.fromkeys(policies["policy"]))
    assert table.set_index("policy").loc["fetch every miss", "times as fast [95 %]"] == "1.00 [1.00, 1.00]"
    assert list(report.link_table(policies).columns) == ["policy", "disk", "0.2 GB/s", "0.5 GB/s", "4 GB/s"]
    errors = report.error_table(frames["predicted"])
    assert errors["disk"].tolist() == ["+0.0 %"] * 6
    assert report.reads_table(frames["reads"])["runtime / plain [95 %]"].iloc[0] == "0.90 [0.90, 0.90]"
    assert len(report.of_models(policies)) == 4
    assert all(found.shape[1] <= 8 for found in (table, errors, report.reads_table(frames["reads"]), report.of_models(policies)))


def test_crossings_are_told_in_words(frames):
    table = report.crossing_table(frames["curve"], frames["formula"], [1.0001, 50.0]).set_index("policy")
    assert table.loc["formula (ESTIMATED)", "50 times as fast up to"] == "no rate tried"
    assert table.loc["0.15 rule (MEASURED)", "50 times as fast up to"] == "no rate tried"
    own = pd.DataFrame({"ratio": [3.0, 2.0, 1.0]})
    assert report.up_to(own, 5e8, 2.5, "ratio") == "0.5 GB/s"
    assert report.up_to(own, float("nan"), 0.5, "ratio") == "every rate tried"
    assert report.up_to(own, float("nan"), 2.5, "ratio") == "not in order"


def test_links_are_named_by_what_has_about_their_rate():
    words = (report.link_words(DISK), report.link_words("0.5 GB/s"), report.link_words("0.05 GB/s"))
    assert words == ("this machine's disk", "0.5 GB/s, SATA SSD", "0.05 GB/s")


def test_the_numbers_of_the_prose_are_those_of_the_frames(frames):
    found, disk = report.values(frames), seconds_per_token.on_disk(frames["policies"]).set_index("policy")["seconds_per_token"]
    assert found["fetch_ms"] == pytest.approx(1e3 * disk["fetch every miss"])
    assert found["floor_ms"] == pytest.approx(1e3 * 2 * (LAYER + 8 * EXPERT))
    assert found["quality_ratio"] == pytest.approx(found["fetch_ms"] / found["quality_ms"])
    assert found["num_within"] == found["num_within_median"] == found["num_link_predictions"] == 18
    assert found["num_equal"] == found["num_predicted"] == 24
    assert found["read_ratio"] == pytest.approx(0.9)
    assert found["num_tokens"] == 24
    assert all(np.isfinite(value) for value in found.values() if isinstance(value, float))


def test_what_the_counters_do_not_see_is_the_rest(frames):
    rows = report.with_rest(frames["policies"])
    parts = rows[list(drawn.PARTS)].sum(axis=1)
    assert (parts >= rows["seconds_per_token"] - 1e-12).all()


def test_figures_show_every_link_and_the_disk_open(frames):
    bars = drawn.time_parts(report.with_rest(frames["policies"]), ["a", "b", "c", "d"])
    assert [axes.get_title(loc="left") for axes in bars.axes[:4]] == ["a", "b", "c", "d"]
    points = frames["curve"][frames["curve"]["policy"] != ALL_HITS]
    figure = drawn.ratio_by_link(points.assign(is_disk=points["link"] == DISK), frames["formula"], (2.5, 3.0))
    faces = [line.get_markerfacecolor() for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    assert faces.count("white") == 1
    predicted = frames["predicted"].assign(is_disk=frames["predicted"]["link"] == DISK)
    figure = drawn.predicted_by_measured(predicted, 0.15)
    assert len([line for line in figure.axes[0].get_lines() if line.get_marker() not in ("None", "")]) == len(predicted)
    with pytest.raises(ValueError, match="no colour is kept for policy 'guess'"):
        drawn.predicted_by_measured(predicted.assign(policy="guess"), 0.15)


def test_the_formula_uses_the_mean_of_the_links_constants():
    links = made_up({"0.2 GB/s": 2e8, "4 GB/s": 4e9})
    machines = [runtime_curve.machine(links, name) for name in ("0.2 GB/s", "4 GB/s")]
    floor = 2 * np.mean([machine.layer_seconds + 8 * machine.seconds_per_expert(MIB) for machine in machines])
    assert seconds_per_token.formula(links)["floor_seconds"].tolist() == pytest.approx([floor] * seconds_per_token.NUM_RATES)


# Under a cap of memory


def runs(outcome: str = "ran") -> pd.DataFrame:
    rows = []
    for number in range(2):
        for engine, seconds in (("ours", 0.02), ("accelerate", 0.3 + 0.1 * number)):
            fails = engine == "accelerate" and outcome != "ran"
            row = {"round": number, "engine": engine, "threads": 1, "cap_bytes": 2_600_000_000, "outcome": outcome if fails else "ran"}
            row |= {"seconds_per_token": np.nan if fails else seconds, "median_seconds": np.nan if fails else seconds, "load_seconds": 2.0}
            rows.append(row | {"peak_bytes": 2_500_000_000, "peak_rss_bytes": 2_000_000_000, "read_bytes_per_token": 6e7, "detail": ""})
    return pd.DataFrame(rows)


AGREEMENT = pd.DataFrame(
    [{"num_tokens": 60, "largest_logit": 9.0, "largest_difference": 0.05, "same_argmax_share": 1.0, "mean_kl_nats": 1e-4}]
)


def test_a_comparison_under_the_cap_is_told_with_its_range():
    story = seconds_under_cap.story_of(runs(), AGREEMENT)
    assert "15.0 to 20.0 times as long" in story
    assert "MEASURED" in story
    assert "100.0% of 60 tokens" in story
    assert seconds_under_cap.table_of(runs()).shape == (4, 8)


def test_an_engine_that_the_cap_killed_has_no_ratio_and_is_named():
    story = seconds_under_cap.story_of(runs("killed by the cap"), AGREEMENT.iloc[:0])
    assert "There is no ratio" in story
    assert "accelerate, disk offload: killed by the cap" in story


def test_what_cannot_run_here_is_said_and_nothing_is_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(tmp_path))
    monkeypatch.setenv("MOECACHE_RESULTS", "own")
    monkeypatch.setattr(seconds_under_cap.rival, "why_not", lambda: "there are no memory cgroups")
    found = seconds_under_cap.answer(QUESTION, 60)
    assert found.table is None
    assert found.story == "Not measured here: there are no memory cgroups."
    assert not list(tmp_path.rglob("*.csv"))
    assert "Left out of the quick run" in seconds_under_cap.answer(QUESTION, 0).story
    monkeypatch.setenv("MOECACHE_RESULTS", "stored")
    assert "no stored result" in seconds_under_cap.answer(replace(QUESTION, warm_tokens=7), 61).story


def test_what_runs_here_is_run_once_for_both_frames(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(tmp_path))
    monkeypatch.setenv("MOECACHE_RESULTS", "own")
    monkeypatch.setattr(seconds_under_cap.rival, "why_not", lambda: None)
    monkeypatch.setattr(seconds_under_cap, "timed_checkpoint", lambda *_, **__: "checkpoint")
    monkeypatch.setattr(seconds_under_cap, "timed_text", lambda *_: np.arange(300))
    monkeypatch.setattr(seconds_under_cap.rival, "timed_under_cap", lambda *_, **__: calls.append(1) or (runs(), AGREEMENT.iloc[:0]))
    found = seconds_under_cap.answer(replace(QUESTION, warm_tokens=9), 62)
    assert found.table is not None
    assert len(calls) == 1
    assert results.used()[-1].frame.empty
