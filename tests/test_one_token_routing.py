"""One token's routing and its weights after a decision are those of the general path, to the last bit."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, documents

from moecache import hf_internals
from moecache.experts import replaced_rows, reroute
from moecache.families import family_of, routing_of
from moecache.hf_internals import RouterOutput
from moecache.kernel import Outcome
from moecache.one_token_routing import OneRow
from moecache.policy import WeightRule

TEXT = documents(lengths=(30,))[0]
KINDS = [int(kind) for kind in (Outcome.HIT, Outcome.FETCHED, Outcome.SUBSTITUTED, Outcome.DROPPED, Outcome.LOW_PRECISION)]


@torch.no_grad()
def router_outputs(model):
    """Every layer's router output of a text, one token each."""
    heard, generator = [], torch.Generator().manual_seed(0)
    with hf_internals.watched(hf_internals.moe_layers(model), lambda layer, output: heard.append(output)):
        model(input_ids=torch.from_numpy(TEXT)[None])
    for output in heard:
        for token in range(len(output.ids)):
            row = slice(token, token + 1)
            order = torch.randperm(output.ids.shape[1], generator=generator) if token % 2 else slice(None)  # some routers do not sort
            yield RouterOutput(output.logits[row], output.weights[row][:, order], output.ids[row][:, order], output.correction)


def random_decision(generator, routing, num_experts):
    """Outcomes and who computes each call, -1 = nobody; sometimes every call is dropped."""
    ids, top_k = routing.topk_ids[0], routing.topk_ids.shape[1]
    outcome = generator.choice(KINDS, top_k) if generator.random() > 0.1 else np.full(top_k, int(Outcome.DROPPED))
    others = generator.permutation(np.setdiff1d(np.arange(num_experts), ids))
    computed = np.where(outcome == int(Outcome.SUBSTITUTED), np.resize(others, top_k), ids)
    return outcome.astype(np.uint8), np.where(outcome == int(Outcome.DROPPED), -1, computed).astype(np.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_the_general_path_gives(family, dtype):
    model = FAMILIES[family]().to(dtype)
    row_family, generator = family_of(model), np.random.default_rng(0)
    for output in router_outputs(model):
        scores = np.zeros(output.logits.shape[1], np.float16)
        expected = routing_of(row_family, output)
        for rule in WeightRule:
            row = OneRow(row_family, rule, scores)
            row.hear(output, with_scores=True)
            found = row.routing()
            for name in ("selection_scores", "topk_ids", "gate_weights", "column"):
                assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
            outcome, computed = random_decision(generator, expected, scores.size)
            if not replaced_rows(outcome[None]).size:
                continue
            new = row.reroute(output, outcome.tolist(), computed.tolist())
            wanted = reroute(row_family, rule, output, expected, np.array([0]), computed[None])
            assert torch.equal(new.ids, wanted.ids)
            assert new.weights.dtype == wanted.weights.dtype
            assert new.weights.to(torch.float32).numpy().tobytes() == wanted.weights.to(torch.float32).numpy().tobytes()


def test_equal_weights_are_in_the_order_of_ids():
    row = OneRow(family_of(FAMILIES["olmoe"]()), WeightRule.OWN, np.zeros(6, np.float16))
    weights = torch.tensor([[0.25, 0.0, 0.25, 0.25]])
    for given, ids in ((weights, [1, 4, 5, 0]), (torch.zeros(1, 4), [0, 1, 4, 5])):
        output = RouterOutput(torch.tensor([[0.0, 1, 2, 3, -0.0, -1e-9]]), given, torch.tensor([[4, 0, 1, 5]]))
        row.hear(output, with_scores=True)
        expected = routing_of(row.family, output)
        assert row.ids == expected.topk_ids[0].tolist() == ids
        assert row.column == expected.column[0].tolist()
        assert row.routing().selection_scores.tobytes() == expected.selection_scores.tobytes()


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -70000.0])
def test_logits_that_decisions_cannot_be_made_on_are_refused(worst):
    row = OneRow(family_of(FAMILIES["olmoe"]()), WeightRule.OWN, np.zeros(3, np.float16))
    with pytest.raises(ValueError, match="finite in float16"):
        row.hear(RouterOutput(torch.tensor([[1.0, worst, 2.0]]), torch.ones(1, 2), torch.tensor([[0, 2]])), with_scores=False)
