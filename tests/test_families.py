"""Families: shapes, the rows' truth about the models' own routers, refusals."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from tiny_models import FAMILIES, documents, olmoe, qwen3_moe, qwen3_next
from transformers import LlamaConfig, LlamaForCausalLM

import moecache as mc
from moecache import hf_internals
from moecache.families import (
    Family,
    UnknownRouter,
    check_router,
    family_of,
    model_shape,
    routing_of,
    understood_families,
)
from moecache.hf_internals import RouterOutput

SOFTMAX = Family(("any",), "softmax", True)


def router_output(logits, top_k=2, is_normalised=True):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    weights, ids = torch.softmax(logits, -1).topk(top_k)
    return RouterOutput(logits, weights / weights.sum(-1, keepdim=True) if is_normalised else weights, ids)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_next", (4, 16, 4, True)),
        ("olmoe", (3, 8, 2, False)),
        ("qwen3_moe", (2, 12, 3, False)),  # the middle one of three layers is dense
        ("mixtral", (2, 8, 2, True)),
        ("qwen2_moe", (2, 12, 3, False)),
        ("granitemoe", (2, 8, 3, True)),
        ("gpt_oss", (2, 8, 3, True)),
        ("deepseek_v3", (2, 16, 3, True)),  # the first of three layers is dense
        ("deepseek_v2", (2, 16, 3, False)),
        ("glm4_moe", (2, 12, 3, True)),
    ],
)
def test_shape_counts_layers_with_experts_and_the_bytes_of_one(name, expected):
    shape = model_shape(FAMILIES[name]())
    assert (shape.num_layers, shape.num_experts, shape.top_k, shape.norm_topk_prob) == expected
    assert shape.scoring == ("sigmoid" if name in ("deepseek_v3", "glm4_moe") else "softmax")
    biases = 2 * 16 + 32 if name == "gpt_oss" else 0
    assert shape.expert_bytes == (3 * 32 * 16 + biases) * 4  # gate, up and down matrices in float32


def test_expert_bytes_follow_the_type_of_the_weights():
    assert model_shape(olmoe().to(torch.bfloat16)).expert_bytes == 3 * 32 * 16 * 2


def test_normalisation_is_read_from_the_configuration():
    assert model_shape(olmoe(norm_topk_prob=True)).norm_topk_prob
    assert model_shape(qwen3_moe(norm_topk_prob=True)).norm_topk_prob
    assert not model_shape(qwen3_next(norm_topk_prob=False)).norm_topk_prob


def test_unknown_family_is_refused_by_name_with_the_known_ones():
    model = olmoe()
    model.config.model_type = "unheard_of"
    with pytest.raises(UnknownRouter, match="'unheard_of'") as error:
        model_shape(model)
    assert all(name in str(error.value) for name in understood_families())
    assert set(FAMILIES) <= set(understood_families())


def test_dense_model_has_no_moe_layers():
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="declares no router"):
        hf_internals.moe_layers(LlamaForCausalLM(config))


def test_something_else_than_a_model_is_refused():
    with pytest.raises(ValueError, match="a transformers model is needed, got int"):
        model_shape(3)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_pair_each_router_with_the_experts_of_its_layer(name):
    model = FAMILIES[name]()
    layers = hf_internals.moe_layers(model)
    assert len({id(layer.experts) for layer in layers}) == len(layers)
    for layer in layers:
        inside = dict(layer.decoder.named_modules()).values()
        assert any(module is layer.router for module in inside)
        assert any(module is layer.experts for module in inside)
    positions = [int(layer.name.rsplit(".", 1)[1]) for layer in layers]
    assert positions == sorted(positions)


def test_router_that_does_not_follow_its_row_is_refused():
    model = olmoe()
    for layer in hf_internals.moe_layers(model):
        layer.router.norm_topk_prob = True  # the configuration still says False
    from moecache.record import record

    with pytest.raises(UnknownRouter, match=r"layers\.0 \(olmoe\) does not weigh its top-k as softmax scores as they are"):
        record(model, documents())


def tampered(model, **changes):
    for layer in hf_internals.moe_layers(model):
        for name, value in changes.items():
            assert hasattr(layer.router, name)
            setattr(layer.router, name, value)
    return model


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, r"as sigmoid scores divided by their sum, times 2\.5"),
        ("deepseek_v3", {"norm_topk_prob": False}, "divided by their sum"),
        ("deepseek_v3", {"topk_group": 4}, "deepseek_v3"),  # it chooses from all groups, where the row says two
        ("deepseek_v2", {"topk_method": "greedy"}, "deepseek_v2"),
        ("glm4_moe", {"routed_scaling_factor": 3.0}, r"times 1\.4"),
        ("qwen2_moe", {"norm_topk_prob": True}, "as softmax scores as they are"),
    ],
)
def test_router_that_departs_from_its_configuration_is_refused(name, changes, message):
    with pytest.raises(UnknownRouter, match=message):
        mc.record(tampered(FAMILIES[name](), **changes), documents())


def test_correction_that_is_missing_or_not_expected_is_refused():
    model = FAMILIES["deepseek_v3"]()
    with torch.no_grad():
        output = hf_internals.route(hf_internals.moe_layers(model)[0], torch.randn(4, 32))
    with pytest.raises(UnknownRouter, match="lacks a correction"):
        check_router(family_of(model), "a layer", replace(output, correction=None))
    output = replace(router_output([[3.0, 2.0, 1.0, 0.0]]), correction=torch.zeros(4))
    with pytest.raises(UnknownRouter, match="has a correction"):
        routing_of(SOFTMAX, output)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_experts_of_groups_that_were_not_chosen_have_the_lowest_score_and_never_stand_in(name):
    model, texts = FAMILIES[name](), documents()
    run = mc.emulate(model, texts, mc.SUBSTITUTE_EVERY_MISS, 6)
    trace = mc.record(model, texts)
    scores, ids = trace.selection_scores[:, 0], run.decisions.computed_ids[:, 0].astype(np.int64)
    assert np.array_equal(np.isneginf(scores).sum(axis=1), np.full(len(scores), 8))  # two of four groups of four
    assert np.isfinite(np.take_along_axis(scores, ids, axis=1)).all()
    assert run.summary()["forced"] > 0  # where no resident lies in the chosen groups
    assert run.summary()["substituted"] > 50


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_of_bfloat16_models_follow_their_rows(name):
    trace = mc.record(FAMILIES[name]().to(torch.bfloat16), documents(lengths=(12,)))
    np.testing.assert_allclose(trace.gate_weights.sum(-1), 1, atol=1e-6)


def test_router_that_leaves_out_the_best_expert_is_refused():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    output = router_output(logits)
    check_router(SOFTMAX, "a layer", output)
    ids = torch.tensor([[1, 2]])
    weights = torch.softmax(logits, -1).gather(1, ids)
    with pytest.raises(UnknownRouter):
        check_router(SOFTMAX, "a layer", RouterOutput(logits, weights / weights.sum(), ids))


def test_routing_is_in_rank_order_whatever_the_routers_order():
    logits = torch.tensor([[0.5, 2.0, 1.0, -1.0], [1.0, 1.0, 0.0, 2.0]])
    ids = torch.tensor([[2, 1], [3, 1]])
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    routing = routing_of(SOFTMAX, RouterOutput(logits, weights, ids))
    assert routing.topk_ids.tolist() == [[1, 2], [1, 3]]  # among equals the lower id first
    assert routing.gate_weights.tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert routing.column.tolist() == [[1, 0], [1, 0]]
    assert np.array_equal(np.take_along_axis(ids.numpy(), routing.column, 1), routing.topk_ids)


def test_gate_weights_sum_to_one_where_the_family_does_not_normalise():
    routing = routing_of(Family(("any",), "softmax", False), router_output([[2.0, 1.0, 0.0, -1.0]], is_normalised=False))
    assert routing.gate_weights.dtype == np.float32
    assert routing.gate_weights[0] == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])


def test_scores_are_float16_without_negative_zero():
    routing = routing_of(SOFTMAX, router_output([[-1e-9, -0.0, 1.00001, -3.0]]))
    assert routing.selection_scores.dtype == np.float16
    assert routing.selection_scores.view(np.uint16).tolist() == [[0, 0, 0x3C00, 0xC200]]


@pytest.mark.parametrize("bad", [1e6, float("nan"), float("inf")])
def test_logits_that_float16_cannot_hold_are_refused(bad):
    with pytest.raises(ValueError, match="finite in float16"):
        routing_of(SOFTMAX, router_output([[bad, 0.0, 1.0]]))


def test_router_with_another_output_is_refused():
    with pytest.raises(ValueError, match="must return \\(logits, weights, ids\\)"):
        hf_internals.router_output(torch.nn.Identity(), torch.zeros(2, 2))


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_cache_keyword_is_one_that_does_not_warn(name):
    model = FAMILIES[name]()
    keyword = hf_internals.cache_keyword(model)
    ids = torch.tensor([[1]])
    first = model(input_ids=ids, use_cache=True)
    model(input_ids=ids, use_cache=True, **{keyword: hf_internals.decoding_cache(first)})


def test_another_version_of_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    with pytest.raises(ImportError, match=r"5\.24\.\*.*5\.99\.0 is installed"):
        importlib.reload(hf_internals.layers)


def test_experts_implementation_is_put_back():
    model = olmoe()
    before = model.get_experts_implementation()
    with hf_internals.experts_implementation(model, "eager"):
        assert model.get_experts_implementation() == {"": "eager"}
    assert model.get_experts_implementation() == before


def test_tiny_models_are_reproducible_and_differ_by_seed():
    first, again, other = (tiny_models.olmoe(seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert family_of(olmoe()).norm_topk_prob is False
