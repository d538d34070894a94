"""The verdicts: each follows the data, flips when the data flip, and says so when the data cannot carry
it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from paired_frames import SyntheticPolicy, paired_frame

from moecache import claims
from moecache.claims import State
from moecache.claims.data import stored_frame
from moecache.frame_file import write_frame
from moecache.kernel import KERNEL_VERSION

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED, NOT_SUPPORTED, INCONCLUSIVE = State.SUPPORTED, State.NOT_SUPPORTED, State.INCONCLUSIVE
NUM_DOCUMENTS = 72  # 24 clusters

# A world in which all claims hold: loss follows mass where first choices are fetched, and first choices cost far more.
WORLD = {
    "fetch every miss": SyntheticPolicy("fetch every miss", 0.0, 0.0, 0.0),
    "substitute every miss": SyntheticPolicy("substitute every miss", 0.9, 0.40, 0.39, 0.04),
    "0.15 rule": SyntheticPolicy("threshold and first choice", 0.115, 0.33, 0.37),
    "first choice": SyntheticPolicy("first J", 0.14, 0.34, 0.373),
    "first 3": SyntheticPolicy("first J", 0.05, 0.27, 0.33),
    "first 5": SyntheticPolicy("first J", 0.02, 0.16, 0.20),
    "gate weight 0.10": SyntheticPolicy("threshold", 0.033, 0.25, 0.30),
    "gate weight 0.08": SyntheticPolicy("threshold", 0.008, 0.10, 0.13),
    "only rank 0 substituted": SyntheticPolicy("one rank", 0.60, 0.05, 0.03, 0.03),
}
SETTINGS = (("reference-512", "admitted_anyway", 128), ("reference-512", "stays_out", 128))


def _with(**changes: dict[str, float]) -> dict[str, SyntheticPolicy]:
    """The world with some policies changed; names are written with underscores."""
    named = {name.replace("_", " ").replace("015", "0.15"): change for name, change in changes.items()}
    return WORLD | {name: replace(WORLD[name], **change) for name, change in named.items()}


def _frame(policies: dict[str, SyntheticPolicy], settings: tuple = SETTINGS[:1]) -> pd.DataFrame:
    frames = [paired_frame(policies, NUM_DOCUMENTS, i, setting) for i, setting in enumerate(settings)]
    return pd.concat(frames, ignore_index=True)


def _verdict(claim_id: str, frame: pd.DataFrame) -> claims.Verdict:
    """The verdict with fewer draws than the study's, which is enough for worlds as clear as these."""
    drawing, listed = claims.load_claims()
    claim = next(c for c in listed if c.id == claim_id)
    return claims.combine(claims.judge_settings(claim, replace(drawing, num_draws=1000), frame))


def _upside_down() -> dict[str, SyntheticPolicy]:
    """Losses reversed among the rules that always fetch the first choice: the more mass, the less loss."""
    kept = [name for name, p in WORLD.items() if p.substituted_fraction and not p.first_choice_fraction]
    losses = sorted(WORLD[name].loss_nats for name in kept)
    by_mass = sorted(kept, key=lambda name: -WORLD[name].mass)
    return WORLD | {n: replace(WORLD[n], loss_nats=loss) for n, loss in zip(by_mass, losses, strict=True)}


def _driven_by_mass() -> dict[str, SyntheticPolicy]:
    return {name: replace(p, mass_slope=10.0) for name, p in WORLD.items()}


FLIPS: list[tuple[str, Callable[[], dict[str, SyntheticPolicy]], State]] = [
    ("a", lambda: WORLD, SUPPORTED),
    ("a", lambda: _with(only_rank_0_substituted={"loss_nats": 0.03}), NOT_SUPPORTED),
    ("a", lambda: _with(only_rank_0_substituted={"loss_nats": 0.14, "noise_nats": 0.2}), INCONCLUSIVE),
    ("a", lambda: _with(only_rank_0_substituted={"substituted_fraction": 0.3}), INCONCLUSIVE),
    ("b", lambda: WORLD, SUPPORTED),
    ("b", _upside_down, NOT_SUPPORTED),
    ("b", lambda: {n: replace(p, noise_nats=0.3) for n, p in WORLD.items()}, INCONCLUSIVE),
    ("c", lambda: WORLD, SUPPORTED),
    ("c", _driven_by_mass, NOT_SUPPORTED),
    ("c", lambda: _with(first_5={"mass_slope": 20.0}), INCONCLUSIVE),
    ("d", lambda: WORLD, SUPPORTED),
    ("d", lambda: _with(only_rank_0_substituted={"loss_nats": 0.003}), NOT_SUPPORTED),
    ("d", lambda: _with(only_rank_0_substituted={"loss_nats": 0.016, "noise_nats": 0.05}), INCONCLUSIVE),
    ("d", lambda: _with(only_rank_0_substituted={"mass": 0.36}), INCONCLUSIVE),
    ("m", lambda: WORLD, SUPPORTED),
    ("m", lambda: _with(only_rank_0_substituted={"loss_nats": 0.01}), INCONCLUSIVE),
    ("m", lambda: _with(only_rank_0_substituted={"loss_nats": 0.01, "substituted_fraction": 0.37}), NOT_SUPPORTED),
    ("m", lambda: _with(only_rank_0_substituted={"substituted_fraction": 0.45}), INCONCLUSIVE),
]


@pytest.mark.parametrize(("claim", "world", "expected"), FLIPS)
def test_a_verdict_flips_with_the_data(claim: str, world: Callable[[], dict[str, SyntheticPolicy]], expected: State) -> None:
    assert _verdict(claim, _frame(world())).state is expected


@pytest.mark.parametrize("claim", ["a", "b", "c", "d", "m"])
def test_settings_that_disagree_are_inconclusive(claim: str) -> None:
    against = {
        "a": _with(only_rank_0_substituted={"loss_nats": 0.03}),
        "b": _upside_down(),
        "c": _driven_by_mass(),
        "d": _with(only_rank_0_substituted={"loss_nats": 0.003}),
        "m": _with(only_rank_0_substituted={"loss_nats": 0.01, "substituted_fraction": 0.37}),
    }[claim]
    agree = _verdict(claim, _frame(WORLD, SETTINGS))
    assert (agree.state, agree.evidence) == (SUPPORTED, "in all 2 settings")
    other = paired_frame(against, NUM_DOCUMENTS, 1, SETTINGS[1])
    mixed = _verdict(claim, pd.concat([_frame(WORLD), other], ignore_index=True))
    assert mixed.state is INCONCLUSIVE
    assert mixed.evidence == "supported in 1, not supported in 1 of 2 settings"


def test_the_evidence_names_effect_interval_and_n() -> None:
    drawing, listed = claims.load_claims()
    sentences = {}
    for claim in listed:
        if claim.experiment in ("04_misses_that_matter", "05_mass_hypothesis"):
            (verdict,) = claims.judge_settings(claim, drawing, _frame(WORLD)).values()
            sentences[claim.id] = verdict.evidence
            assert "n = 24 clusters" in verdict.evidence
    # 0.6 of 0.6 + 0.14 nats with 3 of 3 + 37.3 % of the calls.
    assert re.search(r"has 7\.4 % of the substituted calls and 81\.\d % \[8\d\.\d %, 8\d\.\d %\]", sentences["a"])
    assert re.search(r"Spearman \d\.\d\d \[\d\.\d\d, \d\.\d\d\] over 6 rules, at least \d\.\d\d with any one", sentences["b"])
    assert "mean of 6 rules" in sentences["c"]
    assert "*gate weight 0.08* loses" in sentences["d"]
    assert "substitutes 0.08 times the calls of *first choice*" in sentences["m"]


def test_the_matched_pair_is_preferred_where_it_was_measured() -> None:
    matched = WORLD | {"last 5": SyntheticPolicy("last J", 0.7, 0.25, 0.19, 0.03)}
    drawing, listed = claims.load_claims()
    claim = next(c for c in listed if c.id == "m")
    (verdict,) = claims.judge_settings(claim, drawing, _frame(matched)).values()
    assert verdict.state is SUPPORTED
    assert verdict.evidence.startswith("*last 5* substitutes 0.95 times the calls of *first 5*")


def test_what_was_not_measured_is_said_not_guessed() -> None:
    for claim in ("a", "d", "m"):
        frame = _frame({name: p for name, p in WORLD.items() if name != "only rank 0 substituted"})
        verdict = _verdict(claim, frame)
        assert verdict.state is State.NOT_YET_MEASURED
        assert "*only rank 0 substituted*" in verdict.evidence
    assert claims.verdict_on("a", pd.DataFrame()).state is State.NOT_YET_MEASURED


def test_too_few_rules_or_units_decide_nothing() -> None:
    few = {name: p for name, p in WORLD.items() if not name.startswith("first")}
    verdict = _verdict("b", _frame(few))
    assert verdict.state is INCONCLUSIVE
    drawing, listed = claims.load_claims()
    small = paired_frame(WORLD, 57, 0, SETTINGS[0])
    for claim in (claim for claim in listed if claim.rule and not claim.drawing):
        for judged in claims.judge_settings(claim, drawing, small).values():
            assert judged.evidence.startswith("only 19 clusters were read, 20 are needed")
            assert judged.state is (State.NOT_YET_MEASURED if claim.also else INCONCLUSIVE)


def test_controls_with_another_fallback_do_not_enter_the_relation() -> None:
    control = WORLD | {"random resident": SyntheticPolicy("control", 0.9, 0.05, 0.05)}
    drawing, listed = claims.load_claims()
    claim = next(c for c in listed if c.id == "b")
    (verdict,) = claims.judge_settings(claim, drawing, _frame(control)).values()
    assert "over 6 rules" in verdict.evidence
    assert verdict.state is SUPPORTED


def test_a_claim_may_have_units_settings_and_rows_of_its_own() -> None:
    drawing, listed = claims.load_claims()
    speed = next(claim for claim in listed if claim.id == "j")
    assert (speed.drawn(drawing).unit, drawing.unit) == ("repeat", "cluster")
    assert speed.drawn(drawing).confidence == drawing.confidence
    ran = {"model": "m", "is_capped": True, "outcome": "ran"}
    rates = {speed.parameters["stock"]: 1.0, **{engine: 2.0 * factor for engine, factor in speed.parameters["factors"].items()}}
    rows = [
        {**ran, "cell": cell, "is_fitting": cell == "all", "engine": engine, "repeat": repeat, "tokens_per_second": rate * (1 + repeat)}
        for cell in ("some", "all") for repeat in range(3) for engine, rate in rates.items()
    ]  # fmt: skip
    found = claims.judge_settings(speed, drawing, pd.DataFrame(rows))
    assert {setting: verdict.state for setting, verdict in found.items()} == {"m, some": SUPPORTED}
    once = claims.judge_settings(speed, drawing, pd.DataFrame([row for row in rows if row["repeat"] == 0]))
    assert [verdict.evidence for verdict in once.values()] == ["only 1 repeat was read, 3 are needed"]


def test_the_interval_alone_decides() -> None:
    assert claims.verdict.side_of(0.1, 0.2) is SUPPORTED
    assert claims.verdict.side_of(-0.2, -0.1) is NOT_SUPPORTED
    assert claims.verdict.side_of(-0.1, 0.1) is INCONCLUSIVE
    assert claims.verdict.side_of(0.1, 0.9, bound=0.5) is INCONCLUSIVE


# The data file


def test_all_thirteen_claims_are_listed_with_rules_that_exist() -> None:
    _, listed = claims.load_claims()
    assert [claim.id for claim in listed] == list("abcdefghijklm")
    for claim in listed:
        assert all(re.fullmatch(r"\d\d", number) for number in claim.chapters)
        assert claim.rule in claims.RULES or not claim.rule
        assert claim.also is None or claim.also.rule in claims.RULES
        assert {half.experiment[:2] for half in (claim, claim.also) if half is not None} <= set(claim.chapters)
        assert "{" not in claim.rule_in_words
        assert "|" not in claim.text + claim.reported


def test_the_numbers_of_a_rule_are_those_of_its_text() -> None:
    _, listed = claims.load_claims()
    rule = next(claim for claim in listed if claim.id == "a")
    assert "at most 25%" in rule.rule_in_words
    changed = replace(rule, parameters={**rule.parameters, "few": 0.1})
    assert "at most 10%" in changed.rule_in_words
    drawing = claims.Drawing(num_draws=500)
    crowded = _frame(_with(only_rank_0_substituted={"substituted_fraction": 0.06}))  # 14 % of the two rules' calls
    states = [next(iter(claims.judge_settings(c, drawing, crowded).values())).state for c in (rule, changed)]
    assert states == [SUPPORTED, INCONCLUSIVE]


def test_a_wrong_data_file_is_answered_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "claims.yml"
    head = "drawing: {unit: cluster}\nclaims:\n"
    good = "  - {id: a, title: t, text: s, chapters: ['04']}\n"
    cases = [
        (head + "  - {id: a, title: t, chapters: []}\n", "claim a lacks text"),
        (head + good.replace("text: s", "text: s, verdict: supported"), "claim a has the unknown verdict"),
        (head + good.replace("text: s", "text: s, rule: r"), "claim a has a rule but lacks experiment, parameters, rule_text"),
        (head + good + good, "claim a occurs more than once"),
        (head + good.replace("text: s", "text: s, also: {title: t}"), "its other half, has the unknown title"),
        (head + good.replace("text: s", "text: s, also: {rule: r}"), "claim a has a rule but lacks experiment, parameters, rule_text"),
    ]
    for content, message in cases:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            claims.load_claims(path)
    with pytest.raises(ValueError, match="does not exist"):
        claims.load_claims(tmp_path / "none.yml")
    with pytest.raises(ValueError, match="no rule decides claim 'z'"):
        claims.verdict_on("z", pd.DataFrame())


# The page


def _store(folder: Path, frame: pd.DataFrame, kernel_version: int = KERNEL_VERSION, experiment: str = "04_misses_that_matter") -> None:
    about = {"device": "one core of a test", "date": "2026-11-29T00:00:00", "commit": "0123456789abcdef"}
    write_frame(folder / experiment / "one.csv", frame, {"kernel_version": kernel_version, "provenance": about})


def test_without_results_every_claim_is_not_yet_measured(tmp_path: Path) -> None:
    rows = [line for line in claims.page(tmp_path, tmp_path).splitlines() if re.match(r"\| [a-m] \|", line)]
    assert len(rows) == 13
    assert all("| not yet measured: no results of chapter" in row and "(planned)" in row for row in rows)
    (two_halves,) = [row for row in rows if row.startswith("| g |")]
    assert "| not yet measured: no results of chapters 10 and 09 are stored | not measured |" in two_halves


def test_a_claim_of_which_half_is_stored_says_in_the_table_only_what_is_missing(tmp_path: Path) -> None:
    policies = {label: SyntheticPolicy("first J", 0.01, 0.2, 0.3) for label in ("speed-first", "first choice")}
    _store(tmp_path, _frame(policies, SETTINGS), experiment="10_chosen_policies")
    table, _, evidence = claims.page(tmp_path, tmp_path).partition("## Rules and evidence")
    (row,) = [line for line in table.splitlines() if line.startswith("| i |")]
    assert "| not yet measured: no results of chapter 09 are stored | not measured |" in row
    told = [line for line in evidence.partition("### i. ")[2].partition("### j. ")[0].splitlines() if line.startswith("- reference-512")]
    assert len(told) == 2
    assert all("*speed-first* minus *first choice*" in line and "the other half was not measured here" in line for line in told)


def test_the_page_shows_verdicts_evidence_and_where_it_was_measured(tmp_path: Path) -> None:
    _store(tmp_path, _frame(WORLD, (SETTINGS[1], ("reference-64", "stays_out", 16))))
    (tmp_path / "04_which_misses_matter.py").touch()
    text = claims.page(tmp_path, tmp_path)
    assert "| **supported**: in all 2 settings | not measured | [04](chapters/04_which_misses_matter.ipynb) |" in text
    assert "- reference-512, 128 slots, a substituted miss stays out: **supported**. *only rank 0 substituted* has 7.4 %" in text
    assert "*MEASURED* on one core of a test, 2026-11-29, commit 0123456789." in text
    unbuilt = claims.page(tmp_path, tmp_path, built=["00"])
    assert "chapters/04" not in unbuilt
    assert "04 (planned)" in unbuilt


def test_one_model_alone_does_not_support_a_claim(tmp_path: Path) -> None:
    _store(tmp_path, _frame(WORLD, SETTINGS))
    row = next(line for line in claims.page(tmp_path, tmp_path).splitlines() if line.startswith("| a |"))
    assert "| **inconclusive**: supported in all 2 settings, but not measured on reference-64 |" in row


def test_results_of_another_kernel_decide_nothing(tmp_path: Path) -> None:
    _store(tmp_path, _frame(WORLD), KERNEL_VERSION + 1)
    assert "**supported**" not in claims.page(tmp_path, tmp_path)


def test_the_command_prints_the_page_for_the_chapters_being_built(tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps({"00": {}}))
    command = [sys.executable, "-W", "error", "-m", "moecache.claims"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"MOECACHE_VALUES": str(values)}, capture_output=True, text=True, check=True)
    assert done.stdout == claims.page(built=["00"]) + "\n"
    assert done.stderr == ""


def test_every_decided_claim_names_a_plan_that_speaks_of_it() -> None:
    """The analysis was written down beforehand: its page exists, is dated and names the claim."""
    for claim in claims.load_claims()[1]:
        if claim.rule:
            page = ROOT / "book" / "decisions" / f"{claim.plan}.md"
            assert claim.plan, f"claim {claim.id} has a rule and no plan"
            assert page.is_file(), f"claim {claim.id} names the plan {claim.plan}, which does not exist"
            assert re.search(r"^20\d\d-\d\d-\d\d, accepted", page.read_text(), re.MULTILINE)
            assert re.search(rf"\b[Cc]laims? (?:[a-z], )*(?:[a-z] and )?{claim.id}\b|\({claim.id}\)", page.read_text()), (
                f"{page.name}: {claim.id}"
            )


def test_turning_signs_are_found_where_a_coefficient_is_near_zero_and_not_where_it_is_clear() -> None:
    assert _verdict("l", _frame(WORLD)).state == SUPPORTED
    sloped = {name: replace(policy, mass_slope=3.0) for name, policy in WORLD.items()}
    assert _verdict("l", _frame(sloped)).state == NOT_SUPPORTED


def test_blocks_of_one_measurement_may_repeat_a_name_and_two_measurements_may_not(tmp_path):
    def stored(name: str, documents: list[str], **parameters: int) -> None:
        frame = pd.DataFrame({"policy": "x", "document": documents, "num_tokens": 9})
        header = {"kernel_version": KERNEL_VERSION, "provenance": {}, "parameters": parameters}
        write_frame(tmp_path / "06_test" / f"{name}.csv", frame, header)

    stored("one", ["a", "b"], first_document=8, num_documents=2, num_tokens=9)
    stored("two", ["a", "c", "c"], first_document=10, num_documents=3, num_tokens=9)
    frame, _ = stored_frame("06_test", tmp_path)
    assert sorted(frame["document"]) == ["a", "a #2", "b", "c", "c #2"]
    stored("three", ["a"], num_documents=1, num_tokens=7)
    again, _ = stored_frame("06_test", tmp_path)
    assert (again["document"] == "a").sum() == 2
