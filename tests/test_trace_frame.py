"""Tables of calls: one row a call, in any order and under any names, and everything that can be wrong with one."""

import numpy as np
import pandas as pd
import pytest

import moecache as mc


def calls(num_documents=1):
    """A table of 2 documents x 3 tokens x 2 layers x 2 calls."""
    rows = [
        (f"text {d}", token, layer, rank, (token + layer + rank + d) % 5, 0.75 - 0.5 * rank)
        for d in range(num_documents) for token in range(3) for layer in range(2) for rank in range(2)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["document", "token", "layer", "rank", "expert", "weight"])


def test_from_frame():
    trace = mc.RouterTrace.from_frame(calls(2).sample(frac=1, random_state=3).sort_values("document"), document="document", num_experts=5)
    assert trace.shape == mc.ModelShape(2, 5, 2)
    assert trace.topk_ids[:3].tolist() == [[[0, 1], [1, 2]], [[1, 2], [2, 3]], [[2, 3], [3, 4]]]
    assert trace.topk_ids[3].tolist() == [[1, 2], [2, 3]]
    assert trace.document_start.tolist() == [True, False, False] * 2
    assert (trace.gate_weights == [0.75, 0.25]).all()
    assert trace.source == {}


def test_other_names_kinds_and_numberings():
    """Layers 3 and 7 of a model whose other layers are dense; ranks from 1; numbers as words; unsigned and nullable columns."""
    frame = calls().assign(layer=lambda f: f["layer"] * 4 + 3, rank=lambda f: f["rank"] + 1, expert=lambda f: f["expert"].astype(str))
    frame = frame.astype({"token": "UInt16", "rank": "float32"}).rename(columns={"token": "t", "layer": "l", "rank": "r", "expert": "e"})
    trace = mc.RouterTrace.from_frame(frame, "t", "l", "r", "e", shape=None, num_experts=5, source={"text": "mine"})
    assert trace.source == {"text": "mine", "layers": [3, 7]}
    expected = mc.RouterTrace.from_frame(calls(), num_experts=5)
    assert np.array_equal(trace.topk_ids, expected.topk_ids)
    unranked = mc.RouterTrace.from_frame(calls().drop(columns="rank"), rank=None, num_experts=5)
    assert np.array_equal(unranked.topk_ids, expected.topk_ids)
    shaped = mc.RouterTrace.from_frame(calls(), shape=mc.ModelShape(2, 5, 2, expert_bytes=9))
    assert np.array_equal(shaped.topk_ids, expected.topk_ids)
    assert shaped.shape.expert_bytes == 9


def test_a_file_of_json_lines(tmp_path):
    calls(2).to_json(tmp_path / "calls.jsonl", orient="records", lines=True)
    frame = pd.read_json(tmp_path / "calls.jsonl", lines=True)
    assert mc.RouterTrace.from_frame(frame, document="document", num_experts=5).num_tokens == 6


def cell(row, column, value):
    frame = calls().astype(object)
    frame.loc[row, column] = value
    return frame


SHAPE = mc.ModelShape(2, 5, 2)
BAD_FRAMES = {
    "no column": (calls().drop(columns=["layer", "weight"]), {}, r"columns \['layer', 'weight'\] are missing; the table has \['document'"),
    "no rows": (calls()[:0], {}, "the table holds no calls"),
    "no number of experts": (calls(), {"num_experts": None}, "does not tell the number of experts: give num_experts or shape"),
    "a call twice": (pd.concat([calls(), calls()[5:6]]), {}, "token 1, layer 0, rank 1: the call stands twice"),
    "a missing call": (calls().drop(6), {}, r"token 1, layer 1 lacks its call of rank 0; every token needs 2 layers x 2 calls"),
    "a missing layer": (calls().drop([2, 3]), {}, "token 0, layer 1 lacks its call of rank 0"),
    "missing at the end": (calls()[:-1], {}, r"token 2, layer 1 lacks its call of rank 1; .* \(is it cut\?\)"),
    "a rank more": (cell(6, "rank", 2), {}, "token 0, layer 0 lacks its call of rank 2"),
    "a call more": (pd.concat([calls(), calls()[5:6]]), {"rank": None, "shape": SHAPE}, "token 1, layer 0: more than 2 calls"),
    "a call less": (calls().drop(6), {"rank": None}, "token 1, layer 1 lacks its call of rank 1"),
    "no expert": (cell(7, "expert", None), {}, r"token 1, layer 1: column 'expert' holds None, which is no integer \(row 7\)"),
    "half an expert": (cell(7, "expert", 1.5), {}, "token 1, layer 1: column 'expert' holds 1.5, which is no integer"),
    "a word": (cell(7, "expert", "third"), {}, "token 1, layer 1: column 'expert' holds third, which is no integer"),
    "an endless number": (cell(7, "rank", np.inf), {}, "token 1, layer 1: column 'rank' holds inf, which is no integer"),
    "a number past float64": (cell(7, "token", 1e30), {}, r"layer 1: column 'token' holds 1e\+30, which is no integer"),
    "truth": (calls().assign(expert=True), {}, "token 0, layer 0: column 'expert' holds True, which is no integer"),
    "no such expert": (cell(7, "expert", 5), {}, r"token 1, layer 1: column 'expert' holds 5, outside 0\.\.4"),
    "a negative expert": (cell(7, "expert", -1), {}, "token 1, layer 1: column 'expert' holds -1, outside"),
    "no such layer": (cell(7, "layer", 2), {"shape": SHAPE}, r"layer 2: column 'layer' holds 2, outside 0\.\.1"),
    "no weight": (cell(7, "weight", np.nan), {}, "token 1, layer 1: column 'weight' holds nan, which is no gate weight"),
    "a negative weight": (cell(7, "weight", -0.25), {}, "token 1, layer 1: column 'weight' holds -0.25"),
    "a wrong sum": (cell(7, "weight", 0.5), {}, "token 1, layer 1: gate weights that do not sum to 1"),
    "one expert twice": (cell(7, "expert", 2), {}, "token 1, layer 1: the same expert called twice: 2"),
    "no document": (cell(7, "document", None), {"document": "document"}, "token 1 .*column 'document' holds None, which names no document"),
    "another document": (
        cell(7, "document", "b"), {"document": "document"}, "token 1 of document text 0, layer 1 lacks its call of rank 1"
    ),
    "no such model": (calls(), {"num_experts": 1}, r"column 'expert' holds \d, outside 0\.\.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_tables_that_are_no_trace(name):
    frame, options, message = BAD_FRAMES[name]
    with pytest.raises(mc.TraceError, match=message):
        mc.RouterTrace.from_frame(frame, **{"num_experts": 5, **options})


def test_errors_name_the_tables_own_tokens_and_layers():
    frame = cell(7, "weight", 0.5)
    frame["token"], frame["layer"] = frame["token"] + 100, frame["layer"] + 12
    with pytest.raises(mc.TraceError, match=r"^token 101, layer 13: gate weights that do not sum to 1"):
        mc.RouterTrace.from_frame(frame, num_experts=5)
