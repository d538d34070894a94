"""What is in a trace, and what it can tell: the report to read before the first experiment on it.

Three things decide whether a trace can compare policies at all.

- *Regime*: how many experts a layer really calls, against the slots. Where everything that is called fits, nobody is evicted, and every
  policy is the same policy.
- *Length*: misses of the first calls are the same for all. A policy shows itself in evictions, and a few dozen are an anecdote.
- *Independence*: a document that occurs twice is remembered the second time, which no text of one's own would be.

The report counts them by replaying the trace with the least recently used policy from an empty cache, and warns. It knows no model: what a
miss costs the text, or the clock, is not in a trace.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moecache.kernel.codes import EVICTIONS, FETCHED, HIT
from moecache.policy import FETCH_EVERY_MISS
from moecache.simulate import simulate
from moecache.synthetic import mean_entropy
from moecache.trace import ModelShape, RouterTrace, token_blocks

WINDOW_TOKENS = 256
ENTROPY_TOKENS = 1024  # tokens, evenly spread, that the router's entropy is taken from
FEWEST_EVICTIONS = 100  # a layer
SMALLEST_EVICTION_SHARE = 0.01  # of calls
LARGEST_COLD_SHARE = 0.2  # of misses
LOWEST_FLOAT16 = np.float32(-65504)


@dataclass(frozen=True, eq=False)
class TraceReport:
    """What `RouterTrace.report` found; print it, or take `to_frame` for the layers.

    Attributes
    ----------
    shape, num_tokens, num_documents : of the trace.
    document_tokens : shortest, median and longest document.
    num_recorded : scores recorded a step (E, M, or 0).
    num_predicted : predictions a step, 0 without.
    num_slots : slots a layer of the replay.
    neighbour_overlap : [L], mean share of the top-k that the token before, in the same document, called too (NaN without neighbours).
    gate_weight_by_rank : [K], mean gate weight of each rank.
    distinct_experts : [L], experts called at least once.
    working_set : [L], mean number of experts called within 256 tokens.
    calls_per_slot : calls a layer, divided by its slots.
    hit_rate_cold, hit_rate_warm : [L], least recently used from an empty cache, over the first and the second half of the tokens.
    evictions : [L], of that replay.
    cold_share : [L], share of its misses that are the first call of an expert, which no policy avoids.
    router_entropy : [L], mean entropy of the router's softmax as a share of log E; None without all scores, or for sigmoid families.
    warnings : what the trace cannot tell, in words.
    """

    shape: ModelShape
    num_tokens: int
    num_documents: int
    document_tokens: tuple[int, float, int]
    num_recorded: int
    num_predicted: int
    num_slots: int
    neighbour_overlap: np.ndarray
    gate_weight_by_rank: np.ndarray
    distinct_experts: np.ndarray
    working_set: np.ndarray
    calls_per_slot: float
    hit_rate_cold: np.ndarray
    hit_rate_warm: np.ndarray
    evictions: np.ndarray
    cold_share: np.ndarray
    router_entropy: np.ndarray | None
    warnings: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a layer."""
        names = ("neighbour_overlap", "distinct_experts", "working_set", "hit_rate_cold", "hit_rate_warm", "evictions", "cold_share")
        columns = {"layer": np.arange(self.shape.num_layers)} | {name: getattr(self, name) for name in names}
        if self.router_entropy is not None:
            columns["router_entropy"] = self.router_entropy
        return pd.DataFrame(columns)

    def __str__(self) -> str:
        shape, kinds = (
            self.shape,
            {0: "none (no stand-in by score can be replayed)", self.shape.num_experts: f"of all {self.shape.num_experts} experts"},
        )
        shortest, median, longest = self.document_tokens
        scores = kinds.get(self.num_recorded, f"of the best {self.num_recorded} of {shape.num_experts} experts")
        lines = [
            f"{self.num_tokens:,} tokens x {shape.num_layers} MoE layers x top-{shape.top_k} of {shape.num_experts} experts",
            f"documents          {self.num_documents:,} of {shortest:,} to {longest:,} tokens (median {median:,g})",
            f"scores             {scores}" + (f", {self.num_predicted} predictions a step" if self.num_predicted else ""),
            f"gate weight        {' '.join(f'{weight:.3f}' for weight in self.gate_weight_by_rank)} by rank",
            f"neighbour overlap  {_range(self.neighbour_overlap, '.1%')}",
            f"experts called     {_range(self.distinct_experts, '.0f')}, within {WINDOW_TOKENS} tokens {_range(self.working_set, '.0f')}",
            f"at {self.num_slots} slots".ljust(19) + f"{self.calls_per_slot:,.0f} calls a slot, {_range(self.evictions, ',.0f')} evictions",
            f"LRU hit rate       cold {_range(self.hit_rate_cold, '.1%')}, warm {_range(self.hit_rate_warm, '.1%')}",
        ]
        if self.router_entropy is not None:
            lines.append(f"router entropy     {_range(self.router_entropy, '.3f')} of log {shape.num_experts}")
        return "\n".join([*lines, *(f"WARNING: {warning}" for warning in self.warnings)])


def report_trace(trace: RouterTrace, num_slots: int | None = None) -> TraceReport:
    """Describe a trace, and replay it once with the least recently used policy.

    Parameters
    ----------
    trace : RouterTrace.
    num_slots : slots a layer of the replay; a quarter of the experts by default, and top-k at least.

    Returns
    -------
    TraceReport

    Raises
    ------
    ValueError : fewer slots than top-k, or more than experts.
    """
    shape, lengths = trace.shape, np.array([part.stop - part.start for part in trace.document_slices()])
    slots = max(shape.top_k, round(shape.num_experts / 4)) if num_slots is None else int(num_slots)
    middle = trace.num_tokens // 2
    run = simulate(trace, FETCH_EVERY_MISS, slots, "empty", keep="summary", warmup_tokens=middle)
    assert run.warm_counts is not None
    calls, distinct, evictions = trace.num_tokens * shape.top_k, _distinct_experts(trace), run.counts[:, EVICTIONS]
    with np.errstate(invalid="ignore"):
        cold_share = distinct / run.counts[:, FETCHED]
    return TraceReport(
        shape=shape,
        num_tokens=trace.num_tokens,
        num_documents=lengths.size,
        document_tokens=(int(lengths.min()), float(np.median(lengths)), int(lengths.max())),
        num_recorded=trace.num_recorded,
        num_predicted=0 if trace.predicted_ids is None else trace.predicted_ids.shape[-1],
        num_slots=slots,
        neighbour_overlap=neighbour_overlap(trace),
        gate_weight_by_rank=trace.gate_weights.mean(axis=(0, 1), dtype=np.float64),
        distinct_experts=distinct,
        working_set=_working_set(trace),
        calls_per_slot=calls / slots,
        hit_rate_cold=_hit_rate(run.counts - run.warm_counts),
        hit_rate_warm=_hit_rate(run.warm_counts),
        evictions=evictions,
        cold_share=cold_share,
        router_entropy=_router_entropy(trace),
        warnings=(*_replay_warnings(evictions, cold_share, calls, slots), *_repeated_documents(trace)),
    )


def _hit_rate(counts: np.ndarray) -> np.ndarray:
    """[L] of counts [L,..]; NaN where there were no calls (a trace of one token has no first half)."""
    with np.errstate(invalid="ignore"):
        return counts[:, HIT] / (counts[:, HIT] + counts[:, FETCHED])


def _range(values: np.ndarray, form: str) -> str:
    """The mean over layers, and the lowest and highest where they differ."""
    if np.isnan(values).all():
        return "unknown"
    low, mean, high = np.nanmin(values), np.nanmean(values), np.nanmax(values)
    told = f"{mean:{form}}"
    return told if low == high else f"{told} ({low:{form}} to {high:{form}} by layer)"


def neighbour_overlap(trace: RouterTrace) -> np.ndarray:
    """[L] mean share of a token's top-k that the token before it, in the same document, called too; NaN where none has a neighbour."""
    shared, ids = np.zeros(trace.shape.num_layers), trace.topk_ids
    has_neighbour = ~trace.document_start
    for block in token_blocks(1, trace.num_tokens, trace.shape.num_layers * trace.shape.top_k**2):
        here, before = ids[block], ids[block.start - 1 : block.stop - 1]
        is_shared = (here[..., :, None] == before[..., None, :]).any(-1)
        shared += is_shared[has_neighbour[block]].sum(axis=(0, 2))
    with np.errstate(invalid="ignore"):
        return shared / (has_neighbour.sum() * trace.shape.top_k)


def _is_called(trace: RouterTrace, block: slice) -> np.ndarray:
    """[L,E] bool: called by a token of the block."""
    is_called = np.zeros((trace.shape.num_layers, trace.shape.num_experts), bool)
    is_called[np.arange(trace.shape.num_layers)[:, None], trace.topk_ids[block]] = True
    return is_called


def _distinct_experts(trace: RouterTrace) -> np.ndarray:
    """[L] experts called at least once."""
    blocks = token_blocks(0, trace.num_tokens, trace.shape.num_layers * trace.shape.top_k)
    return np.logical_or.reduce([_is_called(trace, block) for block in blocks]).sum(axis=1)


def _working_set(trace: RouterTrace) -> np.ndarray:
    """[L] mean number of experts called within windows of 256 tokens, one after the other (a shorter trace is one window)."""
    starts = range(0, max(1, trace.num_tokens - WINDOW_TOKENS + 1), WINDOW_TOKENS)
    return np.mean([_is_called(trace, slice(start, start + WINDOW_TOKENS)).sum(axis=1) for start in starts], axis=0)


def _router_entropy(trace: RouterTrace) -> np.ndarray | None:
    """[L] normalised entropy of the router's softmax over all experts; scores of other kinds are no logits."""
    scores, shape = trace.selection_scores, trace.shape
    if scores is None or trace.num_recorded < shape.num_experts or shape.num_experts == 1 or shape.scoring != "softmax":
        return None
    tokens = np.unique(np.linspace(0, trace.num_tokens - 1, ENTROPY_TOKENS).astype(np.int64))
    layers = (np.maximum(scores[tokens, layer].astype(np.float32), LOWEST_FLOAT16) for layer in range(shape.num_layers))
    return np.array([mean_entropy(logits) for logits in layers])


def _replay_warnings(evictions: np.ndarray, cold_share: np.ndarray, calls: int, num_slots: int) -> list[str]:
    told, num_layers = [], evictions.size
    if (is_short := evictions < FEWEST_EVICTIONS).any():
        told.append(
            f"too short to evict: {is_short.sum()} of {num_layers} layers see fewer than {FEWEST_EVICTIONS} evictions at {num_slots} slots "
            f"(the fewest {evictions.min()}); use a longer trace or fewer slots"
        )
    if evictions.sum() < SMALLEST_EVICTION_SHARE * calls * num_layers:
        told.append(
            f"near-empty eviction: only {evictions.sum() / (calls * num_layers):.2%} of calls evict anybody at {num_slots} slots, "
            "so eviction policies can hardly differ; use fewer slots"
        )
    if (mean := float(np.nan_to_num(cold_share).mean())) > LARGEST_COLD_SHARE:
        told.append(
            f"cold: {mean:.0%} of the misses are first calls, which no policy avoids; use a longer trace, or tell cold and warm apart"
        )
    return told


def _repeated_documents(trace: RouterTrace) -> list[str]:
    """Documents with the token ids or the routes of an earlier one."""
    first: dict[bytes, int] = {}
    repeats: dict[int, int] = {}
    for number, part in enumerate(trace.document_slices()):
        seen = [hashlib.sha256(trace.topk_ids[part].tobytes()).digest()]
        if (trace.token_ids[part] >= 0).all():
            seen.append(hashlib.sha256(trace.token_ids[part].tobytes()).digest() + b"ids")
        earlier = [first[digest] for digest in seen if digest in first]
        if earlier:
            repeats[number] = min(earlier)
        for digest in seen:
            first.setdefault(digest, number)
    if not repeats:
        return []
    listed = ", ".join(f"{number} = {earlier}" for number, earlier in list(repeats.items())[:5])
    more = ", ..." if len(repeats) > 5 else ""
    return [f"repeated documents: {len(repeats)} have the tokens or routes of an earlier one ({listed}{more}); keep one of each"]
