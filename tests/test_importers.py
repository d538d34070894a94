"""Public trace formats: small files made here, and the real ones where they lie beside the clone."""

import io
import zipfile

import numpy as np
import pytest

import moecache as mc

CSV_HEAD = """# route_trace v1
# model=tiny.gguf arch=tiny n_layer=2 n_expert=5 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=90 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""


def csv_rows(turn, phase, step, layers=(0, 1)):
    """The calls of one token: experts (step, step + 1) modulo 5, weights 0.25 and 0.75."""
    return [
        f"{turn},{phase},{step},{layer},{slot},{(step + slot) % 5},{0.25 + 0.5 * slot},0,100\n" for layer in layers for slot in range(2)
    ]


def csv_lines():
    """Two turns; the last layer saw only the last token of each prompt (phase 0)."""
    lines = []
    for turn in range(2):
        lines += csv_rows(turn, 0, 0, layers=(0,)) + csv_rows(turn, 0, 1, layers=(0,)) + csv_rows(turn, 0, 2)
        lines += csv_rows(turn, 1, 3) + csv_rows(turn, 1, 4)
    return lines


@pytest.fixture
def csv(tmp_path):
    def write(lines, head=CSV_HEAD):
        path = tmp_path / "tiny.route.csv"
        path.write_text(head + "".join(lines))
        return path

    return write


def test_route_csv(csv):
    trace = mc.load_trace(csv(csv_lines()))
    assert trace.shape == mc.ModelShape(2, 5, 2, expert_bytes=100)
    assert trace.topk_ids[:, 0].tolist() == [[3, 2], [4, 3], [0, 4]] * 2
    assert np.array_equal(trace.topk_ids[:, 0], trace.topk_ids[:, 1])
    assert (trace.gate_weights == [0.75, 0.25]).all()
    assert trace.document_start.tolist() == [True, False, False] * 2
    assert trace.selection_scores is None
    assert trace.source == {"file": "tiny.route.csv", "format": "route_trace v1", "model": "tiny.gguf", "dropped_tokens": 4}


def test_order_of_lines_does_not_matter(csv):
    expected = mc.load_trace(csv(csv_lines()))
    found = mc.load_trace(csv(csv_lines()[::-1]))
    assert np.array_equal(found.topk_ids, expected.topk_ids)
    assert np.array_equal(found.document_start, expected.document_start)


GOOD = csv_rows(0, 1, 0)
BAD_CSV = {
    "no lines": ([], CSV_HEAD, "holds no calls"),
    "a cut decode token": (GOOD[:3], CSV_HEAD, r"token 0 of document 0, layer 1 lacks its call of rank 1; .* \(is it cut\?\)"),
    "nothing but a prompt": (csv_rows(0, 0, 0, layers=(0,)), CSV_HEAD, "no token has its 2 layers x 2 calls"),
    "a line twice": ([*GOOD, GOOD[0]], CSV_HEAD, "turn 0, step 0, layer 0: slot 0 stands twice"),
    "a layer too many": ([*GOOD, "0,1,0,2,0,1,0.5,0,100\n"], CSV_HEAD, r"layer 2: column 'layer' holds 2, outside 0\.\.1 \(row 4\)"),
    "a slot too many": ([*GOOD, "0,1,0,1,2,1,0.5,0,100\n"], CSV_HEAD, r"document 0, layer 1: column 'slot' holds 2, outside 0\.\.1"),
    "an expert too many": ([*GOOD[:3], "0,1,0,1,1,5,0.75,0,100\n"], CSV_HEAD, r"layer 1: column 'expert' holds 5, outside 0\.\.4"),
    "a negative expert": ([*GOOD[:3], "0,1,0,1,1,-1,0.75,0,100\n"], CSV_HEAD, r"layer 1: column 'expert' holds -1, outside"),
    "one expert twice": ([*GOOD[:3], "0,1,0,1,1,0,0.75,0,100\n"], CSV_HEAD, "token 0 of document 0, layer 1: the same expert called twice"),
    "a wrong sum": ([*GOOD[:3], "0,1,0,1,1,1,0.5,0,100\n"], CSV_HEAD, "token 0 of document 0, layer 1: gate weights that do not sum to 1"),
    "a cut line": ([*GOOD[:3], "0,1,0,1"], CSV_HEAD, "layer 1: column 'slot' holds nan, which is no integer"),
    "no weight": ([*GOOD[:3], "0,1,0,1,1,1,,0,100\n"], CSV_HEAD, "token 0 of document 0, layer 1: column 'weight' holds nan"),
    "half an expert": ([*GOOD[:3], "0,1,0,1,1,0.5,0.75,0,100\n"], CSV_HEAD, r"column 'expert' holds 0\.5, which is no integer"),
    "a huge step": ([*GOOD[:3], f"0,1,{10**30},1,1,1,0.75,0,100\n"], CSV_HEAD, "column 'step' holds 10+, which is no integer"),
    "many layers": (GOOD, CSV_HEAD.replace("n_layer=2", "n_layer=32767"), "layer 2 lacks its call of rank 0; .* 32767 layers"),
    "more layers than any": (GOOD, CSV_HEAD.replace("n_layer=2", f"n_layer={10**12}"), "impossible model shape"),
    "words": ([*GOOD[:3], "0,1,0,1,one,0,0.75,0,100\n"], CSV_HEAD, "token 0 of document 0, layer 1: column 'slot' holds one"),
    "too many fields": ([*GOOD, "0,1,0,1,0,0,0.75,0,100,1,2\n"], CSV_HEAD, "not a readable route_trace v1 file"),
    "a field more in all": ([row.replace("\n", ",1\n") for row in GOOD], CSV_HEAD, "more fields than its header"),
    "no facts": (GOOD, CSV_HEAD.replace("n_expert_used", "used"), "not a readable route_trace v1 file .*n_expert_used"),
    "impossible facts": (GOOD, CSV_HEAD.replace("n_expert_used=2", "n_expert_used=9"), "not a readable .*impossible model shape"),
    "other columns": (GOOD, CSV_HEAD.replace("slot,expert", "rank,expert"), r"columns \['slot'\] are missing"),
    "nothing but the first line": ([], "# route_trace v1\n", "not a readable route_trace v1 file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CSV)
def test_damaged_route_csv(csv, name):
    lines, head, message = BAD_CSV[name]
    path = csv(lines, head)
    with pytest.raises(mc.TraceError, match=message) as caught:
        mc.load_trace(path)
    assert str(path) in str(caught.value)


def test_binary_after_the_first_line(tmp_path):
    path = tmp_path / "odd.csv"
    path.write_bytes(b"# route_trace v1\n\xff\xfe\x00\x01")
    with pytest.raises(mc.TraceError, match="not a readable route_trace v1 file"):
        mc.load_trace(path)


IDS = np.array([[[0, 3], [1, 2]], [[3, 1], [2, 0]], [[0, 1], [1, 0]]], np.uint8)
WEIGHTS = np.tile(np.array([0.75, 0.25], np.float16), (3, 2, 1))


@pytest.fixture
def npz(tmp_path):
    def write(**arrays):
        path = tmp_path / "tiny.npz"
        np.savez_compressed(path, **arrays)
        return path

    return write


def test_npz(npz):
    trace = mc.load_trace(npz(ids=IDS, weights=WEIGHTS, offsets=[0, 2, 3]), num_experts=6)
    assert trace.shape == mc.ModelShape(2, 6, 2)
    assert np.array_equal(trace.topk_ids, IDS)
    assert trace.document_start.tolist() == [True, False, True]
    assert trace.source["num_experts"] == "given"
    guessed = mc.load_trace(npz(ids=IDS, weights=WEIGHTS))
    assert guessed.shape.num_experts == 4
    assert guessed.source["num_experts"] == "largest id + 1"
    assert guessed.document_start.tolist() == [True, False, False]


BAD_NPZ = {
    "no weights": ({"ids": IDS, "offsets": [0, 3]}, r"arrays \['ids', 'offsets'\]; \['weights'\] are missing"),
    "no layers": ({"ids": IDS[:, 0], "weights": WEIGHTS[:, 0]}, r"ids are uint8 \[3, 2\] .*expected integers and reals"),
    "empty": ({"ids": IDS[:0], "weights": WEIGHTS[:0]}, r"ids are uint8 \[0, 2, 2\]"),
    "real ids": ({"ids": IDS / 2, "weights": WEIGHTS}, "ids are float64"),
    "integer weights": ({"ids": IDS, "weights": IDS}, "weights uint8"),
    "fewer weights": ({"ids": IDS, "weights": WEIGHTS[:2]}, r"topk_ids \(3, 2, 2\) and gate_weights \(2, 2, 2\)"),
    "one expert": ({"ids": IDS * 0, "weights": WEIGHTS}, "impossible model shape"),
    "a double call": ({"ids": IDS - IDS % 2, "weights": WEIGHTS}, "token 0, layer 1|same expert"),
    "offsets past the end": ({"ids": IDS, "weights": WEIGHTS, "offsets": [0, 2, 4]}, r"offsets must rise from 0 to 3.*\[0 2 4\]"),
    "offsets that stop early": ({"ids": IDS, "weights": WEIGHTS, "offsets": [0, 2]}, "offsets must rise from 0 to 3"),
    "offsets that start late": ({"ids": IDS, "weights": WEIGHTS, "offsets": [1, 3]}, "offsets must rise"),
    "offsets that fall": ({"ids": IDS, "weights": WEIGHTS, "offsets": [0, 2, 2, 3]}, "offsets must rise"),
    "real offsets": ({"ids": IDS, "weights": WEIGHTS, "offsets": [0.0, 3.0]}, "offsets must rise"),
    "a pickle": ({"ids": IDS, "weights": WEIGHTS, "offsets": np.array([{}], object)}, "Python objects"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_NPZ)
def test_damaged_npz(npz, name):
    arrays, message = BAD_NPZ[name]
    path = npz(**arrays)
    with pytest.raises(mc.TraceError, match=message) as caught:
        mc.load_trace(path)
    assert str(path) in str(caught.value)


def test_too_few_experts_given(npz):
    with pytest.raises(mc.TraceError, match=r"an expert id outside 0\.\.2: 3"):
        mc.load_trace(npz(ids=IDS, weights=WEIGHTS), num_experts=3)


def test_npz_truncated_or_flipped(npz):
    """zip keeps a checksum of every array: damage is found, or lies where nobody reads."""
    path = npz(ids=IDS, weights=WEIGHTS, offsets=[0, 2, 3])
    content = path.read_bytes()
    for length in range(4, len(content), 37):
        path.write_bytes(content[:length])
        with pytest.raises(mc.TraceError, match=r"not a readable \.npz file|not a readable zip archive"):
            mc.load_trace(path)
    for position in range(4, len(content), 5):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        try:
            trace = mc.load_trace(path)
        except mc.TraceError as error:
            assert str(path) in str(error)  # noqa: PT017 (a flip in a time stamp is harmless)
        else:
            assert np.array_equal(trace.topk_ids, IDS)
            assert (trace.gate_weights == [0.75, 0.25]).all()


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"turn,phase,step\n", b"PK", b"\0" * 64])
def test_unknown_files(tmp_path, content):
    path = tmp_path / "what"
    path.write_bytes(content)
    with pytest.raises(mc.TraceError, match="what"):
        mc.load_trace(path)


def test_a_format_without_scores_cannot_replay_stand_ins_by_score(npz):
    trace = mc.load_trace(npz(ids=IDS, weights=WEIGHTS))
    with pytest.raises(ValueError, match="no selection scores are given; record them, or use another fallback"):
        mc.simulate(trace, mc.GATE_015, 2)
    assert mc.simulate(trace, mc.GATE_015.replace(fallback="drop"), 2).summary()["calls"] == 12


def test_real_gpt_oss_npz(test_data):
    trace = mc.load_trace(test_data / "gptoss20b_mmlu20.npz")
    assert trace.topk_ids.shape == (10_220, 24, 4)
    assert trace.shape.num_experts == 32
    assert np.flatnonzero(trace.document_start).tolist() == [511 * document for document in range(20)]
    by_rank = trace.gate_weights.mean(axis=(0, 1), dtype=np.float64)
    assert by_rank == pytest.approx([0.351, 0.264, 0.211, 0.174], abs=0.004)  # published means of the same model


REAL_CSV = {
    "helldez_qwen.route.csv": (mc.ModelShape(48, 128, 6, expert_bytes=3_059_712), 129, 27),
    "helldez_gptoss.route.csv": (mc.ModelShape(36, 128, 2, expert_bytes=13_219_200), 65, 84),
}


@pytest.mark.parametrize("name", REAL_CSV)
def test_real_route_csv(test_data, name):
    shape, num_tokens, num_dropped = REAL_CSV[name]
    trace = mc.load_trace(test_data / name)
    assert trace.shape == shape
    assert trace.num_tokens == num_tokens
    assert trace.source["dropped_tokens"] == num_dropped
    assert mc.simulate(trace, mc.FETCH_EVERY_MISS, shape.top_k).summary()["fetched"] > 0


def test_real_first_line(test_data):
    """The first decoded token of the published file, read by eye."""
    path = test_data / "helldez_qwen.route.csv"
    lines = [line.split(",") for line in path.read_text().splitlines() if line.startswith("0,1,")]
    calls = [(float(line[6]), int(line[5])) for line in lines[:6]]
    trace = mc.load_trace(path)
    assert trace.topk_ids[1, 0].tolist() == [expert for _, expert in sorted(calls, key=lambda call: (-call[0], call[1]))]


def test_lengths_that_an_archive_announces_are_not_believed(tmp_path):
    """A small .npz that announces terabytes is refused before anything of that size is asked for."""
    path, header = tmp_path / "bomb.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (2**40, 2, 2)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", header.getvalue() + b"\0" * 64)
        archive.writestr("weights.npy", header.getvalue() + b"\0" * 64)
    with pytest.raises(mc.TraceError, match=r"announces int64 \[1099511627776, 2, 2\], but holds 64 bytes"):
        mc.load_trace(path)


def test_what_is_given_and_what_a_file_says(npz, csv, tmp_path):
    path = csv(csv_lines())
    assert mc.load_trace(path, num_experts=5, top_k=2).num_tokens == 6
    with pytest.raises(mc.TraceError, match="num_experts=6 was given, but the file holds num_experts=5"):
        mc.load_trace(path, num_experts=6)
    mc.load_trace(path).save(tmp_path / "own.safetensors")
    with pytest.raises(mc.TraceError, match="top_k=3 was given, but the file holds top_k=2"):
        mc.load_trace(tmp_path / "own.safetensors", top_k=3)
