"""Planned interventions: nothing named changes nothing, a policy's own calls give its logits, and every stand-in by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense import moe_output
from tiny_models import FAMILIES, documents, mixtral, olmoe, qwen3_next

import moecache as mc
from moecache import hf_internals
from moecache.observe import LayerCalls
from moecache.stand_ins import NEVER, ages, best_stand_ins, residents_before

TEXTS = documents()
NUM_TOKENS = sum(text.size for text in TEXTS)
REPLACED = (mc.Outcome.SUBSTITUTED, mc.Outcome.DROPPED)


def shape_of(model):
    layers = hf_internals.moe_layers(model)
    return NUM_TOKENS, len(layers), int(layers[0].router.top_k)


def logits_of(run):
    return run.extra["logits"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("has_slots", [False, True])
def test_naming_no_call_changes_no_logit(name, has_slots):
    model = FAMILIES[name]()
    num_slots = shape_of(model)[2] + 1 if has_slots else None
    exact = mc.emulate(model, TEXTS, mc.FETCH_EVERY_MISS, shape_of(model)[2], keep_logits=True)
    named = np.zeros(shape_of(model), bool)
    run = mc.intervene(model, TEXTS, named, num_slots, keep_logits=True, layer_error=True)
    injected = mc.inject(model, TEXTS, named[..., 0], 0, 0.1, num_slots, keep_logits=True)
    for other in (run, injected):
        assert np.array_equal(logits_of(other), logits_of(exact))
        assert np.array_equal(other.loss_nats, exact.loss_nats, equal_nan=True)
        assert other.summary()["substituted"] == other.summary()["substituted_mass"] == 0
    assert not run.extra["relative_error2"].any()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [
        mc.SUBSTITUTE_EVERY_MISS,
        mc.SPEED_FIRST,
        mc.Policy(wait_ranks=(0,), fallback="drop"),
        mc.Policy(wait_ranks=(0,), weight_rule="inherit", fallback="random_resident"),
    ],
    ids=lambda policy: policy.label,
)
def test_naming_a_policys_own_calls_gives_its_logits(name, policy):
    model = FAMILIES[name]()
    run = mc.emulate(model, TEXTS, policy, shape_of(model)[2] + 1, keep_logits=True, layer_error=True)
    named = np.isin(run.decisions.outcome, REPLACED)
    assert named.any()
    again = mc.intervene(
        model, TEXTS, named, stand_in=run.decisions.computed_ids, weight_rule=policy.weight_rule, keep_logits=True, layer_error=True
    )
    assert np.array_equal(logits_of(again), logits_of(run))
    assert np.array_equal(again.decisions.substituted_mass, run.decisions.substituted_mass)
    assert np.array_equal(again.extra["relative_error2_by_layer"], run.extra["relative_error2_by_layer"])
    assert np.array_equal(again.extra["is_named"], named)


def test_the_cache_behaves_as_under_fetching_every_miss():
    model, num_slots = qwen3_next(), 6
    named = np.random.default_rng(0).random(shape_of(model)) < 0.3
    run = mc.intervene(model, TEXTS, named, num_slots)
    is_left = ~named
    with_trace = mc.record(model, TEXTS)
    exact = mc.simulate(with_trace, mc.FETCH_EVERY_MISS, num_slots)
    first_layer = run.decisions.outcome[:, 0][is_left[:, 0]]
    assert np.array_equal(first_layer, exact.decisions.outcome[:, 0][is_left[:, 0]])
    assert np.array_equal(run.decisions.evicted_ids[:, 0], exact.decisions.evicted_ids[:, 0])


def residents_by_hand(log, layer, resident):
    """Sets, one token after the other."""
    now, found = set(np.flatnonzero(resident)), []
    for token in range(len(log.outcome)):
        found.append(set(now))
        for rank in range(log.outcome.shape[2]):
            if log.outcome[token, layer, rank] == mc.Outcome.FETCHED:
                now.discard(int(log.evicted_ids[token, layer, rank]))
                now.add(int(log.computed_ids[token, layer, rank]))
    return found


@pytest.mark.parametrize("cold_start", ["first", "empty"])
def test_best_resident_by_hand(cold_start):
    model, num_slots = qwen3_next(), 6
    named = np.random.default_rng(1).random(shape_of(model)) < 0.4
    run = mc.intervene(model, TEXTS, named, num_slots, cold_start=cold_start)
    trace = mc.record(model, TEXTS)
    log = mc.simulate(trace, mc.FETCH_EVERY_MISS, num_slots, cold_start=cold_start).decisions
    initial = np.arange(16) < (num_slots if cold_start == "first" else 0)
    residents = residents_by_hand(log, 0, initial)
    assert [set(np.flatnonzero(row)) for row in residents_before(log, 0, initial)] == residents
    for token in range(NUM_TOKENS):
        called = trace.topk_ids[token, 0].tolist()
        queue = sorted(residents[token] - set(called), key=lambda e: (-float(trace.selection_scores[token, 0, e]), e))
        for rank in np.flatnonzero(named[token, 0]):
            served = queue.pop(0) if queue else called[rank]
            assert run.decisions.computed_ids[token, 0, rank] == served
            assert (run.decisions.outcome[token, 0, rank] == mc.Outcome.SUBSTITUTED) == (served != called[rank])


def test_without_slots_the_best_expert_outside_the_topk_stands_in():
    model = olmoe()
    trace = mc.record(model, TEXTS)
    named = np.zeros(shape_of(model), bool)
    named[:, 0, 1] = True
    runs = [mc.intervene(model, TEXTS, named), mc.intervene(model, TEXTS, named, 3, stand_in="outside")]
    scores = trace.selection_scores[:, 0].astype(np.float64)
    np.put_along_axis(scores, trace.topk_ids[:, 0].astype(np.int64), -np.inf, axis=1)
    for run in runs:
        assert np.array_equal(run.decisions.computed_ids[:, 0, 1], scores.argmax(axis=1))
    assert np.array_equal(runs[0].loss_nats, runs[1].loss_nats, equal_nan=True)
    assert runs[0].num_slots.tolist() == [8, 8, 8]


def test_equal_scores_go_to_the_lower_id_and_nobody_serves_twice():
    scores = np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    may_serve = np.array([[True, True, True, False], [False, True, False, False]])
    is_named = np.array([[True, True], [True, True]])
    assert best_stand_ins(scores, may_serve, is_named).tolist() == [[1, 2], [1, -1]]


def test_random_residents_are_residents_outside_the_topk_and_follow_the_seed():
    model, num_slots = qwen3_next(), 8
    named = np.zeros(shape_of(model), bool)
    named[:, :, 0] = True
    runs = [mc.intervene(model, TEXTS, named, num_slots, stand_in="random", seed=seed) for seed in (0, 0, 1)]
    assert runs[0].decisions.is_equal(runs[1].decisions)
    assert not runs[0].decisions.is_equal(runs[2].decisions)
    trace = mc.record(model, TEXTS)
    log = mc.simulate(trace, mc.FETCH_EVERY_MISS, num_slots).decisions
    residents = residents_before(log, 0, np.arange(16) < num_slots)
    served = runs[0].decisions.computed_ids[:, 0, 0]
    is_served = runs[0].decisions.outcome[:, 0, 0] == mc.Outcome.SUBSTITUTED
    assert is_served.sum() > 20
    assert residents[np.flatnonzero(is_served), served[is_served]].all()
    assert not (served[is_served, None] == trace.topk_ids[is_served, 0]).any()


def ages_by_hand(topk_ids):
    last, found = {}, np.empty(topk_ids.shape)
    for token, row in enumerate(topk_ids):
        for rank, expert in enumerate(row):
            found[token, rank] = token - last[expert] if expert in last else np.inf
        last |= dict.fromkeys(row, token)
    return found


def test_ages_by_hand_and_in_pieces():
    topk_ids = mc.record(qwen3_next(), TEXTS).topk_ids[:, 1]
    last_call = np.full(16, NEVER)
    pieces = [ages(topk_ids[a:b], a, last_call) for a, b in ((0, 11), (11, 12), (12, NUM_TOKENS))]
    assert np.array_equal(np.concatenate(pieces), ages_by_hand(topk_ids))


def test_a_function_names_calls_by_what_it_sees():
    model, num_slots = qwen3_next(), 6
    seen: list[LayerCalls] = []

    def old_misses_of_light_calls(calls: LayerCalls) -> np.ndarray:
        seen.append(calls)
        return calls.is_miss & (calls.age > 3) & (calls.rank >= 1) & (calls.gate_weight < 0.3) & (calls.position > 0)

    run = mc.intervene(model, TEXTS, old_misses_of_light_calls, num_slots)
    named = run.extra["is_named"]
    assert named.any()
    assert not named[..., 0].any()
    assert not named[run.document_start].any()
    assert (run.extra["ages"][named] > 3).all()
    assert (run.extra["gate_weights"][named] < 0.3).all()
    assert [calls.layer for calls in seen] == [0, 1, 2, 3] * 3
    assert [calls.document for calls in seen[::4]] == [0, 1, 2]
    again = mc.intervene(model, TEXTS, named, num_slots)
    assert again.decisions.is_equal(run.decisions)


def test_a_trace_of_the_tokens_before_sets_slots_and_ages():
    model, num_slots = qwen3_next(), 6
    calls = np.zeros((NUM_TOKENS, 4, 4), bool)
    whole = mc.intervene(model, TEXTS, calls, num_slots)
    rest = mc.intervene(model, TEXTS[2], calls[-33:], num_slots, before=mc.record(model, TEXTS[:2]))
    assert np.array_equal(rest.decisions.outcome, whole.decisions.outcome[-33:])
    assert np.array_equal(rest.extra["ages"], whole.extra["ages"][-33:])
    with pytest.raises(mc.TraceError, match="record it with this model"):
        mc.intervene(model, TEXTS[2], calls[-33:], num_slots, before=mc.record(olmoe(), TEXTS[0]))


@pytest.mark.parametrize("name", ["qwen3_next", "olmoe", "qwen3_moe", "mixtral"])  # the twin knows their plain experts
@pytest.mark.parametrize("has_slots", [False, True])
def test_injection_by_hand(name, has_slots):
    """At one site of the last MoE layer the output moves by q times the routed sum times the difference of two experts."""
    model, text, token, rank, q = FAMILIES[name](), TEXTS[0], 17, 1, 0.3
    layer = hf_internals.moe_layers(model)[-1]
    num_layers = len(hf_internals.moe_layers(model))
    num_slots = int(layer.router.top_k) + 1 if has_slots else None
    sites = np.zeros((text.size, num_layers), bool)
    sites[token, -1] = True
    seen = []
    handle = layer.experts.register_forward_hook(lambda module, args, output: seen.append((*args, output)))
    exact = mc.intervene(model, text, np.zeros((*sites.shape, int(layer.router.top_k)), bool), num_slots)
    handle.remove()
    streams = []
    handle = layer.decoder.register_forward_hook(
        lambda module, args, output: streams.append(output[0] if isinstance(output, tuple) else output)
    )
    run = mc.inject(model, text, sites, rank, q, num_slots, layer_error=True)
    plain = mc.emulate(model, text, mc.FETCH_EVERY_MISS, int(layer.router.top_k))
    handle.remove()
    moved = (streams[0] - streams[1]).reshape(text.size, -1).double()
    trace = mc.record(model, text)
    hidden, _, weights, _ = seen[0]
    candidates = np.ones(trace.shape.num_experts, bool)
    if has_slots:
        log = exact.decisions
        candidates = residents_before(log, num_layers - 1, np.arange(candidates.size) < num_slots)[token]
    candidates[trace.topk_ids[token, -1]] = False
    stand_in = max(np.flatnonzero(candidates), key=lambda e: (trace.selection_scores[token, -1, e], -e))
    scale = q * float(weights[token].double().sum())
    expected = moe_output(layer.experts, hidden[token][None], [[stand_in, trace.topk_ids[token, -1, rank]]], [[scale, -scale]])[0]
    np.testing.assert_allclose(moved[token], expected, rtol=1e-3, atol=1e-5)
    others = np.arange(text.size) != token
    assert float(moved[others].abs().max()) < 1e-5
    h2 = float(streams[1].reshape(text.size, -1)[token].double().square().sum())
    assert run.extra["relative_error2_by_layer"][token, -1] == pytest.approx(float(expected.square().sum()) / h2, rel=1e-3)
    assert np.argwhere(run.extra["injected_rank"] >= 0).tolist() == [[token, num_layers - 1]]
    assert np.array_equal(run.loss_nats[1 : token + 1], plain.loss_nats[1 : token + 1])
    assert run.loss_nats[token + 1] != plain.loss_nats[token + 1]


def test_injecting_a_calls_own_weight_is_substituting_it_where_the_stand_in_inherits():
    model = olmoe()
    trace = mc.record(model, TEXTS)
    sites = np.random.default_rng(2).random(shape_of(model)[:2]) < 0.2
    sites[:, 1:] = False  # the weights of later layers would follow
    named = sites[..., None] & (np.arange(2) == 1)
    substituted = mc.intervene(model, TEXTS, named, 4, weight_rule="inherit", keep_logits=True)
    injected = mc.inject(model, TEXTS, sites, 1, trace.gate_weights[..., 1], 4, keep_logits=True)
    assert not np.allclose(logits_of(substituted), logits_of(mc.inject(model, TEXTS, sites, 1, 0.0, 4, keep_logits=True)), atol=1e-3)
    np.testing.assert_allclose(logits_of(injected), logits_of(substituted), atol=2e-4)


def test_a_run_says_that_it_is_an_intervention_and_leaves_the_model_as_it_was():
    model, text = mixtral(), torch.from_numpy(TEXTS[0])[None]
    with torch.no_grad():
        before = model(input_ids=text).logits
    named = np.zeros(shape_of(model), bool)
    named[5, 1, 1] = True
    for run in (mc.intervene(model, TEXTS, named, 4), mc.inject(model, TEXTS, named[..., 1], 1, 0.2, 4)):
        assert run.instrument == "intervention"
        assert run.policy.label.startswith("intervention")
        assert len(run.frame()) == NUM_TOKENS
    with torch.no_grad():
        assert torch.equal(model(input_ids=text).logits, before)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"calls": np.zeros((3, 3, 2), bool)}, "must be bool"),
        ({"calls": np.zeros((NUM_TOKENS, 3, 2))}, "must be bool"),
        ({"calls": lambda calls: calls.gate_weight}, "must return bool"),
        ({"stand_in": "worst"}, "worst"),
        ({"stand_in": np.zeros((NUM_TOKENS, 3, 2))}, "must be expert ids"),
        ({"num_slots": 1}, "below top-k"),
        ({"weight_rule": "none"}, "none"),
    ],
)
def test_refused_interventions(arguments, told):
    with pytest.raises(ValueError, match=told):
        mc.intervene(olmoe(), TEXTS, **({"calls": np.zeros((NUM_TOKENS, 3, 2), bool)} | arguments))


def test_given_stand_ins_may_not_be_called_or_used_twice():
    model = olmoe()
    topk_ids = mc.record(model, TEXTS).topk_ids
    named = np.ones(topk_ids.shape, bool)
    with pytest.raises(ValueError, match="called by the token itself"):
        mc.intervene(model, TEXTS, named, stand_in=topk_ids[..., ::-1])
    outside = np.array([next(e for e in range(8) if e not in row) for row in topk_ids.reshape(-1, 2)])
    twice = np.repeat(outside, 2).reshape(topk_ids.shape)
    with pytest.raises(ValueError, match="serves two calls"):
        mc.intervene(model, TEXTS, named, stand_in=twice)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"sites": np.zeros((3, 3), bool)}, "must be bool"),
        ({"rank": 2}, "from 0 to 1"),
        ({"rank": 0.5}, "from 0 to 1"),
        ({"stand_in": "drop"}, "no output to add"),
    ],
)
def test_refused_injections(arguments, told):
    given = {"sites": np.ones((NUM_TOKENS, 3), bool), "rank": 0, "gate_weight": 0.1} | arguments
    with pytest.raises(ValueError, match=told):
        mc.inject(olmoe(), TEXTS, **given)
