"""Our LRU replay beside libCacheSim's (C), on the same accesses, interleaved in one run: the ratio is the result, not the speeds.

    python tests/bench/bench_peer.py [--tokens 600] [--rounds 11]

The trace is that of `bench_kernel.py` (48 layers of 512 experts, top-10, 128 slots a layer). libCacheSim reads each layer's calls one by
one from a memory-mapped oracleGeneral file into one cache of 128 objects, with a hash table of 2^12 entries (its default of 2^24 is four
times slower on caches this small). We replay the same calls as steps of ten, and once more as steps of one (K = 1), where a step's
fixed cost is paid for every call. CPU seconds. Hits are compared: equal at K = 1; at K = 10 a step is atomic, so they may differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import libcachesim
import numpy as np
from bench_kernel import NUM_SLOTS, synthetic_trace

import moecache as mc
from moecache.provenance import provenance

RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def write_layers(trace: mc.RouterTrace, folder: Path) -> list[Path]:
    """One oracleGeneral file a layer, calls in rank order."""
    paths = []
    for layer in range(trace.shape.num_layers):
        calls = trace.topk_ids[:, layer].reshape(-1)
        records = np.zeros(calls.size, RECORD)
        records["time"], records["id"], records["size"] = np.arange(calls.size), calls + 1, 1
        records["next"] = -1
        paths.append(folder / f"{layer}.oracleGeneral")
        records.tofile(paths[-1])
    return paths


def peer_seconds(paths: list[Path], num_calls: int) -> tuple[float, int]:
    """CPU seconds and hits of libCacheSim over all layers; opening the files is not counted."""
    seconds, hits = 0.0, 0.0
    for path in paths:
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim.LRU(cache_size=NUM_SLOTS, hashpower=12)
        start = time.process_time()
        miss_ratio, _ = cache.process_trace(reader)
        seconds += time.process_time() - start
        hits += (1 - miss_ratio) * num_calls / len(paths)
    return seconds, round(hits)


def our_seconds(trace: mc.RouterTrace) -> tuple[float, int]:
    """CPU seconds and hits of `simulate`, totals only, empty at the start."""
    start = time.process_time()
    run = mc.simulate(trace, mc.FETCH_EVERY_MISS, NUM_SLOTS, cold_start="empty", keep="summary")
    return time.process_time() - start, int(run.summary()["hits"])


def one_by_one(trace: mc.RouterTrace) -> mc.RouterTrace:
    """The same calls as steps of one."""
    ids = trace.topk_ids.transpose(0, 2, 1).reshape(-1, trace.shape.num_layers, 1)
    return mc.RouterTrace.from_arrays(ids, np.ones(ids.shape, np.float32), num_experts=trace.shape.num_experts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    trace = synthetic_trace(asked.tokens)
    single, calls = one_by_one(trace), trace.topk_ids.size
    print(json.dumps({"calls": calls, "libcachesim": libcachesim.__version__, **provenance()}))
    ratios: dict[str, list[float]] = {"K = 10": [], "K = 1": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_layers(trace, Path(folder))
        our_seconds(trace), our_seconds(single), peer_seconds(paths, calls)
        for _ in range(asked.rounds):
            peer, peer_hits = peer_seconds(paths, calls)
            for name, ours in (("K = 10", our_seconds(trace)), ("K = 1", our_seconds(single))):
                ratios[name].append(peer / ours[0])
                last = {"calls_per_second": round(calls / ours[0]), "peer_calls_per_second": round(calls / peer)}
                print(json.dumps({"steps": name, **last, "ratio": round(peer / ours[0], 3), "hits": ours[1], "peer_hits": peer_hits}))
    print(json.dumps({f"median ratio, {name}": round(statistics.median(values), 3) for name, values in ratios.items()}))


if __name__ == "__main__":
    main()
