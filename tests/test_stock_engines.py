"""Engines that are compared: all are asked the same way, and those that compute by the library's products give the same logits."""

from __future__ import annotations

import argparse
import json
import mmap
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_checkpoints
import tiny_models
import torch

from moecache import hf_internals
from moecache.experiments import stock_agreement
from moecache.experiments.stock_agreement import DisagreementError, check, compare
from moecache.experiments.stock_engines import accelerate_offload, llama_cpp, ours, protocol, transformers_mmap
from moecache.experiments.stock_engines.protocol import Measured, advise_mappings, measure, read_tokens
from moecache.hf_checkpoints import skeleton
from moecache.stores.checkpoint import read_config

DOCUMENTS = [document.astype(np.int64) for document in tiny_models.documents(lengths=(9, 5))]


class Counting:
    """An engine that answers with what it was told, and counts steps."""

    def __init__(self):
        self.versions, self.settings, self.history, self.document = {}, {}, [], []

    def begin(self):
        self.document = []

    def step(self, token_id):
        self.document.append(token_id)
        self.history.append(token_id)
        return np.array([len(self.document), token_id], np.float32)

    def stats(self):
        return {"steps": len(self.history)}

    def gpu_peak_bytes(self):
        return None


def _asked(**given):
    common = {"model": "m", "threads": 1, "warm_tokens": 0, "measured_tokens": 1, "logits": None, "onednn": False}
    return argparse.Namespace(**{**common, "device": "cpu", "gpu_expert_layers": 0, **given})


def _ours(**given):
    """The command line of this project's runtime."""
    parser = argparse.ArgumentParser()
    ours.declare(parser)
    return _asked(**{**vars(parser.parse_args(["--slots", "3", "--readers", "1"])), **given})


def test_every_token_is_a_step_and_a_document_begins_anew(tmp_path):
    engine = Counting()
    answer = measure("e", engine, DOCUMENTS, _asked(warm_tokens=4, logits=tmp_path / "logits.npy"), 1.5)
    assert engine.history == np.concatenate(DOCUMENTS).tolist()
    assert (len(answer.warm_seconds), len(answer.seconds), answer.load_seconds) == (4, 10, 1.5)
    assert answer.stats == {"steps": 10}
    logits = np.load(tmp_path / "logits.npy")
    assert logits[:, 0].tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    assert logits[:, 1].tolist() == engine.history[4:]
    assert answer.peak_resident_bytes > answer.private_bytes > 0


def test_an_answer_is_the_last_line_of_the_output():
    answer = measure("e", Counting(), DOCUMENTS, _asked(), 0.0)
    assert Measured.from_output(f"a library says this\n{json.dumps(asdict(answer))}\n") == answer
    with pytest.raises(ValueError, match="no answer: 'Killed'"):
        Measured.from_output("Killed")


@pytest.mark.parametrize(("shape", "num_tokens", "lengths"), [((12,), 12, [12]), ((12,), 5, [5]), ((3, 4), 9, [4, 4, 1]), ((3, 4), 4, [4])])
def test_tokens_are_cut_into_documents(shape, num_tokens, lengths, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(12, dtype=np.int32).reshape(shape))
    documents = read_tokens(tmp_path / "tokens.npy", num_tokens)
    assert [len(document) for document in documents] == lengths
    assert np.concatenate(documents).tolist() == list(range(num_tokens))


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "told"),
    [(np.arange(4), 5, "holds 4 tokens, 5 were asked for"), (np.arange(4), 0, "0 were asked"), (np.zeros(3), 1, "integer"),
     (np.zeros((1, 1, 1), int), 1, "integer token ids")],
)  # fmt: skip
def test_other_tokens_are_refused(tokens, num_tokens, told, tmp_path):
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ValueError, match=told):
        read_tokens(tmp_path / "tokens.npy", num_tokens)


def test_advice_reaches_the_model_and_nothing_else(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with pytest.raises(ValueError, match="maps no file"):
        advise_mappings(path, "random")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert advise_mappings(path, "random") == 3 * mmap.PAGESIZE


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def checkpoint(request, tmp_path_factory):
    model = tiny_models.olmoe(num_experts=8, top_k=2).to(request.param)
    return tiny_checkpoints.save(model, tmp_path_factory.mktemp("fused"), "fused")


def _logits(engine):
    logits = []
    for document in DOCUMENTS:
        engine.begin()
        logits += [engine.step(token).copy() for token in document.tolist()]
    return np.stack(logits)


def test_our_runtime_equals_plain_transformers(checkpoint):
    reference = transformers_mmap.load(_asked(model=checkpoint))
    engine = ours.load(_ours(model=checkpoint))
    try:
        found = _logits(engine)
        assert engine.stats()["fetched"] > 0
    finally:
        engine._model.moecache.close()
    assert np.array_equal(found, _logits(reference))


def test_another_policy_would_be_seen(checkpoint):
    engine = ours.load(_ours(model=checkpoint, policy="substitute every miss"))
    try:
        found = _logits(engine)
    finally:
        engine._model.moecache.close()
    assert compare(_logits(transformers_mmap.load(_asked(model=checkpoint))), found)["mean_kl_nats"] > 1e-2


def test_mapped_experts_are_pages_of_the_file(checkpoint):
    transformers = transformers_mmap.load(_asked(model=checkpoint))
    address = hf_internals.moe_layers(transformers._model)[0].experts.gate_up_proj.data_ptr()
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    inside = [fields for fields in lines if int(fields[0].split("-")[0], 16) <= address < int(fields[0].split("-")[1], 16)]
    assert inside[0][-1] == str((checkpoint / "model.safetensors").resolve())


def test_one_matrix_for_each_expert_is_refused(tmp_path):
    folder = tiny_checkpoints.save(tiny_models.olmoe(), tmp_path / "hub")
    with pytest.raises(ValueError, match="all experts of a layer in one tensor is needed"):
        transformers_mmap.load(_asked(model=folder))


def test_accelerate_keeps_experts_and_nothing_else_on_disk(checkpoint):
    places = accelerate_offload._device_map(_asked(model=checkpoint))
    weights = [name for name, _ in skeleton(read_config(checkpoint)).named_parameters()]
    for name in weights:
        found = [place for path, place in places.items() if name.startswith(f"{path}.")]
        assert found == ["disk" if ".experts." in name else "cpu"], name


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_accelerate_keeps_the_first_layers_experts_on_a_gpu(checkpoint, num_layers):
    places = accelerate_offload._device_map(_asked(model=checkpoint, device="cuda", gpu_expert_layers=num_layers))
    experts = [place for path, place in places.items() if path.endswith(".experts")]
    assert experts == ["cuda:0"] * num_layers + ["disk"] * (len(experts) - num_layers)
    assert {place for path, place in places.items() if not path.endswith(".experts")} == {"cuda:0"}


def test_our_runtime_is_opened_on_the_device_with_experts_in_main_memory(monkeypatch):
    class OpenedError(Exception):
        pass

    asked = []

    def offload(*given, **named):
        asked.append(named)
        raise OpenedError

    monkeypatch.setattr("moecache.offload", offload, raising=False)
    for given in ({}, {"device": "cuda", "host_mebibytes": 2900}):
        with pytest.raises(OpenedError):
            ours.load(_ours(**given))
    assert asked == [{"device": "cpu", "num_readers": 1}, {"device": "cuda", "host_memory": "2900 MiB", "num_readers": 1}]


class FakeLlama:
    """The library's functions until a model is loaded."""

    LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP = 0, 1

    def __init__(self, supports_gpu):
        self.llama_supports_gpu_offload = lambda: supports_gpu
        self.llama_log_set = lambda *_: None
        self.llama_backend_init = lambda: None
        self.llama_model_default_params = lambda: argparse.Namespace(tensor_buft_overrides=None)
        self.asked, self.kept = [], []

    def llama_model_load_from_file(self, path, parameters):
        self.asked.append((parameters.n_gpu_layers, parameters.load_mode))
        if parameters.tensor_buft_overrides:
            entries = (llama_cpp.KeptTensors * 2).from_address(parameters.tensor_buft_overrides)
            self.kept.append([(entry.pattern, entry.memory) for entry in entries])


def _llama(**given):
    parser = argparse.ArgumentParser()
    llama_cpp.declare(parser)
    return _asked(**{**vars(parser.parse_args([])), **given})


def test_llama_cpp_leaves_the_first_layers_experts_to_the_processor(monkeypatch):
    def cpu_memory():
        return 4096

    library = FakeLlama(supports_gpu=True)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    ggml = argparse.Namespace(libggml=argparse.Namespace(ggml_backend_cpu_buffer_type=cpu_memory))
    monkeypatch.setitem(sys.modules, "llama_cpp._ggml", ggml)
    for given in ({}, {"gpu_layers": -1}, {"gpu_layers": -1, "cpu_expert_layers": 11}):
        with pytest.raises(ValueError, match=r"llama\.cpp cannot load m"):
            llama_cpp.load(_llama(**given))
    assert library.asked == [(0, 1), (-1, 1), (-1, 1)]
    [[(pattern, memory), end]] = library.kept
    assert (memory, end) == (4096, (None, None))
    kept = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 9, 10) for part in ("gate", "up", "down")]
    others = ["blk.11.ffn_up_exps.weight", "blk.1.attn_q.weight", "blk.0.ffn_gate_inp.weight", "output.weight", "xblk.1.ffn_up_exps.weight"]
    assert [name for name in kept + others if re.search(pattern.decode(), name)] == kept


def test_llama_cpp_without_a_gpu_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlama(supports_gpu=False))
    with pytest.raises(ValueError, match=r"built without support of a GPU.*CMAKE_ARGS=-DGGML_CUDA=on"):
        llama_cpp.load(_llama(gpu_layers=-1))


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ValueError, match=r"pip install moecache\[stock\]"):
        llama_cpp.load(_asked())
    monkeypatch.setattr(accelerate_offload.importlib.metadata, "version", _absent)
    with pytest.raises(ValueError, match=r"accelerate is not installed.*moecache\[stock\]"):
        accelerate_offload.load(_asked())


def _absent(name):
    raise accelerate_offload.importlib.metadata.PackageNotFoundError(name)


def test_the_command_line_prints_an_answer(tmp_path, monkeypatch, capsys):
    np.save(tmp_path / "tokens.npy", np.arange(6))
    monkeypatch.setattr(
        "sys.argv", ["e", "m", str(tmp_path / "tokens.npy"), "--warm-tokens", "2", "--measured-tokens", "3", "--threads", "2"]
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MOECACHE_A", "kept")
    seen = {}

    def load(asked):
        """Load nothing."""
        seen.update({name: protocol.os.environ[name] for name in ("OMP_NUM_THREADS", "MOECACHE_A", "MOECACHE_B")})
        return Counting()

    assert protocol.main("e", lambda parser: None, load, {"MOECACHE_A": "new", "MOECACHE_B": "new"}) == 0
    monkeypatch.delenv("MOECACHE_B")
    assert seen == {"OMP_NUM_THREADS": "2", "MOECACHE_A": "kept", "MOECACHE_B": "new"}
    answer = Measured.from_output(capsys.readouterr().out)
    assert (answer.engine, answer.threads, len(answer.seconds), answer.settings) == ("e", 2, 3, {"advice": "normal"})


# Agreement


def test_divergence_is_that_of_the_definition():
    reference, found = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])), np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    told = compare(reference.astype(np.float32), found.astype(np.float32) + np.float32(3))
    first = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert told["mean_kl_nats"] == pytest.approx(first / 2, abs=1e-6)
    assert told["max_kl_nats"] == pytest.approx(first, abs=1e-6)
    assert told["same_top_fraction"] == 0.5
    assert not told["is_equal"]
    assert compare(reference, reference)["is_equal"]
    with pytest.raises(ValueError, match="logits"):
        compare(reference, found[:1])


def _row(engine, kl, is_equal, must_be_equal, bits=16):
    return {"engine": engine, "bits": bits, "mean_kl_nats": kl, "max_difference": 1.0, "is_equal": is_equal, "must_be_equal": must_be_equal}


def test_only_engines_that_agree_pass():
    good = [_row("ours", 0.0, True, True), _row("llama_cpp", 9e-3, False, False), _row("llama_cpp", 0.3, False, False, bits=4)]
    check(pd.DataFrame(good))
    for bad in (_row("ours", 1e-9, False, True), _row("llama_cpp", 1.1e-2, False, False), _row("llama_cpp", float("nan"), False, False)):
        with pytest.raises(DisagreementError, match=f"{bad['engine']}: mean KL"):
            check(pd.DataFrame([*good, bad]))


def test_agreement_asks_each_engine_for_the_same_tokens(monkeypatch):
    asked = []

    def logits_of(module, files, tokens, place):
        assert not place.is_gpu
        asked.append((module, files, tokens.tolist()))
        return np.eye(4, 6, dtype=np.float32) + (1e-3 if module == "llama_cpp" else 0) * np.arange(6, dtype=np.float32)

    monkeypatch.setattr(stock_agreement, "tokens_of", lambda number, document: np.arange(number))
    monkeypatch.setattr(stock_agreement, "files_of", lambda *given: given[3])
    monkeypatch.setattr(stock_agreement, "logits_of", logits_of)
    modules = ["transformers_mmap", "ours", "llama_cpp", "ours", "accelerate_offload"]
    frame = stock_agreement.measure("m", 512, 128, modules, 4, bits=(16, 4))
    tokens = [0, 1, 2, 3]
    assert asked == [("transformers_mmap", 16, tokens), ("ours", 16, tokens), ("llama_cpp", 16, tokens), ("accelerate_offload", 16, tokens),
                     ("ours", 4, tokens), ("llama_cpp", 4, tokens)]  # fmt: skip
    assert frame["must_be_equal"].tolist() == [True, False, True, False, False]
    assert frame["is_equal"].tolist() == [True, False, True, True, False]
    check(frame)
