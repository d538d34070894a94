"""How surprised a model is by each token of a document: token losses in nats, teacher-forced.

The loss of token t is -log p(token t | the tokens before it in the same document); the first token of a document has
nothing before it and gets NaN. One full forward a document gives all of them. Every instrument that computes losses
uses the functions below, so that two runs over the same text differ by what was done to the model and by nothing else.

A full forward's logits are tokens x vocabulary; the vocabulary head is applied in blocks of tokens, so the memory
stays flat. Caches and policies are not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tqdm import tqdm

from moecache import hf_internals

LOGITS_PER_BLOCK = 2**26  # 256 MiB of float32


def score(model: Any, token_ids: Any, progress: bool = False) -> NDArray[np.float64]:
    """Token losses of documents under the unchanged model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode.
    token_ids : array-like of int [T], or a list of such
        One document, or several; each is its own forward.
    progress : bool
        Show a bar over documents.

    Returns
    -------
    ndarray [T] float64
        Nats; documents one after the other, NaN at the first token of each.

    Raises
    ------
    ValueError
        If a document is empty or has token ids outside the vocabulary, or the model is in training mode.
    """
    documents = as_documents(model, token_ids)
    check_evaluation(model)
    with hf_internals.experts_implementation(model):
        losses = [document_losses(model, document)[0] for document in with_progress(documents, progress, "score")]
    return np.concatenate(losses)


def as_documents(model: Any, token_ids: Any) -> list[NDArray[np.int32]]:
    """Documents as a list of int32 arrays, whatever they came as: one [T], a list of them, or a matrix of rows.

    Raises
    ------
    ValueError
        If there is no token, or a token id lies outside the model's vocabulary.
    """
    documents = [_as_array(document) for document in _split(token_ids)]
    vocabulary = int(hf_internals.text_config(model).vocab_size)
    if not documents:
        raise ValueError("token_ids holds no document; give one array of token ids or a list of them")
    for position, document in enumerate(documents):
        if document.ndim != 1 or document.size == 0 or not np.issubdtype(document.dtype, np.integer):
            raise ValueError(
                f"document {position} must be a row of at least one integer token id, got {document.dtype} of shape {document.shape}; "
                "of a held-out document pass its .tokens"
            )
        if document.min() < 0 or document.max() >= vocabulary:
            raise ValueError(
                f"document {position} has token ids from {document.min()} to {document.max()}, but the vocabulary is "
                f"0 to {vocabulary - 1}; was it tokenized for another model?"
            )
    return [document.astype(np.int32) for document in documents]


def _split(token_ids: Any) -> Sequence[Any]:
    """A list of documents: the argument itself if its elements have a length, else the argument alone."""
    if len(token_ids) == 0:
        return []
    first = token_ids[0]
    is_single_number = np.ndim(first) == 0
    return [token_ids] if is_single_number else list(token_ids)


def _as_array(document: Any) -> NDArray[Any]:
    if isinstance(document, torch.Tensor):
        return document.detach().cpu().numpy()
    return np.asarray(document)


def document_starts(documents: Iterable[NDArray[np.int32]]) -> NDArray[np.bool_]:
    """Marks [T] of the first token of each document, for documents laid one after the other."""
    return np.concatenate([np.arange(document.size) == 0 for document in documents])


def check_evaluation(model: Any) -> None:
    """Refuse a model whose outputs are random, or whose experts are not all in this process's memory.

    Raises
    ------
    ValueError
        In training mode (dropout, router noise), or with expert weights on the meta device or on other processes.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout makes outputs random; call model.eval() first")
    for layer in hf_internals.moe_layers(model):
        num_absent = sum(weight.is_meta for weight in layer.experts.parameters())
        if num_absent or hf_internals.is_split_over_devices(layer.experts):
            raise ValueError(
                f"every expert must be in memory, but those of {layer.name} are "
                f"{'on the meta device' if num_absent else 'spread over processes'}; load the whole model on one device"
            )


def describe_model(model: Any, documents: list[NDArray[np.int32]]) -> dict[str, Any]:
    """Which model read which text, as plain JSON values."""
    config = hf_internals.text_config(model)
    return {
        "model": str(getattr(config, "name_or_path", "") or type(model).__name__),
        "model_type": hf_internals.model_type(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_documents": len(documents),
        "tokens_sha256": hashlib.sha256(np.concatenate(documents).astype("<i4").tobytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def with_progress(documents: list[Any], progress: bool, label: str) -> Iterable[Any]:
    """The documents, with a bar where one is wanted."""
    return tqdm(documents, desc=label, unit="document", disable=not progress)


@dataclass(frozen=True)
class DocumentScores:
    """What a model says about one document of T tokens; entry t is about token t given those before it, NaN at the first.

    `loss_nats` [T] float64; where asked for `logits` [T, V] float32, and against the exact model `kl_nats` [T] float64 =
    KL(exact || this model) and `same_top_token` [T] float64, 1 where both hold the same token for the likeliest, else 0.
    """

    loss_nats: NDArray[np.float64]
    logits: NDArray[np.float32] | None = None
    kl_nats: NDArray[np.float64] | None = None
    same_top_token: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class ExactDocument:
    """The unchanged model's answer to one document: token losses, and what its logits can be had from again, in small memory."""

    loss_nats: NDArray[np.float64]
    hidden: torch.Tensor | None
    stepped_logits: tuple[torch.Tensor, ...]

    def logits(self, model: Any) -> Iterator[torch.Tensor]:
        """Blocks [n, V], cut as the model's own."""
        return iter(self.stepped_logits) if self.hidden is None else _head_in_blocks(model, self.hidden)


@torch.no_grad()
def document_losses(
    model: Any, document: NDArray[np.int32], keep_logits: bool = False, stepped: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float32] | None]:
    """Token losses [T] of one document, and its logits [T, V] float32 if they are wanted.

    One full forward, or with `stepped` one forward a token with the model's decoding cache, as in generation.
    """
    scores = score_document(model, document, keep_logits, stepped)
    return scores.loss_nats, scores.logits


@torch.no_grad()
def exact_document(model: Any, document: NDArray[np.int32], stepped: bool = False) -> ExactDocument:
    """The model's answer to one document, kept to compare others with; nothing may be replacing its routing meanwhile."""
    ids = torch.from_numpy(document).to(model.device, torch.int64)
    hidden = None if stepped else _hidden(model, ids)
    steps = tuple(_stepped_logits(model, ids)) if hidden is None else ()
    blocks = iter(steps) if hidden is None else _head_in_blocks(model, hidden)
    return ExactDocument(_losses_of_blocks(blocks, ids), hidden, steps)


@torch.no_grad()
def score_document(
    model: Any, document: NDArray[np.int32], keep_logits: bool = False, stepped: bool = False, exact: ExactDocument | None = None
) -> DocumentScores:
    """Everything that is asked for about one document, block by block of its logits; with `exact` also the distance from that."""
    ids = torch.from_numpy(document).to(model.device, torch.int64)
    others = None if exact is None else exact.logits(model)
    losses, kept, divergence, agreement, start = [], [], [], [], 0
    for logits in _stepped_logits(model, ids) if stepped else _head_in_blocks(model, _hidden(model, ids)):
        stop = start + len(logits)
        losses.append(losses_of(logits, ids[start + 1 : stop + 1]))
        if keep_logits:
            kept.append(logits.to(torch.float32).cpu().numpy())
        if others is not None:
            true = next(others)
            divergence.append(divergence_nats(true, logits))
            agreement.append((true.argmax(-1) == logits.argmax(-1)).cpu().numpy().astype(np.float64))
        start = stop
    return DocumentScores(
        _from_second_token(losses),
        np.concatenate(kept) if keep_logits else None,
        _from_second_token(divergence)[: len(document)] if exact is not None else None,
        _from_second_token(agreement)[: len(document)] if exact is not None else None,
    )


def divergence_nats(exact_logits: torch.Tensor, logits: torch.Tensor) -> NDArray[np.float64]:
    """KL(exact || other) [n] in nats, from logits [n, V]: what is lost by taking the other's probabilities for the exact ones."""
    true, other = (torch.log_softmax(values.to(torch.float32), dim=-1) for values in (exact_logits, logits))
    return (true.exp() * (true - other)).sum(-1, dtype=torch.float64).cpu().numpy()


def _from_second_token(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """NaN, then the parts: what logits say is about the token after."""
    return np.concatenate([[np.nan], *parts])


def _losses_of_blocks(blocks: Iterable[torch.Tensor], ids: torch.Tensor) -> NDArray[np.float64]:
    losses, start = [], 0
    for logits in blocks:
        losses.append(losses_of(logits, ids[start + 1 : start + len(logits) + 1]))
        start += len(logits)
    return _from_second_token(losses)


def _hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, H] after the last norm, from one forward."""
    return hf_internals.final_hidden_states(model, ids[None], use_cache=False).last_hidden_state[0]


def _head_in_blocks(model: Any, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits [n, V] of successive blocks of tokens."""
    block = max(1, LOGITS_PER_BLOCK // int(hf_internals.text_config(model).vocab_size))
    for start in range(0, len(hidden), block):
        yield hf_internals.vocabulary_logits(model, hidden[start : start + block])


def _stepped_logits(model: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits [1, V] of one token after the other."""
    keyword, cache = hf_internals.cache_keyword(model), None
    for token in range(len(ids)):
        output = model(input_ids=ids[None, token : token + 1], use_cache=True, **{keyword: cache})
        cache = hf_internals.decoding_cache(output)
        yield output.logits[0]


def losses_of(logits: torch.Tensor, next_ids: torch.Tensor) -> NDArray[np.float64]:
    """-log p in nats of the next tokens [n], from logits [n or n + 1, V]; a last row without a next token is dropped."""
    logits = logits[: len(next_ids)].to(torch.float32)
    loss = torch.nn.functional.cross_entropy(logits, next_ids, reduction="none")
    return loss.cpu().numpy().astype(np.float64)
