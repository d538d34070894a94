"""A GGUF file holds the checkpoint's weights bit for bit, and nothing half-written is left behind."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import tiny_checkpoints
import tiny_models
import torch
from tokenizers import Tokenizer, models
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moecache import export_gguf as exporting
from moecache import hf_internals
from moecache.cli import main
from moecache.export_gguf import export_gguf

NORMS = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")


SIZES = {**tiny_models.ATTENTION, "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}


def _olmoe(**fields):
    return tiny_models.lively(OlmoeForCausalLM, OlmoeConfig(**{**SIZES, "num_key_value_heads": 2, **fields}), seed=0)


def _qwen3_moe(**fields):
    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return tiny_models.lively(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**sizes, **fields}), seed=0)


@pytest.fixture(scope="module", params=[(_olmoe, "hub"), (_olmoe, "fused"), (_qwen3_moe, "hub")], ids=["olmoe", "olmoe fused", "qwen3_moe"])
def source(request, tmp_path_factory):
    build, layout = request.param
    model = build().to(torch.bfloat16)
    return model, tiny_checkpoints.save(model, tmp_path_factory.mktemp("source"), layout)


def _read(path):
    """Every tensor [.., outputs, inputs] by name: its type, and its bytes (float32 as numbers)."""
    return {
        tensor.name: (tensor.tensor_type.name, tensor.data, tuple(tensor.shape.tolist()[::-1])) for tensor in gguf.GGUFReader(path).tensors
    }


def _field(path, name):
    return gguf.GGUFReader(path).fields[name].contents()


def _bits_of(weight):
    return weight.detach().contiguous().view(torch.uint8).numpy().reshape(-1)


def _experts(model, layer):
    gate_up, down = (getattr(hf_internals.moe_layers(model)[layer].experts, name) for name in ("gate_up_proj", "down_proj"))
    return {"gate": gate_up.chunk(2, dim=1)[0], "up": gate_up.chunk(2, dim=1)[1], "down": down}


def test_experts_and_matrices_are_the_source_bit_for_bit(source, tmp_path):
    model, folder = source
    found = _read(export_gguf(folder, tmp_path / "model.gguf", progress=False))
    parameters, body = dict(model.named_parameters()), "model.layers"
    meant = {"token_embd.weight": parameters["model.embed_tokens.weight"], "output.weight": parameters["lm_head.weight"]}
    for layer in range(2):
        meant |= {f"blk.{layer}.ffn_{part}_exps.weight": weight for part, weight in _experts(model, layer).items()}
        for mine, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
            meant[f"blk.{layer}.attn_{mine}.weight"] = parameters[f"{body}.{layer}.self_attn.{theirs}.weight"]
    for name, weight in meant.items():
        kind, data, shape = found.pop(name)
        assert (kind, shape) == ("BF16", tuple(weight.shape)), name
        assert np.array_equal(data.reshape(-1).view(np.uint8), _bits_of(weight)), name
    assert {name.split(".")[-2] for name in found} == {*NORMS, "output_norm", "ffn_gate_inp"}


def test_norms_and_routers_are_float32(source, tmp_path):
    model, folder = source
    found = _read(export_gguf(folder, tmp_path / "model.gguf", progress=False))
    for layer, parts in enumerate(hf_internals.moe_layers(model)):
        kind, data, _ = found[f"blk.{layer}.ffn_gate_inp.weight"]
        assert kind == "F32"
        assert np.array_equal(data, parts.router.weight.detach().float().numpy())
        kind, data, _ = found[f"blk.{layer}.attn_q_norm.weight"]
        assert kind == "F32"
        assert np.array_equal(data, parts.decoder.self_attn.q_norm.weight.detach().float().numpy())


def test_the_configuration_is_told(source, tmp_path):
    model, folder = source
    path, config = export_gguf(folder, tmp_path / "model.gguf", progress=False), model.config
    arch = _field(path, "general.architecture")
    assert arch == {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}[config.model_type]
    told = {
        "embedding_length": config.hidden_size,
        "block_count": 2,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "feed_forward_length": config.intermediate_size,
    }
    if config.model_type == "qwen3_moe":
        told |= {"expert_feed_forward_length": config.moe_intermediate_size, "attention.key_length": config.head_dim}
    assert {name: _field(path, f"{arch}.{name}") for name in told} == told
    assert _field(path, f"{arch}.rope.freq_base") == pytest.approx(config.rope_parameters["rope_theta"])
    assert _field(path, f"{arch}.attention.layer_norm_rms_epsilon") == pytest.approx(config.rms_norm_eps)
    assert _field(path, "tokenizer.ggml.model") == "none"


@pytest.mark.parametrize(("bits", "code", "step"), [(8, "Q8_0", 1 / 127), (4, "Q4_0", 1 / 8)])
def test_few_bits_round_experts_and_nothing_else(bits, code, step, tmp_path):
    model = _olmoe().to(torch.bfloat16)
    folder = tiny_checkpoints.save(model, tmp_path / "source")
    found = _read(export_gguf(folder, tmp_path / "model.gguf", bits, progress=False))
    assert {kind for name, (kind, _, _) in found.items() if "_exps" in name} == {code}
    assert {kind for name, (kind, _, _) in found.items() if "_exps" not in name} == {"BF16", "F32"}
    for part, weight in _experts(model, 1).items():
        kind, data, _ = found[f"blk.1.ffn_{part}_exps.weight"]
        back = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        blocks = weight.detach().float().numpy().reshape(*weight.shape[:-1], -1, 32)
        error = np.abs(back.reshape(blocks.shape) - blocks)
        assert (error <= 1.01 * step * np.abs(blocks).max(axis=-1, keepdims=True)).all()
        assert error.max() > 0


def test_float32_stays_float32_and_tied_embeddings_are_written_twice(tmp_path):
    model = _olmoe(tie_word_embeddings=True)
    folder = tiny_checkpoints.save(model, tmp_path / "source")
    found = _read(export_gguf(folder, tmp_path / "model.gguf", progress=False))
    assert {kind for kind, _, _ in found.values()} == {"F32"}
    assert np.array_equal(found["output.weight"][1], model.model.embed_tokens.weight.detach().numpy())
    assert np.array_equal(found["token_embd.weight"][1], found["output.weight"][1])


def test_the_vocabulary_goes_along(tmp_path):
    folder = tiny_checkpoints.save(_olmoe(), tmp_path / "source")
    tokenizer = Tokenizer(models.BPE({"<|end|>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = export_gguf(folder, tmp_path / "model.gguf", progress=False)
    tokens, kinds = _field(path, "tokenizer.ggml.tokens"), _field(path, "tokenizer.ggml.token_type")
    assert tokens[:5] == ["<|end|>", "a", "b", "ab", "[unused 4]"]
    assert len(tokens) == len(kinds) == tiny_models.VOCABULARY
    assert kinds[:5] == [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * 3, gguf.TokenType.UNUSED]
    assert _field(path, "tokenizer.ggml.merges") == ["a b"]
    assert _field(path, "tokenizer.ggml.eos_token_id") == 0


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_nothing(fault, tmp_path, monkeypatch):
    folder, plain, seen = tiny_checkpoints.save(_olmoe(), tmp_path / "source"), exporting._stacking, []

    def interrupted(*given):
        def read():
            if len(seen) == 3:
                raise fault
            seen.append(given)
            assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".part"]
            return plain(*given)()

        return read

    monkeypatch.setattr(exporting, "_stacking", interrupted)
    with pytest.raises(fault):
        export_gguf(folder, tmp_path / "model.gguf", progress=False)
    assert len(seen) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (tiny_checkpoints.FAMILIES["mixtral"], "family 'mixtral' cannot be exported; understood are olmoe, qwen3_moe"),
        (lambda: _olmoe(clip_qkv=8.0), r"clip_qkv=8\.0 cannot be exported"),
        (lambda: _olmoe(norm_topk_prob=True), "norm_topk_prob=True cannot be exported"),
        (lambda: _olmoe(attention_bias=True), "attention_bias=True"),
        (lambda: _olmoe(num_key_value_heads=1), "num_key_value_heads=1"),
        (lambda: _qwen3_moe(mlp_only_layers=[1]), "1 of 2 layers have no experts"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(build, told, tmp_path):
    folder = tiny_checkpoints.save(build(), tmp_path / "source")
    with pytest.raises(ValueError, match=told):
        export_gguf(folder, tmp_path / "model.gguf", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_bits_widths_and_targets_are_checked(tmp_path, monkeypatch):
    folder = tiny_checkpoints.save(_olmoe(intermediate_size=16), tmp_path / "source")
    with pytest.raises(ValueError, match="bits=3 cannot be exported; choose one of 16, 8, 4"):
        export_gguf(folder, tmp_path / "model.gguf", bits=3)
    with pytest.raises(ValueError, match=r"Q4_0 rounds blocks of 32 weights; matrices of \(32, 16\)"):
        export_gguf(folder, tmp_path / "model.gguf", bits=4)
    with pytest.raises(ValueError, match="already"):
        export_gguf(folder, folder / "config.json")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install moecache\[stock\]"):
        export_gguf(folder, tmp_path / "model.gguf")


def test_the_command_exports(tmp_path, capsys):
    folder = tiny_checkpoints.save(_olmoe(), tmp_path / "source")
    assert main(["export-gguf", str(folder), str(tmp_path / "model.gguf"), "--bits", "8"]) == 0
    assert "model.gguf" in capsys.readouterr().out
    assert main(["export-gguf", str(folder), str(tmp_path / "model.gguf")]) == 1
    assert "already" in capsys.readouterr().err
