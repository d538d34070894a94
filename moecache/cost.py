"""Seconds from decisions: what a decision log would take on given hardware. Everything here is SIMULATED, nothing is measured.

One layer of one token goes through five moments, on one device and one link:

1. Attention, router and the layer's other fixed work: `layer_seconds`. The link is idle and moves background copies.
2. Copies that land at this step must be complete. What is missing of them is moved now, and everybody waits: a *stall*.
3. The fetches of the step share the link one after the other: F = sum of (latency + bytes / rate). Background copies pause.
4. Ready calls (hits, stand-ins, low-bit copies) are computed meanwhile, R seconds; the wait that is left is
   max(0, F - overlap x R). The fetched experts are computed after it. Calls computed on the CPU run beside all this.
5. While the phase lasts longer than F the link is idle again and moves background copies, the one that lands first going first.

A copy whose expert is fetched while it is under way becomes that fetch: what it has moved already is not moved again, so the bytes count
once (its staging block serves every fetch of that expert until it lands); of a copy and a prefetch of one expert, the one that lands first
is moved and serves both. A copy that is
dropped on arrival is moved, but nobody waits for it. Copies cancelled by a document reset, and copies that had not landed when the log
ended, are not charged. With a host tier, a transfer whose block is not in host memory first reads it from the disk, one after the other;
the tier starts empty and the block read least recently leaves it.

The estimate is a pure function of the decision log: the logical clock has decided already who is resident, so slow hardware changes
seconds and never decisions. It knows no contention between CPU and link, no kernel launches, and no batch: one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moecache.cost_loop import Copies, Costs, Totals, new_host, new_link, run_tokens
from moecache.hardware import Hardware, as_hardware
from moecache.kernel import ArrivalKind, Landing, Outcome
from moecache.metrics import check_clocks
from moecache.run import Run
from moecache.trace import DecisionLog

SIMULATED = "simulated"


@dataclass(frozen=True, eq=False)
class TimeEstimate:
    """Simulated seconds of every token, and where they go.

    Attributes
    ----------
    seconds : [T] float64, the sum of the next three.
    compute_seconds, blocking_seconds, stall_seconds : [T] computation, waiting for fetches, waiting for late background copies.
    link_busy_seconds : [T] the link moving (or a disk reading for it), for whatever reason.
    transfers : [T] int64, experts sent over the link, counted when they are asked for.
    disk_reads : [T] int64, how many of them were not in the host tier.
    hardware, expert_bytes : what was assumed.
    seconds_kind : always "simulated".
    """

    seconds: np.ndarray
    compute_seconds: np.ndarray
    blocking_seconds: np.ndarray
    stall_seconds: np.ndarray
    link_busy_seconds: np.ndarray
    transfers: np.ndarray
    disk_reads: np.ndarray
    hardware: Hardware
    expert_bytes: int
    seconds_kind: str = SIMULATED

    def summary(self, first_token: int = 0) -> dict[str, Any]:
        """Means a token from token `first_token` on, with the hardware's name.

        Raises
        ------
        ValueError : an empty window.
        """
        if not 0 <= first_token < self.seconds.size:
            raise ValueError(f"first_token={first_token} is outside 0..{self.seconds.size - 1}")
        mean = {name: float(values[first_token:].mean()) for name, values in self._per_token().items()}
        seconds = mean["seconds"]
        return {
            "hardware": self.hardware.name,
            "seconds_kind": self.seconds_kind,
            "seconds_per_token": seconds,
            "tokens_per_second": 1 / seconds if seconds else math.inf,
            "compute_seconds_per_token": mean["compute_seconds"],
            "blocking_seconds_per_token": mean["blocking_seconds"],
            "stall_seconds_per_token": mean["stall_seconds"],
            "link_busy_fraction": mean["link_busy_seconds"] / seconds if seconds else 0.0,
            "bytes_per_token": mean["transfers"] * self.expert_bytes,
            "disk_reads_per_token": mean["disk_reads"],
        }

    def frame(self) -> pd.DataFrame:
        """One row a token."""
        return pd.DataFrame({"token": np.arange(self.seconds.size), **self._per_token()})

    def _per_token(self) -> dict[str, np.ndarray]:
        names = ("seconds", "compute_seconds", "blocking_seconds", "stall_seconds", "link_busy_seconds", "transfers", "disk_reads")
        return {name: getattr(self, name) for name in names}


def estimate_seconds(
    run: Run | DecisionLog, hardware: Hardware | str, expert_bytes: int | None = None, prefetch_lead_steps: int = 1
) -> TimeEstimate:
    """Simulate how long the decisions of a run would take, token by token.

    Parameters
    ----------
    run : Run with its decisions, or a DecisionLog that starts at clock 0.
    hardware : Hardware, or the name of a profile.
    expert_bytes : size of one expert; by default the run's own (`run.shape.expert_bytes`).
    prefetch_lead_steps : how many layers before its own a prefetch is known: 1 when the layer before predicts it (a stale gate), L when
        the previous token does, which is the most.

    Returns
    -------
    TimeEstimate : [T] seconds with `seconds_kind` "simulated".

    Raises
    ------
    ValueError : no decisions, an unknown size of an expert, calls on a CPU path that the hardware lacks, or a log that is not whole.
    """
    hardware = as_hardware(hardware)
    log, size = _log_and_size(run, expert_bytes)
    costs = _costs(hardware, size)
    if hardware.cpu_seconds is None and (num_calls := log.count(Outcome.CPU)):
        raise ValueError(f"{num_calls} calls were computed on the CPU, but hardware {hardware.name!r} has no cpu_seconds; give them")
    if not 1 <= prefetch_lead_steps <= log.outcome.shape[1]:
        raise ValueError(
            f"prefetch_lead_steps={prefetch_lead_steps} must be 1 (the layer before) to {log.outcome.shape[1]} layers (the token before)"
        )
    copies = _copies(log, prefetch_lead_steps)
    num_tokens, num_layers, _ = log.outcome.shape
    num_experts = 1 + max(int(log.computed_ids.max(initial=0)), int(copies.expert.max(initial=0)))
    totals = Totals(*(np.zeros(num_tokens) for _ in range(4)), *(np.zeros(num_tokens, np.int64) for _ in range(2)))
    run_tokens(
        _read_only(log.outcome),
        _read_only(log.computed_ids),
        copies,
        costs,
        totals,
        new_link(copies.expert.size, num_layers, num_experts),
        new_host(costs.num_host_blocks, num_layers * num_experts),
    )
    seconds = totals.compute + totals.blocking + totals.stall
    return TimeEstimate(seconds, *totals, hardware=hardware, expert_bytes=size)


def with_seconds(run: Run, hardware: Hardware | str, expert_bytes: int | None = None, prefetch_lead_steps: int = 1) -> Run:
    """The run with simulated `seconds`; their parts are in `run.extra` and so in `run.frame()`.

    Parameters
    ----------
    run : Run with its decisions.
    hardware, expert_bytes, prefetch_lead_steps : as for `estimate_seconds`.

    Returns
    -------
    Run : with `seconds` [T] float64, `seconds_kind` "simulated", and [T] `compute_seconds`, `blocking_seconds`, `stall_seconds`,
        `link_busy_seconds` in `extra`.

    Raises
    ------
    ValueError : what `estimate_seconds` raises.
    """
    estimate = estimate_seconds(run, hardware, expert_bytes, prefetch_lead_steps)
    parts = ("compute_seconds", "blocking_seconds", "stall_seconds", "link_busy_seconds")
    return replace(
        run,
        seconds=estimate.seconds,
        seconds_kind=SIMULATED,
        extra={**run.extra, **{name: getattr(estimate, name) for name in parts}},
        provenance={**run.provenance, "hardware": estimate.hardware.to_dict(), "expert_bytes": estimate.expert_bytes},
    )


def cost_sensitivity(
    run: Run | DecisionLog,
    hardware: Hardware | str,
    expert_bytes: int | None = None,
    factors: Sequence[float] = (0.5, 0.8, 1.25, 2.0),
    first_token: int = 0,
    prefetch_lead_steps: int = 1,
) -> pd.DataFrame:
    """How the simulated seconds answer to each constant: one constant at a time, multiplied by each factor.

    Parameters
    ----------
    run, hardware, expert_bytes, prefetch_lead_steps : as for `estimate_seconds`.
    factors : above 0; `overlap` stops at 1.
    first_token : where the window starts.

    Returns
    -------
    DataFrame : constant, factor, value, seconds_per_token, change_fraction (against the hardware as given) and elasticity
        (log of the ratio of seconds / log of the ratio of values). Constants that are absent or 0 have no row.

    Raises
    ------
    ValueError : a factor of 0 or less, and what `estimate_seconds` raises.
    """
    if bad := [factor for factor in factors if not 0 < factor < math.inf]:
        raise ValueError(f"factors={bad} must be above 0 and finite")
    hardware = as_hardware(hardware)

    def seconds_on(machine: Hardware) -> float:
        return estimate_seconds(run, machine, expert_bytes, prefetch_lead_steps).summary(first_token)["seconds_per_token"]

    base = seconds_on(hardware)
    rows = []
    for name, value in _varied_constants(hardware).items():
        for factor in factors:
            changed = min(value * factor, 1.0) if name == "overlap" else type(value)(value * factor)
            if changed == value:
                continue
            seconds = seconds_on(hardware.replace(**{name: changed}))
            rows.append((name, factor, float(changed), seconds, *_response(seconds, base, changed / value)))
    return pd.DataFrame(rows, columns=["constant", "factor", "value", "seconds_per_token", "change_fraction", "elasticity"])


def _response(seconds: float, base: float, factor: float) -> tuple[float, float]:
    """Relative change and elasticity; NaN where nothing takes any time."""
    if not (seconds and base):
        return math.nan, math.nan
    return seconds / base - 1, math.log(seconds / base) / math.log(factor)


def _varied_constants(hardware: Hardware) -> dict[str, Any]:
    return {name: value for name, value in hardware.to_dict().items() if isinstance(value, (int, float)) and value > 0}


def _log_and_size(run: Run | DecisionLog, expert_bytes: int | None) -> tuple[DecisionLog, int]:
    if isinstance(run, Run):
        if run.decisions is None:
            raise ValueError("only totals were kept; run with keep='log', because seconds follow from every decision")
        if run.replay != "atomic":
            raise ValueError(f"replay={run.replay!r} is a diagnostic: its steps are not a model's, so it has no seconds")
        log, expert_bytes = run.decisions, run.shape.expert_bytes if expert_bytes is None else expert_bytes
    else:
        log = run
    if expert_bytes is None:
        raise ValueError("the size of an expert is unknown: give expert_bytes=..., or a trace whose shape has expert_bytes")
    if expert_bytes < 1:
        raise ValueError(f"expert_bytes={expert_bytes} must be at least 1")
    return log, int(expert_bytes)


def _read_only(array: np.ndarray) -> np.ndarray:
    """One flavour of argument, so that the loop is compiled once."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _costs(hardware: Hardware, expert_bytes: int) -> Costs:
    expert = hardware.seconds_per_expert(expert_bytes)
    return Costs(
        layer=float(hardware.layer_seconds),
        token=float(hardware.token_seconds),
        expert=float(expert),
        low_precision=float(expert if hardware.low_precision_seconds is None else hardware.low_precision_seconds),
        cpu=float(hardware.cpu_seconds or 0.0),
        overlap=float(hardware.overlap),
        link=float(hardware.seconds_per_transfer(expert_bytes)),
        disk=float(hardware.seconds_per_disk_read(expert_bytes)),
        num_host_blocks=-1 if hardware.host_ram_bytes is None else int(hardware.host_ram_bytes // expert_bytes),
    )


def _copies(log: DecisionLog, prefetch_lead_steps: int) -> Copies:
    """The copies of a log by landing and by booking; step s is token s // L, layer s % L."""
    check_clocks(log)
    num_tokens, num_layers, _ = log.outcome.shape
    rows = log.arrivals[log.arrivals[:, 6] != Landing.CANCELLED]
    landed, layer = rows[:, 1], rows[:, 2]
    order = np.lexsort((np.arange(layer.size), layer, landed))
    rows, landing = rows[order], (landed * num_layers + layer)[order]
    # A prefetch is logged where it lands, and known some layers earlier.
    lead = np.where(rows[:, 5] == ArrivalKind.PREFETCH, prefetch_lead_steps, 0)
    booking = np.maximum(rows[:, 0] * num_layers + rows[:, 2] - lead, 0)
    booked = np.argsort(booking, kind="stable")
    steps = np.arange(num_tokens * num_layers + 1)
    return Copies(
        layer=rows[:, 2].copy(),
        expert=rows[:, 3].copy(),
        is_landing=rows[:, 6] == Landing.LANDED,
        first_landing=np.searchsorted(landing, steps),
        booked=booked,
        first_booking=np.searchsorted(booking[booked], steps),
    )
