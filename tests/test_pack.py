"""Packing: the packed folder is the same model, and no fault leaves anything that looks like one."""

from __future__ import annotations

import errno
import fcntl
import os

import numpy as np
import pytest
import tiny_checkpoints
import torch

from moecache import hf_internals
from moecache.cli import main
from moecache.low_bit import round_trip
from moecache.runtime.loading import load_dense
from moecache.stores import pack as packing
from moecache.stores.blocks import StoreError, aligned_bytes
from moecache.stores.checkpoint_store import CheckpointStore
from moecache.stores.pack import pack
from moecache.stores.packed_file import FILE_NAME, UNIT_BYTES, PackedStore, checksums, read_packed_header
from moecache.stores.store import DequantisedStore, HostTier, RamStore, open_store


@pytest.fixture(scope="module")
def model():
    return tiny_checkpoints.FAMILIES["qwen3_moe"]()


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    return tiny_checkpoints.save(model, tmp_path_factory.mktemp("source"), max_shard_size="30KB")


@pytest.fixture
def packed(source, tmp_path):
    return pack(source, tmp_path / "packed", progress=False)


def _blocks(store):
    copy = RamStore.from_store(store, progress=False)
    return [
        [store.layout.views(torch.from_numpy(copy.block(layer, e))) for e in range(store.num_experts)] for layer in range(store.num_layers)
    ]


def _holds(store, model):
    blocks = _blocks(store)
    layers = hf_internals.moe_layers(model)
    return all(
        torch.equal(view, getattr(layers[layer].experts, name)[expert])
        for layer, row in enumerate(blocks)
        for expert, views in enumerate(row)
        for name, view in views.items()
    )


def test_a_packed_folder_is_the_same_model(model, packed):
    assert _holds(PackedStore(packed), model)
    dense = load_dense(packed)
    tiny_checkpoints.put_back(dense, open_store(packed))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(dense.parameters(), model.parameters(), strict=True))
    assert sorted(path.name for path in packed.iterdir()) == ["config.json", FILE_NAME, "generation_config.json", "model.safetensors"]


def test_every_block_is_aligned(packed):
    store = PackedStore(packed)
    assert {store.header.offset(layer, e) % 4096 for layer in range(2) for e in range(12)} == {0}


def test_packing_again_does_nothing_and_other_targets_are_refused(source, packed):
    before = (packed / FILE_NAME).stat().st_mtime_ns
    assert pack(source, packed, progress=False) == packed
    assert (packed / FILE_NAME).stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="not packed from these files"):
        pack(source, packed, bits=8, progress=False)


def test_an_interrupted_packing_goes_on(source, model, tmp_path, monkeypatch):
    target, plain, written = tmp_path / "packed", packing._write_block, []

    def interrupted(store, header, descriptor, row):
        if len(written) == 7:
            raise KeyboardInterrupt
        written.append(row)
        return plain(store, header, descriptor, row)

    monkeypatch.setattr(packing, "_write_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(source, target, progress=False)
    assert not target.exists()
    with pytest.raises(StoreError, match="lacks 17 of 24 experts"):
        PackedStore(tmp_path / "packed.part")
    monkeypatch.setattr(packing, "_write_block", lambda *given: (written.append(given[3]), plain(*given))[1])
    assert _holds(PackedStore(pack(source, target, progress=False)), model)
    assert written == list(range(24))
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_a_part_of_another_source_is_not_gone_on_with(source, model, tmp_path, monkeypatch):
    plain = packing._header
    monkeypatch.setattr(packing, "_copy_dense", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pack(source, tmp_path / "packed", bits=8, progress=False)
    monkeypatch.undo()
    assert packing._header is plain
    assert _holds(PackedStore(pack(source, tmp_path / "packed", progress=False)), model)


def test_a_full_disk_is_found_at_the_start(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packing.os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"\d+ bytes are needed, \d+ are free"):
        pack(source, tmp_path / "packed", progress=False)
    assert not list(tmp_path.rglob(FILE_NAME))
    assert not (tmp_path / "packed").exists()


def test_a_write_that_fails_leaves_nothing_that_looks_whole(source, model, tmp_path, monkeypatch):
    plain, written = os.pwrite, []

    def failing(descriptor, data, offset):
        written.append(offset)
        if len(written) == 6:
            raise OSError(errno.EIO, "Input/output error")
        return plain(descriptor, data, offset)

    monkeypatch.setattr(packing.os, "pwrite", failing)
    with pytest.raises(OSError, match="Input/output"):
        pack(source, tmp_path / "packed", progress=False)
    monkeypatch.undo()
    assert not (tmp_path / "packed").exists()
    assert _holds(PackedStore(pack(source, tmp_path / "packed", progress=False)), model)


def test_a_second_process_is_kept_out(source, tmp_path):
    (tmp_path / "packed.part").mkdir()
    with (tmp_path / "packed.part" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is packing"):
            pack(source, tmp_path / "packed", progress=False)


def test_a_wrong_byte_is_found_once_or_always_or_never(packed):
    header, _ = read_packed_header(packed / FILE_NAME)
    store = PackedStore(packed, check="first")
    out = aligned_bytes(header.layout.block_bytes)
    store.read(1, 4, out)
    _flip(packed / FILE_NAME, header.offset(1, 4) + 5)
    for check in ("first", "always"):
        with pytest.raises(StoreError, match=r"layer 1, expert 4: the \d+ bytes at \d+ have checksum [0-9a-f]{8}, expected [0-9a-f]{8}"):
            PackedStore(packed, check=check).read(1, 4, out)
    PackedStore(packed, check="never").read(1, 4, out)
    PackedStore(packed).read(1, 3, out)
    with pytest.raises(StoreError, match="changed while it was open"):
        store.read(1, 4, out)


def _flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(0, 0))


def test_checksums_are_of_each_unit():
    block = np.random.default_rng(0).integers(0, 256, UNIT_BYTES + 4096).astype(np.uint8)
    first, second = checksums(block)
    block[UNIT_BYTES + 1] ^= 1
    assert checksums(block)[0] == first
    assert checksums(block)[1] != second


def test_a_cut_or_damaged_file_is_refused(packed):
    path = packed / FILE_NAME
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(StoreError, match=r"expected \d+ bytes, got \d+; it is truncated"):
        open_store(packed)
    _flip(path, 40)
    with pytest.raises(StoreError, match="header is damaged"):
        open_store(packed)


def test_two_stores_on_one_file(packed, model):
    first, second = PackedStore(packed), PackedStore(packed)
    first.close()
    assert _holds(second, model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_are_the_rounded_weights(family, bits, tmp_path):
    model = tiny_checkpoints.FAMILIES[family]()
    source = tiny_checkpoints.save(model, tmp_path / "source")
    packed = pack(source, tmp_path / "packed", bits=bits, progress=False)
    store = open_store(packed, host_bytes=10**6)
    assert isinstance(store, DequantisedStore)
    assert isinstance(store.store, HostTier)
    for layer, row in enumerate(_blocks(store)):
        experts = hf_internals.moe_layers(model)[layer].experts
        for name, weight in experts.named_parameters():
            meant = round_trip(weight, bits, hf_internals.is_transposed(experts)) if weight.ndim == 3 else weight
            assert torch.equal(torch.stack([views[name] for views in row]), meant)


def test_other_numbers_of_bits_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="bits=3 cannot be packed; choose 16, 8 or 4"):
        pack(source, tmp_path / "packed", bits=3, progress=False)


def test_the_command_packs(source, tmp_path, capsys):
    assert main(["pack", str(source), str(tmp_path / "packed"), "--bits", "8"]) == 0
    assert "experts" in capsys.readouterr().out
    assert PackedStore(tmp_path / "packed").header.bits == 8
    assert main(["pack", str(tmp_path), str(tmp_path / "other")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_checkpoint_store_is_what_is_packed(source, packed):
    plain, aligned = CheckpointStore(source), PackedStore(packed)
    assert plain.layout == aligned.layout
