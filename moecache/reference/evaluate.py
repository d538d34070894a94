"""What a reference model can do: token losses and bits per byte per domain, tasks solved, shape of its routing.

Teacher-forced on held-out documents. Bits per byte = sum of token losses / (ln 2 x bytes of the predicted text); unlike
perplexity it can be compared across tokenizers. The routing figures say whether routing is learnt: share of experts
called, normalised entropy of the calls, mean gate weight by rank.

Letters: T tokens, L layers, E experts, K top-k. Figures are measured on the exact model, without any cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moecache.reference.answers import accuracy, greedy, held_out_questions
from moecache.reference.held_out import Document, held_out_documents
from moecache.reference.loading import load_model, load_tokenizer
from moecache.reference.network import RouterTap
from moecache.reference.texts import TASK_MODULES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel


@torch.no_grad()
def document_losses(model: PreTrainedModel, document: Document) -> NDArray[np.float64]:
    """Loss in nats of every token given those before it [n - 1]; the document's first token has none."""
    ids = torch.from_numpy(document.tokens.astype(np.int64))[None]
    logits = model(ids, use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double().numpy()


def num_bytes(tokenizer: Tokenizer, document: Document) -> int:
    """Bytes of the text that the document's tokens after the first stand for."""
    return len(tokenizer.decode(document.tokens[1:].tolist()).encode())


def domain_figures(model: PreTrainedModel, tokenizer: Tokenizer, documents: Sequence[Document]) -> dict[str, dict[str, float]]:
    """Per domain and over `all`: documents, mean token loss (nats), perplexity, bits per byte."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for document in documents:
        losses = document_losses(model, document)
        values = (1, losses.sum(), len(losses), num_bytes(tokenizer, document))
        for domain in (document.domain, "all"):
            sums[domain] = [a + b for a, b in zip(sums[domain], values, strict=True)]
    return {
        domain: {
            "num_documents": int(count),
            "loss_nats": float(total / tokens),
            "perplexity": math.exp(total / tokens),
            "bits_per_byte": float(total / math.log(2) / size),
        }
        for domain, (count, total, tokens, size) in sums.items()
    }


@torch.no_grad()
def routing_figures(model: PreTrainedModel, documents: Sequence[Document]) -> dict[str, list]:
    """Per layer: share of experts called, normalised entropy of calls; over all: mean gate weight by rank [K]."""
    tap = RouterTap(model)
    num_layers = len(tap.routers)
    calls: NDArray[np.float64] = np.zeros((num_layers, model.config.num_experts))
    weights: list[NDArray[np.float64]] = []
    for document in documents:
        tap.clear()
        model(torch.from_numpy(document.tokens.astype(np.int64))[None], use_cache=False)
        for layer in range(num_layers):
            calls[layer] += torch.bincount(tap.topk_ids[layer].reshape(-1), minlength=calls.shape[1]).numpy()
            gate = tap.gate_weights[layer].sort(-1, descending=True).values
            weights.append((gate / gate.sum(-1, keepdim=True)).mean(0).double().numpy())
    tap.close()
    shares = calls / calls.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(1) / math.log(calls.shape[1])
    return {
        "experts_called_fraction": (calls > 0).mean(1).round(4).tolist(),
        "normalised_entropy": entropy.round(4).tolist(),
        "gate_weight_by_rank": np.mean(weights, 0).round(4).tolist(),
    }


def task_figures(model: PreTrainedModel, tokenizer: Tokenizer, num_questions: int = 60) -> dict[str, float]:
    """Share of held-out questions of each generated domain that greedy decoding answers right."""
    generate = greedy(model, tokenizer)
    return {
        domain: accuracy(held_out_questions(domain, num_questions), generate, lambda text: tokenizer.encode(text).ids)
        for domain in TASK_MODULES
    }


def evaluate(name: str = "reference-512", directory: str | None = None, num_documents: int = 175, num_questions: int = 60) -> dict:
    """All figures of a model in one dictionary of plain values."""
    model, tokenizer = load_model(name, directory), load_tokenizer(name, directory)
    documents = held_out_documents(num_documents, name=name, directory=directory)
    return {
        "domains": domain_figures(model, tokenizer, documents),
        "tasks": task_figures(model, tokenizer, num_questions),
        "num_questions": num_questions,
        "routing": routing_figures(model, documents[: min(35, num_documents)]),
    }
