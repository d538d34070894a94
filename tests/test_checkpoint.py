"""Checkpoints as downloaded: whatever is missing, cut or different is named, and what is read is the expert."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file

from moecache import hf_internals
from moecache.stores import aligned_read
from moecache.stores.aligned_read import AlignedFile
from moecache.stores.blocks import StoreError, aligned_bytes
from moecache.stores.checkpoint import read_checkpoint
from moecache.stores.checkpoint_store import CheckpointStore
from moecache.stores.shard_writer import ShardWriter
from moecache.stores.store import open_store


@pytest.fixture(scope="module")
def model():
    return tiny_checkpoints.FAMILIES["olmoe"]()


@pytest.fixture
def folder(model, tmp_path):
    return tiny_checkpoints.save(model, tmp_path, max_shard_size="20KB")


def _is_the_expert(model, store, layer, expert):
    out = aligned_bytes(store.layout.block_bytes)
    store.read(layer, expert, out)
    experts = hf_internals.moe_layers(model)[layer].experts
    return all(torch.equal(view, getattr(experts, name)[expert]) for name, view in store.layout.views(torch.from_numpy(out)).items())


@pytest.mark.parametrize("is_direct", [None, False])
def test_an_expert_spread_over_shards_is_read_whole(model, folder, is_direct):
    store = CheckpointStore(folder, is_direct)
    assert len({tensor.path for tensor in store.checkpoint.tensors.values()}) > 3
    assert all(_is_the_expert(model, store, layer, expert) for layer in range(3) for expert in range(8))


def test_parts_of_a_block_make_the_whole(folder):
    store = CheckpointStore(folder)
    whole, parts = (aligned_bytes(store.layout.block_bytes) for _ in range(2))
    whole[:], parts[:] = 0, 0
    store.read(1, 5, whole)
    for first in range(0, store.layout.block_bytes, 777):
        store.read(1, 5, parts, first, min(777, store.layout.block_bytes - first))
    assert np.array_equal(whole, parts)


def test_keys_without_a_place_are_counted_and_not_read(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    save_file({**tensors, "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(3)}, shard)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.unknown_keys == ("mtp.layers.0.mlp.experts.0.up_proj.weight",)
    CheckpointStore(checkpoint)


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_a_shard_of_another_length_is_refused(folder, change):
    shard = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size + change)
    with pytest.raises(StoreError, match=rf"{shard.name}: expected \d+ bytes, got {shard.stat().st_size}"):
        open_store(folder)


def test_a_shard_cut_or_changed_while_open_is_an_error(folder):
    store = CheckpointStore(folder)
    out = aligned_bytes(store.layout.block_bytes)
    shard = store.checkpoint.tensors["model.layers.0.mlp.experts.0.up_proj.weight"].path
    before = shard.stat()
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(StoreError, match=f"{shard.name} changed while it was open"):
        store.read(0, 0, out)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    store.read(0, 0, out)


@pytest.mark.parametrize("is_direct", [None, False])
def test_a_read_that_ends_early_is_an_error(tmp_path, is_direct):
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    file = AlignedFile(path, is_direct)
    with pytest.raises(StoreError, match=r"expected \d+ bytes at \d+, got \d+"):
        file.read(8192, aligned_bytes(4096))


def test_reads_in_small_steps_are_put_together(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 256, 50_000).astype(np.uint8)
    path = tmp_path / "file"
    path.write_bytes(content.tobytes())
    plain = os.preadv
    monkeypatch.setattr(aligned_read.os, "preadv", lambda fd, buffers, offset: plain(fd, [buffers[0][:5000]], offset))
    for is_direct in (None, False):
        file = AlignedFile(path, False)
        file.is_direct = is_direct is None  # 5000 bytes are no multiple of 4096: the reader has to go back to one
        out = np.zeros(40_000, np.uint8)
        file.read(123, out)
        assert np.array_equal(out, content[123:40_123])


def test_an_error_of_the_disk_names_file_and_place(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    file = AlignedFile(path)

    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(aligned_read.os, "preadv", broken)
    with pytest.raises(StoreError, match=r"file: reading 4096 bytes at 4096 failed.*Input/output"):
        file.read(4096, aligned_bytes(4096))


def test_reading_after_closing_is_an_error(folder):
    store = CheckpointStore(folder)
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.read(0, 0, aligned_bytes(store.layout.block_bytes))


def test_shards_that_are_missing_are_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(StoreError, match=f"lacks 1 of .* shards: {shard.name}"):
        read_checkpoint(folder)


def test_pickled_weights_are_refused(folder):
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"found: pytorch_model\.bin.*only safetensors"):
        read_checkpoint(folder)


def test_shards_outside_the_folder_are_refused(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(StoreError, match="outside its folder"):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 100, (20).to_bytes(8, "little") + b"no json" * 10])
def test_what_is_no_safetensors_file_is_refused(folder, content):
    sorted(folder.glob("*.safetensors"))[0].write_bytes(content)
    with pytest.raises(StoreError, match="no safetensors file"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [(torch.ones(3, 4), "does not fit"), (torch.ones(16, 32, dtype=torch.bfloat16), "does not fit"), (None, "not whole")],
)
def test_an_expert_of_another_shape_or_a_missing_one_is_refused(model, tmp_path, tensor, told):
    folder = tiny_checkpoints.save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[key]
    save_file(tensors if tensor is None else {**tensors, key: tensor}, folder / "model.safetensors")
    with pytest.raises(StoreError, match=told):
        open_store(folder)


def test_a_shard_writer_writes_what_others_read(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    with ShardWriter(tmp_path / "x.safetensors", {"a": ("float32", (2, 3)), "b": ("bfloat16", (5,))}) as writer:
        for key, tensor in tensors.items():
            content = tensor.contiguous().view(torch.uint8).flatten().numpy()
            writer.write(key, content[:4])
            writer.write(key, content[4:])
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_a_shard_that_is_not_whole_does_not_appear(tmp_path):
    with (
        pytest.raises(ValueError, match=r"1 tensors were announced and not written: \['a'\]"),
        ShardWriter(tmp_path / "x.safetensors", {"a": ("float32", (2,))}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"'a' is next with 8 bytes left"),
        ShardWriter(tmp_path / "x.safetensors", {"a": ("float32", (2,))}) as writer,
    ):
        writer.write("b", np.zeros(8, np.uint8))
    assert not list(tmp_path.iterdir())
