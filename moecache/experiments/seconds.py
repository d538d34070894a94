"""From misses to seconds: what the decisions of a policy would take on a machine, simulated from two traces.

A cost model turns a decision log into seconds (`moecache.cost`). Here it is asked, for many policies, machines and sizes of an expert:

- how long a token takes and where the time goes (`by_policy`), and on how many documents that holds (`by_unit`),
- how the answer moves with the rate of the link (`by_link_rate`) and with every constant (`sensitivity`),
- what waits and what is substituted in exchange (`ladder`).

The *recorded* trace is real but has few layers. The *synthetic* one has as many layers as a large model, and routers that are made up.
Layers run one after the other, so a token's seconds are scaled to one number of layers: seconds x scaled_layers / L. What the scaling
cannot repair: background copies of a trace of few layers come in bursts, since one token is all the time they have to spread over.

Everything is SIMULATED: no link, device or disk is touched. Letters: T tokens, L MoE layers, E experts a layer, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moecache.cost import cost_sensitivity, estimate_seconds
from moecache.experiments.capacity import REFERENCE, slots_of, unit_starts, warm_start
from moecache.hardware import Hardware, as_hardware
from moecache.policy import (
    FETCH_EVERY_MISS,
    FIRST_CHOICE,
    GATE_015,
    QUALITY_FIRST,
    SPEED_FIRST,
    SUBSTITUTE_EVERY_MISS,
    Policy,
    cache_prior,
    first_j,
    mass_budget,
    max_rank,
    threshold,
)
from moecache.run import Run
from moecache.simulate import simulate
from moecache.synthetic import synthetic_trace
from moecache.trace import RouterTrace
from moecache.trace.importers import load_trace

MEBIBYTE = 2**20
RECORDED, SYNTHETIC = "recorded", "synthetic"
STUDY_CACHE = {"eviction": "decayed_count", "half_life": 128, "admission": "background", "mass_threshold": 0.5}
FETCH_DECAYED = Policy(eviction="decayed_count", half_life=128, label="fetch, decayed count")

Kin = tuple[str, Policy]  # family, policy


class Setting(NamedTuple):
    """What all measurements of a chapter share."""

    resident_fraction: float  # slots as a share of a layer's experts
    warmup_fraction: float  # share of a trace's tokens before the warm window, rounded up to a whole document
    scaled_layers: int  # MoE layers that seconds a token are scaled to

    def slots(self, trace: RouterTrace) -> int:
        """Slots a layer."""
        return slots_of([self.resident_fraction], trace.shape.num_experts, trace.shape.top_k)[0]

    def start(self, trace: RouterTrace) -> int:
        """First token of the warm window."""
        return warm_start(trace, round(self.warmup_fraction * trace.num_tokens))


def compared() -> list[Kin]:
    """The policies of the main table: fetching, the presets, and rules that others use."""
    return [
        ("fetch every miss", FETCH_EVERY_MISS),
        ("fetch every miss", FETCH_DECAYED),
        ("mass budget", mass_budget(0.1, label="mass budget 0.1")),
        ("first J", first_j(3, label="first 3")),
        ("routing bias", cache_prior(label="cache-prior 0.2")),
        ("routing bias", max_rank(30, label="max-rank 30")),
        ("threshold and first choice", GATE_015),
        ("first J", FIRST_CHOICE),
        ("threshold and first choice", QUALITY_FIRST),
        ("first J", SPEED_FIRST),
        ("substitute every miss", SUBSTITUTE_EVERY_MISS),
    ]


def rungs() -> list[Kin]:
    """Rules from cautious to careless, each bare (LRU) and in the presets' cache (decayed counts, background admission)."""
    weights, ranks, budgets = (0.05, 0.08, 0.10, 0.12, 0.15), (1, 2, 3, 5), (0.02, 0.05, 0.1, 0.2, 0.3)
    bare = [
        *(("threshold and first choice", threshold(weight, first_choice=True, label=f"gate weight {weight:g}")) for weight in weights),
        *(("first J", first_j(number, label=f"first {number}")) for number in ranks),
        *(("mass budget", mass_budget(budget, label=f"mass budget {budget:g}")) for budget in budgets),
    ]
    admitting = [(family, policy.replace(**STUDY_CACHE, label=f"{policy.label}, admitting")) for family, policy in bare]
    return [("fetch every miss", FETCH_EVERY_MISS), ("fetch every miss", FETCH_DECAYED), *bare, *admitting]


@lru_cache(maxsize=1)
def open_recorded(trace_path: str, num_documents: int, num_tokens: int, model_name: str) -> RouterTrace:
    """The recorded trace, see `open_traces`."""
    return load_trace(trace_path) if trace_path else _record_reference(num_documents, num_tokens, model_name)


@lru_cache(maxsize=1)
def open_traces(
    trace_path: str, num_documents: int, num_tokens: int, synthetic_tokens: int, model_name: str = REFERENCE
) -> dict[str, RouterTrace]:
    """The two traces by kind.

    Parameters
    ----------
    trace_path : a recorded trace with scores, in any format that `load_trace` reads; empty = a reference model on its held-out text.
    num_documents, num_tokens, model_name : documents and tokens of each, and the reference model.
    synthetic_tokens : tokens of the synthetic trace: 48 layers of 512 experts, top-10.
    """
    return {
        RECORDED: open_recorded(trace_path, num_documents, num_tokens, model_name),
        SYNTHETIC: synthetic_trace(synthetic_tokens),
    }


def _record_reference(num_documents: int, num_tokens: int, model_name: str) -> RouterTrace:
    from moecache.record import record
    from moecache.reference import held_out_documents, load_model

    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, say=lambda _: None)
    return record(load_model(model_name), [document.tokens for document in documents], predict="stale_gate")


def describe(traces: dict[str, RouterTrace], setting: Setting) -> pd.DataFrame:
    """One row a trace: `trace`, its shape, `num_documents`, `first_warm_token`, `num_slots`, `units`, `num_units`."""
    rows = []
    for name, trace in traces.items():
        start = setting.start(trace)
        starts, units = unit_starts(trace, start)
        shape = trace.shape
        rows.append((name, trace.num_tokens, shape.num_layers, shape.num_experts, shape.top_k, int(trace.document_start.sum()), start,
                     setting.slots(trace), units, starts.size))  # fmt: skip
    names = ["trace", "num_tokens", "num_layers", "num_experts", "top_k", "num_documents", "first_warm_token", "num_slots"]
    return pd.DataFrame(rows, columns=[*names, "units", "num_units"])


def each_run(traces: dict[str, RouterTrace], kin: Sequence[Kin], setting: Setting) -> Iterator[tuple[dict[str, Any], Run]]:
    """Every policy over every trace: (`trace`, `policy`, `family` and what was decided in the warm window, the run)."""
    for name, trace in traces.items():
        for family, policy in kin:
            run = simulate(trace, policy, setting.slots(trace))
            yield {"trace": name, "policy": policy.label, "family": family, **decided(run, setting.start(trace))}, run


def decided(run: Run, start: int) -> dict[str, float]:
    """Rates of the warm window that no machine changes."""
    totals = run.summary(start)
    names = ("hit_rate", "substituted_mass", "fetches_per_step", "copies_per_step")
    return {name: float(totals[name]) for name in names}


def timed(run: Run, machine: Hardware | str, mebibytes: float, setting: Setting, start: int, lead_steps: int = 1) -> dict[str, Any]:
    """One machine's simulated time for a run.

    Returns
    -------
    dict : `hardware`, `expert_mebibytes`, `ms_per_token` and its parts `compute_ms`, `waiting_ms`, `stall_ms` (means of the warm window,
        scaled to the setting's layers), `link_busy_fraction`.
    """
    totals = estimate_seconds(run, machine, round(mebibytes * MEBIBYTE), lead_steps).summary(start)
    milliseconds = 1000 * setting.scaled_layers / run.shape.num_layers
    return {
        "hardware": totals["hardware"],
        "expert_mebibytes": mebibytes,
        "ms_per_token": milliseconds * totals["seconds_per_token"],
        "compute_ms": milliseconds * totals["compute_seconds_per_token"],
        "waiting_ms": milliseconds * totals["blocking_seconds_per_token"],
        "stall_ms": milliseconds * totals["stall_seconds_per_token"],
        "link_busy_fraction": totals["link_busy_fraction"],
    }


def by_policy(
    traces: dict[str, RouterTrace], kin: Sequence[Kin], hardware: Sequence[Hardware | str], mebibytes: Sequence[float], setting: Setting
) -> pd.DataFrame:
    """Time per token of every policy on every machine for every size of an expert.

    Returns
    -------
    DataFrame : a row per (trace, policy, size, hardware): `trace`, `policy`, `family`, the rates of `decided`, the times of `timed`.
    """
    rows = []
    for row, run in each_run(traces, kin, setting):
        start = setting.start(traces[row["trace"]])
        rows += [row | timed(run, machine, size, setting, start) for size in mebibytes for machine in hardware]
    return pd.DataFrame(rows)


def by_unit(trace: RouterTrace, kin: Sequence[Kin], hardware: Sequence[str], mebibytes: float, setting: Setting) -> pd.DataFrame:
    """Seconds of every document of the warm window (of every block, in a trace of fewer than three documents).

    Returns
    -------
    DataFrame : `policy`, `hardware`, `unit`, `num_tokens`, `seconds` (of the unit, not scaled).
    """
    starts, _ = unit_starts(trace, setting.start(trace))
    lengths, frames = np.diff(starts, append=trace.num_tokens), []
    for row, run in each_run({RECORDED: trace}, kin, setting):
        for machine in hardware:
            seconds = np.add.reduceat(estimate_seconds(run, machine, round(mebibytes * MEBIBYTE)).seconds, starts)
            columns = {"unit": np.arange(starts.size), "num_tokens": lengths, "seconds": seconds}
            frames.append(pd.DataFrame({"policy": row["policy"], "hardware": machine, **columns}))
    return pd.concat(frames, ignore_index=True)


def by_link_rate(
    traces: dict[str, RouterTrace],
    kin: Sequence[Kin],
    machine: str,
    gigabytes_per_second: Sequence[float],
    mebibytes: Sequence[float],
    setting: Setting,
) -> pd.DataFrame:
    """`by_policy` on one machine whose link is exchanged for others; `gigabytes_per_second` (1e9) besides."""
    base = as_hardware(machine)
    links = [base.replace(link_bytes_per_second=rate * 1e9, name=f"{rate:g}") for rate in gigabytes_per_second]
    frame = by_policy(traces, kin, links, mebibytes, setting)
    return frame.assign(gigabytes_per_second=frame["hardware"].astype(float), hardware=machine)


def sensitivity(
    trace: RouterTrace, kin: Sequence[Kin], hardware: Sequence[str], mebibytes: float, factors: Sequence[float], setting: Setting
) -> pd.DataFrame:
    """How the time of each policy answers to each constant of each machine.

    Returns
    -------
    DataFrame : `policy`, `hardware`, `constant` ("as given" for the machine itself), `factor`, `ms_per_token`, `change_fraction`,
        `elasticity` (log of the ratio of times / log of the ratio of values).
    """
    start, frames = setting.start(trace), []
    for row, run in each_run({RECORDED: trace}, kin, setting):
        scale = 1000 * setting.scaled_layers / run.shape.num_layers
        for machine in hardware:
            found = cost_sensitivity(run, machine, round(mebibytes * MEBIBYTE), factors, start).drop(columns="value")
            given = timed(run, machine, mebibytes, setting, start)["ms_per_token"]
            found = found.assign(ms_per_token=scale * found["seconds_per_token"]).drop(columns="seconds_per_token")
            base = pd.DataFrame([{"constant": "as given", "factor": 1.0, "ms_per_token": given, "change_fraction": 0.0, "elasticity": 0.0}])
            frames.append(pd.concat([base, found]).assign(policy=row["policy"], hardware=machine))
    return pd.concat(frames, ignore_index=True)
