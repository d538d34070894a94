"""Token losses: teacher-forced, per document, in nats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, documents, olmoe, qwen3_next

from moecache import score as module
from moecache.score import as_documents, document_losses, document_starts, score


def by_hand(model, document):
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(document)[None]).logits[0].double()
    shifted = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(document)[1:, None])
    return -shifted[:, 0].numpy()


@pytest.mark.parametrize("build", [qwen3_next, olmoe])
def test_losses_are_of_each_token_given_those_before(build):
    model, texts = build(), documents()
    losses = score(model, texts)
    expected = np.concatenate([np.concatenate([[np.nan], by_hand(model, text)]) for text in texts])
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    assert np.array_equal(np.isnan(losses), document_starts(as_documents(model, texts)))


def test_documents_do_not_see_each_other():
    model, texts = olmoe(), documents()
    assert np.array_equal(score(model, texts), np.concatenate([score(model, text) for text in texts]), equal_nan=True)


def test_head_in_blocks_gives_the_same_losses(monkeypatch):
    model, text = olmoe(), documents()[0]
    whole, logits = document_losses(model, text.astype(np.int32), keep_logits=True)
    monkeypatch.setattr(module, "LOGITS_PER_BLOCK", 7 * VOCABULARY)
    blocks, block_logits = document_losses(model, text.astype(np.int32), keep_logits=True)
    np.testing.assert_allclose(blocks, whole, atol=1e-5)
    np.testing.assert_allclose(block_logits, logits, atol=1e-5)


@pytest.mark.parametrize("build", [qwen3_next, olmoe])
def test_stepping_gives_the_losses_of_one_forward(build):
    model, text = build(), documents()[0].astype(np.int32)
    whole, stepped = (document_losses(model, text, stepped=stepped)[0] for stepped in (False, True))
    np.testing.assert_allclose(stepped, whole, atol=1e-3)


def test_documents_come_in_many_forms():
    model = olmoe()
    expected = score(model, np.array([3, 1, 4]))
    for form in ([3, 1, 4], torch.tensor([3, 1, 4]), torch.tensor([[3, 1, 4]]), [[3, 1, 4]], [torch.tensor([3, 1, 4])]):
        assert np.array_equal(score(model, form), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "no document"),
        ([[1, 2], []], "document 1 must be a row of at least one integer"),
        ([0.5, 1.0], "document 0 must be a row of at least one integer token id, got float64"),
        ([1, VOCABULARY], f"from 1 to {VOCABULARY}, but the vocabulary is 0 to {VOCABULARY - 1}"),
        ([-1, 2], "from -1 to 2"),
    ],
)
def test_impossible_documents_are_refused(token_ids, message):
    with pytest.raises(ValueError, match=message):
        score(olmoe(), token_ids)


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        score(olmoe().train(), documents())


def test_absent_experts_are_refused():
    model = olmoe()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to("meta"))
    with pytest.raises(ValueError, match=r"layers\.1 are on the meta device"):
        score(model, documents())
