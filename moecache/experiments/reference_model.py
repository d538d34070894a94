"""The reference models as language models and as routers: losses, routing, tasks.

What would show that a small trained model is not a toy? Four things, measured as tidy tables:

- it predicts held-out text (`by_document`; what it must beat is in `baselines`),
- its routing is learnt and used: which experts each domain calls, how evenly, how much neighbouring tokens share (`layers`, `gates`,
  `use`, `overlaps`), and what a cache makes of that (`capacity`, `target_slots_by_layer`),
- the choice of expert matters (`reference_controls`),
- it solves held-out tasks (`tasks`).

One pass over the text serves all tables of the first two. Letters: T tokens, L layers, E experts a layer, K top-k. No table knows how it
is compared or shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from moecache.experiments.baselines import label, text_of
from moecache.experiments.capacity import warm_start
from moecache.policy import FETCH_EVERY_MISS
from moecache.record import recording
from moecache.reference import Document
from moecache.reference.answers import Question, extract_answer, greedy, held_out_questions, is_right
from moecache.reference.loading import model_folder
from moecache.reference.texts import TASK_MODULES
from moecache.score import score
from moecache.simulate import simulate
from moecache.trace import RouterTrace
from moecache.trace_report import neighbour_overlap


def card(name: str) -> dict[str, Any]:
    """Sizes of a reference model from its files: `num_layers`, `num_experts`, `top_k`, `hidden_size`, `expert_width`, `total_parameters`,
    `active_parameters` (a token's: all but the experts that it does not call), `weight_rule`, `shared_expert`, `training_tokens`."""
    config = json.loads((model_folder(name) / "config.json").read_text())
    total, routed = 0, 0
    with safe_open(model_folder(name) / "model.safetensors", framework="np") as file:
        for key in file.keys():  # noqa: SIM118 - the file is no dict
            size = math.prod(file.get_slice(key).get_shape())
            total, routed = total + size, routed + size * (".experts." in key)
    idle_fraction = 1 - config["num_experts_per_tok"] / config["num_experts"]
    return {
        "model": name,
        "num_layers": config["num_hidden_layers"],
        "num_experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "hidden_size": config["hidden_size"],
        "expert_width": config.get("moe_intermediate_size", config["intermediate_size"]),
        "total_parameters": total,
        "active_parameters": round(total - routed * idle_fraction),
        "weight_rule": "renormalised" if config["norm_topk_prob"] else "as the softmax gives them",
        "shared_expert": "one, gated" if config.get("shared_expert_intermediate_size") else "none",
        "training_tokens": int(training_log(name)["num_tokens"].iloc[-1]),
    }


def training_log(name: str) -> pd.DataFrame:
    """The log of a training run, a row for every tenth step: `step`, `num_tokens`, `loss_nats`, `learning_rate` and more."""
    lines = (model_folder(name) / "log.jsonl").read_text().splitlines()
    return pd.DataFrame([json.loads(line) for line in lines]).assign(model=name)


@dataclass(frozen=True)
class Reading:
    """What one pass over the text leaves behind. `trace` has no scores; `router_entropy` [D, L] is the mean over a document's tokens, 0 to
    1; `probability` [L, E] the mean router probability."""

    documents: tuple[Document, ...]
    loss_nats: NDArray[np.float64]
    num_bytes: NDArray[np.int64]
    trace: RouterTrace
    router_entropy: NDArray[np.float64]
    probability: NDArray[np.float64]


def reading(model: Any, tokenizer: Any, documents: Sequence[Document]) -> Reading:
    """Read documents: losses, and what every router says, the scores folded into means document by document."""
    losses, parts, entropies, probabilities = [], [], [], []
    for document in documents:
        with recording(model) as recorder:
            losses.append(np.nansum(score(model, document.tokens)))
        part = recorder.trace(document.tokens)
        entropy, probability = _router_means(part)
        entropies.append(entropy)
        probabilities.append(probability * len(document.tokens))
        parts.append(_joined([part]))
    sizes = [len(text_of(tokenizer, document)) for document in documents]
    num_tokens = sum(len(document.tokens) for document in documents)
    trace = _joined(parts)
    return Reading(
        tuple(documents), np.array(losses), np.array(sizes), trace, np.array(entropies), np.sum(probabilities, axis=0) / num_tokens
    )


def _router_means(trace: RouterTrace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean normalised entropy [L] and mean probability [L, E] of the routers' softmax."""
    assert trace.selection_scores is not None
    logs = torch.from_numpy(trace.selection_scores).to(torch.float32).log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1) / math.log(trace.shape.num_experts)
    return entropy.mean(0).double().numpy(), logs.exp().mean(0).double().numpy()


def _joined(parts: Sequence[RouterTrace]) -> RouterTrace:
    return RouterTrace.from_arrays(
        np.concatenate([part.topk_ids for part in parts]),
        np.concatenate([part.gate_weights for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        document_start=np.concatenate([part.document_start for part in parts]),
        shape=parts[0].shape,
    )


def by_document(text: Reading) -> pd.DataFrame:
    """A row per document: `document`, `domain`, `cluster`, `num_tokens` (scored), `num_bytes`, `loss_nats` (sum)."""
    return pd.DataFrame(
        {
            "document": [label(document) for document in text.documents],
            "domain": [document.domain for document in text.documents],
            "cluster": [document.cluster for document in text.documents],
            "num_tokens": [len(document.tokens) - 1 for document in text.documents],
            "num_bytes": text.num_bytes,
            "loss_nats": text.loss_nats,
        }
    )


def calls_by_layer(trace: RouterTrace) -> NDArray[np.int64]:
    """How often each expert is called [L, E]."""
    layers = np.moveaxis(trace.topk_ids, 1, 0).reshape(trace.shape.num_layers, -1)
    return np.stack([np.bincount(ids, minlength=trace.shape.num_experts) for ids in layers])


def layers(text: Reading) -> pd.DataFrame:
    """Health of every router.

    Returns
    -------
    DataFrame : a row per layer: `layer`, `called_fraction` (experts called at all), `busiest_eighth_fraction` (calls that go to the E/8
        experts called most; 0.125 when even), `balance` (E x sum of share of calls x mean probability; 1 when even), `use_entropy` (of the
        shares of calls) and `router_entropy` (of a token's router probabilities, mean), both over ln E, `neighbour_overlap` (share of a
        token's experts that the token before it called too).
    """
    calls, num_experts = calls_by_layer(text.trace), text.trace.shape.num_experts
    shares = calls / calls.sum(1, keepdims=True)
    lengths = [len(document.tokens) for document in text.documents]
    return pd.DataFrame(
        {
            "layer": np.arange(len(calls)),
            "called_fraction": (calls > 0).mean(1),
            "busiest_eighth_fraction": np.sort(shares, axis=1)[:, -max(1, num_experts // 8) :].sum(1),
            "balance": num_experts * (shares * text.probability).sum(1),
            "use_entropy": -(shares * np.log(np.maximum(shares, 1e-300))).sum(1) / math.log(num_experts),
            "router_entropy": np.average(text.router_entropy, axis=0, weights=lengths),
            "neighbour_overlap": neighbour_overlap(text.trace),
        }
    )


def gates(text: Reading) -> pd.DataFrame:
    """Mean gate weight: a row per (`layer`, `rank`) with `gate_weight`."""
    mean = text.trace.gate_weights.mean(axis=0, dtype=np.float64)
    layer, rank = np.indices(mean.shape)
    return pd.DataFrame({"layer": layer.ravel(), "rank": rank.ravel(), "gate_weight": mean.ravel()})


def use(text: Reading) -> pd.DataFrame:
    """Calls of every expert by domain: a row per (`layer`, `domain`, `expert`) that occurs, with `calls`."""
    frames = []
    for domain in dict.fromkeys(document.domain for document in text.documents):
        calls = calls_by_layer(_of(text, lambda document, domain=domain: document.domain == domain))
        layer, expert = np.nonzero(calls)
        frames.append(pd.DataFrame({"layer": layer, "domain": domain, "expert": expert, "calls": calls[layer, expert]}))
    return pd.concat(frames, ignore_index=True)


def _of(text: Reading, is_wanted: Callable[[Document], bool]) -> RouterTrace:
    """The part of the trace that belongs to the documents wanted."""
    slices = text.trace.document_slices()
    parts = [text.trace.tokens(s.start, s.stop) for s, document in zip(slices, text.documents, strict=True) if is_wanted(document)]
    return _joined(parts)


def overlaps(text: Reading, hot_fraction: float) -> pd.DataFrame:
    """How much the hot sets of two domains have in common.

    The hot set is the `hot_fraction` of a layer's experts that are called most. The clusters of every domain are dealt to two halves, and
    the hot set of one half of a domain is compared with that of the other half of another domain, so no two sets share a text; of a domain
    with itself this says how far a hot set can be trusted.

    Returns
    -------
    DataFrame : a row per (`layer`, `domain`, `other`) with `overlap` (share of the hot set; `hot_fraction` by chance).

    Raises
    ------
    ValueError : a domain has documents of one cluster only.
    """
    domains = list(dict.fromkeys(document.domain for document in text.documents))
    hot = {domain: [_hot(_half(text, domain, half), hot_fraction) for half in (0, 1)] for domain in domains}
    rows = []
    for domain in domains:
        for other in domains:
            pairs = [(hot[domain][0], hot[other][1]), (hot[domain][1], hot[other][0])]
            shared = np.mean([(one & two).sum(1) / one.sum(1) for one, two in pairs], axis=0)
            rows += [(layer, domain, other, overlap) for layer, overlap in enumerate(shared)]
    return pd.DataFrame(rows, columns=["layer", "domain", "other", "overlap"])


def _half(text: Reading, domain: str, half: int) -> RouterTrace:
    clusters = list(dict.fromkeys(document.cluster for document in text.documents if document.domain == domain))
    if len(clusters) < 2:
        raise ValueError(f"the documents of {domain} come from {len(clusters)} cluster; two halves need at least 2: read more documents")
    return _of(text, lambda document: document.domain == domain and clusters.index(document.cluster) % 2 == half)


def _hot(trace: RouterTrace, hot_fraction: float) -> NDArray[np.bool_]:
    """The experts called most [L, E]; ties go to the lower id."""
    calls = calls_by_layer(trace)
    num_hot = max(1, round(hot_fraction * trace.shape.num_experts))
    is_hot = np.zeros(calls.shape, bool)
    np.put_along_axis(is_hot, np.argsort(-calls, axis=1, kind="stable")[:, :num_hot], True, axis=1)
    return is_hot


def target_slots_by_layer(trace: RouterTrace, hit_rate: float, warmup_tokens: int) -> pd.DataFrame:
    """The fewest slots at which LRU, fetching every miss, hits so often in the warm window, each layer for itself.

    Returns
    -------
    DataFrame : a row per layer: `layer`, `num_slots` (E where even that is not enough), `evictions` at that many slots.
    """
    start, shape = warm_start(trace, warmup_tokens), trace.shape
    low, high = np.full(shape.num_layers, shape.top_k), np.full(shape.num_layers, shape.num_experts)
    calls = (trace.num_tokens - start) * shape.top_k
    while (low < high).any():
        middle = (low + high) // 2
        is_enough = _warm_counts(trace, middle, start)[:, 0] >= hit_rate * calls
        low, high = np.where(is_enough, low, np.minimum(middle + 1, high)), np.where(is_enough, middle, high)
    evictions = calls - _warm_counts(trace, low, start)[:, 0]
    return pd.DataFrame({"layer": np.arange(shape.num_layers), "num_slots": low, "evictions": evictions})


def _warm_counts(trace: RouterTrace, num_slots: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    run = simulate(trace, FETCH_EVERY_MISS, num_slots.tolist(), keep="summary", warmup_tokens=start)
    assert run.warm_counts is not None
    return run.warm_counts


def tasks(model: Any, tokenizer: Any, num_questions: int) -> pd.DataFrame:
    """Held-out questions answered by greedy decoding; the answer is compared by its value, nothing is executed.

    Returns
    -------
    DataFrame : a row per question: `domain`, `template`, `is_right`, `is_right_by_repeating` (whether the last solved item's answer would
        have been right).
    """
    write = greedy(model, tokenizer)
    rows = []
    for domain in TASK_MODULES:
        for question in held_out_questions(domain, num_questions):
            written = write(tokenizer.encode(question.prompt).ids)
            rows.append((domain, question.template, is_right(question, written), _answer_before(question) == question.answer))
    return pd.DataFrame(rows, columns=["domain", "template", "is_right", "is_right_by_repeating"])


def _answer_before(question: Question) -> str:
    """The answer of the last solved item of the prompt."""
    last_line = question.prompt.split("\n\n")[-2].rpartition("\n")[2]
    return extract_answer(question.domain, last_line)
