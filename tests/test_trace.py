"""Traces on disk: what goes in comes out bit for bit, and whatever is damaged, foreign or impossible is named."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from streams import random_stream

import moecache as mc
from moecache.trace import concatenate_layers, concatenate_tokens, to_recorded

NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K = 12, 2, 10, 3
SHAPE = mc.ModelShape(NUM_LAYERS, NUM_EXPERTS, TOP_K, expert_bytes=1234, scoring="sigmoid", norm_topk_prob=False)
SOURCE = {"model": "tiny", "hashes": ["a", "b"], "größe": 1.5}


def arrays():
    ids, weights, scores = random_stream(3, NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, TOP_K)
    return {"topk_ids": ids, "gate_weights": weights, "selection_scores": scores}


def new_trace(**changes):
    starts = np.isin(np.arange(NUM_TOKENS), [0, 5])
    values = {**arrays(), "token_ids": np.arange(NUM_TOKENS), "document_start": starts, "shape": SHAPE, "source": SOURCE}
    return mc.RouterTrace.from_arrays(**{**values, **changes})


def assert_equal(a, b):
    for name in ("topk_ids", "gate_weights", "selection_scores", "token_ids", "document_start"):
        mine, other = getattr(a, name), getattr(b, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype, name
            assert mine.tobytes() == other.tobytes(), name
    assert (a.shape, a.source) == (b.shape, b.source)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "trace.safetensors"
    new_trace().save(path)
    return path


def test_round_trip(path, tmp_path):
    assert_equal(mc.RouterTrace.load(path), new_trace())
    without = mc.RouterTrace.from_arrays(arrays()["topk_ids"], arrays()["gate_weights"], num_experts=NUM_EXPERTS)
    without.save(tmp_path / "new" / "folder.safetensors")
    assert_equal(mc.load_trace(tmp_path / "new" / "folder.safetensors"), without)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "trace.safetensors"]


def test_saving_leaves_no_half_file(path, monkeypatch):
    before = path.read_bytes()

    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("moecache.trace.file.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        new_trace(source={}).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_missing_file(tmp_path):
    for load in (mc.RouterTrace.load, mc.load_trace):
        with pytest.raises(FileNotFoundError, match=r"no trace at .*absent"):
            load(tmp_path / "absent.safetensors")


def test_truncated_at_any_length(path):
    content = path.read_bytes()
    lengths = sorted({0, 1, 7, 8, 9, 40, *np.linspace(10, len(content) - 1, 30).astype(int).tolist()})
    for length in lengths:
        path.write_bytes(content[:length])
        for memory_map in (False, True):
            for load in (mc.RouterTrace.load, mc.load_trace):
                with pytest.raises(mc.TraceError, match=re.escape(str(path))):
                    load(path, memory_map=memory_map)


def test_grown_file(path):
    path.write_bytes(path.read_bytes() + b"\0")
    for memory_map in (False, True):
        with pytest.raises(mc.TraceError, match="not a complete safetensors file"):
            mc.RouterTrace.load(path, memory_map)


def test_foreign_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.zeros((3, 3), np.float32)}, path)
    with pytest.raises(mc.TraceError, match=r"format None instead of .*not a trace of this package"):
        mc.load_trace(path)
    save_file({"weight": np.zeros((3, 3), np.float32)}, path, {"format": "pt"})
    with pytest.raises(mc.TraceError, match="format 'pt' instead of"):
        mc.RouterTrace.load(path)


def rewritten(path, header=None, drop=(), **tensors):
    """The file with other tensors and header fields, and a checksum that fits them."""
    from moecache.trace import file as module

    trace = mc.RouterTrace.load(path)
    values = {name: getattr(trace, name) for name in ("topk_ids", "gate_weights", "selection_scores", "token_ids")}
    values |= {"document_start": trace.document_start.astype(np.uint8), **tensors}
    values = {name: np.ascontiguousarray(array) for name, array in values.items() if name not in drop}
    told = {"format": module.FORMAT, "shape": json.dumps(vars(SHAPE)), "source": json.dumps(SOURCE), **(header or {})}
    told = {name: value for name, value in told.items() if name not in drop}
    told.setdefault("sha256", module.checksum(values, told))
    save_file(values, path, told)
    return path


def lie(**changes):
    return {"shape": json.dumps({**vars(SHAPE), **changes})}


def test_rewriting_alone_changes_nothing(path):
    assert_equal(mc.RouterTrace.load(rewritten(path)), new_trace())


NO_TOKENS = {name: array[:0] for name, array in arrays().items()}
NO_TOKENS |= {"token_ids": np.zeros(0, np.int32), "document_start": np.zeros(0, np.uint8)}

BAD_FILES = {
    "no checksum": ({"header": {"sha256": ""}}, "do not match the file's own checksum"),
    "a missing tensor": ({"drop": ("gate_weights", "token_ids")}, r"tensors \['gate_weights', 'token_ids'\] are missing"),
    "no shape": ({"drop": ("shape",)}, "shape or source cannot be read"),
    "a shape that is no JSON": ({"header": {"shape": "{"}}, "shape or source cannot be read"),
    "an unknown shape field": ({"header": lie(num_heads=3)}, "shape or source cannot be read"),
    "more layers": ({"header": lie(num_layers=3)}, r"topk_ids is int16 \[12, 2, 3\], expected int16 \[12, 3, 3\]"),
    "another top-k": ({"header": lie(top_k=2)}, r"expected int16 \[12, 2, 2\]"),
    "fewer experts": ({"header": lie(num_experts=9)}, r"selection_scores is float16 \[12, 2, 10\], expected float16 \[12, 2, 9\]"),
    "impossible top-k": ({"header": lie(top_k=11)}, "impossible model shape"),
    "unknown scoring": ({"header": lie(scoring="tanh")}, "scoring='tanh' is unknown"),
    "shape in words": ({"header": lie(num_layers="two")}, "shape or source cannot be read"),
    "wide ids": ({"topk_ids": arrays()["topk_ids"].astype(np.int64)}, r"topk_ids is int64 .* expected int16"),
    "half weights": ({"gate_weights": arrays()["gate_weights"].astype(np.float16)}, r"gate_weights is float16 .* expected float32"),
    "wide scores": ({"selection_scores": arrays()["selection_scores"].astype(np.float32)}, r"selection_scores is float32"),
    "fewer token ids": ({"token_ids": np.zeros(11, np.int32)}, r"token_ids is int32 \[11\], expected int32 \[12\]"),
    "no document": ({"document_start": np.zeros(12, np.uint8)}, "document_start is False at token 0"),
    "no tokens": (NO_TOKENS, "no tokens"),
    "a tensor more": ({"weight": np.zeros(3, np.float32)}, r"tensors \['weight'\] are unknown"),
    "a source that is a list": ({"header": {"source": "[1]"}}, "source is list, expected an object"),
    "layers in halves": ({"header": lie(num_layers=2.0)}, r"shape or source cannot be read \(num_layers=2.0"),
    "document marks of two": ({"document_start": np.full(12, 2, np.uint8)}, "document_start is uint8 up to 2, expected uint8 0 or 1"),
    "wide document marks": ({"document_start": np.ones(12, np.int32)}, "document_start is int32 up to 1"),
    "four axes": ({"topk_ids": np.zeros((12, 2, 3, 1), np.int16)}, r"topk_ids has shape \[12, 2, 3, 1\]"),
    "predictions out of range": ({"predicted_ids": np.full((12, 2, 1), 10, np.int16)}, r"a predicted id outside -1\.\.9: 10"),
    "ids without scores": (
        {"recorded_ids": np.zeros((12, 2, 4), np.int16), "drop": ("selection_scores",)}, "but there are no selection_scores"
    ),
    "a single number": ({"topk_ids": np.int16([3])}, r"topk_ids is int16 \[1\], expected int16 \[1, 2, 3\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_contradict_themselves(path, name):
    changes, message = BAD_FILES[name]
    rewritten(path, **changes)
    for memory_map in (False, True):
        with pytest.raises(mc.TraceError, match=message) as caught:
            mc.RouterTrace.load(path, memory_map)
        assert str(path) in str(caught.value)


def spoiled(name, place, value):
    array = arrays()[name].copy()
    array[place] = value
    return {name: array}


PLACE = (7, 1)
SWAPPED = {name: arrays()[name].copy() for name in ("topk_ids", "gate_weights")}
for _array in SWAPPED.values():
    _array[PLACE] = _array[PLACE][::-1]
TIED = {"topk_ids": arrays()["topk_ids"].copy(), "gate_weights": arrays()["gate_weights"].copy()}
TIED["topk_ids"][PLACE], TIED["gate_weights"][PLACE] = [4, 6, 5], [0.5, 0.25, 0.25]

BAD_STEPS = {
    "a negative id": (spoiled("topk_ids", PLACE, [-1, 2, 3]), r"an expert id outside 0\.\.9: -1"),
    "an id too large": (spoiled("topk_ids", PLACE, [1, 10, 3]), r"an expert id outside 0\.\.9: 10"),
    "a double call": (spoiled("topk_ids", PLACE, [1, 3, 3]), "the same expert called twice: 3"),
    "a negative weight": (spoiled("gate_weights", PLACE, [0.7, 0.5, -0.2]), "negative or not finite: -0.2"),
    "NaN weight": (spoiled("gate_weights", PLACE, [0.5, np.nan, 0.2]), "negative or not finite: nan"),
    "infinite weight": (spoiled("gate_weights", PLACE, [np.inf, 0.5, 0.2]), "negative or not finite: inf"),
    "a sum too small": (spoiled("gate_weights", PLACE, [0.5, 0.3, 0.19]), r"do not sum to 1 \(divide them by their sum\): 0\.9"),
    "a sum too large": (spoiled("gate_weights", PLACE, [0.5, 0.3, 0.21]), r"do not sum to 1 .*: 1\.0"),
    "ranks out of order": (SWAPPED, "out of rank order"),
    "a tie out of order": (TIED, "out of rank order"),
    "NaN score": (spoiled("selection_scores", (*PLACE, 4), np.nan), r"NaN or \+infinity in float16: nan"),
    "negative NaN score": (spoiled("selection_scores", (*PLACE, 4), np.copysign(np.nan, -1)), r"NaN or \+infinity in float16: nan"),
    "infinite score": (spoiled("selection_scores", (*PLACE, 4), np.inf), r"NaN or \+infinity in float16: inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STEPS)
def test_impossible_steps_name_token_and_layer(path, name):
    changes, message = BAD_STEPS[name]
    with pytest.raises(mc.TraceError, match=f"{re.escape(str(path))}: token 7, layer 1: .*{message}"):
        mc.RouterTrace.load(rewritten(path, **changes))


def test_sums_within_the_tolerance_are_kept_as_they_are():
    weights = np.full((1, 1, 2), 0.501, np.float32)
    trace = mc.RouterTrace.from_arrays([[[0, 1]]], weights, num_experts=2)
    assert np.array_equal(trace.gate_weights, weights)


def test_from_arrays_sorts_into_rank_order():
    trace = mc.RouterTrace.from_arrays([[[5, 2, 9, 7]]], [[[0.2, 0.3, 0.2, 0.3]]], num_experts=10)
    assert trace.topk_ids.tolist() == [[[2, 7, 5, 9]]]
    assert trace.gate_weights.ravel().tolist() == pytest.approx([0.3, 0.3, 0.2, 0.2])
    assert (trace.topk_ids.dtype, trace.gate_weights.dtype) == (np.int16, np.float32)
    assert trace.token_ids.tolist() == [-1]
    assert trace.document_start.tolist() == [True]
    assert (trace.num_tokens, trace.shape) == (1, mc.ModelShape(1, 10, 4))


def test_ids_that_are_unsigned_are_sorted_as_numbers():
    trace = mc.RouterTrace.from_arrays(np.array([[[200, 3]]], np.uint8), [[[0.5, 0.5]]], num_experts=256)
    assert trace.topk_ids.tolist() == [[[3, 200]]]


FROM_ARRAYS = [
    ({"topk_ids": np.zeros((3, 2))}, r"topk_ids \(3, 2\) and gate_weights \(12, 2, 3\) must both be"),
    ({"gate_weights": np.ones((12, 2, 2))}, r"gate_weights \(12, 2, 2\)"),
    ({"router_logits": arrays()["selection_scores"]}, "router_logits or selection_scores, not both"),
    ({"selection_scores": None, "shape": None}, "their number is unknown: give num_experts or shape"),
    ({"topk_ids": arrays()["topk_ids"] + 0.5}, r"topk_ids are float64 \[12, 2, 3\]; expert ids are integers"),
    ({"topk_ids": arrays()["topk_ids"].astype(np.int64) + 65536}, r"token 0, layer 0: an expert id outside 0\.\.9: 655"),
    ({"selection_scores": arrays()["selection_scores"].astype(float) * 1e6}, r"NaN or \+infinity in float16"),
    ({"token_ids": np.arange(5)}, r"token_ids is int32 \[5\], expected int32 \[12\]"),
    ({"document_start": [True]}, r"document_start is bool \[1\]"),
    ({"predicted_ids": np.full((12, 2, 1), 70_000)}, r"token 0, layer 0: a predicted id outside -1\.\.9: 70000"),
    ({"predicted_ids": np.full((12, 1, 1), -1)}, r"predicted_ids is int16 \[12, 1, 1\], expected int16 \[12, 2, any\]"),
]


@pytest.mark.parametrize(("changes", "message"), FROM_ARRAYS)
def test_arrays_that_contradict_each_other(changes, message):
    with pytest.raises(mc.TraceError, match=message):
        new_trace(**changes)


IMPOSSIBLE = [
    ({"num_layers": 0}, "impossible model shape"),
    ({"num_layers": 40_000}, "impossible model shape"),
    ({"top_k": 0}, "impossible model shape"),
    ({"top_k": 11}, "impossible model shape"),
    ({"num_experts": 40_000}, "impossible model shape"),
    ({"expert_bytes": -1}, "impossible model shape"),
    ({"num_layers": 2.0}, r"num_layers=2\.0 must be an integer"),
    ({"expert_bytes": "many"}, "expert_bytes='many' must be an integer"),
    ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be True or False"),
]


@pytest.mark.parametrize(("field", "message"), IMPOSSIBLE)
def test_impossible_shapes(field, message):
    with pytest.raises(ValueError, match=message):
        mc.ModelShape(**{"num_layers": 2, "num_experts": 10, "top_k": 3, **field})


def test_recorded_scores():
    with np.errstate(over="raise"):
        recorded = to_recorded(np.array([-0.0, 0.0, 1e-9, -1e-9, 1.0004, 70000.0, -np.inf]))
    assert recorded.dtype == np.float16
    assert recorded.view(np.uint16)[:4].tolist() == [0, 0, 0, 0]  # no negative zero, which would sort below zero
    assert recorded[4:].tolist() == [1.0, np.inf, -np.inf]


def test_negative_zero_is_refused(path):
    """It would sort below 0.0, and cannot be corrected in a mapped file; nothing that is rounded by `to_recorded` has one."""
    scores = arrays()["selection_scores"].copy()
    scores[3, 0, 2] = -0.0
    new_trace(selection_scores=scores).save(path)
    assert mc.RouterTrace.load(path).selection_scores[3, 0, 2].tobytes() == b"\0\0"
    for memory_map in (False, True):
        with pytest.raises(mc.TraceError, match=r"token 3, layer 0: a selection score of -0\.0"):
            mc.RouterTrace.load(rewritten(path, selection_scores=scores), memory_map)
        new_trace().save(path)


def test_documents_and_windows():
    trace = new_trace()
    assert trace.document_slices() == [slice(0, 5), slice(5, 12)]
    window = trace.tokens(3, 8)
    assert window.num_tokens == 5
    assert window.document_start.tolist() == [True, False, True, False, False]
    assert np.array_equal(window.topk_ids, trace.topk_ids[3:8])
    assert np.array_equal(window.selection_scores, trace.selection_scores[3:8])
    assert window.token_ids.tolist() == [3, 4, 5, 6, 7]
    assert not trace.document_start[3]


def new_log():
    return mc.ExpertCache(SHAPE, mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(), 4).decide(*arrays().values())


def test_logs_are_compared_whole():
    log = new_log()
    assert log.is_equal(new_log())
    assert len(log.arrivals) > 3
    for name in ("outcome", "computed_ids", "evicted_ids", "arrivals", "substituted_mass"):
        changed = new_log()
        getattr(changed, name)[-1] += 1
        assert not log.is_equal(changed), name
    shuffled = new_log()
    shuffled.arrivals[:] = shuffled.arrivals[::-1].copy()
    assert log.is_equal(shuffled)


def test_logs_are_laid_together():
    cache = mc.ExpertCache(SHAPE, mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(), 4)
    parts = [cache.decide(*[a[rows] for a in arrays().values()]) for rows in (slice(0, 5), slice(5, 12))]
    assert concatenate_tokens(parts).is_equal(new_log())
    cache = mc.ExpertCache(SHAPE, mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(), 4)
    parts = [cache.decide(*[a[:, i : i + 1] for a in arrays().values()], first_layer=i) for i in range(NUM_LAYERS)]
    assert concatenate_layers(parts).is_equal(new_log())
    assert new_log().count(mc.Outcome.SUBSTITUTED) == (new_log().outcome == 3).sum() > 0
