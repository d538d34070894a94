"""Several processes on one packed model: readers are both right, a second packer and an early reader are told why they must wait."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, contextmanager

import numpy as np
import pytest
import tiny_checkpoints
import tiny_models
import torch

import moecache as mc
from moecache import hf_internals
from moecache.runtime.loading import load_dense
from moecache.score import document_losses
from moecache.stores import pack as packing
from moecache.stores.blocks import StoreError
from moecache.stores.pack import pack
from moecache.stores.packed_file import PackedStore, part_of
from moecache.stores.store import open_store

FAMILY, NUM_SLOTS = "qwen3_moe", 5
TEXT = tiny_models.documents(lengths=(20,))[0].astype(np.int32)
READER = """
import sys, numpy as np
import moecache as mc
from moecache.score import document_losses
model = mc.offload(sys.argv[1], mc.FETCH_EVERY_MISS, int(sys.argv[3]))
print("open", flush=True)
sys.stdin.readline()
np.save(sys.argv[4], document_losses(model, np.load(sys.argv[2]), keep_logits=True, stepped=True)[1])
model.moecache.close()
"""
PACKER = """
import sys
from moecache.stores import pack as packing
right, written, packing.CONFIRMED_BYTES = packing._write_block, [], 1
def waiting(*arguments):
    written.append(right(*arguments))
    if len(written) == 5:
        print("some", flush=True)
        sys.stdin.readline()
    return written[-1]
packing._write_block = waiting
packing.pack(sys.argv[1], sys.argv[2], progress=False)
"""


@pytest.fixture(scope="module")
def model():
    return tiny_checkpoints.FAMILIES[FAMILY]()


@pytest.fixture(scope="module")
def source(model, tmp_path_factory):
    return tiny_checkpoints.save(model, tmp_path_factory.mktemp("source"), max_shard_size="30KB")


@contextmanager
def started(program, *arguments):
    """A process that has come to its first line of output and waits for one of input; killed if it is still there afterwards."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline(), process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def logits_of(model):
    return document_losses(model, TEXT, keep_logits=True, stepped=True)[1]


def is_the_model(folder, model):
    with closing(open_store(folder)) as store:
        whole = tiny_checkpoints.put_back(load_dense(folder), store)
    return all(torch.equal(weight, dict(model.named_parameters())[name]) for name, weight in whole.named_parameters())


def test_two_processes_read_one_packed_model_at_once(model, source, tmp_path):
    packed = pack(source, tmp_path / "packed", progress=False)
    with hf_internals.experts_implementation(model, "grouped_mm"):
        expected = logits_of(model)
    np.save(tmp_path / "text.npy", TEXT)
    mine = mc.offload(packed, mc.FETCH_EVERY_MISS, NUM_SLOTS)
    with closing(mine.moecache), started(READER, packed, tmp_path / "text.npy", NUM_SLOTS, tmp_path / "logits.npy") as other:
        assert np.array_equal(logits_of(mine), expected)  # both are open, one reads
        go_on(other)
        while other.poll() is None:
            assert np.array_equal(logits_of(mine), expected)  # both read
        assert other.returncode == 0, other.stderr.read()
        assert np.array_equal(logits_of(mine), expected)  # the other is closed
    assert np.array_equal(np.load(tmp_path / "logits.npy"), expected)


def test_while_one_process_packs_others_neither_pack_nor_open(model, source, tmp_path):
    target = tmp_path / "packed"
    with started(PACKER, source, target) as packer:
        with pytest.raises(ValueError, match="another process is packing"):
            pack(source, target, progress=False)
        with pytest.raises(StoreError, match=r"packed\.part is there: it is being packed"):
            mc.offload(target, mc.FETCH_EVERY_MISS, NUM_SLOTS)
        with pytest.raises(StoreError, match=r"lacks \d+ of \d+ experts: it is being packed"):
            open_store(part_of(target))
        go_on(packer)
        assert packer.wait(60) == 0, packer.stderr.read()
    assert is_the_model(target, model)
    assert pack(source, target, progress=False) == target


def test_a_killed_packer_is_gone_on_from(model, source, tmp_path, monkeypatch):
    target, written = tmp_path / "packed", []
    with started(PACKER, source, target):
        pass  # killed while it waits
    assert not target.exists()
    right = packing._write_block
    monkeypatch.setattr(packing, "_write_block", lambda *given: written.append(given[-1]) or right(*given))
    pack(source, target, progress=False)
    store = PackedStore(target)
    assert 0 < len(written) < store.num_layers * store.num_experts
    store.close()
    assert is_the_model(target, model)


def test_a_target_that_another_process_has_just_finished_is_taken_as_it_is(model, source, tmp_path, monkeypatch):
    target, lock = tmp_path / "packed", packing._locked
    elsewhere = pack(source, tmp_path / "elsewhere", progress=False)

    def locked(folder, name):
        elsewhere.rename(target)
        return lock(folder, name)

    monkeypatch.setattr(packing, "_locked", locked)
    assert pack(source, target, progress=False) == target
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    assert is_the_model(target, model)
