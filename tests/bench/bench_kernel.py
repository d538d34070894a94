"""How fast the kernel decides: calls a second for every preset and eviction, how that scales, and how soon the first result is there.

    python tests/bench/bench_kernel.py [--tokens 600] [--repeats 7]

prints one JSON line per measurement, the machine and the versions in the first. The trace is synthetic, 48 layers of 512 experts,
top-10, 128 slots: router logits x <- 0.75 x + 0.661 N(0, 1) plus a fixed popularity N(0, 0.7) an expert and layer, which gives LRU a hit
rate near the 81 % that others report for a model of this shape. CPU seconds of the decisions with totals only, best of the repeats; what
Belady knows of the future is worked out before. On a shared machine only the ratios within one run mean something.

Scaling: one, four and sixteen times the tokens, and the layers; `ratio` is the time of a call over that of the smallest, so 1 is
linear growth, and less is what a replay costs once, spread over more calls. First result: CPU seconds of a new process whose kernel is
in numba's cache, for `import moecache` and from there on. That memory stays flat while a trace is replayed from disk is shown by
`tests/test_trace_mapped.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import moecache as mc
from moecache.calibrate import buddy_table, future_calls, predict_previous_token
from moecache.metrics import summarise
from moecache.provenance import provenance

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_SLOTS = 48, 512, 10, 128
SIZES = (1, 4, 16)
FIRST_RESULT = """
import time
start = time.process_time()
import moecache as mc
imported = time.process_time()
trace = mc.RouterTrace.from_arrays([[[0, 1]], [[1, 2]]], [[[0.6, 0.4]], [[0.7, 0.3]]], num_experts=4)
hits = mc.simulate(trace, mc.FETCH_EVERY_MISS, num_slots=2).summary()["hits"]
print(imported - start, time.process_time() - imported, hits)
"""


def synthetic_trace(num_tokens: int, seed: int = 0) -> mc.RouterTrace:
    """A trace with persistence and popularity, full float16 logits."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(NUM_LAYERS, NUM_EXPERTS))
    popularity = generator.normal(scale=0.7, size=logits.shape)
    scores = np.empty((num_tokens, *logits.shape), np.float16)
    for token in range(num_tokens):
        logits = 0.75 * logits + 0.661 * generator.normal(size=logits.shape)
        scores[token] = logits + popularity
    ids = np.argpartition(-scores.astype(np.float32), TOP_K, axis=-1)[..., :TOP_K]
    weights = np.exp(np.take_along_axis(scores, ids, -1).astype(np.float32))
    return mc.RouterTrace.from_arrays(ids, weights / weights.sum(-1, keepdims=True), selection_scores=scores)


def policies() -> dict[str, mc.Policy]:
    """What is measured; the first is what the ratios refer to."""
    evictions = {member.name.lower(): {"eviction": member} for member in mc.Eviction}
    evictions["decayed_count"]["half_life"] = 128
    several = [mc.Policy(**values) for values in evictions.values()]
    several += [mc.Policy(insertion="tinylfu", half_life=128), mc.Policy(insertion="cap", insertion_cap=2), mc.Policy(max_prefetches=4)]
    several += mc.PRESETS[1:]
    several += [
        mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(),
        mc.SPEED_FIRST.replace(fallback="drop"),
        mc.SPEED_FIRST.replace(eviction="lfru", half_life=None),
    ]
    several += [mc.SUBSTITUTE_EVERY_MISS.replace(fallback=name) for name in ("random_resident", "buddy")]
    several += [mc.mass_budget(0.1), mc.cache_prior(), mc.max_rank(32)]
    return {policy.label: policy for policy in several}


class Replay:
    """A trace with all that any policy may want to know, ready to be decided again and again."""

    def __init__(self, trace: mc.RouterTrace) -> None:
        self.trace = predict_previous_token(trace)
        self.next_use, first_use = future_calls(trace.topk_ids, trace.shape.num_experts, np.array([0]))
        self.first_use = first_use[0]
        self.buddies = buddy_table(trace)

    def decide(self, policy: mc.Policy) -> mc.ExpertCache:
        """All tokens, totals only."""
        trace = self.trace
        cache = mc.ExpertCache(trace.shape, policy, NUM_SLOTS, buddies=self.buddies)
        if policy.needs_future:
            cache.reset(self.first_use)
        arrays = trace.topk_ids, trace.gate_weights, trace.selection_scores
        cache.decide(*arrays, predicted_ids=trace.predicted_ids, next_use=self.next_use, keep_log=False)
        return cache


def best_seconds(replay: Replay, policy: mc.Policy, repeats: int) -> tuple[float, dict[str, Any]]:
    """The least CPU seconds of one replay, and its totals; the first replay is thrown away."""
    cache = replay.decide(policy)
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        cache = replay.decide(policy)
        best = min(best, time.process_time() - start)
    return best, summarise(cache.counts, float(cache.state.mass_sum.sum()), replay.trace.num_tokens)


def one_step_seconds(repeats: int) -> float:
    """CPU seconds of one token at one layer through the door, log included."""
    trace = synthetic_trace(1)
    cache = mc.ExpertCache(trace.shape, mc.QUALITY_FIRST, NUM_SLOTS)
    arrays = [array[:, :1] for array in (trace.topk_ids, trace.gate_weights, trace.selection_scores)]
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.process_time()
        for _ in range(200):
            cache.decide(*arrays)
        best = min(best, (time.process_time() - start) / 200)
    return best


def scaled(trace: mc.RouterTrace) -> Iterator[tuple[str, int, mc.RouterTrace]]:
    """(what grows, how many times, the trace): first tokens of all layers, then all tokens of the first layers."""
    for times in SIZES:
        yield "tokens", times, trace.tokens(0, trace.num_tokens * times // SIZES[-1])
    part = trace.tokens(0, trace.num_tokens // SIZES[1])
    for times in SIZES:
        layers = slice(0, NUM_LAYERS * times // SIZES[-1])
        arrays = {name: getattr(part, name)[:, layers] for name in ("topk_ids", "gate_weights", "selection_scores")}
        yield "layers", times, replace(part, **arrays, shape=replace(part.shape, num_layers=layers.stop))


def say_scaling(tokens: int, repeats: int) -> None:
    """Time of a call at each size over that at the smallest."""
    base: dict[tuple[str, str], float] = {}
    for grows, times, trace in scaled(synthetic_trace(tokens)):
        replay = Replay(trace)
        for policy in (mc.FETCH_EVERY_MISS, mc.QUALITY_FIRST):
            seconds, totals = best_seconds(replay, policy, repeats)
            a_call = seconds / totals["calls"]
            ratio = a_call / base.setdefault((grows, policy.label), a_call)
            say(scaling=grows, times=times, policy=policy.label, calls_per_second=round(1 / a_call), ratio=round(ratio, 3))


def first_result_seconds() -> tuple[float, float]:
    """CPU seconds of importing, and from there to the first result, in a new process."""
    done = subprocess.run([sys.executable, "-c", FIRST_RESULT], capture_output=True, text=True, check=True)
    imported, first, _ = map(float, done.stdout.split())
    return imported, first


def say(**values: Any) -> None:
    """One JSON line."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    say(kernel_version=mc.KERNEL_VERSION, shape=[NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_SLOTS], **provenance())
    trace = synthetic_trace(asked.tokens)
    replay, base = Replay(trace), 0.0
    for name, policy in policies().items():
        seconds, totals = best_seconds(replay, policy, asked.repeats)
        rate = totals["calls"] / seconds
        base = base or rate
        say(
            policy=name, tokens=asked.tokens, calls_per_second=round(rate), ratio_to_lru=round(rate / base, 3),
            hit_rate=round(totals["hit_rate"], 4), substitution_rate=round(totals["substitution_rate"], 4),
        )  # fmt: skip
    say_scaling(4 * asked.tokens, max(2, asked.repeats // 2))
    say(one_step_microseconds=round(one_step_seconds(asked.repeats) * 1e6, 1))
    imported, first = min(first_result_seconds() for _ in range(3))
    say(import_seconds=round(imported, 3), first_result_seconds=round(first, 3))


if __name__ == "__main__":
    main()
