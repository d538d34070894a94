"""Agreement of the instruments: the same decisions on the same logits, and outputs that a second, plain computation confirms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dense import logged_output
from tiny_models import FAMILIES, documents

import moecache as mc
from moecache import hf_internals
from moecache.families import model_shape
from moecache.kernel import Fallback
from moecache.record import recording
from moecache.score import score

TEXTS = documents(lengths=(48, 1, 30))
OTHERS = (
    mc.SUBSTITUTE_EVERY_MISS.replace(fallback="random_resident", seed=5, label="random resident"),
    mc.FIRST_CHOICE.replace(fallback="random_resident", weight_rule="inherit", label="random resident, inherited weight"),
    mc.FIRST_CHOICE.replace(fallback="drop", label="drop"),
    mc.FIRST_CHOICE.replace(fallback="drop", weight_rule="own_raw", label="drop, raw"),
    mc.FIRST_CHOICE.replace(fallback="drop", weight_rule="rescale", label="drop, rescaled"),
    mc.FIRST_CHOICE.replace(weight_rule="own_raw", label="own weight, raw"),
    mc.FIRST_CHOICE.replace(weight_rule="inherit", label="inherited weight"),
    mc.SUBSTITUTE_EVERY_MISS.replace(weight_rule="rescale", label="rescaled weight"),
    mc.SUBSTITUTE_EVERY_MISS.replace(eviction="fifo", label="fifo").admitted_anyway(),
    mc.GATE_015.replace(eviction="plain_count", stand_ins_count=True, label="plain count"),
)
LOW_PRECISION = mc.FIRST_CHOICE.replace(fallback="low_precision", label="low precision")
DECIDED = (
    mc.SUBSTITUTE_EVERY_MISS.replace(fallback="buddy", label="buddy"),
    LOW_PRECISION,
    mc.SUBSTITUTE_EVERY_MISS.replace(fallback="cpu", label="cpu"),
    mc.mass_budget(0.3, label="mass budget"),
    mc.mass_budget(0.05, is_squared=True, label="squared budget"),
    mc.cache_prior(0.3, first_choices=1, label="cache-prior"),
    mc.max_rank(6, label="max-rank"),
    mc.FIRST_CHOICE.replace(max_prefetches=2, label="prefetch"),
    mc.FIRST_CHOICE.replace(insertion="tinylfu", half_life=16, label="tinylfu"),
    mc.FETCH_EVERY_MISS.replace(insertion="cap", insertion_cap=1, label="insertion cap"),
    mc.SPEED_FIRST.replace(account_half_life=8, admission_delay=3, max_in_flight=2, max_bookings=1, label="bounded admission"),
    mc.FIRST_CHOICE.replace(eviction="lfru", counted_calls="served", label="lfru, served"),
    mc.threshold(1.3, threshold_unit="uniform", eviction="slru", label="multiple of uniform, slru"),
)
POLICIES = (*mc.PRESETS, *OTHERS, *DECIDED)
FULLY_TRIED = ("qwen3_next", "olmoe", "deepseek_v3")
PAIRS = [
    (family, number)
    for family in FAMILIES
    for number, policy in enumerate(POLICIES)
    if family in FULLY_TRIED or policy in mc.PRESETS or policy.label in ("drop, rescaled", "own weight, raw", "prefetch")
]
NULL_POLICIES = (mc.FETCH_EVERY_MISS, mc.FETCH_EVERY_MISS.replace(eviction="decayed_count", half_life=16))

every_family = pytest.mark.parametrize("family", FAMILIES)
every_pair = pytest.mark.parametrize(
    ("family", "policy"), [(family, POLICIES[n]) for family, n in PAIRS], ids=lambda value: getattr(value, "label", str(value))
)
every_preset = pytest.mark.parametrize("policy", mc.PRESETS, ids=lambda policy: policy.label)


@pytest.fixture(scope="module")
def models():
    return {name: build() for name, build in FAMILIES.items()}


def given_for(policy, model):
    """What the emulator needs beside some policies."""
    if policy.fallback == Fallback.BUDDY:
        return {"buddies": np.argsort(np.random.default_rng(1).random((*shape_of(model), shape_of(model)[1])), axis=2)[..., :6]}
    if policy.fallback == Fallback.LOW_PRECISION:
        return {"low_bits": 3}
    return {"predict": "stale_gate"} if policy.max_prefetches else {}


def shape_of(model):
    shape = model_shape(model)
    return shape.num_layers, shape.num_experts


def plain_logits(model, text):
    with torch.no_grad(), hf_internals.experts_implementation(model, "grouped_mm"):
        return model(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0].numpy()


def plain_stepped_logits(model, text):
    cache, logits = {}, []
    with torch.no_grad():
        for token in text:
            output = model(input_ids=torch.tensor([[token]]), use_cache=True, **cache)
            cache = {hf_internals.cache_keyword(model): hf_internals.decoding_cache(output)}
            logits.append(output.logits[0].numpy())
    return np.concatenate(logits)


def few_slots(model):
    shape = model_shape(model)
    return shape.top_k + 2


# 1. With room for every expert, or when every miss is fetched, nothing changes.


@every_family
@every_preset
def test_full_cache_gives_the_plain_models_logits_bit_for_bit(models, family, policy):
    model = models[family]
    run = mc.emulate(model, TEXTS, policy, num_slots=model_shape(model).num_experts, keep_logits=True)
    assert np.array_equal(run.extra["logits"], np.concatenate([plain_logits(model, text) for text in TEXTS]))
    assert np.array_equal(run.loss_nats, score(model, TEXTS), equal_nan=True)
    assert run.summary()["hit_rate"] == 1.0


@every_family
@pytest.mark.parametrize("policy", NULL_POLICIES, ids=lambda policy: policy.label)
def test_fetching_every_miss_changes_no_logit(models, family, policy):
    model = models[family]
    run = mc.emulate(model, TEXTS, policy, num_slots=few_slots(model), keep_logits=True)
    assert run.summary()["fetched"] > 50
    assert np.array_equal(run.extra["logits"], np.concatenate([plain_logits(model, text) for text in TEXTS]))


@every_family
def test_full_cache_and_null_policy_agree_with_plain_stepping_bit_for_bit(models, family):
    model, text = models[family], TEXTS[2]
    expected = plain_stepped_logits(model, text)
    full = mc.emulate(model, text, mc.SPEED_FIRST, model_shape(model).num_experts, stepped=True, keep_logits=True)
    null = mc.emulate(model, text, mc.FETCH_EVERY_MISS, few_slots(model), stepped=True, keep_logits=True)
    assert np.array_equal(full.extra["logits"], expected)
    assert np.array_equal(null.extra["logits"], expected)


@every_family
def test_substituting_does_change_logits(models, family):
    model = models[family]
    run = mc.emulate(model, TEXTS, mc.SUBSTITUTE_EVERY_MISS, few_slots(model), keep_logits=True)
    assert np.abs(run.extra["logits"] - np.concatenate([plain_logits(model, text) for text in TEXTS])).max() > 0.1


# 2. The simulator, fed the trace that was recorded during an emulation, decides the same: through a file, without torch.

SETTINGS = ({}, {"documents": "reset", "exact_prefix_tokens": 5, "cold_start": "random", "seed": 3})


@pytest.fixture(scope="module")
def replayed(models, tmp_path_factory):
    """Emulated and replayed logs of every family, policy and setting; one new process replays all."""
    folder, plan, emulated = tmp_path_factory.mktemp("traces"), [], {}
    for family, number in PAIRS:
        setting = number % len(SETTINGS)
        model, policy, key = models[family], POLICIES[number], (family, number)
        given, path = given_for(policy, model), folder / f"{len(plan)}.safetensors"
        with recording(model, given.get("predict")) as recorder:
            run = mc.emulate(model, TEXTS, policy, few_slots(model), **SETTINGS[setting], **given)
        recorder.trace(TEXTS).save(path)
        emulated[key] = run.decisions
        buddies = {"buddies": given["buddies"].tolist()} if "buddies" in given else {}
        plan.append([str(path), policy.to_dict(), few_slots(model), SETTINGS[setting] | buddies])
    (folder / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).with_name("replay_in_new_process.py")
    subprocess.run([sys.executable, script, folder / "plan.json", folder / "logs.npz"], check=True, timeout=1800)
    with np.load(folder / "logs.npz") as file:
        names = ("outcome", "computed_ids", "evicted_ids", "arrivals", "substituted_mass")
        logs = [mc.DecisionLog(**{name: file[f"{number}.{name}"] for name in names}) for number in range(len(plan))]
    return {key: (log, other) for (key, log), other in zip(emulated.items(), logs, strict=True)}


@pytest.mark.parametrize(("family", "policy"), PAIRS, ids=lambda value: getattr(value, "label", str(value)))
def test_simulator_replays_the_emulators_decisions_bit_for_bit(replayed, family, policy):
    emulated, simulated = replayed[family, policy]
    assert emulated.is_equal(simulated)
    num_hits = emulated.count(mc.Outcome.HIT)
    assert 0 < num_hits < emulated.outcome.size


def test_replayed_decisions_cover_every_outcome_and_arrivals(replayed):
    seen = set(np.concatenate([np.unique(log.outcome) for log, _ in replayed.values()]).tolist())
    assert seen == set(mc.Outcome)
    assert sum(len(log.arrivals) for log, _ in replayed.values()) > 100
    assert any((log.arrivals[:, 5] == mc.ArrivalKind.PREFETCH).any() for log, _ in replayed.values())


@every_family
def test_recording_the_exact_model_is_enough_where_nothing_is_replaced(models, family):
    model, trace = models[family], mc.record(models[family], TEXTS)
    run = mc.emulate(model, TEXTS, mc.FETCH_EVERY_MISS, few_slots(model))
    assert mc.simulate(trace, mc.FETCH_EVERY_MISS, few_slots(model)).decisions.is_equal(run.decisions)


@every_family
def test_first_layer_is_replayed_from_the_exact_model_under_any_policy(models, family):
    """Nothing is replaced before the first layer, and layers do not look at one another."""
    model, trace = models[family], mc.record(models[family], TEXTS)
    for policy in POLICIES[:8]:
        run, replay = mc.emulate(model, TEXTS, policy, few_slots(model)), mc.simulate(trace, policy, few_slots(model))
        assert np.array_equal(run.decisions.computed_ids[:, 0], replay.decisions.computed_ids[:, 0])


# 3. A second, plain computation of the experts, handed the log, gives the same.


@every_pair
def test_experts_output_is_what_a_plain_computation_of_the_log_gives(models, family, policy):
    model, seen = models[family], {}
    layers = hf_internals.moe_layers(model)

    def keep(index):
        return lambda module, args, output: seen.setdefault(index, []).append((args[0], output))

    hooks = [layer.experts.register_forward_hook(keep(index)) for index, layer in enumerate(layers)]
    if policy is LOW_PRECISION:
        policy = policy.replace(fallback="cpu")  # copies have a test of their own
    run = mc.emulate(model, TEXTS[2], policy, few_slots(model), **given_for(policy, model))
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(layers):
        ((hidden, output),) = seen[index]
        expected = logged_output(layer, hidden, run.decisions.computed_ids[:, index], policy.weight_rule, family)
        np.testing.assert_allclose(output.numpy(), expected.numpy(), atol=1e-5)


# 4. All tokens of a layer at once, or token by token through all layers: the same decisions but for near ties.

SHORT_TEXTS = documents(seed=1, lengths=(16, 1, 8))
STEPPED = [(f, p) for f in FAMILIES for p in ((*POLICIES[:8], *DECIDED) if f == "qwen3_next" else (mc.SPEED_FIRST, mc.GATE_015, OTHERS[1]))]


@pytest.mark.parametrize(("family", "policy"), STEPPED, ids=lambda value: getattr(value, "label", str(value)))
def test_one_pass_and_stepped_emulation_agree(models, family, policy):
    model = models[family]
    given = given_for(policy, model) | ({"predict": "previous_token"} if policy.max_prefetches else {})
    one_pass = mc.emulate(model, SHORT_TEXTS, policy, few_slots(model), keep_logits=True, **given)
    stepped = mc.emulate(model, SHORT_TEXTS, policy, few_slots(model), keep_logits=True, stepped=True, **given)
    assert one_pass.near_ties is not None
    for name in ("outcome", "computed_ids", "evicted_ids"):
        differs = getattr(one_pass.decisions, name) != getattr(stepped.decisions, name)
        assert differs.any(axis=2).sum() <= one_pass.near_ties
    np.testing.assert_allclose(one_pass.decisions.substituted_mass, stepped.decisions.substituted_mass, atol=1e-4)
    np.testing.assert_allclose(one_pass.extra["logits"], stepped.extra["logits"], atol=1e-3)
    np.testing.assert_allclose(one_pass.loss_nats, stepped.loss_nats, atol=1e-3)
