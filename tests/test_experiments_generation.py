"""Chapter 12: problems and judges, rows of a tiny model, the rule in worlds of known truth, and the way of a real file."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pytest
import tiny_models

from moecache import claims
from moecache.claims.data import Drawing, load_claims
from moecache.claims.generation_rules import generation_follows_mass_partly
from moecache.experiments import generation, generation_files, generation_report
from moecache.experiments.generation_problems import TASKS, Problem, has_ended, in_turns, is_right, read_problems
from moecache.figures import generation as figures
from moecache.policy import FETCH_EVERY_MISS, SUBSTITUTE_EVERY_MISS, first_j
from moecache.reference.settings import MODELS_FOLDER

POLICIES = [
    ("fetch every miss", FETCH_EVERY_MISS),
    *(("first J", first_j(j, label=f"first {j}")) for j in (1, 2, 3)),
    ("substitute every miss", SUBSTITUTE_EVERY_MISS),
]
FAMILIES = ("threshold", "first J", "mass budget", "routing bias")


def encode(text):
    return [ord(letter) % tiny_models.VOCABULARY for letter in text]


def decode(ids):
    return "".join(chr(40 + i) for i in ids)


@pytest.fixture(scope="module")
def frame():
    problems = [Problem(kind, f"{kind} {i}", "t", "abcdefgh"[i:] + "xyzuvwab"[:i], "1") for i in range(7) for kind in TASKS]
    model = tiny_models.olmoe(num_experts=16, top_k=4)
    found = generation.measure(model, encode, decode, problems, POLICIES, 5, num_warmup_problems=2, max_new_tokens=6)
    return found.assign(model="tiny", regime=generation.STAYS_OUT)


def test_every_policy_answers_every_scored_problem_and_the_exact_model_agrees_with_itself(frame):
    assert frame.groupby(["policy", "domain"])["document"].nunique().eq(6).all()
    exact = frame[frame["policy"] == "fetch every miss"]
    assert exact[["agreement_before", "agreement_whole", "is_same"]].eq(1).all(axis=None)
    assert exact["substituted_mass"].eq(0).all()
    worst = frame[frame["policy"] == "substitute every miss"]
    assert worst["agreement_before"].mean() < 1.0
    assert worst["substituted_mass"].mean() > 0.0
    assert (frame["is_same"] == (frame["agreement_whole"] == 1.0)).all()
    assert (frame["agreement_before"] == 1.0).equals(frame["is_same"])
    assert (frame["steps"] == (frame["num_written"] - 1) * 3).all()
    calls = frame[["hits", "fetched", "forced", "substituted", "dropped"]].sum(axis=1)
    assert (calls == 4 * frame["steps"]).all()


@pytest.mark.parametrize(
    ("mine", "exact", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], (1.0, 1.0)),
        ([1, 2, 9, 4], [1, 2, 3, 4], (1 / 3, 2 / 3)),
        ([1, 2], [1, 2, 3, 4], (1 / 3, 1 / 3)),
        ([1, 2, 3, 4, 5], [1, 2, 3], (1.0, 0.5)),
        ([1, 9, 3], [1, 2, 3], (0.0, 0.5)),
        ([1], [1], (1.0, 1.0)),
    ],
)
def test_agreement_by_hand(mine, exact, expected):
    assert generation.agreement(np.array(mine), np.array(exact)) == pytest.approx(expected)


@pytest.mark.parametrize("top_k", [8, 10])
def test_the_list_is_the_plans(top_k):
    found = generation.listed_policies(top_k)
    assert len({policy.label for _, policy in found}) == 11
    assert len({family for family, _ in found}) == 6
    assert generation.all_policies(top_k)[0][1] == FETCH_EVERY_MISS
    anyway = generation.all_policies(top_k, generation.ADMITTED)
    assert [policy.label for _, policy in anyway[1:]] == [policy.label for _, policy in found]
    assert all(policy.mass_threshold == 0 for _, policy in anyway[1:])


def test_generated_problems_come_in_turns_and_are_judged_by_their_value():
    problems = in_turns(TASKS, 3)
    assert [problem.kind for problem in problems] == [*TASKS] * 3
    for problem in problems:
        written = f"Answer: {problem.answer}\n\n" if problem.kind == "word_problems" else f"{problem.answer}\n\n"
        assert is_right(problem, written)
        assert has_ended(problem.kind, written)
        assert not is_right(problem, written.replace(problem.answer, "none"))


def test_files_of_both_forms_are_read_and_judged(tmp_path):
    rows = [{"question": f"What is {i}?", "answer": f"It is <<{i}=1,{i}00>>.\n#### 1,{i}00"} for i in range(1, 8)]
    (tmp_path / "gsm.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = read_problems(tmp_path / "gsm.jsonl", 2)
    assert first.prompt.startswith("Question: What is 1?")
    assert first.prompt.endswith("What is 5?\nAnswer:")
    assert second.name != first.name
    assert "What is 5?" not in second.prompt
    assert is_right(first, " So 3 and then $1500.00 in all.\n\nQuestion: 7")
    assert not is_right(first, " 1501")
    assert not is_right(first, "")
    task = {"task_id": "T/0", "prompt": "def two(x):\n", "entry_point": "two", "test": "def check(f):\n    assert f(3) == 6\n"}
    with gzip.open(tmp_path / "human.jsonl.gz", "wt") as file:
        file.write(json.dumps(task) + "\n")
    (problem,) = read_problems(tmp_path / "human.jsonl.gz", 1)
    assert is_right(problem, "    return 2 * x\n\ndef other(")
    assert not is_right(problem, "    return x\n")
    with pytest.raises(ValueError, match="1 to 1 problems"):
        read_problems(tmp_path / "human.jsonl.gz", 2)
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="neither GSM8K"):
        read_problems(tmp_path / "other.jsonl", 1)
    with pytest.raises(ValueError, match="no file"):
        read_problems(tmp_path / "absent.jsonl", 1)


def world(slope, within, num_problems=60, seed=0):
    """Rows in which agreement falls with mass by `slope` from policy to policy, and by `within` from problem to problem."""
    rng = np.random.default_rng(seed)
    found = []
    for kind in TASKS:
        easy = rng.normal(0, 0.05, num_problems)
        for p in range(8):
            noise = rng.normal(0, 0.05, num_problems)
            agreement = 0.9 - slope * 0.05 * p - within * noise + easy + rng.normal(0, 0.01, num_problems)
            names = [f"{kind} {i}" for i in range(num_problems)]
            found.append(
                pd.DataFrame(
                    {"document": names, "cluster": names, "substituted_mass": 0.1 + 0.05 * p + noise, "agreement_before": agreement}
                ).assign(
                    policy=f"p{p}",
                    family=FAMILIES[p % 4],
                    domain=kind,
                    num_tokens=1,
                    model="m",
                    regime="stays_out",
                    num_slots=1,
                )
            )
    return pd.concat(found, ignore_index=True)


def test_the_rule_in_worlds_of_known_truth():
    _, listed = load_claims()
    parameters = next(claim.parameters for claim in listed if claim.id == "k")

    def state(frame):
        return generation_follows_mass_partly(frame, parameters, Drawing(num_draws=300)).state

    assert state(world(1.0, 1.0)) == "not supported"
    assert state(world(0.0, 1.0)) == "supported"  # does not follow across policies
    many = world(1.0, 0.0, 150)
    assert state(many) == "supported"  # says nothing problem by problem
    assert state(many.assign(agreement_before=1.0)) == "inconclusive"
    assert state(many[many["domain"] == TASKS[0]]) == "not yet measured"
    assert claims.verdict_on("k", world(1.0, 1.0, 6)).state == "inconclusive"  # fewer units than are needed


def test_right_answers_are_compared_problem_by_problem(frame):
    rows = pd.DataFrame(frame[frame["domain"] == "interpreter"]).drop(columns=["is_right", "exact_is_right"])
    number = rows.groupby("policy", sort=False).cumcount()
    rows = rows.assign(exact_is_right=number < 5, is_right=(number < 5) & (rows["policy"] == "first 1"))
    found = generation_report.accuracy_tests(rows)
    assert found is not None
    tests = found.set_index("question")
    assert tests.loc["interpreter: substitute every miss", "p"] == pytest.approx(4 * 2 * 0.5**5)  # Holm over four policies
    assert tests.loc["interpreter: substitute every miss", "estimate"] == pytest.approx(5 / 6)
    assert tests.loc["interpreter: first 1", "p"] == 1.0
    assert generation_report.accuracy_tests(rows.assign(exact_is_right=False)) is None


def test_report_and_figures_show_every_policy(frame):
    points = generation_report.points(frame, num_draws=200)
    assert len(points) == 10
    assert len(generation_report.policy_table(frame)) == 10
    assert (points["low"] <= points["agreement"]).all()
    assert (points["agreement"] <= points["high"]).all()
    ages = generation_report.right_at_ages({"young": frame.assign(is_right=False), "old": frame.assign(is_right=True)})
    assert ages["young, right"].eq("0.0%").all()
    assert ages["old, right"].eq("100.0%").all()
    assert len(ages) == 10
    titles = {kind: generation_report.words_of(kind) for kind in TASKS}
    assert len(figures.agreement_by_mass(points, titles).axes) == 2
    found = world(1.0, 1.0).assign(num_exact=3, exact_is_right=True, is_right=True, template="t", agreement_whole=1.0)
    table = generation_report.by_problem(found, num_draws=200)
    assert len(table) == 16
    assert (table["r"] < 0).all()
    assert len(figures.mass_by_problem(table, titles, 0.3).axes) == 2
    relations = generation_report.relations(found)
    assert (relations["status"] == "planned").sum() == 4
    values = generation_report.values(found)
    assert values["follows_interpreter"] == "follows mass"
    assert values["nothing_interpreter"] == "says something"


@pytest.mark.parametrize("name", ["gsm8k_test.jsonl", "HumanEval.jsonl.gz"])
def test_a_real_file_and_a_checkpoint_go_the_whole_way(name, test_data, tmp_path, monkeypatch):
    monkeypatch.setattr(generation_files, "all_policies", lambda top_k: [POLICIES[0], POLICIES[-1]])
    monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(tmp_path))
    monkeypatch.setenv("MOECACHE_RESULTS", "auto")
    found = generation_files.file_rows(str(test_data / name), str(MODELS_FOLDER / "reference-512"), 0.25, 3, 0, 8)
    assert found.groupby("policy")["document"].nunique().eq(3).all()
    assert found["num_written"].between(1, 8).all()
    assert not found["exact_is_right"].any()
    assert "solves 0% of 3 problems" in generation_report.file_words(found)
    assert generation_report.accuracy_tests(found) is None
    assert len(generation_report.policy_table(found)) == 2


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json and no tokenizer\.json"):
        generation_files.open_checkpoint(tmp_path)
