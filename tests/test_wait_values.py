"""Waiting by other values than gate weights: against the plain twin, live and replayed, an oracle by hand, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense import one_expert
from streams import random_stream, twin_policy
from tiny_models import documents, granitemoe, olmoe, qwen3_next
from twin import TwinLayer

import moecache as mc
from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.contribution import contribution_oracle
from moecache.record import recording
from moecache.wait_values import decide_by_values

POLICIES = (
    mc.threshold(0.3),
    mc.threshold(0.3, first_choice=True, eviction="fifo"),
    mc.threshold(0.4, fallback="drop", eviction="decayed_count", half_life=8),
    mc.threshold(1.2, threshold_unit="uniform", fallback="random_resident", seed=3),
    mc.threshold(0.3, eviction="slru").admitted_anyway(),
    mc.threshold(0.5).admitted_anyway().replace(admission_delay=3),
)


class WaitingTwin(TwinLayer):
    """The twin, whose miss rule looks at other numbers."""

    values = None

    def waits(self, misses, ids, weights, scores):
        return super().waits(misses, ids, self.values, scores)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)
def test_decisions_are_the_twins(policy):
    ids, weights, scores = random_stream(5, 120, 2, 12, 4)
    values = np.random.default_rng(2).random(ids.shape).astype(np.float32)
    cache = ExpertCache(mc.ModelShape(2, 12, 4), policy, 6)
    parts = [slice(0, 50), slice(50, 120)]
    logs = [decide_by_values(cache, values[p], ids[p], weights[p], scores[p]) for p in parts]
    total = 0.0
    for layer in range(2):
        twin = WaitingTwin(twin_policy(policy, 4), 12, 6, list(range(6)), layer)
        for token in range(120):
            twin.values = values[token, layer]
            twin.step(ids[token, layer].tolist(), weights[token, layer], scores[token, layer])
        for token, (outcome, computed, evicted, mass) in enumerate(twin.rows):
            log, row = logs[token >= 50], token - 50 * (token >= 50)
            assert log.outcome[row, layer].tolist() == outcome
            assert log.computed_ids[row, layer].tolist() == computed
            assert log.evicted_ids[row, layer].tolist() == evicted
            assert log.substituted_mass[row, layer] == np.float32(mass)
            total += mass
    assert cache.state.mass_sum.sum() == pytest.approx(total)
    by_weight = ExpertCache(mc.ModelShape(2, 12, 4), policy, 6).decide(ids[:50], weights[:50], scores[:50])
    assert not np.array_equal(by_weight.outcome, logs[0].outcome)


def test_gate_weights_as_values_change_nothing():
    model, texts = qwen3_next(), documents()
    trace = mc.record(model, texts)
    plain = mc.simulate(trace, POLICIES[0], 6)
    same = mc.simulate(trace, POLICIES[0], 6, wait_values=trace.gate_weights)
    assert same.decisions.is_equal(plain.decisions)
    assert same.mass_sum == plain.mass_sum
    by_function = mc.emulate(model, texts, POLICIES[0], 6, wait_values=lambda layer, routing, first: routing.gate_weights)
    assert by_function.decisions.is_equal(mc.emulate(model, texts, POLICIES[0], 6).decisions)
    summary = mc.simulate(trace, POLICIES[0], 6, wait_values=trace.gate_weights, keep="summary")
    assert summary.summary() == plain.summary()


@pytest.mark.parametrize("stepped", [False, True])
def test_values_of_a_live_run_are_kept_and_replayed(stepped):
    model, texts = olmoe(), documents(lengths=(20, 1, 9))
    values = np.random.default_rng(0).random((30, 3, 2)).astype(np.float32)
    with recording(model) as recorder:
        run = mc.emulate(model, texts, mc.threshold(0.5), 4, wait_values=values, stepped=stepped)
    replayed = mc.simulate(recorder.trace(texts), mc.threshold(0.5), 4, wait_values=run.extra["wait_values"])
    assert np.array_equal(run.extra["wait_values"], values)
    assert replayed.decisions.is_equal(run.decisions)
    is_fetched, is_replaced = (run.decisions.outcome == code for code in (mc.Outcome.FETCHED, mc.Outcome.SUBSTITUTED))
    assert values[is_fetched].min() >= 0.5 > values[is_replaced].max()


@pytest.mark.parametrize("build", [qwen3_next, olmoe, granitemoe])
def test_contribution_oracle_by_hand(build):
    model, text = build(), documents(lengths=(12,))[0]
    layers, given, streams = hf_internals.moe_layers(model), [], []
    hooks = []
    for layer in layers:
        hooks.append(layer.experts.register_forward_pre_hook(lambda module, args: given.append(args)))
        hooks.append(
            layer.decoder.register_forward_hook(
                lambda module, args, output: streams.append(output[0] if isinstance(output, tuple) else output)
            )
        )
    mc.emulate(model, text, mc.FETCH_EVERY_MISS, 6)
    for hook in hooks:
        hook.remove()
    run = mc.emulate(model, text, mc.threshold(1e-9), 6, wait_values=contribution_oracle())  # waits for every miss: the exact model
    assert run.summary()["substituted"] == 0
    for index, layer in enumerate(layers):
        hidden, ids, weights = given[index]
        stream = (streams[index][0] if isinstance(streams[index], tuple) else streams[index]).reshape(text.size, -1)
        for token in range(0, text.size, 5):
            order = weights[token].argsort(descending=True)
            with torch.no_grad():
                sizes = [
                    float(weights[token, c] * one_expert(layer.experts, int(ids[token, c]), hidden[token].double()).norm()) for c in order
                ]
            expected = np.array(sizes) / float(stream[token].double().norm())
            np.testing.assert_allclose(run.extra["wait_values"][token, index], expected, rtol=1e-3)


def test_an_oracle_waits_for_the_largest_contributions_and_leaves_the_model_alone():
    model, texts = qwen3_next(), documents()
    tau = 0.1
    with recording(model) as recorder:
        run = mc.emulate(model, texts, mc.threshold(tau), 6, wait_values=contribution_oracle(), layer_error=True)
    values, outcome = run.extra["wait_values"], run.decisions.outcome
    assert values[outcome == mc.Outcome.FETCHED].min() >= tau > values[outcome == mc.Outcome.SUBSTITUTED].max()
    assert mc.simulate(recorder.trace(texts), mc.threshold(tau), 6, wait_values=values).decisions.is_equal(run.decisions)
    blind_runs = (mc.emulate(model, texts, mc.threshold(weight), 6, layer_error=True) for weight in (0.3, 0.28, 0.26, 0.24, 0.22, 0.2))
    blind = next(other for other in blind_runs if other.summary()["fetched"] >= run.summary()["fetched"])
    assert run.extra["relative_error2"].mean() < blind.extra["relative_error2"].mean()  # although it waits for no more calls
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("policy", "keywords", "message"),
    [
        (mc.mass_budget(0.3), {}, "miss_rule='mass_budget' does not read"),
        (mc.FETCH_EVERY_MISS, {}, "but 0.0 compares nothing"),
        (mc.FIRST_CHOICE, {}, "but inf compares nothing"),
        (mc.QUALITY_FIRST, {}, "cannot be carried out with mass_threshold=0.5"),
        (mc.threshold(0.2), {"wait_values": np.ones((3, 3, 2))}, "of 3 tokens, but the documents have 74"),
        (mc.threshold(0.2), {"wait_values": np.full((74, 3, 2), -1.0)}, "0 or more"),
        (mc.threshold(0.2), {"wait_values": np.ones((74, 3, 5))}, r"wait_values are \[40, 5\]"),
        (mc.threshold(0.2), {"wait_values": contribution_oracle(), "stepped": True}, "use stepped=False"),
    ],
)
def test_what_values_cannot_do_is_refused(policy, keywords, message):
    with pytest.raises(ValueError, match=message):
        mc.emulate(olmoe(), documents(), policy, 4, **({"wait_values": np.ones((74, 3, 2))} | keywords))


def test_values_in_a_sequential_replay_are_refused():
    trace = mc.record(olmoe(), documents())
    with pytest.raises(ValueError, match="replay='sequential' waits for all"):
        mc.simulate(trace, mc.FETCH_EVERY_MISS, 4, wait_values=trace.gate_weights, replay="sequential")
