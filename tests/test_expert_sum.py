"""One sum of experts: the library's own, to the last bit for one token, in whichever order experts are handed out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, documents

from moecache import hf_internals
from moecache.expert_sum import IMPLEMENTATION, ClosedError, ClosedSource, OwnParameters, expert_sum, set_source
from moecache.score import document_losses

every_family = pytest.mark.parametrize("family", FAMILIES)
TEXT = documents(lengths=(10,))[0]


def logits_of(model, implementation, stepped, dtype=torch.float32):
    with hf_internals.experts_implementation(model.to(dtype), implementation):
        return document_losses(model, TEXT, keep_logits=True, stepped=stepped)[1]


@every_family
def test_one_token_is_the_librarys_own_sum_bit_for_bit(family):
    model = FAMILIES[family]()
    found, expected = (logits_of(model, name, stepped=True) for name in (IMPLEMENTATION, "grouped_mm"))
    if family == "gpt_oss":  # its transposed product rounds differently
        np.testing.assert_allclose(found, expected, atol=1e-5)
    else:
        assert np.array_equal(found, expected)


@every_family
def test_many_tokens_are_the_librarys_own_sum(family):
    model = FAMILIES[family]()
    found, expected = (logits_of(model, name, stepped=False) for name in (IMPLEMENTATION, "grouped_mm"))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_bfloat16_keeps_the_librarys_promotions(family):
    """Weights of mixtral are float32 beside bfloat16 products; a scalar weight would round them."""
    model = FAMILIES[family]()
    found, expected = (logits_of(model, name, stepped=True, dtype=torch.bfloat16) for name in (IMPLEMENTATION, "grouped_mm"))
    assert np.array_equal(found, expected)


class Backwards(OwnParameters):
    """Hands out the calls last first, in two chunks."""

    def calls(self, ids):
        return reversed(list(super().calls(ids)))

    def chunks(self, num_tokens):
        return [slice(0, 3), slice(3, num_tokens)]


def layer_and_call(num_tokens):
    experts = hf_internals.moe_layers(FAMILIES["qwen3_moe"]())[0].experts
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(num_tokens)])
    return experts, (torch.randn(num_tokens, 32, generator=generator), ids, torch.rand(num_tokens, 3, generator=generator))


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_order_and_chunks_do_not_change_a_bit(num_tokens):
    experts, call = layer_and_call(num_tokens)
    expected = expert_sum(experts, *call)
    set_source(experts, Backwards(experts))
    found = expert_sum(experts, *call)
    set_source(experts, None)
    if num_tokens == 1:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_call_that_nobody_computes_counts_nothing():
    experts, (hidden, ids, weights) = layer_and_call(1)

    class Dropping(OwnParameters):
        def calls(self, ids):
            return ((call, None if call == 1 else tensors) for call, tensors in super().calls(ids))

    set_source(experts, Dropping(experts))
    found = expert_sum(experts, hidden, ids, weights)
    set_source(experts, None)
    torch.testing.assert_close(found, expert_sum(experts, hidden, ids, weights * torch.tensor([[1.0, 0.0, 1.0]])))
    assert not torch.equal(found, expert_sum(experts, hidden, ids, weights))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_closed_source_says_so(num_tokens):
    experts, call = layer_and_call(num_tokens)
    set_source(experts, ClosedSource())
    with pytest.raises(ClosedError, match="is closed; open the model again"):
        expert_sum(experts, *call)
    set_source(experts, None)
