"""Committed traces: recorded from the committed weights, readable without torch, and good enough to replay a policy on."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from moecache import QUALITY_FIRST, Outcome, RouterTrace, simulate
from moecache.reference import traces
from moecache.reference.loading import model_folder
from moecache.reference.packages import sha256_of
from moecache.reference.settings import MODELS_FOLDER, SETTINGS
from moecache.reference.texts import DOMAINS

FOLDER = MODELS_FOLDER.parent / "traces"
NAMES = [name for name in SETTINGS if (model_folder(name) / "model.safetensors").exists()]
LARGEST_BYTES = 20_000_000


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def trace(name):
    return RouterTrace.load(FOLDER / f"{name}.safetensors")


def test_it_was_recorded_from_the_committed_weights(name, trace):
    assert trace.source["reference_model"] == name
    assert trace.source["weights_sha256"] == sha256_of(model_folder(name) / "model.safetensors")
    geometry = SETTINGS[name].geometry
    assert (trace.shape.num_experts, trace.shape.top_k) == (geometry["num_experts"], geometry["num_experts_per_tok"])
    assert trace.shape.norm_topk_prob == geometry["norm_topk_prob"]


def test_every_document_is_marked_and_named(name, trace):
    documents = trace.source["documents"]
    lengths = {part.stop - part.start for part in trace.document_slices()}
    assert {len(values) for values in documents.values()} == {int(trace.document_start.sum())}
    assert lengths == {1000}
    assert set(documents["domain"]) == set(DOMAINS)
    assert len(set(documents["name"])) == len(documents["name"])
    assert (FOLDER / f"{name}.safetensors").stat().st_size <= LARGEST_BYTES
    assert sha256_of(FOLDER / f"{name}.safetensors") in (MODELS_FOLDER.parent / "README.md").read_text()


def test_a_policy_replays_and_its_stand_ins_were_recorded(trace):
    few = trace.tokens(0, 2000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ stand-ins lie outside")  # counted below
        run = simulate(few, QUALITY_FIRST, num_slots=trace.shape.num_experts // 4)
    summary = run.summary()
    assert summary["calls"] == few.topk_ids.size
    assert 0.3 < summary["hit_rate"] < 0.95
    assert (run.decisions.outcome == Outcome.SUBSTITUTED).any()
    assert summary["outside_recorded"] < 0.01 * summary["calls"]


def test_the_header_names_model_texts_and_documents(tmp_path):
    """On a short trace made here: as the command makes it, compact and whole."""
    found = traces.record_held_out(NAMES[0], num_documents=1, num_best=16, num_tokens=20)
    assert found.recorded_ids is not None
    assert found.recorded_ids.shape == (20, found.shape.num_layers, 16)
    assert found.source["documents"]["domain"] == [DOMAINS[0]]
    found.save(tmp_path / "trace.safetensors")
    again = RouterTrace.load(tmp_path / "trace.safetensors")
    assert again.source["weights_sha256"] == sha256_of(model_folder(NAMES[0]) / "model.safetensors")
    np.testing.assert_array_equal(again.topk_ids, found.topk_ids)


def test_the_command_says_what_it_needs():
    command = [sys.executable, "-m", "moecache.reference", "record", "--model", "no-such-model", "--out", "x.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
