"""Plans from configurations alone, checked against public shapes and against models that are really built."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints
import torch
import transformers

import moecache as mc
from moecache import hf_checkpoints, hf_internals
from moecache.cache import CapacityError
from moecache.cli import main
from moecache.runtime.loading import load_dense
from moecache.runtime.plan import plan, read_geometry

PUBLIC = {  # the configurations of these models, as far as they decide bytes
    "Qwen3-30B-A3B": lambda: transformers.Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, dtype=torch.bfloat16,
    ),
    "OLMoE-1B-7B": lambda: transformers.OlmoeConfig(
        hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_experts=64, num_experts_per_tok=8, dtype=torch.bfloat16
    ),
    "Mixtral-8x7B": lambda: transformers.MixtralConfig(dtype=torch.bfloat16),
    "gpt-oss-20b": lambda: transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32, dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_geometry_is_that_of_the_public_model(name, test_data):
    public = next(row for row in json.loads((test_data / "moe_configs.json").read_text()) if row["model"] == name)
    geometry = read_geometry(PUBLIC[name]())
    shape = geometry.shape
    assert (shape.num_layers, shape.num_experts, shape.top_k) == (public["moe_layers"], public["experts"], public["top_k"])
    assert sum(spec.num_bytes for spec in geometry.layout.tensors if len(spec.shape) == 2) == 2 * public["params_per_expert"]


@pytest.mark.parametrize("family", tiny_checkpoints.FAMILIES)
def test_a_plan_counts_what_a_model_has(family, tmp_path):
    model = tiny_checkpoints.FAMILIES[family]()
    geometry = read_geometry(model.config)
    experts = sum(weight.numel() * 4 for layer in hf_internals.moe_layers(model) for weight in layer.experts.parameters())
    assert geometry.shape.num_layers * geometry.shape.num_experts * geometry.shape.expert_bytes == experts
    assert (
        geometry.dense_bytes == sum(weight.numel() * weight.element_size() for weight in (*model.parameters(), *model.buffers())) - experts
    )
    with torch.no_grad():
        cache = hf_internals.decoding_cache(model(input_ids=torch.zeros(1, 40, dtype=torch.long), use_cache=True))
    held = sum(tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in hf_checkpoints._tensors(vars(layer)))
    assert hf_checkpoints.cache_bytes(geometry.skeleton, 40) == held


def test_a_window_bounds_the_decoding_cache():
    skeleton = read_geometry(tiny_checkpoints.FAMILIES["gpt_oss"]().config).skeleton
    short, long, longer = (hf_checkpoints.cache_bytes(skeleton, n) for n in (128, 256, 384))
    assert long - short == longer - long == 128 * 2 * 16 * 4  # one of two layers has no window


@pytest.fixture
def folder(tmp_path):
    config = tiny_checkpoints.FAMILIES["olmoe"]().config
    config.save_pretrained(tmp_path)
    return tmp_path


def _plan(folder, memory, **given):
    return plan(folder, memory, **{"hardware": "nvme", "reserve": 0, "context_tokens": 64, "policy": mc.FETCH_EVERY_MISS, **given})


def test_what_is_planned_fits_and_one_slot_more_does_not(folder):
    small = _plan(folder, "200 KB")
    used = small.dense_bytes + small.cache_bytes + small.num_copy_blocks * small.block_bytes
    a_slot = small.block_bytes * small.shape.num_layers
    assert 2 <= small.num_slots < 8
    assert used + small.num_slots * a_slot <= small.memory_bytes < used + (small.num_slots + 1) * a_slot
    assert _plan(folder, "1 GiB").num_slots == 8


def test_a_memory_too_small_is_refused_with_the_smallest_that_works(folder):
    with pytest.raises(CapacityError, match="is too small") as refused:
        _plan(folder, 1000)
    smallest = int(str(refused.value).split("works is ")[1].split(" bytes")[0])
    assert _plan(folder, smallest).num_slots == 2
    with pytest.raises(CapacityError):
        _plan(folder, smallest - 1)


def test_a_plan_s_dense_bytes_are_those_that_are_loaded(tmp_path):
    folder = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["olmoe"](), tmp_path)
    loaded = load_dense(folder)
    assert read_geometry(folder).dense_bytes == sum(w.numel() * w.element_size() for w in (*loaded.parameters(), *loaded.buffers()))


def test_more_slots_and_faster_links_are_estimated_faster(folder):
    few, many, slow = _plan(folder, "200 KB"), _plan(folder, "1 GiB"), _plan(folder, "200 KB", hardware="sata")
    assert many.seconds_per_token < few.seconds_per_token < slow.seconds_per_token
    assert many.seconds_per_token == pytest.approx(many.all_hits_seconds)
    assert few.seconds_kind == "estimated"
    assert few.hit_rate < many.hit_rate == 1.0


def test_a_gpu_has_its_experts_in_main_memory_or_behind_a_tier(folder):
    whole = _plan(folder, "200 KB", device="cuda", hardware=None)
    assert (whole.host_bytes, whole.hardware.name) == (whole.packed_bytes[16], "pcie4")
    tiered = _plan(folder, "200 KB", device="cuda", hardware=None, host_memory="60 KB")
    assert tiered.host_bytes == 60_000
    assert tiered.seconds_per_token > whole.seconds_per_token


@pytest.mark.parametrize(
    ("given", "told"), [({"device": "tpu"}, "'tpu'"), ({"context_tokens": 0}, "at least 1"), ({"memory": "many"}, "many")]
)
def test_what_makes_no_sense_is_refused(folder, given, told):
    with pytest.raises(ValueError, match=told):
        _plan(folder, **{"memory": "1 GiB", **given})


def test_the_command_plans(folder, capsys):
    assert main(["plan", str(folder), "--memory", "1 GiB", "--hardware", "nvme", "--policy", "speed-first"]) == 0
    told = capsys.readouterr().out
    assert "3 MoE layers of 8 experts, top-2" in told
    assert "ESTIMATED" in told
    assert main(["plan", str(folder), "--memory", "1 KB", "--hardware", "nvme"]) == 1
    assert "too small" in capsys.readouterr().err
    assert main(["plan", str(folder / "nowhere"), "--memory", "1 GiB"]) == 1
