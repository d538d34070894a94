"""Loading without experts: nothing but them is missing, and with them put back the model is the same to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from transformers import AutoModelForCausalLM

from moecache import hf_internals
from moecache.runtime.loading import load_dense
from moecache.stores.blocks import StoreError
from moecache.stores.checkpoint_store import CheckpointStore
from moecache.widen import widen

PROMPT = torch.tensor([[5, 17, 3, 80, 41, 2, 9]])


@torch.no_grad()
def _outputs(model):
    logits = model(input_ids=PROMPT).logits
    return logits, model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("layout", tiny_checkpoints.LAYOUTS)
@pytest.mark.parametrize("family", tiny_checkpoints.FAMILIES)
def test_with_its_experts_put_back_a_model_is_the_same(family, layout, tmp_path):
    original = tiny_checkpoints.FAMILIES[family]()
    folder = tiny_checkpoints.save(original, tmp_path, layout, max_shard_size="20KB")
    model = load_dense(folder)
    assert all(not dict(layer.experts.named_parameters()) for layer in hf_internals.moe_layers(model))
    store = CheckpointStore(model.moecache_checkpoint)
    tiny_checkpoints.put_back(model, store)
    assert not [name for name, weight in (*model.named_parameters(), *model.named_buffers()) if weight.is_meta]
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    for weight in plain.parameters():  # products at odd addresses round otherwise
        weight.data = weight.data.clone()
    for mine, theirs in zip(_outputs(model), _outputs(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == bool(plain.config.tie_word_embeddings)
    assert not model.moecache_checkpoint.unknown_keys


def test_experts_are_never_read(tmp_path):
    model = tiny_checkpoints.FAMILIES["olmoe"]()
    folder = tiny_checkpoints.save(model, tmp_path, max_shard_size="20KB")
    dense = load_dense(folder)
    loaded = sum(weight.numel() for weight in dense.parameters())
    experts = sum(weight.numel() for layer in hf_internals.moe_layers(model) for weight in layer.experts.parameters())
    assert loaded == sum(weight.numel() for weight in model.parameters()) - experts


def test_dense_weights_do_not_lie_in_the_file(tmp_path):
    folder = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["gpt_oss"](), tmp_path)
    dense = load_dense(folder)
    before = [weight.clone() for weight in dense.parameters()]
    for shard in folder.glob("*.safetensors"):
        assert str(shard) not in Path("/proc/self/maps").read_text()
        os.truncate(shard, 0)
    assert all(torch.equal(weight, copy) for weight, copy in zip(dense.parameters(), before, strict=True))
    assert not any(weight.data_ptr() % 64 for weight in dense.parameters())


def test_a_model_without_experts_is_not_saved_as_a_whole_one(tmp_path):
    dense = load_dense(tiny_checkpoints.save(tiny_checkpoints.FAMILIES["olmoe"](), tmp_path / "a"))
    with pytest.raises(ValueError, match="quantized"):
        dense.save_pretrained(tmp_path / "b")


def test_other_types_of_dense_weights(tmp_path):
    folder = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["olmoe"](), tmp_path)
    assert load_dense(folder, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_a_quantized_checkpoint_is_refused_with_what_to_do(tmp_path):
    folder = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["olmoe"](), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ValueError, match=r"already quantized \(mxfp4\).*bfloat16"):
        load_dense(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"config\.json"):
        load_dense(tmp_path)


_PROGRAM = """
import re, sys
from moecache.runtime.loading import load_dense
from moecache.stores.checkpoint_store import CheckpointStore
def peak(): return 1000 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
model = load_dense(sys.argv[1])
store = CheckpointStore(model.moecache_checkpoint)
dense = sum(weight.numel() * weight.element_size() for weight in (*model.parameters(), *model.buffers()))
print(peak() - before, dense, store.num_layers * store.num_experts * store.layout.block_bytes)
"""


@pytest.mark.long
def test_the_peak_of_memory_is_that_of_the_dense_weights(tmp_path):
    small = tiny_checkpoints.save(tiny_checkpoints.FAMILIES["qwen3_next"](), tmp_path / "small")
    wide = widen(small, tmp_path / "wide", hidden_size=512, expert_width=512, layout="hub", dtype="float32", progress=False)
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(wide)], capture_output=True, text=True, check=True)
    grown, dense, experts = map(int, done.stdout.split())
    assert experts > 190e6
    assert grown < dense + 60e6
