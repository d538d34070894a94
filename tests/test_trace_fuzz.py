"""Damaged trace files: truncated, flipped, overwritten, cut and glued, with headers that lie.

Every one is a TraceError, or by luck the very trace that was written (a blank in the padding, a date in an archive). Never another trace,
another exception, a crash or a hang. Plain text has no checksum: there a changed digit may leave another possible trace, but never an
impossible one.
"""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from streams import random_stream

import moecache as mc

ARRAYS = ("topk_ids", "gate_weights", "selection_scores", "recorded_ids", "predicted_ids", "token_ids", "document_start")
NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K = 6, 2, 9, 3
HUGE = [2**16 - 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
CASES = {"quick": 120, "long": 3000}  # a format
lengths = pytest.mark.parametrize("length", ["quick", pytest.param("long", marks=pytest.mark.long)])


def original():
    ids, weights, scores = random_stream(1, NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K)
    return mc.RouterTrace.from_arrays(
        ids, weights, selection_scores=scores, token_ids=np.arange(NUM_TOKENS), document_start=np.arange(NUM_TOKENS) % 4 == 0,
        predicted_ids=ids[::-1], source={"text": "größe"},
    )  # fmt: skip


def safetensors_file(path):
    original().save(path)


def compact_file(path):
    original().compact(5).save(path)


def npz_file(path, save=np.savez_compressed):
    trace = original()
    with path.open("wb") as file:
        save(file, ids=trace.topk_ids, weights=trace.gate_weights, offsets=np.array([0, 4, NUM_TOKENS]))


def plain_npz_file(path):
    npz_file(path, np.savez)


def pt_file(path):
    torch.save(torch.from_numpy(original().selection_scores.astype(np.float32)), path)


FILES = {"safetensors": safetensors_file, "compact": compact_file, "npz": npz_file, "plain npz": plain_npz_file, "pt": pt_file}
OPTIONS = {"npz": {"num_experts": NUM_EXPERTS}, "plain npz": {"num_experts": NUM_EXPERTS}, "pt": {"top_k": TOP_K, "norm_topk_prob": True}}


def is_same(a, b):
    pairs = [(getattr(a, name), getattr(b, name)) for name in ARRAYS]
    return a.shape == b.shape and all((x is None) == (y is None) and (x is None or x.tobytes() == y.tobytes()) for x, y in pairs)


def damaged(content, generator):
    """One way of losing some of a file."""
    kind, size = generator.integers(7), len(content)
    start, stop = sorted(generator.integers(0, size + 1, 2).tolist())
    stop = min(stop, start + 64)
    changed = bytearray(content)
    if kind == 0:
        return content[:start]
    if kind == 1:
        changed[start % size] ^= 1 << int(generator.integers(8))
    elif kind == 2:
        changed[start:stop] = generator.bytes(stop - start)
    elif kind == 3:
        changed[start:stop] = bytes(stop - start)
    elif kind == 4:
        del changed[start:stop]
    elif kind == 5:
        changed[start:start] = changed[start:stop]
    else:  # a length, wherever one stands, becomes huge
        changed[start : start + 8] = HUGE[generator.integers(len(HUGE))].to_bytes(8, "little")
    return bytes(changed)


def check(path, content, expected, **options):
    """Load what is left by every way in; the loads agree on whether it is a trace."""
    path.write_bytes(content)
    outcomes = []
    for memory_map in (False, True):
        try:
            outcomes.append(is_same(mc.load_trace(path, memory_map=memory_map, **options), expected))
        except mc.TraceError as error:
            assert str(path) in str(error)  # noqa: PT017 (most must raise, a few may not)
            outcomes.append(None)
    assert False not in outcomes, "another trace"
    return outcomes[0] is None


@lengths
@pytest.mark.parametrize("name", FILES)
def test_damaged_files(tmp_path, name, length):
    path, options = tmp_path / "trace", OPTIONS.get(name, {})
    FILES[name](path)
    content, expected = path.read_bytes(), mc.load_trace(path, **options)
    generator = np.random.default_rng([len(content), 7])
    num_found = sum(check(path, damaged(content, generator), expected, **options) for _ in range(CASES[length]))
    assert num_found > 0.8 * CASES[length]


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_start(tmp_path, name):
    """The first bytes decide who reads the file."""
    path, options = tmp_path / "trace", OPTIONS.get(name, {})
    FILES[name](path)
    content, expected = path.read_bytes(), mc.load_trace(path, **options)
    for position in range(24):
        for value in (0, 0x50, 0x7B, 0xFF, content[position] ^ 1):
            check(path, content[:position] + bytes([value]) + content[position + 1 :], expected, **options)
    for length in (*range(12), len(content) - 1):
        assert check(path, content[:length], expected, **options)


def described(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def lying(header, generator):
    """The header with one thing in it replaced by a thing that does not belong there."""
    header = json.loads(json.dumps(header))
    names = list(header)
    name = names[generator.integers(len(names))]
    values = [0, -1, 2**31, 2**62, 2**64, 1.5, True, None, "", "F16", "I64", [], [0], [0, 0], [2**40, 2**41], {}, {"dtype": "I16"}]
    value = values[generator.integers(len(values))]
    if generator.integers(4) == 0:
        header[name] = value
    elif generator.integers(8) == 0:
        del header[name]
    elif generator.integers(8) == 0:
        other = names[generator.integers(len(names))]
        header[name], header[other] = header[other], header[name]
    else:
        keys = list(header[name])
        key = keys[generator.integers(len(keys))]
        part = header[name][key]
        if isinstance(part, list) and part and generator.integers(2):
            part[generator.integers(len(part))] = value
        else:
            header[name][key] = value
    return header


@lengths
@pytest.mark.parametrize("name", ["safetensors", "compact"])
def test_headers_that_lie_at_random(tmp_path, name, length):
    path = tmp_path / "trace"
    FILES[name](path)
    content, expected = path.read_bytes(), mc.load_trace(path)
    generator = np.random.default_rng(11)
    header, body = described(content)
    for _ in range(2 * CASES[length]):
        text = json.dumps(lying(header, generator)).encode()
        text += b" " * (-len(text) % 8)
        check(path, len(text).to_bytes(8, "little") + text + body, expected)


@lengths
@pytest.mark.parametrize("name", ["safetensors", "compact"])
def test_contents_that_lie_with_a_right_checksum(tmp_path, name, length):
    """Somebody's faulty writer: whatever is loaded is a possible trace, and the simulator can replay it."""
    from safetensors.numpy import save_file

    from moecache.trace.file import checksum

    path = tmp_path / "trace"
    FILES[name](path)
    header, _ = described(path.read_bytes())
    trace, metadata = mc.load_trace(path), header["__metadata__"]
    tensors = {name: getattr(trace, name) for name in ARRAYS if getattr(trace, name) is not None}
    tensors["document_start"] = tensors["document_start"].astype(np.uint8)
    generator, num_loaded = np.random.default_rng(13), 0
    for _ in range(CASES[length]):
        changed = {key: array.copy() for key, array in tensors.items()}
        name = list(changed)[generator.integers(len(changed))]
        values = changed[name].reshape(-1).view(np.uint8)
        values[generator.integers(values.size)] ^= 1 << int(generator.integers(8))
        save_file(changed, path, {**metadata, "sha256": checksum(changed, metadata)})
        for memory_map in (False, True):
            try:
                found = mc.load_trace(path, memory_map=memory_map)
            except mc.TraceError as error:
                assert str(path) in str(error)  # noqa: PT017 (many must raise, some may not)
                continue
            num_loaded += 1
            run = mc.simulate(found, mc.GATE_015.replace(max_prefetches=2), NUM_EXPERTS - 1, keep="summary")
            assert run.summary()["calls"] == NUM_TOKENS * NUM_LAYERS * TOP_K
    assert num_loaded > 0


def rewritten_archive(content, generator):
    """The archive with a member damaged *before* its checksum is made: only the reader of the member can find it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = list(members)[generator.integers(len(members))]
    if members[name]:
        members[name] = damaged(members[name], generator)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for key, value in members.items():
            archive.writestr(key, value)
    return target.getvalue()


@lengths
@pytest.mark.parametrize("name", ["npz", "pt"])
def test_archives_with_right_checksums_of_wrong_members(tmp_path, name, length):
    path = tmp_path / "trace"
    FILES[name](path)
    content, generator = path.read_bytes(), np.random.default_rng(17)
    num_found = 0
    for _ in range(CASES[length]):
        path.write_bytes(rewritten_archive(content, generator))
        try:
            trace = mc.load_trace(path, **OPTIONS[name])
        except mc.TraceError as error:
            assert str(path) in str(error)  # noqa: PT017 (many must raise, some may not)
            num_found += 1
        else:
            assert trace.num_tokens <= 2 * NUM_TOKENS
    assert num_found > 0.4 * CASES[length]


CSV = """# route_trace v1
# model=tiny.gguf arch=tiny n_layer=2 n_expert=5 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
""" + "".join(
    f"{turn},{int(step > 0)},{step},{layer},{slot},{(step + slot) % 5},{0.25 + 0.5 * slot},0,100\n"
    for turn in range(2) for step in range(3) for layer in range(2) for slot in range(2)
)  # fmt: skip


@lengths
def test_damaged_text(tmp_path, length):
    path, generator = tmp_path / "trace.csv", np.random.default_rng(19)
    num_found = 0
    for case in range(2 * CASES[length]):
        path.write_bytes(damaged(CSV.encode(), generator))
        try:
            trace = mc.load_trace(path)
        except mc.TraceError as error:
            assert str(path) in str(error), case  # noqa: PT017 (most must raise, some may not)
            num_found += 1
        else:  # possible: checked again, and no larger than the text
            mc.RouterTrace(**vars(trace))
            assert trace.num_tokens <= 12, case
    assert num_found > 0.5 * CASES[length]


def test_text_cut_anywhere(tmp_path):
    """Every cut is found, except between two tokens: then the trace ends there."""
    path = tmp_path / "trace.csv"
    path.write_text(CSV)
    whole, num_shorter = mc.load_trace(path), 0
    for size in range(CSV.index("turn,"), len(CSV), 2):
        path.write_text(CSV[:size])
        try:
            trace = mc.load_trace(path)
        except mc.TraceError:
            continue
        num_shorter += trace.num_tokens < whole.num_tokens
        assert np.array_equal(trace.topk_ids, whole.topk_ids[: trace.num_tokens])
        assert np.array_equal(trace.gate_weights, whole.gate_weights[: trace.num_tokens])
    assert num_shorter > 0


def test_a_missing_file(tmp_path):
    for memory_map in (False, True):
        with pytest.raises(FileNotFoundError, match="no trace at"):
            mc.load_trace(tmp_path / "absent", memory_map=memory_map)
        with pytest.raises(FileNotFoundError, match="no trace at"):
            mc.load_trace(tmp_path, memory_map=memory_map)
