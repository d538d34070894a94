"""Capacity and eviction: the hit rate that a bigger cache or a better eviction buys, counted by replaying one trace.

Every policy here waits for every miss; only the eviction differs. What is counted:

- hits by document, so that two evictions can be compared on the same documents (`by_document`),
- hits by layer, in the cold and in the warm window (`by_layer`),
- how many misses a replay of single calls reports instead (`sequential_misses`).

Capacities are given as shares of the experts of a layer, so that one set of parameters suits every model. The cold window is everything
before the first document that starts at or after `warmup_tokens`; it is reported apart and enters no comparison. The cache is kept across
documents.

No model's losses are known here: a hit rate is a number of copies, not a quality. Nor is any statistic: see `capacity_report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache.calibrate import most_called
from moecache.experiments.inputs import file_hash, reference_inputs
from moecache.kernel import Eviction, Outcome
from moecache.kernel.codes import EVICTIONS, NUM_OUTCOMES
from moecache.policy import Policy
from moecache.run import Run
from moecache.simulate import simulate
from moecache.trace import RouterTrace
from moecache.trace.importers import load_trace
from moecache.trace_report import neighbour_overlap

REFERENCE = "reference-512"
HIT = int(Outcome.HIT)
FEWEST_UNITS, NUM_BLOCKS = 3, 10
WORDS = {"lru": "LRU", "fifo": "FIFO", "slru": "SLRU", "lfru": "LFRU", "belady": "Belady", "belady_bypass": "Belady with bypass"}
BOUNDS = ("belady", "belady_bypass")  # they know the future: what is possible at best, not rivals


def policies(evictions: Sequence[str], half_lives_tokens: Sequence[float]) -> list[Policy]:
    """One fetching policy per eviction, and one per half-life for decayed counts; labels name both."""
    found = []
    for eviction in evictions:
        half_lives = half_lives_tokens if eviction == "decayed_count" else [None]
        found += [Policy(eviction=eviction, half_life=value, label=label(eviction, value)) for value in half_lives]
    return found


def label(eviction: str, half_life: float | None = None) -> str:
    """The name of an eviction: "LRU", or "decayed count (128)"."""
    words = WORDS.get(eviction, eviction.replace("_", " "))
    return words + (f" ({half_life:g})" if half_life else "")


def slots_of(fractions: Sequence[float], num_experts: int, top_k: int) -> list[int]:
    """Shares of a layer's experts as numbers of slots, rising, each at least top-k and at most E.

    Raises
    ------
    ValueError : a share outside (0, 1].
    """
    wrong = [fraction for fraction in fractions if not 0 < fraction <= 1]
    if wrong:
        raise ValueError(f"capacity fraction {wrong[0]} must lie above 0 and at most 1: the share of a layer's experts that is resident")
    return sorted({max(top_k, round(fraction * num_experts)) for fraction in fractions})


@lru_cache(maxsize=2)
def open_trace(
    trace_path: str = "", num_experts: int = 0, num_documents: int = 0, num_tokens: int = 0, model_name: str = REFERENCE
) -> RouterTrace:
    """A trace from a file, or what a reference model's routers say about its held-out documents.

    Parameters
    ----------
    trace_path : a file of any format that `load_trace` reads; empty for a reference model.
    num_experts : experts a layer, where the file does not say; 0 = it does.
    num_documents, num_tokens, model_name : of the held-out text and the reference model.
    """
    if trace_path:
        return load_trace(trace_path, num_experts or None)
    return _record_reference(num_documents, num_tokens, model_name)


def _record_reference(num_documents: int, num_tokens: int, model_name: str) -> RouterTrace:
    """Ids and gate weights only: nobody stands in here, and without scores a long text fits in memory."""
    from moecache.record import record
    from moecache.reference import held_out_documents, load_model

    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, say=_say_nothing)
    model = load_model(model_name)
    parts = [record(model, document.tokens) for document in documents]
    return RouterTrace.from_arrays(
        np.concatenate([part.topk_ids for part in parts]),
        np.concatenate([part.gate_weights for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        document_start=np.concatenate([part.document_start for part in parts]),
        shape=parts[0].shape,
        source={"model": model_name, "text": "its held-out documents"},
    )


def _say_nothing(_: str) -> None:
    pass


def key_of(
    trace_path: str, num_experts: int, num_documents: int, num_tokens: int, model_name: str = REFERENCE
) -> tuple[dict[str, Any], dict[str, str]]:
    """What a stored result over `open_trace(...)` depends on: (parameters, content hashes)."""
    if trace_path:
        return {"num_experts": num_experts}, {"trace": file_hash(trace_path)}
    return {"num_documents": num_documents, "num_tokens": num_tokens}, reference_inputs(model_name)


def describe(trace: RouterTrace, warmup_tokens: int) -> pd.DataFrame:
    """One row of facts: `num_tokens`, `num_layers`, `num_experts`, `top_k`, `num_documents`, `first_warm_token`,
    `units` ("documents", or "blocks" where there are too few), `num_units`, `neighbour_overlap` (share of a token's experts that the token
    before called too), `model`."""
    start = warm_start(trace, warmup_tokens)
    starts, units = unit_starts(trace, start)
    shape, source = trace.shape, trace.source
    row = {
        "num_tokens": trace.num_tokens,
        "num_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "num_documents": int(trace.document_start.sum()),
        "first_warm_token": start,
        "units": units,
        "num_units": starts.size,
        "neighbour_overlap": float(np.nan_to_num(neighbour_overlap(trace)).mean()),
        "model": str(source.get("model") or source.get("file") or "unnamed trace"),
    }
    return pd.DataFrame([row])


def warm_start(trace: RouterTrace, warmup_tokens: int) -> int:
    """The first token of the first document that starts at or after `warmup_tokens`; that token itself in a trace of one document.

    Raises
    ------
    ValueError : nothing is left for the warm window.
    """
    starts = np.flatnonzero(trace.document_start)
    later = starts[starts >= warmup_tokens]
    start = int(later[0]) if later.size else warmup_tokens
    if not 0 <= start < trace.num_tokens or (later.size == 0 and starts.size > 1):
        raise ValueError(
            f"warmup_tokens={warmup_tokens} leaves none of the trace's {starts.size} documents ({trace.num_tokens} tokens) for the warm "
            "window; use fewer warm-up tokens or a longer trace"
        )
    return start


def unit_starts(trace: RouterTrace, start: int) -> tuple[np.ndarray, str]:
    """First tokens of the units that are compared: the documents from token `start` on, or ten equal blocks of text.

    Returns
    -------
    starts : [n] int64. "documents", or "blocks" where fewer than three documents are left: an interval needs three units.
    """
    starts = np.flatnonzero(trace.document_start)
    starts = starts[starts >= start]
    if starts.size >= FEWEST_UNITS:
        return starts, "documents"
    return np.linspace(start, trace.num_tokens, NUM_BLOCKS, endpoint=False).astype(np.int64), "blocks"


def replay(trace: RouterTrace, policy: Policy, slots: int, start: int, **options: Any) -> Run:
    """`simulate`, where a static cache holds the experts that were called most before token `start`: its calibration text is disjoint from
    the warm window, and it is as long as the others' warm-up.

    Raises
    ------
    ValueError : a static cache without a text to calibrate on.
    """
    if policy.eviction != Eviction.STATIC:
        return simulate(trace, policy, slots, **options)
    if start == 0:
        raise ValueError("a static cache is calibrated on the tokens before the warm window, and there are none; use warm-up tokens")
    return simulate(trace, policy, slots, cold_start=most_called(trace.tokens(0, start)), **options)


def by_document(trace: RouterTrace, compared: Sequence[Policy], fractions: Sequence[float], warmup_tokens: int) -> pd.DataFrame:
    """Hits of every document of the warm window (of every block, in a trace of fewer than three; see `unit_starts`).

    Returns
    -------
    DataFrame : a row per (policy, num_slots, document): `policy`, `eviction`, `half_life_tokens` (0 = has none), `num_slots`,
        `document` (0 = the first warm one), `num_tokens`, `calls`, `hits`.
    """
    start = warm_start(trace, warmup_tokens)
    starts, _ = unit_starts(trace, start)
    lengths, calls_a_token = np.diff(starts, append=trace.num_tokens), trace.shape.num_layers * trace.shape.top_k
    frames = []
    for slots in slots_of(fractions, trace.shape.num_experts, trace.shape.top_k):
        for policy in compared:
            log = replay(trace, policy, slots, start).decisions
            assert log is not None
            hits = np.add.reduceat((log.outcome == HIT).sum(axis=(1, 2)), starts)
            rows = {"document": np.arange(starts.size), "num_tokens": lengths, "calls": lengths * calls_a_token, "hits": hits}
            frames.append(pd.DataFrame({**_named(policy, slots), **rows}))
    return pd.concat(frames, ignore_index=True)


def by_layer(trace: RouterTrace, compared: Sequence[Policy], fractions: Sequence[float], warmup_tokens: int) -> pd.DataFrame:
    """Hits and evictions of every layer in the cold and the warm window.

    Returns
    -------
    DataFrame : a row per (policy, num_slots, window, layer): `policy`, `eviction`, `half_life_tokens`, `num_slots`, `window` ("cold" or
        "warm"; no "cold" rows without a warm-up), `layer`, `num_tokens`, `calls`, `hits`, `evictions`.
    """
    start, frames = warm_start(trace, warmup_tokens), []
    for slots in slots_of(fractions, trace.shape.num_experts, trace.shape.top_k):
        for policy in compared:
            run = replay(trace, policy, slots, start, keep="summary", warmup_tokens=start)
            assert run.warm_counts is not None
            windows = {"cold": (run.counts - run.warm_counts, start), "warm": (run.warm_counts, trace.num_tokens - start)}
            for window, (counts, num_tokens) in windows.items():
                if num_tokens:
                    frames.append(_layer_rows(_named(policy, slots) | {"window": window}, counts, num_tokens, trace.shape.top_k))
    return pd.concat(frames, ignore_index=True)


def _named(policy: Policy, slots: int) -> dict[str, Any]:
    eviction = policy.to_dict()["eviction"]
    return {"policy": policy.label, "eviction": eviction, "half_life_tokens": float(policy.half_life or 0.0), "num_slots": slots}


def _layer_rows(named: dict[str, Any], counts: np.ndarray, num_tokens: int, top_k: int) -> pd.DataFrame:
    rows = {"layer": np.arange(len(counts)), "num_tokens": num_tokens, "calls": num_tokens * top_k}
    return pd.DataFrame({**named, **rows, "hits": counts[:, HIT], "evictions": counts[:, EVICTIONS]})


def sequential_misses(trace: RouterTrace, compared: Sequence[Policy], num_slots: Sequence[int], warmup_tokens: int) -> pd.DataFrame:
    """Misses of the warm window when each call is replayed as a step of its own, beside the right number.

    Returns
    -------
    DataFrame : `policy`, `eviction`, `half_life_tokens`, `num_slots`, `misses` (of atomic steps), `sequential_misses`, `inflation` (the
        second over the first).
    """
    start, rows = warm_start(trace, warmup_tokens), []
    for slots in num_slots:
        for policy in compared:
            runs = [simulate(trace, policy, slots, keep="summary", warmup_tokens=start, replay=mode) for mode in ("atomic", "sequential")]
            right, wrong = (_warm_misses(run) for run in runs)
            rows.append(_named(policy, slots) | {"misses": right, "sequential_misses": wrong, "inflation": wrong / max(right, 1)})
    return pd.DataFrame(rows)


def _warm_misses(run: Run) -> int:
    assert run.warm_counts is not None
    return int(run.warm_counts[:, HIT + 1 : NUM_OUTCOMES].sum())
