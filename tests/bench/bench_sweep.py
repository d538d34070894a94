"""How long a sweep takes: 100 (policy, capacity) pairs over 10,000 tokens x 48 layers x top-10. Prints one JSON line a measurement.

    python tests/bench/bench_sweep.py [--tokens 10000] [--layers 48] [--workers 2]

Target: under 60 s on two cores. Wall-clock seconds mean little on a busy machine, so the processor seconds of all processes and the
calls per processor second stand beside them, and so does the load at the start.
"""

import argparse
import json
import os
import resource
import time

from joblib.externals.loky import get_reusable_executor

import moecache as mc
from moecache.provenance import provenance

POLICIES = [
    *mc.PRESETS,
    mc.Policy(eviction="fifo"),
    mc.Policy(eviction="plain_count"),
    mc.Policy(eviction="decayed_count", half_life=128),
    mc.FIRST_CHOICE.replace(fallback="drop"),
]
CAPACITIES = [32, 48, 64, 96, 128, 160, 192, 256, 320, 384]
TARGET_SECONDS = 60


def measured(work):
    """What `work` returns, its wall-clock seconds, and the processor seconds of this process and its finished children."""
    start, used = time.perf_counter(), _processor_seconds()
    result = work()
    get_reusable_executor().shutdown(wait=True)  # only children that have ended are counted
    return result, time.perf_counter() - start, _processor_seconds() - used


def _processor_seconds():
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def report(name, seconds, processor_seconds, num_calls, **facts):
    """One JSON line."""
    print(
        json.dumps(
            {
                "bench": name,
                "seconds": round(seconds, 2),
                "processor_seconds": round(processor_seconds, 2),
                "calls": num_calls,
                "calls_per_processor_second": round(num_calls / processor_seconds),
                **facts,
            }
        ),
        flush=True,
    )


def main():
    """Measure generating, sweeping, and sweeping with simulated seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps({"bench": "machine", "load": os.getloadavg(), **provenance()}), flush=True)
    mc.simulate(mc.synthetic_trace(10, 1, 32, 4), mc.SPEED_FIRST, 8)  # compiled, or loaded from numba's cache
    trace, seconds, used = measured(lambda: mc.synthetic_trace(options.tokens, options.layers, expert_bytes=1_769_472))
    calls = trace.topk_ids.size
    report("synthetic_trace", seconds, used, calls)
    frame, seconds, used = measured(lambda: mc.sweep(trace, POLICIES, CAPACITIES, num_workers=options.workers, progress=False))
    lru = frame[(frame["policy"] == mc.FETCH_EVERY_MISS.label) & (frame["num_slots"] == 128)]["hit_rate"].item()
    report(
        "sweep",
        seconds,
        used,
        calls * len(frame),
        pairs=len(frame),
        workers=options.workers,
        target_seconds=TARGET_SECONDS,
        is_met=seconds < TARGET_SECONDS,
        lru_hit_rate_at_128=round(lru, 4),
    )
    few = POLICIES[:6]
    frame, seconds, used = measured(lambda: mc.sweep(trace, few, 128, hardware="pcie4", num_workers=options.workers, progress=False))
    report("sweep_with_seconds", seconds, used, calls * len(frame), pairs=len(frame), workers=options.workers)
    runs = [mc.simulate(trace, policy, 128) for policy in few]
    mc.estimate_seconds(runs[0], "pcie4")
    _, seconds, used = measured(lambda: [mc.estimate_seconds(run, "pcie4") for run in runs])
    report("estimate_seconds", seconds, used, calls * len(runs))


if __name__ == "__main__":
    main()
