"""Router logits that torch saved: read without running anything, checked where torch does not look."""

import zipfile

import numpy as np
import pytest
import torch

import moecache as mc

LOGITS = np.random.default_rng(5).normal(size=(9, 2, 7)).astype(np.float32)


@pytest.fixture
def pt(tmp_path):
    def write(content):
        path = tmp_path / "logits.pt"
        torch.save(content, path)
        return path

    return write


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_logits(pt, dtype):
    logits = torch.from_numpy(LOGITS).to(getattr(torch, dtype))
    trace = mc.load_trace(pt(logits), top_k=3, norm_topk_prob=False)
    assert trace.shape == mc.ModelShape(2, 7, 3, norm_topk_prob=False)
    chosen = torch.softmax(logits.double(), -1).topk(3)
    assert np.array_equal(trace.topk_ids, chosen.indices.numpy())
    np.testing.assert_allclose(trace.gate_weights, (chosen.values / chosen.values.sum(-1, keepdim=True)).numpy(), rtol=1e-6)
    assert np.array_equal(trace.selection_scores, logits.to(torch.float16).numpy())
    assert trace.source == {"file": "logits.pt", "format": "torch logits"}
    assert mc.simulate(trace, mc.SUBSTITUTE_EVERY_MISS, 3).summary()["substituted"] > 0


def test_torch_logits_that_are_a_part_of_a_tensor(pt):
    whole = torch.from_numpy(np.concatenate([LOGITS, LOGITS], 1))
    trace = mc.load_trace(pt(whole[:, ::2]), top_k=2, norm_topk_prob=True)
    assert np.array_equal(trace.selection_scores, LOGITS[:, [0, 0]].astype(np.float16))


def test_equal_logits_go_to_the_lower_id(pt):
    trace = mc.load_trace(pt(torch.zeros(1, 1, 5)), top_k=2, norm_topk_prob=True)
    assert trace.topk_ids.tolist() == [[[0, 1]]]
    assert trace.gate_weights.tolist() == [[[0.5, 0.5]]]


def spoiled_logits(value):
    logits = torch.from_numpy(LOGITS.copy())
    logits[4, 1, 3] = value
    return logits


class Stranger:
    """Something that no reader may run."""

    def __reduce__(self):
        return (print, ("executed",))


BAD_PT = {
    "a dictionary": ({"router_logits": torch.from_numpy(LOGITS)}, "it holds dict, expected one tensor"),
    "code": (Stranger(), r"not a readable \.pt file"),
    "a matrix": (torch.from_numpy(LOGITS[:, 0]), r"holds float32 \[9, 7\], expected reals \[tokens, layers, experts\]"),
    "integers": (torch.zeros(2, 2, 5, dtype=torch.int64), r"holds int64 \[2, 2, 5\]"),
    "nothing": (torch.zeros(0, 2, 5), r"holds float32 \[0, 2, 5\]"),
    "NaN": (spoiled_logits(np.nan), "token 4, layer 1: a router logit that is NaN or infinite"),
    "infinity": (spoiled_logits(np.inf), "token 4, layer 1: a router logit that is NaN or infinite"),
    "too large for float16": (spoiled_logits(1e6), r"token 4, layer 1: a selection score that is NaN or \+infinity"),
    "two experts": (torch.zeros(2, 2, 2), "impossible model shape"),
    "sparse": (torch.from_numpy(LOGITS).to_sparse(), "it holds Tensor, expected one tensor|not a readable"),
}


@pytest.mark.parametrize("name", BAD_PT)
def test_damaged_pt(pt, name, capsys):
    content, message = BAD_PT[name]
    path = pt(content)
    with pytest.raises(mc.TraceError, match=message) as caught:
        mc.load_trace(path, top_k=3, norm_topk_prob=True)
    assert str(path) in str(caught.value)
    assert capsys.readouterr().out == ""


def test_logits_need_the_routing(pt):
    path = pt(torch.from_numpy(LOGITS))
    for given in ({}, {"top_k": 2}, {"norm_topk_prob": True}):
        with pytest.raises(mc.TraceError, match="do not tell the routing: give top_k= and norm_topk_prob="):
            mc.load_trace(path, **given)
    with pytest.raises(mc.TraceError, match="num_experts=8 was given, but the file holds num_experts=7"):
        mc.load_trace(path, num_experts=8, top_k=2, norm_topk_prob=True)


def test_a_pickle_that_announces_more_than_the_file_holds(pt):
    """Older versions of torch read past the end of the data: the checksums are right, the length in the pickle is not."""
    path = pt(torch.arange(2 * 2 * 5, dtype=torch.float32).reshape(2, 2, 5))
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:40] if name.endswith("/data/0") else content)
    with pytest.raises(mc.TraceError, match=r"announces 80 bytes, but its data have \[40\]|\(40 bytes\) does not match"):
        mc.load_trace(path, top_k=2, norm_topk_prob=True)
