"""The compiled kernel: one step of one layer's cache, the same for simulator, emulator and runtime.

It reads router scores, ids and gate weights and writes decisions; it touches nothing but arrays. `KERNEL_VERSION` is part of every
stored result's key: it rises whenever any decision changes (a golden-stream test fails otherwise).
"""

from __future__ import annotations

from pathlib import Path

from moecache.kernel.admission import Admission
from moecache.kernel.codes import ArrivalKind, Count, Landing, Outcome
from moecache.kernel.eviction import Eviction, growth_table
from moecache.kernel.fallback import NOT_RECORDED, Fallback
from moecache.kernel.insertion import Insertion
from moecache.kernel.jit import drop_stale_cache
from moecache.kernel.miss_rule import MissRule
from moecache.kernel.state import CacheState, Rules, StepLog, Steps, forget, make_resident, new_state
from moecache.kernel.step import replay

KERNEL_VERSION = 1

if hasattr(replay, "stats"):  # absent when NUMBA_DISABLE_JIT=1 runs the kernel as plain Python
    drop_stale_cache(Path(replay.stats.cache_path))

__all__ = [
    "KERNEL_VERSION",
    "NOT_RECORDED",
    "Admission",
    "ArrivalKind",
    "CacheState",
    "Count",
    "Eviction",
    "Fallback",
    "Insertion",
    "Landing",
    "MissRule",
    "Outcome",
    "Rules",
    "StepLog",
    "Steps",
    "forget",
    "growth_table",
    "make_resident",
    "new_state",
    "replay",
]
