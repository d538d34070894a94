"""A public cache simulator in C counts the same hits, exactly, on streams of single calls.

With K = 1 a step is one request, so atomic and sequential replay are the same thing and libCacheSim's caches can be compared: one
cache a layer, empty at the start, objects of size 1. Its LFU forgets the count of an evicted object and breaks ties by recency, as
`plain_count_forget` does.
"""

import libcachesim
import numpy as np
import pytest
from streams import random_stream

import moecache as mc

PEERS = {"lru": libcachesim.LRU, "fifo": libcachesim.FIFO, "plain_count_forget": libcachesim.LFU}


def hits_of_peer(kind, ids, num_slots, next_use=None):
    """Hits of one libCacheSim cache over the ids of one layer."""
    cache = kind(cache_size=num_slots, hashpower=12)
    hits = 0
    for clock, expert in enumerate(ids.tolist()):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = expert, 1, clock
        if next_use is not None:
            request.next_access_vtime = next_use[clock]
        hits += cache.get(request)
    return hits


def hits_of_ours(eviction, ids, num_experts, num_slots):
    trace = mc.RouterTrace.from_arrays(ids[:, :, None], np.ones((*ids.shape, 1)), num_experts=num_experts)
    run = mc.simulate(trace, mc.Policy(eviction=eviction), num_slots, cold_start="empty", keep="summary")
    return run.counts[:, mc.Outcome.HIT].tolist()


def single_calls(trace_ids):
    """[T x K, L]: the calls of a trace one after the other."""
    return trace_ids.transpose(0, 2, 1).reshape(-1, trace_ids.shape[1])


@pytest.fixture(params=["random", "real"])
def stream(request):
    """(ids [N,L] of single calls, number of experts, slots to try)."""
    if request.param == "random":
        return single_calls(random_stream(7, 400, 3, 24, 3)[0]), 24, (3, 8, 16)
    folder = request.getfixturevalue("test_data")
    trace = mc.load_trace(folder / "gptoss20b_mmlu20.npz", num_experts=32)
    return single_calls(trace.topk_ids[:1500, ::6]), 32, (8, 16)


@pytest.mark.parametrize("eviction", PEERS)
def test_same_hits(stream, eviction):
    ids, num_experts, slots = stream
    for num_slots in slots:
        theirs = [hits_of_peer(PEERS[eviction], ids[:, layer], num_slots) for layer in range(ids.shape[1])]
        assert hits_of_ours(eviction, ids, num_experts, num_slots) == theirs
        assert 0 < sum(theirs) < ids.size


def test_same_hits_of_belady(stream):
    ids, num_experts, slots = stream
    never = np.iinfo(np.int64).max
    for num_slots in slots:
        theirs = []
        for layer in range(ids.shape[1]):
            upcoming, next_use = {}, [0] * len(ids)
            for clock in range(len(ids) - 1, -1, -1):
                next_use[clock] = upcoming.get(int(ids[clock, layer]), never)
                upcoming[int(ids[clock, layer])] = clock
            theirs.append(hits_of_peer(libcachesim.Belady, ids[:, layer], num_slots, next_use))
        assert hits_of_ours("belady", ids, num_experts, num_slots) == theirs
