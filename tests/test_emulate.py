"""The emulator: weight rules by hand, boundaries, layer errors, refusals, and a model left as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense import moe_output
from tiny_models import FAMILIES, deepseek_v3, documents, gpt_oss, olmoe, qwen3_next

import moecache as mc
from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.emulate import emulate_policies
from moecache.experts import final_weights, reroute
from moecache.families import Family, UnknownRouter, family_of, model_shape, routing_of
from moecache.hf_internals import RouterOutput
from moecache.kernel import Fallback
from moecache.low_bit import low_bit_copies
from moecache.ties import near_ties

P = np.array([0.4, 0.3, 0.2, 0.1])  # own scores of four experts; the router calls 0 and 1
NORMALISED, PLAIN = Family(("any",), "softmax", True), Family(("any",), "softmax", False)
NOBODY = -1


def weights_after(family, rule, final):
    """Weights of calls (0, 1) after `final` experts serve them."""
    logits = torch.from_numpy(np.log(P))[None].float()
    own = torch.from_numpy(P[:2])[None].float()
    weights = own / own.sum() if family.norm_topk_prob else own
    called, computed = torch.tensor([[0, 1]]), torch.tensor([final])
    final_ids = torch.where(computed < 0, called, computed)
    return final_weights(family, mc.WeightRule(rule), logits, weights, called, final_ids, computed < 0)[0].tolist()


@pytest.mark.parametrize(
    ("family", "rule", "final", "expected"),
    [
        (NORMALISED, "own", (0, 2), (4 / 6, 2 / 6)),
        (NORMALISED, "own_raw", (0, 2), (4 / 7, 2 / 7)),
        (NORMALISED, "inherit", (0, 2), (4 / 7, 3 / 7)),
        (NORMALISED, "rescale", (0, 2), (4 / 6, 2 / 6)),
        (PLAIN, "own", (0, 2), (0.4, 0.2)),  # not renormalised: OLMoE's kept call stays at 0.4
        (PLAIN, "own_raw", (0, 2), (0.4, 0.2)),
        (PLAIN, "inherit", (0, 2), (0.4, 0.3)),
        (PLAIN, "rescale", (0, 2), (0.7 * 4 / 6, 0.7 * 2 / 6)),
        (NORMALISED, "own", (3, 2), (1 / 3, 2 / 3)),
        (PLAIN, "own", (3, 2), (0.1, 0.2)),
        (NORMALISED, "own", (0, NOBODY), (1.0, 0.0)),
        (NORMALISED, "own_raw", (0, NOBODY), (4 / 7, 0.0)),
        (NORMALISED, "rescale", (0, NOBODY), (1.0, 0.0)),
        (PLAIN, "own", (0, NOBODY), (0.4, 0.0)),
        (PLAIN, "own_raw", (0, NOBODY), (0.4, 0.0)),
        (PLAIN, "rescale", (0, NOBODY), (0.7, 0.0)),
        (NORMALISED, "own", (NOBODY, NOBODY), (0.0, 0.0)),
        (PLAIN, "rescale", (NOBODY, NOBODY), (0.0, 0.0)),
    ],
)
def test_weight_rules_by_hand(family, rule, final, expected):
    assert weights_after(family, rule, final) == pytest.approx(expected, abs=1e-6)


def test_rerouting_keeps_the_routers_order_of_calls_and_untouched_rows():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]))
    ids = torch.tensor([[1, 0], [2, 3]])  # lighter call first
    output = RouterOutput(logits, torch.softmax(logits, -1).gather(1, ids), ids)
    computed = np.array([[0, 2], [3, 2]], np.int16)  # rank order: token 0's second choice, expert 1, is served by 2
    replaced = reroute(PLAIN, mc.WeightRule.OWN, output, routing_of(PLAIN, output), np.array([0]), computed)
    assert replaced.ids.tolist() == [[2, 0], [2, 3]]
    assert replaced.weights[0].tolist() == pytest.approx([0.2, 0.4])
    assert torch.equal(replaced.weights[1], output.weights[1])
    assert output.ids.tolist() == [[1, 0], [2, 3]]


def test_calls_of_a_changed_token_that_keep_their_expert_keep_their_weight_where_nothing_is_normalised():
    model, seen = olmoe(), []
    hooks = [
        layer.experts.register_forward_hook(lambda module, args, output: seen.append(args[1:]))
        for layer in hf_internals.moe_layers(model)[:1]
    ]
    text = documents()[0]
    run = mc.emulate(model, text, mc.FIRST_CHOICE, 3)
    trace = mc.record(model, text)
    for hook in hooks:
        hook.remove()
    (_, emulated), (_, exact) = seen
    is_second_replaced = run.decisions.outcome[:, 0, 1] == mc.Outcome.SUBSTITUTED
    assert is_second_replaced.any()
    assert np.array_equal(trace.topk_ids[:, 0, 0], run.decisions.computed_ids[:, 0, 0])
    assert torch.equal(emulated[:, 0], exact[:, 0])
    assert not torch.equal(emulated[:, 1], exact[:, 1])


def test_exact_prefix_waits_for_every_miss_of_each_documents_first_tokens():
    texts = documents(lengths=(30, 20))
    run = mc.emulate(qwen3_next(), texts, mc.SUBSTITUTE_EVERY_MISS, 6, exact_prefix_tokens=8)
    outcome = run.decisions.outcome
    prefix = np.r_[0:8, 30:38]
    assert set(np.unique(outcome[prefix])) == {mc.Outcome.HIT, mc.Outcome.FETCHED}
    assert (outcome[np.r_[8:30, 38:50]] == mc.Outcome.SUBSTITUTED).any()
    assert not (outcome[np.r_[8:30, 38:50]] == mc.Outcome.FETCHED).any()


def test_reset_documents_do_not_depend_on_what_came_before():
    model, texts = qwen3_next(), documents(lengths=(30, 20))
    reset = mc.emulate(model, texts, mc.QUALITY_FIRST, 6, documents="reset")
    alone = mc.emulate(model, texts[1], mc.QUALITY_FIRST, 6)
    kept = mc.emulate(model, texts, mc.QUALITY_FIRST, 6)
    assert np.array_equal(reset.decisions.computed_ids[30:], alone.decisions.computed_ids)
    assert np.array_equal(reset.loss_nats[30:], alone.loss_nats, equal_nan=True)
    assert not np.array_equal(kept.decisions.computed_ids[30:], alone.decisions.computed_ids)
    assert not reset.decisions.is_equal(kept.decisions)


def test_slots_may_differ_by_layer_and_cold_starts_matter():
    model, text = qwen3_next(), documents()[0]
    few = mc.emulate(model, text, mc.FETCH_EVERY_MISS, 5)
    mixed = mc.emulate(model, text, mc.FETCH_EVERY_MISS, [16, 5, 5, 5])
    assert (mixed.decisions.outcome[:, 0] == mc.Outcome.HIT).all()
    assert np.array_equal(mixed.decisions.outcome[:, 1:], few.decisions.outcome[:, 1:])
    starts = [mc.emulate(model, text, mc.FETCH_EVERY_MISS, 5, cold_start=start, seed=3) for start in ("empty", "random")]
    hits = [run.summary()["hits"] for run in (few, *starts)]
    assert len(set(hits)) > 1
    again = mc.emulate(model, text, mc.FETCH_EVERY_MISS, 5, cold_start="random", seed=3)
    assert again.decisions.is_equal(starts[1].decisions)


def test_run_describes_itself():
    run = mc.emulate(olmoe(), documents(), mc.GATE_015, 4, layer_error=True, keep_logits=True)
    assert (run.instrument, run.documents, run.cold_start, run.num_slots.tolist()) == ("emulator", "keep", "first", [4] * 3)
    assert np.flatnonzero(run.document_start).tolist() == [0, 40, 41]
    assert np.array_equal(np.isnan(run.loss_nats), run.document_start)
    assert run.provenance["model"]["model_type"] == "olmoe"
    assert run.extra["logits"].shape == (74, 96)
    frame = run.frame()
    assert len(frame) == 74
    assert "relative_error2" in frame
    calls = run.summary()
    assert calls["calls"] == 74 * 3 * 2 == sum(calls[key] for key in ("hits", "fetched", "forced", "substituted", "dropped"))


@pytest.mark.parametrize("build", [qwen3_next, olmoe])
@pytest.mark.parametrize("stepped", [False, True])
def test_relative_layer_error_by_hand(build, stepped):
    model, text = build(), documents(lengths=(24,))[0]
    layers = hf_internals.moe_layers(model)
    inputs, streams = [[] for _ in layers], [[] for _ in layers]

    def keep(kept, take):
        return lambda module, args, output: kept.append(take(args, output))

    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(layer.experts.register_forward_hook(keep(inputs[index], lambda args, output: args)))
        hooks.append(layer.decoder.register_forward_hook(keep(streams[index], lambda args, output: output[0])))
    run = mc.emulate(model, text, mc.SUBSTITUTE_EVERY_MISS, 5, layer_error=True, stepped=stepped)
    for hook in hooks:
        hook.remove()
    for index, layer in enumerate(layers):
        hidden, ids, weights = (torch.cat(parts) for parts in zip(*inputs[index], strict=True))
        with torch.no_grad():
            _, own_weights, own_ids = layer.router(hidden)
        change = moe_output(layer.experts, hidden, ids.numpy(), weights.numpy()) - moe_output(
            layer.experts, hidden, own_ids.numpy(), own_weights.numpy()
        )
        exact_stream = torch.cat(streams[index]).double() - change
        expected = (change.norm(dim=-1) / exact_stream.norm(dim=-1)).square().numpy()
        np.testing.assert_allclose(run.extra["relative_error2_by_layer"][:, index], expected, rtol=1e-3, atol=1e-9)
    is_exact = (run.decisions.outcome == mc.Outcome.HIT).all(axis=2)
    assert (run.extra["relative_error2_by_layer"][is_exact] == 0).all()
    assert (run.extra["relative_error2_by_layer"][~is_exact] > 0).all()
    np.testing.assert_allclose(run.extra["relative_error2"], run.extra["relative_error2_by_layer"].mean(1))


def test_token_of_zeros_has_no_layer_error():
    """A padding token's embedding is zero, its stream stays zero, and so does the change to it: 0, not 0 / 0."""
    model = qwen3_next()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = 0.0
    run = mc.emulate(model, np.array([7, 1, 2, 3]), mc.SUBSTITUTE_EVERY_MISS, 4, cold_start="empty", layer_error=True)
    assert (run.extra["relative_error2_by_layer"][0] == 0).all()
    run = mc.emulate(model, np.array([7, 1, 2, 3]), mc.SUBSTITUTE_EVERY_MISS, 4, cold_start=[range(12, 16)] * 4, layer_error=True)
    assert (run.decisions.outcome[0] == mc.Outcome.SUBSTITUTED).any()
    assert np.isfinite(run.extra["relative_error2"]).all()


def test_measuring_layer_errors_changes_nothing():
    model = qwen3_next()
    plain, measured = (mc.emulate(model, documents(), mc.SPEED_FIRST, 6, layer_error=flag) for flag in (False, True))
    assert np.array_equal(plain.loss_nats, measured.loss_nats, equal_nan=True)
    assert plain.decisions.is_equal(measured.decisions)
    assert set(plain.extra) == {"squared_mass", "squared_mass_by_layer"}
    assert np.array_equal(plain.extra["squared_mass"], measured.extra["squared_mass"])


def test_interrupted_emulation_leaves_the_model_as_it_was(monkeypatch):
    model, text = qwen3_next(), torch.from_numpy(documents()[0])[None]
    with torch.no_grad():
        before = model(input_ids=text).logits
    decide, calls = ExpertCache.decide, []

    def interrupted(self, *args, **keywords):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decide(self, *args, **keywords)

    monkeypatch.setattr(ExpertCache, "decide", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mc.emulate(model, documents(), mc.SUBSTITUTE_EVERY_MISS, 5, layer_error=True)
    assert len(calls) == 3
    assert not any(module._forward_hooks for module in model.modules())
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    with torch.no_grad():
        assert torch.equal(model(input_ids=text).logits, before)


def test_experts_implementation_of_the_model_is_restored():
    model = olmoe()
    model.set_experts_implementation("eager")
    mc.emulate(model, documents(), mc.GATE_015, 4)
    assert model.get_experts_implementation() == {"": "eager"}


def test_bfloat16_models_are_emulated():
    model = qwen3_next().to(torch.bfloat16)
    exact = mc.emulate(model, documents(), mc.FETCH_EVERY_MISS, 6)
    run = mc.emulate(model, documents(), mc.SUBSTITUTE_EVERY_MISS, 6, layer_error=True)
    assert np.nanmax(np.abs(run.loss_nats - exact.loss_nats)) > 0
    assert np.isfinite(run.extra["relative_error2"]).all()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_slots": 1}, "num_slots=1 is below top-k=2"),
        ({"num_slots": 9}, "num_slots=9 exceeds the 8 experts"),
        ({"documents": "forget"}, "documents='forget' is unknown; choose one of keep, reset"),
        ({"exact_prefix_tokens": -1}, "exact_prefix_tokens=-1 must be 0 or more"),
        ({"cold_start": "warm"}, "cold_start='warm' is unknown"),
    ],
)
def test_impossible_arguments_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        mc.emulate(olmoe(), documents(), mc.GATE_015, **({"num_slots": 4} | keywords))


def test_models_that_cannot_be_emulated_are_refused():
    model = olmoe()
    with pytest.raises(ValueError, match="training mode"):
        mc.emulate(model.train(), documents(), mc.GATE_015, 4)
    model.eval().config.model_type = "unheard_of"
    with pytest.raises(UnknownRouter, match="'unheard_of'"):
        mc.emulate(model, documents(), mc.GATE_015, 4)


LOW = mc.FIRST_CHOICE.replace(fallback="low_precision", label="low precision")


def experts_outputs(model, **keywords):
    """A run, and for each MoE layer what its experts were given and returned."""
    seen = [[] for _ in hf_internals.moe_layers(model)]
    hooks = [
        layer.experts.register_forward_hook(lambda module, args, output, kept=seen[index]: kept.append((args, output)))
        for index, layer in enumerate(hf_internals.moe_layers(model))
    ]
    run = mc.emulate(model, documents(lengths=(24,))[0], **keywords)
    for hook in hooks:
        hook.remove()
    return run, [kept[0] for kept in seen]


@pytest.mark.parametrize("build", [qwen3_next, olmoe, gpt_oss, deepseek_v3])
@pytest.mark.parametrize("bits", [8, 2])
def test_low_precision_calls_are_computed_from_the_copy_and_no_others(build, bits):
    model = build()
    run, seen = experts_outputs(model, policy=LOW, num_slots=6, low_bits=bits, layer_error=True)
    copies = low_bit_copies(model, bits)
    for index, layer in enumerate(hf_internals.moe_layers(model)):
        (hidden, _, _), output = seen[index]
        with torch.no_grad():
            router = hf_internals.route(layer, hidden)
        column = routing_of(family_of(model), router).column
        is_low = np.zeros(column.shape, bool)
        np.put_along_axis(is_low, column, run.decisions.outcome[:, index] == mc.Outcome.LOW_PRECISION, axis=1)
        low, full = np.where(is_low, router.weights.numpy(), 0), np.where(is_low, 0, router.weights.numpy())
        assert is_low.any()
        expected = moe_output(copies.layers[index], hidden, router.ids.numpy(), low) + moe_output(
            layer.experts, hidden, router.ids.numpy(), full
        )
        np.testing.assert_allclose(output.numpy(), expected.numpy(), atol=2e-5)
        has_low = is_low.any(axis=1)
        assert ((run.extra["relative_error2_by_layer"][:, index] > 0) == has_low).all()
        mass = np.where(run.decisions.outcome[:, index] == mc.Outcome.LOW_PRECISION, routing_of(family_of(model), router).gate_weights, 0)
        np.testing.assert_allclose(run.extra["low_precision_mass_by_layer"][:, index], mass.sum(1), atol=1e-6)
    assert run.summary()["substituted_mass"] == 0
    assert run.provenance["low_bits"] == bits
    assert not any("forward" in vars(module) for module in model.modules())


def test_eight_bits_are_nearly_exact_and_two_are_not():
    model, text = qwen3_next(), documents()[0]
    runs = [mc.emulate(model, text, LOW, 6, low_bits=bits, compare_with_exact=True, layer_error=True) for bits in (8, 4, 3, 2)]
    divergence = [np.nanmean(run.extra["kl_nats"]) for run in runs]
    errors = [run.extra["relative_error2"].mean() for run in runs]
    assert 0 < divergence[0] < 1e-3 < divergence[3]
    assert errors == sorted(errors)
    made = low_bit_copies(model, 2)
    again = mc.emulate(model, text, LOW, 6, low_bits=made)
    assert np.array_equal(again.loss_nats, runs[3].loss_nats, equal_nan=True)


def test_low_precision_in_bfloat16_and_copies_of_another_model():
    run = mc.emulate(olmoe().to(torch.bfloat16), documents(), LOW, 4, low_bits=4)
    assert np.isfinite(run.loss_nats[1:40]).all()
    with pytest.raises(ValueError, match="copies are of 3 MoE layers, but this model has 4"):
        mc.emulate(qwen3_next(), documents(), LOW, 6, low_bits=low_bit_copies(olmoe(), 4))


def test_the_processor_computes_calls_as_they_are():
    model = qwen3_next()
    run = mc.emulate(model, documents(), mc.SUBSTITUTE_EVERY_MISS.replace(fallback="cpu"), 6, keep_logits=True, layer_error=True)
    exact = mc.emulate(model, documents(), mc.FETCH_EVERY_MISS, 6, keep_logits=True)
    assert run.summary()["cpu"] > 100
    assert np.array_equal(run.extra["logits"], exact.extra["logits"])
    assert (run.extra["relative_error2"] == 0).all()


def test_distance_from_the_exact_model_by_hand():
    model, texts = qwen3_next(), documents()
    run = mc.emulate(model, texts, mc.FIRST_CHOICE, 6, compare_with_exact=True, keep_logits=True)
    exact = mc.emulate(model, texts, mc.FETCH_EVERY_MISS, 6, keep_logits=True)
    true, other = (torch.log_softmax(torch.from_numpy(r.extra["logits"]).double(), -1) for r in (exact, run))
    expected = (true.exp() * (true - other)).sum(-1).numpy()
    is_same = (true.argmax(-1) == other.argmax(-1)).numpy()
    later = np.flatnonzero(~run.document_start)
    np.testing.assert_allclose(run.extra["kl_nats"][later], expected[later - 1], atol=1e-5)
    assert np.array_equal(run.extra["same_top_token"][later], is_same[later - 1])
    assert np.isnan(run.extra["kl_nats"][run.document_start]).all()
    assert np.array_equal(run.extra["exact_loss_nats"], exact.loss_nats, equal_nan=True)
    assert 0 < np.nanmean(run.extra["same_top_token"]) < 1
    assert {"kl_nats", "same_top_token", "exact_loss_nats", "squared_mass"} <= set(run.frame().columns)
    null = mc.emulate(model, texts, mc.FETCH_EVERY_MISS, 6, compare_with_exact=True)
    assert np.nanmax(np.abs(null.extra["kl_nats"])) == 0
    stepped = mc.emulate(model, texts[2], mc.FIRST_CHOICE, 6, compare_with_exact=True, stepped=True)
    alone = mc.emulate(model, texts[2], mc.FIRST_CHOICE, 6, compare_with_exact=True)
    np.testing.assert_allclose(stepped.extra["kl_nats"], alone.extra["kl_nats"], atol=1e-3)


def test_squared_mass_is_of_the_calls_that_others_served():
    model, text = olmoe(), documents()[0]
    run = mc.emulate(model, text, mc.SUBSTITUTE_EVERY_MISS, 3)
    trace = mc.record(model, text)
    replaced = run.decisions.outcome[:, 0] == mc.Outcome.SUBSTITUTED  # the first layer is routed as without a policy
    expected = np.where(replaced, trace.gate_weights[:, 0], 0) ** 2
    np.testing.assert_allclose(run.extra["squared_mass_by_layer"][:, 0], expected.sum(1), rtol=1e-5)
    np.testing.assert_allclose(run.extra["squared_mass"], run.extra["squared_mass_by_layer"].mean(1))


SEVERAL = (mc.FETCH_EVERY_MISS, mc.QUALITY_FIRST, LOW, mc.Policy(max_prefetches=2, label="prefetch"))


@pytest.mark.parametrize("name", FAMILIES)
def test_several_policies_at_once_are_the_single_runs_bit_for_bit(name):
    model, texts = FAMILIES[name](), documents(lengths=(20, 1, 9))
    num_slots = model_shape(model).top_k + 2
    given = {"documents": "reset", "compare_with_exact": True, "keep_logits": True, "layer_error": True}
    runs = emulate_policies(model, texts, SEVERAL, num_slots, low_bits=3, predict="stale_gate", **given)
    for policy, run in zip(SEVERAL, runs, strict=True):
        own = {"low_bits": 3} if policy is LOW else {"predict": "stale_gate"} if policy.max_prefetches else {}
        alone = mc.emulate(model, texts, policy, num_slots, **own, **(given | {"compare_with_exact": False}))
        assert run.policy == policy
        assert run.decisions.is_equal(alone.decisions)
        for field in ("logits", "squared_mass_by_layer", "relative_error2_by_layer"):
            assert np.array_equal(run.extra[field], alone.extra[field])
    assert np.nanmax(np.abs(runs[0].extra["kl_nats"])) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_start_of_the_model_is_computed_once_a_document():
    model, texts = qwen3_next(), documents(lengths=(20, 9))
    layers, calls = hf_internals.moe_layers(model), {"mixer": 0, "router": 0, "experts": 0, "second": 0}

    def count(name):
        return lambda *_: calls.__setitem__(name, calls[name] + 1)

    first, second = layers[0].decoder, layers[1].decoder
    hooks = [
        first.linear_attn.in_proj_ba.register_forward_hook(count("mixer")),
        first.mlp.shared_expert.up_proj.register_forward_hook(count("router")),
        layers[0].experts.register_forward_hook(count("experts")),
        second.linear_attn.in_proj_ba.register_forward_hook(count("second")),
    ]
    emulate_policies(model, texts, SEVERAL[:2], 6, compare_with_exact=True)
    for hook in hooks:
        hook.remove()
    assert calls == {"mixer": 2, "router": 2, "experts": 6, "second": 6}


@pytest.mark.parametrize(
    ("policy", "keywords", "message"),
    [
        (LOW, {}, 'sets fallback="low_precision", which the emulator carries out with low_bits=; give it 8, 4, 3 or 2 bits'),
        (LOW, {"low_bits": 5}, "low_bits=5 is unknown; choose one of 8, 4, 3, 2"),
        (mc.GATE_015, {"low_bits": 4}, "low_bits is given, but no policy sets fallback"),
        (mc.GATE_015.replace(fallback="buddy"), {}, "carries out with buddies=; give it a table"),
        (mc.GATE_015, {"buddies": np.zeros((3, 8, 1), int)}, "buddies is given, but no policy"),
        (mc.Policy(max_prefetches=2), {}, "carries out with predict=; give it previous_token or stale_gate"),
        (mc.GATE_015, {"predict": "stale_gate"}, "predict is given, but no policy sets max_prefetches"),
        (mc.Policy(max_prefetches=2), {"predict": "tea_leaves"}, "predict='tea_leaves' is unknown"),
        (mc.Policy(eviction="belady"), {}, "knows the future, which only the simulator can tell"),
        ("quality-first", {}, "is no Policy"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(policy, keywords, message):
    with pytest.raises(ValueError, match=message):
        mc.emulate(olmoe(), documents(), policy, 4, **keywords)
    with pytest.raises(ValueError, match="policies is empty"):
        emulate_policies(olmoe(), documents(), [], 4)


def ties(scores, gates=((0.7, 0.3),), outcome=((0, 0),), computed=((0, 1),), threshold=np.inf):
    return near_ties(
        np.array([scores], np.float16).astype(np.float32),
        np.array([[0, 1]], np.int16),
        np.array(gates, np.float32),
        np.array(outcome, np.uint8),
        np.array(computed, np.int16),
        Fallback.SUBSTITUTE,
        threshold,
    ).tolist()


def test_near_ties_by_hand():
    step = 2.0**-10  # of float16 between 1 and 2
    substituted = {"outcome": ((0, mc.Outcome.SUBSTITUTED),), "computed": ((0, 3),)}
    assert ties([3, 1.5, 1, 0, -1]) == [False]
    assert ties([3, 1.5, 1.5 - step, 0, -1]) == [True]  # the border of the top-k
    assert ties([3, 1.5, 1.5 - 2 * step, 0, -1]) == [False]
    assert ties([3, 1.5, 1, 0, -1], gates=((0.5001, 0.4999),)) == [True]  # ranks
    assert ties([3, 1.5, 1, 0, -1], threshold=0.3001) == [True]
    assert ties([3, 1.5, 1, 0, -1], threshold=0.31) == [False]
    assert ties([4, 3, 2.5, 1.5, 1], **substituted) == [False]
    assert ties([4, 3, 2.5, 1.5, 1.5 - step], **substituted) == [True]  # the next expert below the stand-in
    assert ties([4, 3, 1.5 + step, 1.5, 1], **substituted) == [False]  # above it: had it been resident, it would stand in
    both = {"outcome": ((3, 3),), "computed": ((2, 3),)}
    assert ties([4, 3, 1.5 + step, 1.5, 1], **both) == [True]  # two stand-ins
    assert ties([4, 3, 2, 1.5, 1], **both) == [False]
