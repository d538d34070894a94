"""Recency against frequency: where the one hits more often than the other, mapped over capacity, memory and topics.

A decayed count remembers a call for about its half-life. Text keeps to a topic for a while, and each topic has experts of its own. A
count that remembers longer than a topic lasts keeps the favourites of the topic before; one that remembers less has fewer calls to
learn from. So the map has three axes: slots, half-life, and how long topics last. On *synthetic* traces the last one is set: documents
of one topic each, of so many tokens on average, whose routers prefer the hot set of their topic. On a recorded trace it is what it is.

No statistic is here, and no trace of a real model is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from moecache.experiments.capacity import label, slots_of, warm_start
from moecache.policy import FETCH_EVERY_MISS, Policy
from moecache.simulate import simulate
from moecache.synthetic import synthetic_trace
from moecache.trace import RouterTrace


def hit_rate_map(trace: RouterTrace, half_lives_tokens: Sequence[float], fractions: Sequence[float], warmup_tokens: int) -> pd.DataFrame:
    """Hit rates of decayed counts beside LRU's over a grid of capacities and half-lives, warm window.

    Returns
    -------
    DataFrame : `num_slots`, `half_life_tokens` (0 = plain count, which never decays), `hit_rate`, `lru_hit_rate`, `gain` (difference).
    """
    start, rows = warm_start(trace, warmup_tokens), []
    compared = [(half_life, Policy(eviction="decayed_count", half_life=half_life)) for half_life in half_lives_tokens]
    compared.append((0.0, Policy(eviction="plain_count", label=label("plain_count"))))
    for slots in slots_of(fractions, trace.shape.num_experts, trace.shape.top_k):
        recency = _hit_rate(trace, FETCH_EVERY_MISS, slots, start)
        for half_life, policy in compared:
            frequency = _hit_rate(trace, policy, slots, start)
            rows.append((slots, float(half_life), frequency, recency, frequency - recency))
    return pd.DataFrame(rows, columns=["num_slots", "half_life_tokens", "hit_rate", "lru_hit_rate", "gain"])


def _hit_rate(trace: RouterTrace, policy: Policy, slots: int, start: int) -> float:
    return float(simulate(trace, policy, slots, keep="summary", warmup_tokens=start).summary(start)["hit_rate"])


def synthetic_maps(
    topics: Sequence[tuple[int, float]],
    num_tokens: int,
    num_layers: int,
    half_lives_tokens: Sequence[float],
    fractions: Sequence[float],
    seed: int = 0,
) -> pd.DataFrame:
    """`hit_rate_map` of synthetic traces of 512 experts, top-10; a quarter of the tokens warms the cache.

    Parameters
    ----------
    topics : for each trace the mean tokens of a topic, and what a router's score gains for the experts of its topic.

    Returns
    -------
    DataFrame : `topic_tokens`, `topic_strength` and the columns of `hit_rate_map`.
    """
    frames = []
    for tokens, strength in topics:
        trace = synthetic_trace(num_tokens, num_layers, seed=seed, topic_strength=strength, document_tokens=tokens, has_scores=False)
        warmup = min(num_tokens // 4, int(trace.document_start.nonzero()[0][-1]))
        frames.append(hit_rate_map(trace, half_lives_tokens, fractions, warmup).assign(topic_tokens=tokens, topic_strength=strength))
    return pd.concat(frames, ignore_index=True)
