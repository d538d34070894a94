"""The committed models: the file its card was measured on, a loss that says it was trained, clear errors without it."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from moecache.reference import Document, MissingModelError, held_out, load_model, load_tokenizer
from moecache.reference.answers import greedy
from moecache.reference.evaluate import document_losses, domain_figures, routing_figures
from moecache.reference.loading import model_folder
from moecache.reference.packages import sha256_of
from moecache.reference.settings import MODELS_FOLDER

FIXED = (
    "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?\n3 + 4 = 7\nAnswer: 7\n\n"
    "Ann owns 9 pens. She loses 2 pens. How many pens does Ann have in the end?\n9 - 2 = 7\nAnswer: 7\n\n"
    ">>> sorted([3, 1, 2])\n[1, 2, 3]\n\n>>> x = ['cat', 'dog']\n>>> x[0]\n'cat'\n\n"
)


COMMITTED = sorted(path.parent.name for path in MODELS_FOLDER.glob("*/model.safetensors"))
FACTS = {  # experts, top-k, renormalised, hidden, expert width, layers
    "reference-512": (512, 10, True, 128, 16, 4),
    "reference-512-early": (512, 10, True, 128, 16, 4),
    "reference-64": (64, 8, False, 128, 64, 4),
}


@pytest.fixture(scope="module", params=COMMITTED)
def model(request):
    return load_model(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def document(tokenizer, text):
    return Document(np.array([0, *tokenizer.encode(text).ids], np.int32), "fixed", "fixed", "fixed")


@pytest.mark.parametrize("name", COMMITTED)
def test_the_file_is_the_one_the_card_describes(name):
    folder = model_folder(name)
    figures = json.loads((folder / "evaluation.json").read_text())
    digest = sha256_of(folder / "model.safetensors")
    assert figures["sha256"] == digest
    card = (folder / "README.md").read_text()
    assert card.startswith(f"# {name}\n")
    assert digest in card
    datasheet = (folder.parents[1] / "README.md").read_text()
    assert digest in datasheet
    assert sha256_of(folder / "tokenizer.json") in datasheet


def test_it_is_loaded_for_evaluation_with_the_routing_geometry_of_the_card(model):
    config, name = model.config, model.name_or_path.rpartition("/")[2]
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    facts = (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob, config.hidden_size, width, config.num_hidden_layers)
    assert facts == FACTS[name]
    if config.model_type == "qwen3_next":
        assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert config._experts_implementation == "grouped_mm"


def test_weights_are_exactly_what_bfloat16_holds(model):
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


def test_its_loss_on_fixed_tasks_is_that_of_a_trained_model(model, tokenizer):
    losses = document_losses(model, document(tokenizer, FIXED))
    untrained = math.log(4096)
    assert losses.mean() < untrained / 4.5


def test_other_experts_hurt(model, tokenizer):
    fixed = document(tokenizer, FIXED)
    before = document_losses(model, fixed).mean()
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    num_experts = model.config.num_experts
    handles = [r.register_forward_hook(lambda _m, _i, out: (out[0], out[1], (out[2] + num_experts // 2) % num_experts)) for r in routers]
    after = document_losses(model, fixed).mean()
    for handle in handles:
        handle.remove()
    assert after > before + 0.3
    assert document_losses(model, fixed).mean() == before


def test_tokens_stand_for_the_text_and_digits_are_single(tokenizer):
    text = "grün ≠ 東京 1234\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("1234").tokens == list("1234")
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.token_to_id("<|end|>") == 0


def test_figures_are_means_over_tokens(model, tokenizer):
    documents = [document(tokenizer, FIXED), document(tokenizer, FIXED[: len(FIXED) // 2])]
    losses = [document_losses(model, d) for d in documents]
    figures = domain_figures(model, tokenizer, documents)["all"]
    assert figures["loss_nats"] == pytest.approx(np.concatenate(losses).mean())
    size = sum(len(tokenizer.decode(d.tokens[1:].tolist())) for d in documents)
    assert figures["bits_per_byte"] == pytest.approx(np.concatenate(losses).sum() / math.log(2) / size)
    routing = routing_figures(model, documents[:1])
    assert sum(routing["gate_weight_by_rank"]) == pytest.approx(1, abs=1e-3)
    assert sorted(routing["gate_weight_by_rank"], reverse=True) == routing["gate_weight_by_rank"]
    assert len(routing["normalised_entropy"]) == 4


def test_greedy_decoding_with_a_cache_is_that_of_full_forwards(model, tokenizer):
    ids = tokenizer.encode(FIXED + ">>> sorted([").ids
    written = greedy(model, tokenizer, max_new_tokens=4)(ids)
    expected = [0, *ids]
    for _ in range(4):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    assert tokenizer.decode(expected[1 + len(ids) :]).startswith(written)


def test_a_missing_model_is_answered_with_path_and_command(tmp_path):
    with pytest.raises(MissingModelError, match=r"config\.json.*python -m moecache\.reference train"):
        load_model(directory=tmp_path)
    with pytest.raises(MissingModelError, match=r"tokenizer\.json.*python -m moecache\.reference tokenizer"):
        load_tokenizer("no-such-model")
    with pytest.raises(MissingModelError, match=r"no-such-model"):
        held_out.held_out_documents(1, domains=("interpreter",), name="no-such-model")


def test_the_package_loads_without_torch():
    command = "import sys, moecache.reference; raise SystemExit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
