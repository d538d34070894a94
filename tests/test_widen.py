"""Widened models compute what the small ones do: the same routes, and logits that differ by rounding alone."""

from __future__ import annotations

import copy

import pytest
import tiny_checkpoints
import tiny_models
import torch
from transformers import AutoModelForCausalLM

import moecache as mc
from moecache import hf_internals
from moecache.cli import main
from moecache.stores.checkpoint_store import CheckpointStore
from moecache.widen import widen

IDS = tiny_models.documents(lengths=(40,))[0]


def _tied_olmoe():
    return tiny_models.olmoe(tie_word_embeddings=True)


@pytest.fixture(scope="module", params=[tiny_models.qwen3_next, tiny_models.olmoe, _tied_olmoe], ids=["qwen3_next", "olmoe", "tied olmoe"])
def small(request, tmp_path_factory):
    model = request.param()
    return model, tiny_checkpoints.save(model, tmp_path_factory.mktemp("small"))


def _widen(folder, target, **given):
    return widen(folder, target, **{"hidden_size": 128, "expert_width": 48, "dtype": "float32", "progress": False, **given})


@torch.no_grad()
def _logits(model):
    return model(input_ids=torch.from_numpy(IDS)[None]).logits


@pytest.mark.parametrize("layout", ["fused", "hub"])
def test_a_widened_model_computes_the_same(small, layout, tmp_path):
    model, folder = small
    wide = AutoModelForCausalLM.from_pretrained(_widen(folder, tmp_path / "wide", layout=layout, shard_bytes=200_000)).eval()
    assert wide.config.hidden_size == 128
    assert torch.allclose(_logits(wide), _logits(model), atol=1e-4)
    mine, theirs = mc.record(wide, IDS), mc.record(model, IDS)
    assert (mine.topk_ids == theirs.topk_ids).all()
    assert mine.shape.expert_bytes == 3 * 128 * 48 * 4


def test_noise_in_the_padding_changes_no_logit(small, tmp_path):
    zeros = AutoModelForCausalLM.from_pretrained(_widen(small[1], tmp_path / "zeros")).eval()
    noise = AutoModelForCausalLM.from_pretrained(_widen(small[1], tmp_path / "noise", padding="noise")).eval()
    experts = [layer.experts.down_proj for model in (zeros, noise) for layer in hf_internals.moe_layers(model)[:1]]
    shares = [weight.count_nonzero() / weight.numel() for weight in experts]
    assert shares[0] < 0.1 < 0.5 < shares[1]
    assert torch.equal(_logits(noise), _logits(zeros))


def test_padding_without_scales_would_be_seen(small, tmp_path, monkeypatch):
    model, folder = small
    monkeypatch.setattr("moecache.widen._factor", lambda key, widening: 1.0)
    wide = AutoModelForCausalLM.from_pretrained(_widen(folder, tmp_path / "wide")).eval()
    assert not torch.allclose(_logits(wide), _logits(model), atol=1e-2)


def test_the_first_layers_alone_route_as_in_the_whole(small, tmp_path):
    model, folder = small
    wide = AutoModelForCausalLM.from_pretrained(_widen(folder, tmp_path / "wide", num_layers=2)).eval()
    assert wide.generate(torch.from_numpy(IDS)[None, :5], max_new_tokens=3, do_sample=False, use_cache=True).shape == (1, 8)
    assert (mc.record(wide, IDS).topk_ids == mc.record(model, IDS).topk_ids[:, :2]).all()


def test_experts_in_bfloat16_are_exact(small, tmp_path):
    model = copy.deepcopy(small[0])
    plain = CheckpointStore(tiny_checkpoints.save(model.to(torch.bfloat16), tmp_path / "small"))
    wide = CheckpointStore(_widen(tmp_path / "small", tmp_path / "wide", dtype="bfloat16", layout="hub"))
    narrow, padded = torch.zeros(plain.layout.block_bytes, dtype=torch.uint8), torch.zeros(wide.layout.block_bytes, dtype=torch.uint8)
    plain.read(1, 3, narrow.numpy())
    wide.read(1, 3, padded.numpy())
    down, wide_down = (store.layout.views(block)["down_proj"] for store, block in ((plain, narrow), (wide, padded)))
    assert torch.equal(wide_down[:32, :16], down * 2)
    assert torch.count_nonzero(wide_down) == torch.count_nonzero(down)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hidden_size": 64}, "32 times a power of four"),
        ({"hidden_size": 100}, "power of four"),
        ({"expert_width": 8}, "at least 16"),
        ({"layout": "square"}, "'square'"),
        ({"padding": "ones"}, "padding='ones'"),
        ({"num_layers": 9}, r"in 1\.\."),
    ],
)
def test_what_cannot_be_exact_is_refused(small, given, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        _widen(small[1], tmp_path / "wide", **given)
    assert not list(tmp_path.iterdir())


def test_other_families_and_full_folders_are_refused(small, tmp_path):
    with pytest.raises(ValueError, match="already"):
        _widen(small[1], tmp_path)
    other = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["mixtral"](), tmp_path / "mixtral")
    with pytest.raises(ValueError, match="'mixtral' cannot be widened"):
        _widen(other, tmp_path / "wide")


def test_the_command_refuses_what_the_function_refuses(tmp_path, capsys):
    assert main(["widen", str(tmp_path)]) == 1
    assert "already" in capsys.readouterr().err
