"""Memory-mapped traces: the same arrays, left on disk; and headers that lie about what the file holds."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from safetensors.numpy import save_file
from streams import random_stream

import moecache as mc
from moecache.trace import to_recorded


def new_trace(seed=3, num_tokens=150):
    ids, weights, scores = random_stream(seed, num_tokens, 2, 20, 3)
    return mc.RouterTrace.from_arrays(ids, weights, selection_scores=scores, document_start=np.isin(np.arange(num_tokens), [0, 40, 111]))


TRACE = new_trace()


@pytest.fixture(params=["all scores", "best 7"])
def path(request, tmp_path):
    path = tmp_path / "trace.safetensors"
    (TRACE if request.param == "all scores" else TRACE.compact(7)).save(path)
    return path


def test_a_mapped_trace_is_the_same_and_is_not_in_memory(path):
    plain, mapped = (mc.RouterTrace.load(path, memory_map) for memory_map in (False, True))
    for name, array in vars(plain).items():
        if isinstance(array, np.ndarray):
            other = getattr(mapped, name)
            assert (other.dtype, other.shape, type(other)) == (array.dtype, array.shape, np.ndarray)
            assert other.tobytes() == array.tobytes()
            if name != "document_start":
                assert other.flags.aligned
                assert not other.flags.writeable
                assert not other.flags.owndata
    assert (plain.shape, plain.source) == (mapped.shape, mapped.source)
    with pytest.raises(ValueError, match="read-only"):
        mapped.gate_weights[0] = 0


def test_a_mapped_trace_outlives_its_file(path):
    mapped, plain = mc.RouterTrace.load(path, memory_map=True), mc.RouterTrace.load(path)
    new_trace(seed=4).save(path)  # another file takes the name; the old one is still there for who holds it
    assert np.array_equal(mapped.topk_ids, plain.topk_ids)
    path.unlink()
    assert mc.simulate(mapped, mc.FETCH_EVERY_MISS, 12).decisions.is_equal(mc.simulate(plain, mc.FETCH_EVERY_MISS, 12).decisions)


@pytest.mark.parametrize("policy", mc.PRESETS, ids=lambda policy: policy.label)
def test_mapped_decisions(policy, tmp_path):
    TRACE.save(tmp_path / "trace")
    mapped = mc.load_trace(tmp_path / "trace", memory_map=True)
    assert mc.simulate(mapped, policy, 6).decisions.is_equal(mc.simulate(TRACE, policy, 6).decisions)


def header_of(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(described, body, length=None):
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    text += b" " * (-len(text) % 8) if isinstance(described, dict) else b""
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def changed(**entries):
    def change(content):
        described, body = header_of(content)
        for name, entry in entries.items():
            described[name] = {**described.get(name, {}), **entry}
        return with_header(described, body)

    return change


BAD_HEADERS = {
    "a header longer than the file": (lambda c: (2**40).to_bytes(8, "little") + c[8:], "first 8 announce a header of 1099511627776"),
    "a header longer than anything": (lambda c: b"\xff" * 8 + c[8:], "announce a header of 18446744073709551615"),
    "no header": (lambda c: bytes(8) + b"{" + c[9:], "announce a header of 0"),
    "no JSON": (lambda c: c[:8] + b"{" + b"?" * 20 + c[29:], "its header is no JSON"),
    "no UTF-8": (lambda c: c[:9] + b"\xff" + c[10:], "its header is no JSON: 'utf-8'"),
    "deep nesting": (lambda c: with_header(b"{" + b'"a":[' * 200_000, c[8:]), "its header is no JSON"),
    "a name twice": (lambda c: with_header(b'{"topk_ids":{},"topk_ids":{}}', c[8:]), "a name stands twice"),
    "a number for a tensor": (lambda c: with_header({**header_of(c)[0], "token_ids": 3}, b""), "token_ids is not described by dtype"),
    "an unknown dtype": (changed(token_ids={"dtype": "BF16"}), r"token_ids is of dtype 'BF16'; a trace holds"),
    "a dtype that is a list": (changed(token_ids={"dtype": ["I32"]}), "token_ids is of dtype"),
    "a wider dtype": (changed(token_ids={"dtype": "I64"}), r"token_ids takes bytes .*, which are not int64 \[150\]"),
    "a huge shape": (changed(token_ids={"shape": [2**50]}), r"which are not int32 \[1125899906842624\]"),
    "a shape that overflows": (changed(token_ids={"shape": [2**40, 2**40, 2**40]}), "which are not int32"),
    "a negative shape": (changed(token_ids={"shape": [-150]}), r"token_ids has shape \[-150\]"),
    "a shape of truths": (changed(token_ids={"shape": [True]}), r"token_ids has shape \[True\]"),
    "a shape of halves": (changed(token_ids={"shape": [150.0]}), r"token_ids has shape \[150.0\]"),
    "offsets past the end": (changed(token_ids={"data_offsets": [2**40, 2**40 + 600]}), "starts at byte"),
    "offsets that overlap": (changed(token_ids={"data_offsets": [0, 600]}), "starts at byte"),
    "offsets turned round": (changed(token_ids={"data_offsets": [600, 0]}), "which are not int32"),
    "one offset": (changed(token_ids={"data_offsets": [600]}), "token_ids has shape"),
    "a key more": (changed(token_ids={"stride": [1]}), "token_ids is not described by dtype, shape and data_offsets"),
    "metadata that are no text": (changed(__metadata__={"sha256": 3}), "its metadata are not all text"),
    "a byte more": (lambda c: c + b"\0", r"its tensors take \d+ bytes, but there are \d+"),
    "a byte less": (lambda c: c[:-1], r"its tensors take \d+ bytes, but there are \d+"),
    "another format": (changed(__metadata__={"format": "moecache router trace 9"}), "instead of 'moecache router trace 1'"),
    "a broken source": (changed(__metadata__={"source": "\ud800"}), "do not match the file's own checksum"),
}  # fmt: skip


@pytest.mark.parametrize("memory_map", [False, True])
@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers_that_lie(tmp_path, name, memory_map):
    path = tmp_path / "trace.safetensors"
    TRACE.save(path)
    change, message = BAD_HEADERS[name]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(mc.TraceError, match=f"{re.escape(str(path))}: .*{message}"):
        mc.RouterTrace.load(path, memory_map)


def test_tensors_at_odd_bytes_are_read_but_not_mapped(tmp_path):
    """Another writer may pad its header differently; compiled code needs aligned arrays."""
    path = tmp_path / "trace.safetensors"
    TRACE.save(path)
    described, body = header_of(path.read_bytes())
    text = json.dumps(described)
    path.write_bytes(with_header((text + " " * (9 - len(text) % 8)).encode(), body))
    assert np.array_equal(mc.RouterTrace.load(path).topk_ids, TRACE.topk_ids)
    with pytest.raises(mc.TraceError, match=r"starts at a byte that is no multiple of its .*: load it with memory_map=False"):
        mc.RouterTrace.load(path, memory_map=True)


def test_files_of_the_format_s_own_library_are_read(tmp_path):
    """And the file that `save` writes is read by it."""
    import safetensors

    TRACE.save(tmp_path / "ours")
    with safetensors.safe_open(tmp_path / "ours", "np") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    assert np.array_equal(tensors["selection_scores"], TRACE.selection_scores)
    save_file(dict(reversed(tensors.items())), tmp_path / "theirs", metadata)
    assert np.array_equal(mc.load_trace(tmp_path / "theirs", memory_map=True).selection_scores, to_recorded(TRACE.selection_scores))


@pytest.mark.parametrize("num_megabytes", [48, pytest.param(208, marks=pytest.mark.long)])
def test_memory_stays_flat(tmp_path, num_megabytes):
    """Loading and replaying from disk: what the process itself holds does not grow with the trace."""
    trace = mc.synthetic_trace(50, 48, 512, 10, document_tokens=20)
    repeats = num_megabytes * 2**20 // (trace.selection_scores.nbytes + trace.topk_ids.nbytes + trace.gate_weights.nbytes)
    whole = {
        name: np.concatenate([getattr(trace, name)] * repeats)
        for name in ("topk_ids", "gate_weights", "selection_scores", "token_ids", "document_start")
    }
    mc.RouterTrace(**whole, shape=trace.shape).save(tmp_path / "large")
    mc.RouterTrace(**whole, shape=trace.shape).tokens(0, 20 * repeats).compact(64).save(tmp_path / "compact")
    assert (tmp_path / "large").stat().st_size > 0.9 * num_megabytes * 2**20
    trace.save(tmp_path / "small")
    program = Path(__file__).parent / "memory_of_a_replay.py"
    done = subprocess.run([sys.executable, program, *(str(tmp_path / name) for name in ("small", "large", "compact"))],
                          capture_output=True, text=True, check=True)  # fmt: skip
    grown = json.loads(done.stdout)
    assert grown["large, mapped"] < 20, grown  # megabytes: blocks of the check, and the log of a block
    assert grown["compact, mapped"] < 40, grown  # and a block of scores laid out for the kernel
    assert grown["large, read"] > 0.9 * num_megabytes, grown  # or the measurement would see nothing


def test_workers_of_a_sweep_map_their_traces(tmp_path):
    """By path each worker maps the file; a mapped trace that is handed over arrives as what it was."""
    path, sweep_module = tmp_path / "trace.safetensors", import_module("moecache.sweep")
    TRACE.save(path)
    assert not sweep_module._loaded(str(path), path.stat().st_mtime_ns).selection_scores.flags.owndata
    policies, options = [mc.SPEED_FIRST, mc.SUBSTITUTE_EVERY_MISS], {"num_workers": 2, "progress": False}
    rows = [mc.sweep({"trace": t}, policies, [4, 8], **options) for t in (TRACE, path, mc.load_trace(path, memory_map=True))]
    assert_frame_equal(rows[1], rows[0], check_exact=True)
    assert_frame_equal(rows[2], rows[0], check_exact=True)
