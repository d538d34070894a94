"""Sweeps: every policy at every capacity over every trace, in parallel, as one tidy table.

A combination is one run of the simulator that keeps totals only. Combinations know nothing of each other, so the table is the same
whatever the number of workers and whoever runs them: they go through joblib, whose own processes are the default, and whose back end a
user changes with `joblib.parallel_config` (to Dask or Ray, say) without touching this module. Give traces by path where workers share no
memory: each worker then loads a trace once.

With a `store` every finished combination is one small file, named by the hash of all that decides its numbers: the trace's contents, the
policy, the capacity, the options, the hardware and the kernel's version. An interrupted sweep goes on where it stopped, and a changed
option never meets an old number. Files are written by the calling process only, under another name first.
"""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from tqdm import tqdm

from moecache.cache import slots_per_layer
from moecache.cost import estimate_seconds
from moecache.hardware import Hardware, as_hardware
from moecache.kernel import KERNEL_VERSION
from moecache.policy import Policy, check_policy
from moecache.quality.model import QualityModel
from moecache.simulate import simulate
from moecache.sweep_store import digest, stored_results, trace_digest, write_result
from moecache.trace import RouterTrace
from moecache.trace.importers import load_trace

TraceLike = RouterTrace | str | os.PathLike[str]
ROUND_PER_WORKER = 4  # combinations a worker gets at once where the back end returns whole lists only


@dataclass(frozen=True)
class _Options:
    """What all combinations of a sweep share."""

    warmup_tokens: int
    cold_start: Any
    documents: str
    exact_prefix_tokens: int
    seed: int
    buddies: Any
    hardware: tuple[Hardware, ...]
    expert_bytes: int | None
    prefetch_lead_steps: int
    quality: QualityModel | None


class _Job(NamedTuple):
    """One combination."""

    name: str
    trace: RouterTrace | str
    policy: Policy
    num_slots: int | tuple[int, ...]


def sweep(
    traces: TraceLike | Sequence[TraceLike] | Mapping[str, TraceLike],
    policies: Policy | Sequence[Policy],
    capacities: int | Sequence[int | Sequence[int]],
    *,
    hardware: Hardware | str | Sequence[Hardware | str] | None = None,
    expert_bytes: int | None = None,
    prefetch_lead_steps: int = 1,
    warmup_tokens: int = 0,
    cold_start: str | npt.ArrayLike = "first",
    documents: str = "keep",
    exact_prefix_tokens: int = 0,
    seed: int = 0,
    buddies: np.ndarray | None = None,
    quality: QualityModel | None = None,
    num_workers: int | None = None,
    store: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Simulate every (trace, policy, capacity).

    Parameters
    ----------
    traces : RouterTrace or path of a trace file, a list of them, or a dictionary from name to trace.
    policies : Policy, or a list with different labels.
    capacities : slots a layer; a capacity may itself be a list of one number a layer.
    hardware : Hardware or profile name, or a list: adds simulated seconds, one row per hardware.
    expert_bytes, prefetch_lead_steps : as for `estimate_seconds`, for the seconds.
    warmup_tokens : the rows speak of the tokens from here on.
    cold_start, documents, exact_prefix_tokens, seed, buddies, quality : as for `simulate`.
    num_workers : processes; None = all cores, or what `joblib.parallel_config` says; 1 = this process.
    store : folder of finished combinations; a later call with the same folder resumes.
    progress : show a progress bar.

    Returns
    -------
    DataFrame : one row a combination (and hardware), in the order of traces, policies, capacities: trace, policy, num_slots (mean a
        layer), slots_per_layer (where they differ), capacity_fraction, warmup_tokens, the columns of `Run.summary`, and with
        `hardware` those of `TimeEstimate.summary`.

    Raises
    ------
    ValueError : before anything runs: a combination that cannot be replayed, or names that are not different.
    """
    named, kinds = _named_traces(traces), [check_policy(policy) for policy in _as_list(policies, Policy)]
    machines = () if hardware is None else tuple(as_hardware(h) for h in _as_list(hardware, (Hardware, str)))
    options = _Options(
        warmup_tokens, cold_start, documents, exact_prefix_tokens, seed, buddies, machines, expert_bytes, prefetch_lead_steps, quality
    )
    slots = _capacities(capacities)
    _check_names(kinds, machines, slots)
    digests = _check_traces(named, kinds, slots, options, is_stored=store is not None)
    jobs = [_Job(name, trace, policy, num_slots) for name, trace in named.items() for policy in kinds for num_slots in slots]
    keys = [_key(job, digests[job.name], options) for job in jobs] if store is not None else []
    results = stored_results(store, keys)
    todo = [i for i in range(len(jobs)) if i not in results]
    finished = _run_jobs([(i, jobs[i]) for i in todo], options, num_workers)
    bar = tqdm(total=len(jobs), initial=len(results), desc="sweep", unit="run", disable=not progress)
    with bar, closing(finished):
        for i, rows in finished:
            if store is not None:
                write_result(Path(store), keys[i], rows)
            results[i] = rows
            bar.update()
    return pd.DataFrame([_labelled(row, jobs[i]) for i in range(len(jobs)) for row in results[i]])


def _as_list(value: Any, single: type | tuple[type, ...]) -> list[Any]:
    """A list of one for a single value, otherwise a list of the values."""
    return [value] if isinstance(value, single) else list(value)


def _capacities(capacities: Any) -> list[int | tuple[int, ...]]:
    """Slots a layer, as an int or as a tuple of one int a layer; what a trace allows is looked at later."""
    try:
        return [tuple(map(operator.index, c)) if np.ndim(c) else operator.index(c) for c in _as_list(capacities, (int, np.integer))]
    except TypeError:
        raise ValueError(f"capacities={capacities!r} must be integers, slots a layer, or lists of one integer a layer") from None


def _named_traces(traces: TraceLike | Sequence[TraceLike] | Mapping[str, TraceLike]) -> dict[str, RouterTrace | str]:
    """Traces by name: a file by its stem, an object by its place in the list."""
    if isinstance(traces, Mapping):
        pairs = list(traces.items())
    else:
        values = _as_list(traces, (RouterTrace, str, os.PathLike))
        pairs = [(str(i) if isinstance(trace, RouterTrace) else Path(trace).stem, trace) for i, trace in enumerate(values)]
    named = {name: trace if isinstance(trace, RouterTrace) else os.path.abspath(trace) for name, trace in pairs}
    if not named or len(named) < len(pairs):
        raise ValueError(f"traces need different names, got {[name for name, _ in pairs]}; give a dictionary from name to trace")
    return named


def _check_names(policies: list[Policy], machines: tuple[Hardware, ...], slots: list[int | tuple[int, ...]]) -> None:
    for what, names in (
        ("policy labels", [policy.label for policy in policies]),
        ("hardware names", [machine.name for machine in machines]),
        ("capacities", slots),
    ):
        if len(set(names)) < len(names):
            raise ValueError(f"{what} must be different, got {names}")
    if not policies or not slots:
        raise ValueError(f"nothing to sweep: {len(policies)} policies and {len(slots)} capacities")


def _check_traces(
    named: dict[str, RouterTrace | str], policies: list[Policy], slots: list[int | tuple[int, ...]], options: _Options, is_stored: bool
) -> dict[str, str]:
    """Refuse what cannot be replayed, all of it at once; the digest of each trace (empty without a store)."""
    problems, digests = [], {}
    for name, reference in named.items():
        trace = reference if isinstance(reference, RouterTrace) else load_trace(reference, memory_map=True)
        problems += [f"trace {name!r}: {problem}" for problem in _problems(trace, policies, slots, options)]
        digests[name] = trace_digest(trace) if is_stored else ""
    if problems:
        raise ValueError(f"{len(problems)} combinations cannot be replayed:\n" + "\n".join(problems[:20]))
    return digests


def _problems(trace: RouterTrace, policies: list[Policy], slots: list[int | tuple[int, ...]], options: _Options) -> Iterator[str]:
    for num_slots in slots:
        try:
            slots_per_layer(trace.shape, num_slots)
        except ValueError as error:
            yield str(error).replace("num_slots", "capacities", 1)
    for policy in policies:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of stand-ins that are not recorded: one token tells no share
                simulate(trace.tokens(0, 1), policy, trace.shape.top_k, **_simulate_options(options, warmup_tokens=0))
        except ValueError as error:
            yield f"policy {policy.label!r}: {error}"
    if not 0 <= options.warmup_tokens < trace.num_tokens:
        yield f"warmup_tokens={options.warmup_tokens} is outside 0..{trace.num_tokens - 1}"
    if options.hardware and options.expert_bytes is None and trace.shape.expert_bytes is None:
        yield "seconds need the size of an expert: give expert_bytes=..."


def _simulate_options(options: _Options, **changes: Any) -> dict[str, Any]:
    names = ("warmup_tokens", "cold_start", "documents", "exact_prefix_tokens", "seed", "buddies", "quality")
    return {**{name: getattr(options, name) for name in names}, **changes}


def run_job(job: _Job, options: _Options) -> list[dict[str, Any]]:
    """The rows of one combination, without labels; JSON types only. Runs in a worker."""
    trace = _loaded(job.trace, os.stat(job.trace).st_mtime_ns) if isinstance(job.trace, str) else job.trace
    keep = "log" if options.hardware else "summary"
    run = simulate(trace, job.policy, job.num_slots, keep=keep, **_simulate_options(options))
    row = {
        "num_slots": float(run.num_slots.mean()) if run.num_slots.min() < run.num_slots.max() else int(run.num_slots[0]),
        "capacity_fraction": float(run.num_slots.mean() / trace.shape.num_experts),
        "warmup_tokens": options.warmup_tokens,
        **run.summary(options.warmup_tokens),
    }
    estimates = [estimate_seconds(run, machine, options.expert_bytes, options.prefetch_lead_steps) for machine in options.hardware]
    return [row | estimate.summary(options.warmup_tokens) for estimate in estimates] or [row]


def _labelled(row: dict[str, Any], job: _Job) -> dict[str, Any]:
    uneven = {} if isinstance(job.num_slots, int) else {"slots_per_layer": json.dumps(job.num_slots)}
    return {"trace": job.name, "policy": job.policy.label, **uneven, **row}


@lru_cache(maxsize=1)
def _loaded(path: str, changed_at: int) -> RouterTrace:
    """A worker's trace; combinations come trace by trace, so one is enough."""
    del changed_at
    return load_trace(path, memory_map=True)


def _run_jobs(jobs: list[tuple[int, _Job]], options: _Options, num_workers: int | None) -> Generator[tuple[int, list[dict[str, Any]]]]:
    """Results as they come, in any order."""
    import joblib  # here, because it is a sixth of the time that `import moecache` takes
    from joblib.parallel import get_active_backend

    backend, workers = cast(tuple[Any, int | None], get_active_backend())
    if num_workers is not None:
        workers = num_workers
    elif workers is None:  # nobody said; a back end that the user chose (Dask, Ray) has a default of its own, and joblib's own is 1
        workers = -1 if backend.default_n_jobs == 1 else backend.default_n_jobs
    if workers == 1 or not jobs:
        yield from ((i, run_job(job, options)) for i, job in jobs)
        return
    calls = [joblib.delayed(_numbered)(i, job, options) for i, job in jobs]
    if backend.supports_return_generator:
        yield from _cancelled_when_closed(joblib.Parallel(n_jobs=workers, return_as="generator_unordered")(calls))
        return
    size = ROUND_PER_WORKER * joblib.effective_n_jobs(cast(int, workers))
    for start in range(0, len(calls), size):
        yield from cast(Any, joblib.Parallel(n_jobs=workers)(calls[start : start + size]))


def _cancelled_when_closed(results: Any) -> Generator[Any]:
    """joblib's generator; what is still under way is cancelled when the caller stops early, and joblib need not warn of it."""
    try:
        # Not `yield from`: that would close joblib's generator before the warning is silenced.
        for result in results:  # noqa: UP028
            yield result
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            results.close()


def _numbered(i: int, job: _Job, options: _Options) -> tuple[int, list[dict[str, Any]]]:
    return i, run_job(job, options)


def _key(job: _Job, trace_digest: str, options: _Options) -> dict[str, Any]:
    policy = job.policy.to_dict()
    del policy["label"]
    shared: dict[str, Any] = {f.name: getattr(options, f.name) for f in fields(options)}
    shared["hardware"] = [machine.to_dict() for machine in options.hardware]
    shared["quality"] = None if options.quality is None else options.quality.to_dict()
    for name in ("cold_start", "buddies"):
        if shared[name] is not None and not isinstance(shared[name], str):
            shared[name] = digest(shared[name])
    key = {"trace_sha256": trace_digest, "policy": policy, "num_slots": job.num_slots, "kernel_version": KERNEL_VERSION, **shared}
    return json.loads(json.dumps(key))
