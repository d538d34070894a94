"""The simulator: a policy replayed over a trace. It needs router scores only, and never imports torch.

It logs what the kernel decides; nobody carries the decisions out. Hits, misses, substituted gate mass and bytes are exact; what a
substitution does to the text is not known here (a stand-in's output would change what later routers see). It can be estimated by a
`QualityModel` that was fitted to emulated runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moecache.cache import ExpertCache, slots_per_layer
from moecache.calibrate import future_calls
from moecache.kernel.codes import OUTSIDE_RECORDED, SUBSTITUTED
from moecache.policy import Policy, check_policy
from moecache.provenance import provenance
from moecache.quality.model import QualityModel
from moecache.run import Run
from moecache.steps import check_recorded
from moecache.trace import DecisionLog, ModelShape, RouterTrace, concatenate_tokens, token_blocks
from moecache.wait_values import check_waits_by_value, checked_values, decide_by_values

DOCUMENT_HANDLING = ("keep", "reset")
EXPANDED_SCORES = 2**22  # of a compact trace, at a time: 8 MiB
LARGEST_OUTSIDE_SHARE = 0.001  # of the stand-ins sought, before a warning


def simulate(
    trace: RouterTrace,
    policy: Policy,
    num_slots: int | Sequence[int],
    cold_start: str | npt.ArrayLike = "first",
    documents: str = "keep",
    exact_prefix_tokens: int = 0,
    keep: str = "log",
    replay: str = "atomic",
    warmup_tokens: int = 0,
    seed: int = 0,
    buddies: np.ndarray | None = None,
    wait_values: np.ndarray | None = None,
    quality: QualityModel | None = None,
) -> Run:
    """Replay a policy over a trace.

    Parameters
    ----------
    trace : RouterTrace, T tokens at L layers.
    policy : Policy.
    num_slots : slots a layer (at least top-k), or one number a layer.
    cold_start : "first", "random", "empty", or a profile [L,n] of expert ids.
    documents : "keep" the cache across documents, or "reset" it at each.
    exact_prefix_tokens : the first tokens of each document whose misses are all waited for (the prompt).
    keep : "log" for every decision, "summary" for totals only (sweeps).
    replay : "atomic"; "sequential" treats each call as a step of its own: a diagnostic that shows how much misses inflate,
        for policies that wait for every miss, bring nothing beforehand and count nothing within a step. Its log and its counts are of
        the trace's tokens.
    warmup_tokens : where the warm window starts, for totals apart from the cold ones.
    seed : of the random cold start.
    buddies : [L,E,H], for the buddy fallback: `moecache.calibrate.buddy_table` of a disjoint trace.
    wait_values : [T,L,K] in rank order, compared with `gate_threshold` in the place of the gate weight (`moecache.wait_values`).
    quality : a fitted model: `run.estimates` and `run.summary` then hold an estimated perplexity increase with an interval.

    Returns
    -------
    Run : without losses and seconds.

    Raises
    ------
    ValueError : an option that is unknown, a policy that the trace cannot replay, or one that the quality model does not know.

    Warns
    -----
    UserWarning : more than 0.1 % of the stand-ins lie outside the scores that a compact trace holds, and were fetched.
    """
    check_policy(policy)
    _check_options(trace, policy, documents, keep, replay, warmup_tokens, exact_prefix_tokens)
    if quality is not None:
        _check_quality(quality, policy, trace, replay)
    replayed = trace if replay == "atomic" else _one_call_a_step(trace)
    rules = policy if replay == "atomic" else _stretched(policy, trace.shape.top_k)
    cache = ExpertCache(replayed.shape, rules, slots_per_layer(trace.shape, num_slots), cold_start, seed, buddies)
    boundary = warmup_tokens * (1 if replay == "atomic" else trace.shape.top_k)
    values = None if wait_values is None else _checked_values(policy, trace, wait_values, replay)
    segments = _segments(replayed, documents, boundary)
    inputs = _inputs(replayed, policy, exact_prefix_tokens, segments)
    if policy.needs_future:
        cache.reset(inputs.first_use[0])
    logs: list[DecisionLog] = []
    cold = (np.zeros_like(cache.counts), 0.0)
    for block in segments:
        if block.start == boundary:
            cold = (cache.counts.copy(), float(cache.state.mass_sum.sum()))
        if documents == "reset" and block.start > 0 and replayed.document_start[block.start]:
            _log_cancelled(logs, cache.reset(inputs.first_use.get(block.start)))
        for part in _parts(replayed, rules, block):
            decide = cache.decide if values is None else partial(decide_by_values, cache, values[part])
            log = decide(
                replayed.topk_ids[part],
                replayed.gate_weights[part],
                replayed.scores(part) if rules.needs_scores else None,
                is_exact=inputs.is_exact[part],
                predicted_ids=_cut(replayed.predicted_ids, part),
                next_use=_cut(inputs.next_use, part),
                keep_log=keep == "log" or quality is not None,
                is_checked=True,
            )
            if log is not None:
                logs.append(log)
    _warn_of_few_scores(trace, cache.counts)
    mass = float(cache.state.mass_sum.sum())
    decisions = concatenate_tokens(logs) if logs else None
    if decisions is not None and replay == "sequential":
        decisions = _as_steps(decisions, trace.shape)
    estimates = {} if quality is None or decisions is None else quality.estimate_windows(trace, decisions, warmup_tokens)
    return Run(
        instrument="simulator",
        policy=policy,
        shape=trace.shape,
        num_slots=cache.num_slots,
        cold_start=cold_start if isinstance(cold_start, str) else "profile",
        documents=documents,
        replay=replay,
        document_start=trace.document_start,
        decisions=decisions if keep == "log" else None,
        counts=cache.counts,
        mass_sum=mass,
        warmup_tokens=warmup_tokens,
        warm_counts=cache.counts - cold[0],
        warm_mass_sum=mass - cold[1],
        provenance=provenance(),
        estimates=estimates,
    )


def _check_quality(quality: QualityModel, policy: Policy, trace: RouterTrace, replay: str) -> None:
    if replay != "atomic":
        raise ValueError("quality estimates the loss of a model's steps, and replay='sequential' has others; use replay='atomic'")
    quality.check(policy, trace.shape, str(trace.source.get("model", "")))


def _checked_values(policy: Policy, trace: RouterTrace, wait_values: np.ndarray, replay: str) -> np.ndarray:
    if replay != "atomic":
        raise ValueError("wait_values decide which misses are waited for, and replay='sequential' waits for all; use 'atomic'")
    check_waits_by_value(policy)
    return checked_values(wait_values, trace.topk_ids.shape)


@dataclass(frozen=True)
class _Inputs:
    """What a replay needs beside the trace."""

    is_exact: np.ndarray
    next_use: np.ndarray | None
    first_use: dict[int, np.ndarray]


def _inputs(trace: RouterTrace, policy: Policy, exact_prefix_tokens: int, segments: list[slice]) -> _Inputs:
    is_exact = exact_prefix(trace.document_start, exact_prefix_tokens)
    if not policy.needs_future:
        return _Inputs(is_exact, None, {})
    starts = np.array([block.start for block in segments])
    return _Inputs(is_exact, *future_calls(trace.topk_ids, trace.shape.num_experts, starts))


def _parts(trace: RouterTrace, policy: Policy, block: slice) -> Iterator[slice]:
    """The block at once, or in pieces where a compact trace's scores must be laid out for the kernel."""
    if trace.recorded_ids is None or not policy.needs_scores:
        yield block
    else:
        yield from token_blocks(block.start, block.stop, trace.shape.num_layers * trace.shape.num_experts, EXPANDED_SCORES)


def _warn_of_few_scores(trace: RouterTrace, counts: np.ndarray) -> None:
    outside, inside = int(counts[:, OUTSIDE_RECORDED].sum()), int(counts[:, SUBSTITUTED].sum())
    if outside > LARGEST_OUTSIDE_SHARE * (outside + inside):
        warnings.warn(
            f"{outside} of {outside + inside} stand-ins lie outside the best {trace.num_recorded} of {trace.shape.num_experts} scores that "
            "the trace holds, and were fetched instead; record more scores a step",
            UserWarning, stacklevel=3,
        )  # fmt: skip


def _cut(array: np.ndarray | None, block: slice) -> np.ndarray | None:
    return None if array is None else array[block]


def exact_prefix(document_start: np.ndarray, num_tokens: int) -> np.ndarray:
    """[T] bool: True at the first `num_tokens` tokens of each document."""
    position = np.arange(document_start.size)
    start = np.maximum.accumulate(np.where(document_start, position, 0))
    return position - start < num_tokens


def _segments(trace: RouterTrace, documents: str, boundary: int) -> list[slice]:
    """Slices to decide at once: cut where the cache is reset and where the warm window starts."""
    cuts = {0, trace.num_tokens} | ({boundary} if 0 < boundary < trace.num_tokens else set())
    if documents == "reset":
        cuts |= {part.start for part in trace.document_slices()}
    return [slice(a, b) for a, b in pairwise(sorted(cuts))]


def _log_cancelled(logs: list[DecisionLog], rows: np.ndarray) -> None:
    if logs and rows.size:
        last = logs[-1]
        logs[-1] = DecisionLog(
            last.outcome, last.computed_ids, last.evicted_ids, np.concatenate([last.arrivals, rows]), last.substituted_mass
        )


def _one_call_a_step(trace: RouterTrace) -> RouterTrace:
    """The trace with each call as a token of its own: [T x K, L, 1]."""
    shape = type(trace.shape)(trace.shape.num_layers, trace.shape.num_experts, 1, trace.shape.expert_bytes)
    starts = np.zeros(trace.num_tokens * trace.shape.top_k, bool)
    starts[:: trace.shape.top_k] = trace.document_start
    ids = trace.topk_ids.transpose(0, 2, 1).reshape(-1, trace.shape.num_layers, 1)
    return RouterTrace.from_arrays(ids, np.ones(ids.shape, np.float32), document_start=starts, shape=shape, source=trace.source)


def _check_sequential(policy: Policy) -> None:
    if not policy.waits_for_every_miss:
        raise ValueError(f"replay='sequential' is a diagnostic for policies that wait for every miss, not {policy.label!r}")
    for name, neutral in {"insertion_cap": None, "max_prefetches": 0}.items():
        if (value := getattr(policy, name)) != neutral:
            raise ValueError(f"{name}={value} counts within a step, and replay='sequential' has steps of one call; use replay='atomic'")


def _as_steps(log: DecisionLog, shape: ModelShape) -> DecisionLog:
    """The log of a replay call by call [T x K, L, 1] as one of steps [T, L, K]; nothing arrives in such a replay."""
    size = (-1, shape.top_k, shape.num_layers)
    outcome, computed, evicted = (a.reshape(size).swapaxes(1, 2).copy() for a in (log.outcome, log.computed_ids, log.evicted_ids))
    return DecisionLog(outcome, computed, evicted, log.arrivals, log.substituted_mass[:: shape.top_k])


def _stretched(policy: Policy, top_k: int) -> Policy:
    return policy if policy.half_life is None else policy.replace(half_life=policy.half_life * top_k, label=policy.label)


def _check_options(
    trace: RouterTrace, policy: Policy, documents: str, keep: str, replay: str, warmup_tokens: int, exact_prefix_tokens: int
) -> None:
    options = {
        "documents": (documents, DOCUMENT_HANDLING),
        "keep": (keep, ("log", "summary")),
        "replay": (replay, ("atomic", "sequential")),
    }
    for name, (value, known) in options.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    if replay == "sequential":
        _check_sequential(policy)
    check_recorded(policy, trace.num_recorded, trace.shape.num_experts)
    if not 0 <= warmup_tokens < trace.num_tokens:
        raise ValueError(f"warmup_tokens={warmup_tokens} is outside 0..{trace.num_tokens - 1}, the trace's tokens")
    if exact_prefix_tokens < 0:
        raise ValueError(f"exact_prefix_tokens={exact_prefix_tokens} must be 0 or more")
