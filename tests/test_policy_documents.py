"""What was substituted, described by layer and rank group, against plain loops; and the rows of a small emulation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models

from moecache import emulate, substituted_calls
from moecache.experiments import policy_documents
from moecache.kernel import Outcome
from moecache.policy import first_j, only_rank_substituted, threshold
from moecache.record import recording
from moecache.substituted_calls import RANK_GROUPS, call_ages, describe_substituted, rank_groups

POLICIES = [
    ("threshold", threshold(0.4, label="gate weight 0.4")),
    ("first J", first_j(1, label="first choice")),
    ("one rank", only_rank_substituted(0, 6, label="only rank 0 substituted")),
]


def texts(num_documents: int = 5, num_tokens: int = 40) -> list[SimpleNamespace]:
    rng = np.random.default_rng(1)
    return [
        SimpleNamespace(tokens=rng.integers(0, 60, num_tokens + i), domain="code", cluster=f"c{i // 2}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_models.qwen3_next(num_experts=24, top_k=6, num_layers=2)


@pytest.fixture(scope="module")
def rows(model):
    return policy_documents.measure(model, texts(), POLICIES, 10, num_warmup_documents=2)


def test_rank_groups_by_hand() -> None:
    assert [RANK_GROUPS[g] for g in rank_groups(8)] == ["r0", "r1", "r2_3", "r2_3", "r4_up", "r4_up", "r4_up", "r4_up"]
    assert rank_groups(2).tolist() == [0, 1]


def test_ages_equal_a_loop_over_tokens() -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(9)[:3] for _ in range(2)] for _ in range(50)]).astype(np.int16)
    ages = call_ages(ids, largest_age=7)
    for layer in range(2):
        last: dict[int, int] = {}
        for token in range(50):
            for rank, expert in enumerate(ids[token, layer].tolist()):
                assert ages[token, layer, rank] == min(token - last.get(expert, token - 7), 7)
            last |= dict.fromkeys(ids[token, layer].tolist(), token)


def test_descriptions_equal_a_loop_over_calls() -> None:
    rng = np.random.default_rng(2)
    ids = np.stack([[rng.permutation(20)[:5] for _ in range(2)] for _ in range(60)]).astype(np.int16)
    weights = rng.dirichlet(np.ones(5), (60, 2)).astype(np.float32)
    outcome = rng.choice([int(o) for o in Outcome], (60, 2, 5)).astype(np.uint8)
    document = np.repeat([0, 1, 2], [10, 30, 20])
    found, ages = describe_substituted(ids, weights, outcome, document), call_ages(ids)
    for d in range(3):
        for layer in range(2):
            for g in range(4):
                calls = [
                    (float(weights[t, layer, k]) ** 2, int(ages[t, layer, k]))
                    for t in np.flatnonzero(document == d)
                    for k in range(5)
                    if rank_groups(5)[k] == g and outcome[t, layer, k] in substituted_calls.SUBSTITUTED
                ]
                squares = sum(square for square, _ in calls)
                assert found["squared"][d, layer, g] == pytest.approx(squares / (document == d).sum())
                if calls:
                    assert found["age"][d, layer, g] == pytest.approx(np.mean([age for _, age in calls]))
                    expected = sum(square * np.log2(age) for square, age in calls) / squares
                    assert found["log_age"][d, layer, g] == pytest.approx(expected)
                else:
                    assert found["age"][d, layer, g] == found["log_age"][d, layer, g] == 0


def test_rows_hold_what_an_emulation_says(model, rows) -> None:
    documents = texts()
    policy = POLICIES[0][1]
    with recording(model) as recorder:
        run = emulate(model, [d.tokens for d in documents], policy, 10, layer_error=True)
    trace = recorder.trace([d.tokens for d in documents])
    assert run.decisions is not None
    frame = run.frame()
    third = frame[frame["document"] == 3]
    row = rows[(rows["policy"] == policy.label) & (rows["document"] == "document 3")].iloc[0]
    exact = policy_documents.exact_losses_of(model, documents)[third.index]
    assert row["mean_difference_nats"] == pytest.approx(np.nanmean(third["loss_nats"] - exact))
    assert row["num_tokens"] == len(third) - 1
    assert row["relative_error2"] == pytest.approx(third["relative_error2"].mean(), rel=1e-5)
    is_substituted = np.isin(run.decisions.outcome[third.index], substituted_calls.SUBSTITUTED)
    squares = np.where(is_substituted, trace.gate_weights[third.index] ** 2, 0)
    assert row["squared_weights"] == pytest.approx(squares.sum(axis=2).mean(), rel=1e-5)
    assert row["squared_l1_r0"] == pytest.approx(squares[:, 1, 0].mean(), rel=1e-5)
    assert row[["hits", "fetched", "forced", "substituted", "dropped"]].sum() == row["calls"] == row["steps"] * 6


def test_every_policy_has_every_scored_document_and_only_its_ranks(rows) -> None:
    assert rows.groupby("policy")["document"].nunique().to_dict() == dict.fromkeys((p.label for _, p in POLICIES), 3)
    first = rows[rows["policy"] == "only rank 0 substituted"]
    assert (first["squared_l0_r0"] > 0).all()
    assert not first[[f"squared_l{layer}_{g}" for layer in (0, 1) for g in RANK_GROUPS[1:]]].to_numpy().any()
    assert (rows.loc[rows["policy"] == "first choice", "squared_l0_r0"] == 0).all()


def test_bad_questions_are_refused(model) -> None:
    with pytest.raises(ValueError, match="leaves none of 5 documents"):
        policy_documents.measure(model, texts(), POLICIES, 10, num_warmup_documents=5)
    with pytest.raises(ValueError, match="different labels"):
        policy_documents.measure(model, texts(), [POLICIES[0], POLICIES[0]], 10, num_warmup_documents=1)


def test_without_layer_errors_the_rows_lack_them(model) -> None:
    rows = policy_documents.measure(model, texts(3), POLICIES[:1], 10, num_warmup_documents=1, layer_error=False)
    assert "relative_error2" not in rows
