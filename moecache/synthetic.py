"""Synthetic router traces: seeded streams with the locality of a large router, for tests, benches and what-if questions.

A router score is built from three parts, so that each cause of locality has a knob of its own:

    z[t, e] = popularity_skew * p[e]  +  topic_strength * 1[e in hot set of t's topic]  +  x[t, e]

with p[e] drawn once from N(0, 1), and x an AR(1) process of unit variance, x[t] = persistence * x[t-1] + sqrt(1 - persistence^2) N(0, 1),
that starts afresh with each document. A document has one topic; the hot sets of the topics share `topic_overlap` of their experts. Router
logits are z times one factor a layer, chosen so that the mean entropy of the router's softmax is `router_entropy` x log E. The factor
changes gate weights, never who is called.

The defaults are tuned to public figures for 512 experts and top-10: LRU hits 67 % of calls at 64 slots and 81 % at 128
(llama.cpp, pull request 27861), and the entropy of the router over all experts is .90 of its maximum.

What this does not know: any model or text. There is no grammar, no dependence between layers, and no two layers differ in kind. A
synthetic trace can show how a mechanism behaves; how often a real router behaves so is a question for recorded traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from moecache.cache import rank_order
from moecache.trace import ModelShape, RouterTrace

GENERATOR_VERSION = 1  # part of every source: rises when the same parameters give other traces
CHUNK_TOKENS = 512
PILOT_TOKENS = 64
LARGEST_FACTOR = 4096.0  # keeps logits inside float16


@dataclass(frozen=True)
class _Knobs:
    """What shapes the scores; see `synthetic_trace`."""

    popularity_skew: float
    persistence: float
    num_topics: int
    topic_strength: float
    topic_overlap: float
    hot_fraction: float
    document_tokens: int


class _Layer(NamedTuple):
    """What one layer needs to go on: its generator and state are changed in place."""

    generator: np.random.Generator
    state: np.ndarray  # [E] float32, x of the last token
    bias: np.ndarray  # [num_topics,E] float32, popularity and hot sets
    factor: np.float32  # logits = factor * z


def synthetic_trace(
    num_tokens: int = 2000,
    num_layers: int = 48,
    num_experts: int = 512,
    top_k: int = 10,
    *,
    seed: int = 0,
    popularity_skew: float = 0.7,
    persistence: float = 0.7,
    num_topics: int = 8,
    topic_strength: float = 0.7,
    topic_overlap: float = 0.25,
    hot_fraction: float = 0.125,
    document_tokens: int = 512,
    router_entropy: float | Sequence[float] = 0.9,
    has_scores: bool = True,
    expert_bytes: int | None = None,
) -> RouterTrace:
    """Generate a trace; the same arguments give the same trace, and layer l is the same whatever the number of layers.

    Parameters
    ----------
    num_tokens, num_layers, num_experts, top_k : T, L, E, K.
    seed : 0 or more.
    popularity_skew : standard deviation of the lasting popularity of experts, 0 = all alike.
    persistence : correlation of a score with the same expert's at the token before, 0 <= persistence < 1.
    num_topics : topics; each document has one, drawn uniformly.
    topic_strength : what a hot expert's score gains.
    topic_overlap : share of a hot set that is common to all topics, 0..1 (others may still coincide by chance).
    hot_fraction : share of the experts in one topic's hot set, 0..1.
    document_tokens : mean tokens of a document; lengths are uniform between half and one and a half of it.
    router_entropy : mean entropy of the router's softmax over all E, as a share of log E; one number, or one a layer.
    has_scores : False leaves the scores out (a trace 50 times smaller, which cannot replay stand-ins by score).
    expert_bytes : size of one expert, kept in the shape.

    Returns
    -------
    RouterTrace : scores float16; `source["kind"]` is "synthetic", with every parameter beside it.

    Raises
    ------
    ValueError : a parameter out of its range, with the range.
    """
    shape = ModelShape(num_layers, num_experts, top_k, expert_bytes)
    knobs = _Knobs(popularity_skew, persistence, num_topics, topic_strength, topic_overlap, hot_fraction, document_tokens)
    entropies = _checked(num_tokens, shape, knobs, router_entropy, seed)
    starts, topics = _documents(num_tokens, knobs, np.random.default_rng([seed, 0]))
    layers = [_new_layer(shape, knobs, float(entropies[layer]), seed, layer) for layer in range(num_layers)]
    ids = np.empty((num_tokens, num_layers, top_k), np.int16)
    weights = np.empty(ids.shape, np.float32)
    scores = np.empty((num_tokens, num_layers, num_experts), np.float16) if has_scores else None
    for start in range(0, num_tokens, CHUNK_TOKENS):
        part = slice(start, min(start + CHUNK_TOKENS, num_tokens))
        for number, layer in enumerate(layers):
            logits = _next_logits(layer, starts[part], topics[part], knobs.persistence)
            ids[part, number], weights[part, number] = _route(logits, top_k)
            if scores is not None:
                scores[part, number] = logits
    source = {
        "kind": "synthetic",
        "generator": "moecache.synthetic_trace",
        "generator_version": GENERATOR_VERSION,
        "seed": seed,
        **asdict(knobs),
        "router_entropy": np.asarray(router_entropy, np.float64).tolist(),
    }
    return RouterTrace(ids, weights, scores, np.full(num_tokens, -1, np.int32), starts, shape, source)


def _checked(num_tokens: int, shape: ModelShape, knobs: _Knobs, router_entropy: float | Sequence[float], seed: int) -> np.ndarray:
    """[L] float64 entropies; raises on anything out of range."""

    def require(is_right: bool, name: str, value: object, bound: str) -> None:
        if not is_right:
            raise ValueError(f"{name}={value!r} must be {bound}")

    require(num_tokens >= 1, "num_tokens", num_tokens, "at least 1")
    require(seed >= 0, "seed", seed, "0 or more")
    require(0 <= knobs.popularity_skew < math.inf, "popularity_skew", knobs.popularity_skew, "0 or more and finite")
    require(0 <= knobs.persistence < 1, "persistence", knobs.persistence, "at least 0 and below 1")
    require(knobs.num_topics >= 1, "num_topics", knobs.num_topics, "at least 1 (topic_strength=0 switches topics off)")
    require(0 <= knobs.topic_strength < math.inf, "topic_strength", knobs.topic_strength, "0 or more and finite")
    require(0 <= knobs.topic_overlap <= 1, "topic_overlap", knobs.topic_overlap, "in 0..1")
    require(0 <= knobs.hot_fraction <= 1, "hot_fraction", knobs.hot_fraction, "in 0..1")
    require(knobs.document_tokens >= 1, "document_tokens", knobs.document_tokens, "at least 1")
    entropies = np.asarray(router_entropy, np.float64)
    is_right_length = entropies.shape in ((), (shape.num_layers,))
    require(is_right_length, "router_entropy", router_entropy, f"one number, or one for each of {shape.num_layers} layers")
    require(bool(np.all((entropies > 0) & (entropies < 1))), "router_entropy", router_entropy, "above 0 and below 1")
    return np.broadcast_to(entropies, (shape.num_layers,))


def _documents(num_tokens: int, knobs: _Knobs, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[T] bool starts of documents, and [T] int64 topic of each token."""
    shortest, longest = math.ceil(knobs.document_tokens / 2), math.floor(knobs.document_tokens * 1.5)
    starts, topics = np.zeros(num_tokens, bool), np.empty(num_tokens, np.int64)
    position = 0
    while position < num_tokens:
        length = int(generator.integers(shortest, longest, endpoint=True))
        starts[position] = True
        topics[position : position + length] = generator.integers(knobs.num_topics)
        position += length
    return starts, topics


def _new_layer(shape: ModelShape, knobs: _Knobs, entropy: float, seed: int, number: int) -> _Layer:
    """One layer's popularity, hot sets and factor, each from a stream of its own."""
    generator = np.random.default_rng([seed, 1, number])
    popularity = generator.standard_normal(shape.num_experts)
    hot = _hot_sets(shape.num_experts, knobs, generator)
    bias = (knobs.popularity_skew * popularity + knobs.topic_strength * hot).astype(np.float32)
    pilot = bias[generator.integers(knobs.num_topics, size=PILOT_TOKENS)]
    pilot = pilot + generator.standard_normal(pilot.shape, dtype=np.float32)
    factor = np.float32(_factor_for_entropy(pilot, entropy))
    return _Layer(np.random.default_rng([seed, 2, number]), np.zeros(shape.num_experts, np.float32), bias, factor)


def _hot_sets(num_experts: int, knobs: _Knobs, generator: np.random.Generator) -> np.ndarray:
    """[num_topics,E] bool: a common part, and for each topic a draw of its own from the other experts."""
    num_hot = round(knobs.hot_fraction * num_experts)
    num_common = round(knobs.topic_overlap * num_hot)
    order = generator.permutation(num_experts)
    hot = np.zeros((knobs.num_topics, num_experts), bool)
    hot[:, order[:num_common]] = True
    for topic in hot:
        topic[generator.permutation(order[num_common:])[: num_hot - num_common]] = True
    return hot


def _factor_for_entropy(pilot: np.ndarray, entropy: float) -> float:
    """The factor on `pilot` [n,E] whose softmax has the mean entropy asked for (bisection: entropy falls as the factor grows)."""
    low, high = 0.0, 1.0
    while high < LARGEST_FACTOR and mean_entropy(pilot * np.float32(high)) > entropy:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_entropy(pilot * np.float32(middle)) > entropy else (low, middle)
    return (low + high) / 2


def mean_entropy(router_logits: np.ndarray) -> float:
    """Mean entropy of the softmax over the last axis [..,E], as a share of log E."""
    logits = np.asarray(router_logits, np.float32)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=-1)
    entropy = np.log(total) - (exponentials * shifted).sum(axis=-1) / total
    return float(entropy.mean(dtype=np.float64) / math.log(logits.shape[-1]))


def _next_logits(layer: _Layer, starts: np.ndarray, topics: np.ndarray, persistence: float) -> np.ndarray:
    """[n,E] float16 router logits of the layer's next n tokens."""
    process = layer.generator.standard_normal((starts.size, layer.state.size), dtype=np.float32)
    _advance(process, layer.state, starts, np.float32(persistence), np.float32(math.sqrt(1 - persistence**2)))
    process += layer.bias[topics]
    process *= layer.factor
    return process.astype(np.float16) + np.float16(0.0)  # no -0.0: it would sort below +0.0


@njit(cache=True)
def _advance(process, state, starts, persistence, innovation):
    """Turn [n,E] white noise into the AR(1) process, in place; `state` [E] is the last token's."""
    for token in range(process.shape[0]):
        for expert in range(process.shape[1]):
            noise = process[token, expert]
            state[expert] = noise if starts[token] else persistence * state[expert] + innovation * noise
            process[token, expert] = state[expert]


def _route(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The top-k of rounded logits [n,E] in rank order: ids [n,K], gate weights [n,K] float32."""
    ids, best = np.empty((logits.shape[0], top_k), np.int64), np.empty((logits.shape[0], top_k), np.float32)
    _select_top(logits.astype(np.float32), ids, best)
    weights = np.exp(best - best[:, :1])
    weights /= weights.sum(axis=-1, keepdims=True)
    order = rank_order(weights, ids)  # different logits can give the same float32 weight
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


@njit(cache=True)
def _select_top(logits, ids, best):
    """Fill ids [n,K] and best [n,K] with the largest logits of each row, falling, the lower id first among equals."""
    top_k = ids.shape[1]
    for token in range(logits.shape[0]):
        num_kept = 0
        for expert in range(logits.shape[1]):
            logit = logits[token, expert]
            if num_kept == top_k and logit <= best[token, top_k - 1]:
                continue
            place = min(num_kept, top_k - 1)
            while place > 0 and best[token, place - 1] < logit:
                best[token, place], ids[token, place] = best[token, place - 1], ids[token, place - 1]
                place -= 1
            best[token, place], ids[token, place] = logit, expert
            num_kept = min(num_kept + 1, top_k)
