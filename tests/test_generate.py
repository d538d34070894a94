"""Decoding under a policy: against the stepped emulator, against plain greedy decoding, alone and as a row of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, documents, gpt_oss, olmoe, qwen3_next

import moecache as mc
from moecache import hf_internals
from moecache.kernel import Outcome

POLICIES = [
    mc.FETCH_EVERY_MISS,
    mc.SUBSTITUTE_EVERY_MISS,
    mc.threshold(0.3, label="0.3 rule"),
    mc.FIRST_CHOICE.replace(fallback="drop", label="drop"),
    mc.FIRST_CHOICE.replace(admission="background", mass_threshold=0.3, label="admit"),
]
PROMPTS = documents(3, (12, 12, 12))
MOST = 9


def ends_in_a_multiple_of_seven(written):
    return written[-1] % 7 == 0


def check_same_decisions(log, other):
    """Equal decisions and arrivals; masses up to the last bits, in which one pass or one batch sums differently."""
    for name in ("outcome", "computed_ids", "evicted_ids"):
        assert np.array_equal(getattr(log, name), getattr(other, name)), name
    assert log.substituted_mass == pytest.approx(other.substituted_mass, abs=1e-5)
    mine, theirs = (one.arrivals[np.lexsort(one.arrivals.T[::-1])] for one in (log, other))
    assert np.array_equal(mine, theirs)


def plain_greedy(model, prompt, most, stop):
    """Full forwards without any cache."""
    ids = list(prompt)
    with torch.no_grad(), hf_internals.experts_implementation(model):
        while True:
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if len(ids) - len(prompt) == most or stop(ids[len(prompt) :]):
                return ids[len(prompt) :]


@pytest.mark.parametrize("make", [qwen3_next, olmoe, gpt_oss], ids=["qwen3_next", "olmoe", "gpt_oss"])
def test_decisions_and_tokens_are_those_of_the_stepped_emulator(make):
    model, any_replaced, prompts = make(), False, PROMPTS[:2]
    for policy in POLICIES[1:]:
        found = mc.emulated_generation(model, prompts, policy, 6, max_new_tokens=6, stop=ends_in_a_multiple_of_seven)
        read = [np.concatenate([prompt, ids[:-1]]) for prompt, ids in zip(prompts, found.token_ids, strict=True)]
        run = mc.emulate(model, read, policy, 6, exact_prefix_tokens=12, stepped=True, keep_logits=True)
        check_same_decisions(found.run.decisions, run.decisions)
        assert np.array_equal(found.run.document_start, run.document_start)
        best = np.split(run.extra["logits"].argmax(-1), np.flatnonzero(run.document_start)[1:])
        for ids, own in zip(found.token_ids, best, strict=True):
            assert ids.tolist() == own[11:].tolist()
        is_prompt = found.run.extra["is_prompt"]
        assert is_prompt.sum() == 24
        log = found.run.decisions
        assert log is not None
        assert np.isin(log.outcome[is_prompt], (Outcome.HIT, Outcome.FETCHED)).all()
        any_replaced |= bool(np.isin(log.outcome, (Outcome.SUBSTITUTED, Outcome.DROPPED)).any())
    assert any_replaced


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_fetching_every_miss_writes_what_the_model_writes(name):
    model = FAMILIES[name]()
    num_slots = mc.record(model, PROMPTS[:1]).shape.top_k
    found = mc.emulated_generation(
        model, PROMPTS[:2], mc.FETCH_EVERY_MISS, num_slots, max_new_tokens=MOST, stop=ends_in_a_multiple_of_seven
    )
    for prompt, ids in zip(PROMPTS, found.token_ids, strict=False):
        assert ids.tolist() == plain_greedy(model, prompt, MOST, ends_in_a_multiple_of_seven)


@pytest.mark.parametrize("make", [qwen3_next, olmoe], ids=["qwen3_next", "olmoe"])
def test_a_row_of_a_batch_writes_what_it_writes_alone(make):
    model = make()
    together = mc.emulated_generations(model, PROMPTS[:2], POLICIES, 6, max_new_tokens=MOST)
    for policy, found in zip(POLICIES, together, strict=True):
        alone = mc.emulated_generation(model, PROMPTS[:2], policy, 6, max_new_tokens=MOST)
        assert [ids.tolist() for ids in found.token_ids] == [ids.tolist() for ids in alone.token_ids]
        check_same_decisions(found.run.decisions, alone.run.decisions)
        assert found.policy == policy
    assert len({tuple(ids.tolist()) for found in together for ids in found.token_ids}) > 2  # policies do differ


def test_an_answer_ends_where_it_is_told_or_with_the_models_own_mark():
    model, prompt = olmoe(), PROMPTS[0]
    (free,) = mc.emulated_generation(model, prompt, mc.FETCH_EVERY_MISS, 8, max_new_tokens=MOST).token_ids
    ended = mc.emulated_generation(model, prompt, mc.FETCH_EVERY_MISS, 8, max_new_tokens=MOST, stop=lambda ids: len(ids) == 3)
    assert ended.token_ids[0].tolist() == free[:3].tolist()
    assert ended.run.num_tokens == prompt.size + 2
    model.generation_config.eos_token_id = [int(free[1]), 1000]
    (marked,) = mc.emulated_generation(model, prompt, mc.FETCH_EVERY_MISS, 8, max_new_tokens=MOST).token_ids
    assert marked.tolist() == free[: free.tolist().index(free[1]) + 1].tolist()
    (one,) = mc.emulated_generation(model, prompt, mc.FETCH_EVERY_MISS, 8, max_new_tokens=1).token_ids
    assert one.tolist() == free[:1].tolist()


def test_what_cannot_be_carried_out_is_refused_by_name():
    model = olmoe()
    for policy, field in (
        (mc.FIRST_CHOICE.replace(fallback="low_precision"), "low_precision"),
        (mc.FETCH_EVERY_MISS.replace(max_prefetches=1), "max_prefetches"),
        (mc.FETCH_EVERY_MISS.replace(eviction="belady"), "knows the future"),
    ):
        with pytest.raises(ValueError, match=field):
            mc.emulated_generation(model, PROMPTS, policy, 8)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        mc.emulated_generation(model, PROMPTS, mc.FIRST_CHOICE, 8, max_new_tokens=0)
    with pytest.raises(ValueError, match="training mode"):
        mc.emulated_generation(model.train(), PROMPTS, mc.FIRST_CHOICE, 8)
