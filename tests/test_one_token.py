"""The door for one token decides as the general door does, and leaves the same state behind."""

import numpy as np
import pytest
from streams import random_stream

import moecache as mc
from moecache.cache import ExpertCache
from moecache.kernel import Admission, CacheState, Outcome
from moecache.one_token import OneToken

TOKENS, LAYERS, EXPERTS, TOP_K, SLOTS = 160, 2, 12, 3, [4, 6]
SHAPE = mc.ModelShape(LAYERS, EXPERTS, TOP_K)
BUDDIES = np.argsort(np.random.default_rng(1).random((LAYERS, EXPERTS, EXPERTS)), axis=2)[..., :4]
OTHERS = (
    mc.SUBSTITUTE_EVERY_MISS.replace(fallback="random_resident", seed=5, label="random resident"),
    mc.FIRST_CHOICE.replace(fallback="buddy", label="buddy"),
    mc.FIRST_CHOICE.replace(fallback="drop", label="drop"),
    mc.FIRST_CHOICE.replace(fallback="low_precision", label="low precision"),
    mc.FETCH_EVERY_MISS.replace(eviction="decayed_count", half_life=1, label="decayed count"),
    mc.FETCH_EVERY_MISS.replace(insertion="tinylfu", half_life=16, label="tinylfu"),
    mc.FETCH_EVERY_MISS.replace(eviction="random", seed=3, label="random"),
    mc.FETCH_EVERY_MISS.replace(eviction="static", label="static"),
    mc.SPEED_FIRST.replace(admission_delay=4, mass_threshold=0.0, label="many under way"),
    mc.SPEED_FIRST.replace(max_prefetches=2, label="prefetch and admission"),
    mc.cache_prior(label="cache-prior"),
    mc.mass_budget(0.2, label="mass budget"),
)
SCRATCH_AND_TABLES = {"missed", "waits", "order", "landed", "is_candidate", "key_float", "float16_values"}
every_policy = pytest.mark.parametrize("policy", [*mc.PRESETS, *OTHERS], ids=lambda policy: policy.label)


def new_cache(policy):
    return ExpertCache(SHAPE, policy, SLOTS, "random", seed=2, buddies=BUDDIES if policy.label == "buddy" else None)


def tell(door, ids, weights, scores):
    """Take a step as numbers."""
    door.take(ids.tolist(), weights.tolist())
    if door.needs_scores:
        door.scores[...] = scores


def check_what_is_to_be_carried_out(door, cache, layer, ids, log):
    """Residents and others, and who was asked for, as they follow from the decision and the state after it."""
    outcome, computed = log.outcome[0, 0].tolist(), log.computed_ids[0, 0].tolist()
    rows = [
        [rank, expert, cache.state.slot_of_expert[layer, expert] if expert >= 0 else -1, became]
        for rank, (expert, became) in enumerate(zip(computed, outcome, strict=True))
    ]
    in_place = (Outcome.HIT, Outcome.SUBSTITUTED)
    assert door.residents == [row for row in rows if row[3] in in_place]
    assert door.others == [row for row in rows if row[3] not in in_place]
    assert door.is_rerouted == any(became in (Outcome.SUBSTITUTED, Outcome.DROPPED) for became in outcome)
    missed = [int(expert) for expert, became in zip(ids, outcome, strict=True) if became > Outcome.FORCED]
    lands = cache.state.clock[layer] + cache.rules.admission_delay
    booked = [expert for expert in missed if cache.state.due[layer, expert] == lands]
    assert door.booked == (booked if cache.policy.admission == Admission.BACKGROUND else [])


@every_policy
@pytest.mark.parametrize("seed", [4, 6])  # 4 masks experts, 6 has many ties
def test_decides_as_the_general_door_and_leaves_the_same_state(policy, seed):
    ids, weights, scores = random_stream(seed, TOKENS, LAYERS, EXPERTS, TOP_K)
    general, other = new_cache(policy), new_cache(policy)
    door, generator = OneToken(other), np.random.default_rng(seed)
    for token in range(TOKENS):
        for layer in range(LAYERS):
            is_exact = bool(generator.random() < 0.1)
            predicted = generator.permutation(EXPERTS)[:TOP_K] if policy.max_prefetches else None
            settings = {"is_exact": np.array([is_exact]), "predicted_ids": None if predicted is None else predicted[None, None]}
            given = ids[token, layer], weights[token, layer], scores[token, layer]
            expected = general.decide(*(array[None, None] for array in given), first_layer=layer, **settings)
            if token % 40 == 20:  # in between, a step through the general door of the same cache
                found = other.decide(*(array[None, None] for array in given), first_layer=layer, **settings)
            else:
                tell(door, *given)
                door.decide(layer, is_exact, None if predicted is None else predicted.tolist())
                found = door.log()
                assert door.arrivals == expected.arrivals.tolist()
                check_what_is_to_be_carried_out(door, other, layer, given[0], found)
            assert found.is_equal(expected)
    for name in set(CacheState._fields) - SCRATCH_AND_TABLES:
        assert np.array_equal(getattr(other.state, name), getattr(general.state, name)), name
    assert general.counts.sum() > 0


def test_a_table_that_ends_is_continued():
    policy = mc.FETCH_EVERY_MISS.replace(eviction="decayed_count", half_life=1.943)  # rescaled twice
    general, other = (ExpertCache(mc.ModelShape(1, EXPERTS, TOP_K), policy, 5) for _ in range(2))
    ids, weights, _ = random_stream(1, 2100, 1, EXPERTS, TOP_K)
    expected, door = general.decide(ids, weights), OneToken(other)
    for token in range(len(ids)):
        door.take(ids[token, 0].tolist(), weights[token, 0].tolist())
        door.decide(0)
        assert door.outcome.tolist() == expected.outcome[token, 0].tolist()
    assert np.array_equal(other.state.eviction_score, general.state.eviction_score)


def test_what_cannot_be_decided_is_refused():
    door = OneToken(new_cache(mc.FETCH_EVERY_MISS))
    for ids in ([1, 2], [1, 2, 2], [1, 2, EXPERTS], [-1, 2, 3]):
        with pytest.raises(ValueError, match=r"3 different experts in 0\.\.11, got"):
            door.take(ids, [0.5, 0.3, 0.2])
    with pytest.raises(ValueError, match="knows the future"):
        OneToken(new_cache(mc.FETCH_EVERY_MISS.replace(eviction="belady")))
    door = OneToken(new_cache(mc.FIRST_CHOICE.replace(max_prefetches=1)))
    door.take([1, 2, 3], [0.5, 0.3, 0.2])
    for predicted in (None, [1], [1, 2, EXPERTS]):
        with pytest.raises(ValueError, match=r"3 predicted ids in -1\.\.11"):
            door.decide(0, predicted_ids=predicted)
