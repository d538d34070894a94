"""What a run of an engine measured, as numbers of one row: rates, memory, reads, hits, and how it was set.

Engines, caps and commands are not known here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from moecache.experiments.memory_cap import CappedRun
from moecache.experiments.stock_engines.protocol import Measured

MEBIBYTE = 2**20
DEFAULT = 0  # a choice that is left to the engine or the machine


def figures(run: CappedRun | None, answer: Measured | None) -> dict[str, Any]:
    """What was measured, by the names of `COLUMNS`; NaN where it was not."""
    found: dict[str, Any] = dict.fromkeys(
        ("tokens_per_second", "median_ms", "load_seconds", "peak_mebibytes", "rss_mebibytes", "private_mebibytes",
         "read_mebibytes_per_token", "faults_per_token", "hit_rate", "gpu_peak_mebibytes"), float("nan")
    )  # fmt: skip
    found |= {"threads": DEFAULT, "flags": "{}", "versions": "{}"}
    if run is not None and run.peak_bytes is not None:
        found["peak_mebibytes"] = run.peak_bytes / MEBIBYTE
    if run is None or answer is None:
        return found
    if answer.gpu_peak_bytes is not None:
        found["gpu_peak_mebibytes"] = answer.gpu_peak_bytes / MEBIBYTE
    n = len(answer.seconds)
    return found | {
        "tokens_per_second": n / sum(answer.seconds),
        "median_ms": 1000 * float(np.median(answer.seconds)),
        "load_seconds": answer.load_seconds,
        "rss_mebibytes": answer.peak_resident_bytes / MEBIBYTE,
        "private_mebibytes": answer.private_bytes / MEBIBYTE,
        "read_mebibytes_per_token": answer.read_bytes / MEBIBYTE / n,
        "faults_per_token": answer.major_faults / n,
        "hit_rate": _hit_rate(answer.stats),
        "threads": answer.threads,
        "flags": json.dumps(answer.settings),
        "versions": json.dumps(answer.versions),
    }


def _hit_rate(stats: dict[str, Any]) -> float:
    calls = [stats.get(name, 0) for name in ("hit", "fetched", "forced", "substituted", "dropped")]
    return stats["hit"] / sum(calls) if sum(calls) else float("nan")
