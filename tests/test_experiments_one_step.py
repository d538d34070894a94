"""The worked streams of the first chapter: what each token shows, and that its tables agree with the decisions."""

import numpy as np
import pytest

import moecache as mc
from moecache.experiments import one_step

POLICY = mc.Policy(wait_ranks=(0,), gate_threshold=0.4, admission="background", mass_threshold=0.5)


@pytest.fixture(scope="module")
def story() -> one_step.Walk:
    return one_step.walk(one_step.make_trace(one_step.STREAM), POLICY, 4)


def test_token_by_token_is_the_same_as_in_one_go(story: one_step.Walk) -> None:
    run = mc.simulate(story.trace, POLICY, 4)
    assert run.decisions is not None
    assert story.log.is_equal(run.decisions)


def test_router_logits_give_the_gate_weights_that_the_stream_names() -> None:
    trace = one_step.make_trace(one_step.STREAM)
    assert trace.selection_scores is not None
    called = np.take_along_axis(trace.selection_scores.astype(float), trace.topk_ids.astype(int), -1)
    weights = np.exp(called) / np.exp(called).sum(-1, keepdims=True)
    assert np.abs(weights - trace.gate_weights).max() < 0.001
    best = np.argsort(-trace.selection_scores, axis=-1, kind="stable")[..., :3]
    assert np.array_equal(best, trace.topk_ids)


def test_every_idea_of_the_chapter_is_shown_by_one_token(story: one_step.Walk) -> None:
    assert one_step.first_token(story, mc.Outcome.HIT, at_least=3) == 0
    assert one_step.facts(story, "a", 1) | {"a_story": ""} == {
        "a_expert": "E5", "a_rank": 0, "a_weight": pytest.approx(0.55), "a_victim": "E3", "a_by": "E5", "a_mass": 0.0, "a_story": "",
    }  # fmt: skip
    assert one_step.facts(story, "a", 2)["a_by"] == "E5"
    assert one_step.first_landing(story) == 4
    assert one_step.landing_facts(story, 4)["landing_victim"] == "E0"
    assert one_step.landing_facts(story, 4)["oldest"] == "E5"
    assert "E1 has just been evicted" in one_step.facts(story, "a", 5)["a_story"]


def test_the_victim_stands_on_top_of_its_table(story: one_step.Walk) -> None:
    for token in (1, 4, 5):
        table = one_step.victim_table(story, token)
        assert table["fate"].iloc[0].startswith("leaves for")
        assert (table["fate"].iloc[1:] == "stays").all()
        assert not table["pinned"].iloc[0]


def test_the_stand_in_is_the_first_resident_outside_the_top_k(story: one_step.Walk) -> None:
    for token in (2, 3, 5):
        table = one_step.router_table(story, token)
        stand_in = int(np.flatnonzero(table["part in this step"].str.startswith("stands in"))[0])
        above = table.iloc[3:stand_in]
        evicted = {f"E{expert}" for expert in story.log.evicted_ids[token].ravel() if expert >= 0}
        assert ((above["resident"] == "no") | above["expert"].isin(evicted)).all()


def test_the_account_reaches_the_threshold_and_ends_at_the_landing(story: one_step.Walk) -> None:
    table = one_step.account_table(story, 6)
    assert table["account after"].round(6).to_list() == [0.0, 0.0, 0.35, 0.65, 0.0, 0.0]
    assert table["what happens"].iloc[3] == "substituted; a copy is asked for"
    assert table["what happens"].iloc[4] == "the copy lands, E6 is resident; hit"


def test_single_calls_turn_one_miss_into_three() -> None:
    trace = one_step.make_trace(one_step.TRAP)
    atomic = one_step.walk(trace, mc.FETCH_EVERY_MISS, 4)
    sequential = one_step.walk(one_step.calls_by_call(trace), mc.FETCH_EVERY_MISS, 4)
    assert [one_step.num_misses(atomic, [token]) for token in range(3)] == [0, 1, 1]
    assert [one_step.num_misses(sequential, range(3 * token, 3 * token + 3)) for token in range(3)] == [0, 3, 3]
    run = mc.simulate(trace, mc.FETCH_EVERY_MISS, 4, replay="sequential")
    assert run.decisions is not None
    assert np.array_equal(run.decisions.outcome.swapaxes(1, 2).reshape(sequential.log.outcome.shape), sequential.log.outcome)


def test_a_stream_without_such_a_step_says_what_to_change(story: one_step.Walk) -> None:
    with pytest.raises(ValueError, match=r"no token after -1 has 1 call.* DROPPED: .*gate threshold"):
        one_step.first_token(story, mc.Outcome.DROPPED)
    exact = one_step.walk(story.trace, mc.FETCH_EVERY_MISS, 4)
    with pytest.raises(ValueError, match="no copy lands"):
        one_step.first_landing(exact)


def test_names_are_listed_as_in_a_sentence() -> None:
    assert one_step.names([0]) == "E0"
    assert one_step.names([0, 5]) == "E0 and E5"
    assert one_step.names(np.array([0, 5, 2])) == "E0, E5 and E2"
