"""Recording: the trace holds what the routers said, and the model does not notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense import selection
from tiny_models import FAMILIES, documents, olmoe, qwen3_next

import moecache as mc
from moecache import hf_internals
from moecache.families import UnknownRouter, model_shape


@pytest.mark.parametrize("name", FAMILIES)
def test_trace_holds_the_routers_own_words(name):
    model, texts = FAMILIES[name](), documents()
    trace = mc.record(model, texts)
    shape = model_shape(model)
    assert trace.shape == shape
    assert np.array_equal(trace.token_ids, np.concatenate(texts))
    assert np.flatnonzero(trace.document_start).tolist() == [0, 40, 41]
    first = torch.from_numpy(texts[0])[None]
    with torch.no_grad():
        logits = torch.stack(model(input_ids=first, output_router_logits=True).router_logits, dim=1)
    for index, layer in enumerate(hf_internals.moe_layers(model)):
        scores, choice, *_ = selection(layer.router, logits[:, index].double(), name)
        chosen = choice.topk(shape.top_k).indices
        weights, order = scores.gather(1, chosen).sort(-1, descending=True)
        assert np.array_equal(trace.topk_ids[:40, index], chosen.gather(1, order).numpy())
        np.testing.assert_allclose(trace.gate_weights[:40, index], (weights / weights.sum(-1, keepdim=True)).numpy(), atol=1e-6)
        recorded = trace.selection_scores[:40, index]
        if shape.scoring == "sigmoid":
            np.testing.assert_allclose(recorded, choice.numpy(), atol=1e-3)
        else:
            masked = np.where(np.isinf(recorded), -np.inf, logits[:, index].to(torch.float16).numpy())
            assert np.array_equal(recorded, masked)
            assert np.array_equal(np.isinf(recorded), np.isinf(choice.numpy()))


def test_recording_leaves_the_model_as_it_was():
    model, text = qwen3_next(), torch.from_numpy(documents()[0])[None]
    with torch.no_grad():
        before = model(input_ids=text).logits
        mc.record(model, documents())
        assert torch.equal(model(input_ids=text).logits, before)
    assert not any(layer.router._forward_hooks for layer in hf_internals.moe_layers(model))


def test_trace_survives_a_file(tmp_path):
    trace = mc.record(olmoe(), documents(), source={"text": "random", "revision": 3})
    trace.save(tmp_path / "trace.safetensors")
    loaded = mc.load_trace(tmp_path / "trace.safetensors")
    for field in ("token_ids", "document_start", "selection_scores", "topk_ids", "gate_weights"):
        assert np.array_equal(getattr(loaded, field), getattr(trace, field))
    assert (loaded.shape, loaded.source) == (trace.shape, trace.source)
    assert loaded.source["model_type"] == "olmoe"
    assert loaded.source["revision"] == 3


def test_one_document_needs_no_list():
    model, text = olmoe(), documents()[0]
    alone, listed = mc.record(model, text), mc.record(model, [text])
    assert np.array_equal(alone.selection_scores, listed.selection_scores)


def test_bfloat16_models_are_recorded():
    trace = mc.record(olmoe().to(torch.bfloat16), documents())
    np.testing.assert_allclose(trace.gate_weights.sum(-1), 1, atol=1e-6)
    assert (np.diff(trace.gate_weights, axis=-1) <= 0).all()


def test_unknown_family_and_training_mode_are_refused():
    model = olmoe()
    with pytest.raises(ValueError, match="training mode"):
        mc.record(model.train(), documents())
    model.config.model_type = "unheard_of"
    with pytest.raises(UnknownRouter):
        mc.record(model.eval(), documents())


def stale_gates(model, text, family):
    """[T, L, K] by hand: the router's input at each MoE layer, caught on the way in, times the next router's matrix."""
    layers, inputs = hf_internals.moe_layers(model), []
    handles = [layer.router.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone())) for layer in layers]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(text)[None])
    for handle in handles:
        handle.remove()
    top_k = model_shape(model).top_k
    expected = np.full((text.size, len(layers), top_k), -1)
    for layer in range(1, len(layers)):
        router = layers[layer].router
        logits = inputs[layer - 1].reshape(text.size, -1).double() @ router.weight.double().T
        logits = logits + (router.bias.double() if hasattr(router, "bias") else 0.0)
        scores, choice, *_ = selection(router, logits.detach(), family)
        chosen = choice.topk(top_k).indices
        expected[:, layer] = chosen.gather(1, scores.gather(1, chosen).argsort(-1, descending=True)).numpy()
    return expected


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stale_gate_asks_the_next_router_about_this_layers_input(name):
    model, texts = FAMILIES[name](), documents()
    trace = mc.record(model, texts, predict="stale_gate")
    assert trace.predicted_ids.dtype == np.int16
    assert (trace.predicted_ids[:, 0] == -1).all()
    assert np.array_equal(trace.predicted_ids[:40], stale_gates(model, texts[0], name))
    assert np.array_equal(trace.predicted_ids[41:], stale_gates(model, texts[2], name))
    foreseen = (trace.predicted_ids[:, 1:, :, None] == trace.topk_ids[:, 1:, None, :]).any(-1).mean()
    assert foreseen > 1.3 * trace.shape.top_k / trace.shape.num_experts  # better than chance: the residual stream changes slowly
    plain = mc.record(model, texts)
    assert plain.predicted_ids is None
    assert np.array_equal(plain.topk_ids, trace.topk_ids)
    assert np.array_equal(plain.selection_scores, trace.selection_scores)
    assert not any(layer.router._forward_pre_hooks or layer.router._forward_hooks for layer in hf_internals.moe_layers(model))


def test_predictions_survive_a_file_and_are_fetched(tmp_path):
    trace = mc.record(qwen3_next(), documents(), predict="stale_gate")
    trace.save(tmp_path / "trace.safetensors")
    loaded = mc.load_trace(tmp_path / "trace.safetensors")
    assert np.array_equal(loaded.predicted_ids, trace.predicted_ids)
    run = mc.simulate(loaded, mc.Policy(max_prefetches=4), 8)
    assert run.summary()["prefetched"] > 0
    asked = run.decisions.arrivals
    assert (asked[:, 2] > 0).all()  # nothing is expected of the first layer


def test_the_previous_token_predicts_within_a_document():
    trace = mc.record(olmoe(), documents(), predict="previous_token")
    assert np.array_equal(trace.predicted_ids[1:40], trace.topk_ids[:39])
    assert (trace.predicted_ids[[0, 40, 41]] == -1).all()
    assert np.array_equal(trace.predicted_ids[42:], trace.topk_ids[41:-1])


def test_an_unknown_prediction_is_refused():
    with pytest.raises(ValueError, match="predict='crystal_ball' is unknown; choose one of previous_token, stale_gate, or None"):
        mc.record(olmoe(), documents(), predict="crystal_ball")
