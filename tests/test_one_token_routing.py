"""One token's routing and its weights after a decision are those of the general path, to the last bit."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, documents

import moecache as mc
from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.experts import replaced_rows, reroute
from moecache.families import family_of, routing_of, selection_scores
from moecache.hf_internals import RouterOutput
from moecache.kernel import Outcome
from moecache.one_token import OneToken
from moecache.one_token.compiled import note
from moecache.one_token.routing import OneRow
from moecache.policy import WeightRule
from moecache.trace import ModelShape

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


def new_row(family, rule, num_experts, top_k):
    """A row whose door decides by a policy that needs scores."""
    return OneRow(family, rule, OneToken(ExpertCache(ModelShape(1, num_experts, top_k), mc.FIRST_CHOICE, top_k)))


def pretend(door, outcome, computed):
    """Let the door believe that it decided this."""
    state, rules, _, log, heard = door._parts
    log.outcome[...], log.computed_ids[...] = outcome, computed
    note(state, rules, log, heard, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_the_general_path_gives(family, dtype):
    model = FAMILIES[family]().to(dtype)
    row_family, generator = family_of(model), np.random.default_rng(0)
    for output in router_outputs(model):
        num_experts, top_k = output.logits.shape[1], output.ids.shape[1]
        expected = routing_of(row_family, output)
        for rule in WeightRule:
            row = new_row(row_family, rule, num_experts, top_k)
            assert row.hear(output)
            found = row.routing(output)
            for name in ("selection_scores", "topk_ids", "gate_weights", "column"):
                assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
            assert row.door.scores.tobytes() == expected.selection_scores.tobytes()
            outcome, computed = random_decision(generator, expected, num_experts)
            if not replaced_rows(outcome[None]).size:
                continue
            pretend(row.door, outcome, computed)
            new = row.reroute(output)
            wanted = reroute(row_family, rule, output, expected, np.array([0]), computed[None])
            assert torch.equal(new.ids, wanted.ids)
            assert new.weights.dtype == wanted.weights.dtype
            assert new.weights.to(torch.float32).numpy().tobytes() == wanted.weights.to(torch.float32).numpy().tobytes()


@torch.no_grad()
@pytest.mark.parametrize("part", range(4))
def test_scores_are_rounded_as_torch_rounds_them(part):
    """Every float16, what lies half-way between two of them, and the float32 on either side of both."""
    exact = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)
    exact = exact[exact <= 65504]  # the positive ones
    halfway = (exact[:-1] + exact[1:]) / 2
    near = torch.cat([exact, halfway]).view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    values = near[near >= 0].view(torch.float32)
    values = torch.cat([values, -values])
    values = values[values.abs() <= 65504]
    family, num_experts = family_of(FAMILIES["olmoe"]()), 16384
    row = new_row(family, WeightRule.OWN, num_experts, 2)
    pieces = list(values.split(num_experts))
    pieces[-1] = torch.nn.functional.pad(pieces[-1], (0, num_experts - len(pieces[-1])))
    assert len(pieces) > 20
    for piece in pieces[part::4]:
        output = RouterOutput(piece[None], torch.tensor([[0.6, 0.4]]), torch.tensor([[0, 1]]))
        assert row.hear(output)
        assert row.door.scores.tobytes() == selection_scores(family, piece[None]).numpy().tobytes()


def test_equal_weights_are_in_the_order_of_ids():
    row = new_row(family_of(FAMILIES["olmoe"]()), WeightRule.OWN, 6, 4)
    output = RouterOutput(
        torch.tensor([[0.0, 1, 2, 3, -0.0, -1e-9]]), torch.tensor([[0.25, 0.0, 0.25, 0.25]]), torch.tensor([[4, 0, 1, 5]])
    )
    assert row.hear(output)
    expected = routing_of(row.family, output)
    assert row.door.ids.tolist() == expected.topk_ids[0].tolist() == [1, 4, 5, 0]
    assert row.door.column.tolist() == expected.column[0].tolist()
    assert row.routing(output).selection_scores.tobytes() == expected.selection_scores.tobytes() == row.door.scores.tobytes()


@pytest.mark.parametrize(
    "change",
    [{"logits": torch.tensor([[1.0, worst, 2.0]])} for worst in (float("nan"), float("inf"), -70000.0)]
    + [{"weights": torch.tensor([row])} for row in ([0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0])]
    + [{"ids": torch.tensor([row])} for row in ([0, 3], [-1, 0], [1, 1])],
    ids=str,
)
def test_what_is_unusual_is_left_to_the_general_path(change):
    row = new_row(family_of(FAMILIES["olmoe"]()), WeightRule.OWN, 3, 2)
    usual = {"logits": torch.tensor([[1.0, 0.0, 2.0]]), "weights": torch.ones(1, 2), "ids": torch.tensor([[0, 2]])}
    assert row.hear(RouterOutput(**usual))
    assert not row.hear(RouterOutput(**usual | change))
    assert row.hear(RouterOutput(**usual))
