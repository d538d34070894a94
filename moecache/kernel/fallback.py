"""Fallbacks: what a call gets whose expert is not waited for.

| member | the call is computed by |
|---|---|
| substitute | the best resident outside the token's top-k by selection score, each used once a token |
| random_resident | a seeded random resident outside the top-k, each used once a token (the control) |
| buddy | the first resident in the missed expert's row of a table, outside the top-k, each used once a token |
| drop | nobody |
| low_precision | the same expert, from a low-bit copy |
| cpu | the same expert, where it lies |

Selection scores are float16, which numba cannot compute with on a CPU. Their bits can be compared as integers after one step:
for a negative number flip all bits but the sign. Packed above the inverted expert id, one vector maximum finds the best
stand-in, and among equals the lower id. The bits of one NaN (-1) mark a score that the trace did not record.

A selection score of minus infinity says that the router may not choose the expert for this token (a masked group of experts): such an
expert never stands in by score.

When nobody can stand in, the caller fetches the expert after all.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.codes import OUTSIDE_RECORDED
from moecache.kernel.hashing import draw, random_number
from moecache.kernel.jit import inline, jit, place

NOBODY = -(2**31)
NOT_RECORDED = -1  # bits of a score outside the trace's best M
MASKED = -0x400  # bits of minus infinity


class Fallback(IntEnum):
    """What replaces an expert that is not waited for."""

    SUBSTITUTE = 0
    RANDOM_RESIDENT = 1
    DROP = 2
    BUDDY = 3
    LOW_PRECISION = 4
    CPU = 5


SUBSTITUTE, RANDOM_RESIDENT, BUDDY = int(Fallback.SUBSTITUTE), int(Fallback.RANDOM_RESIDENT), int(Fallback.BUDDY)
DROP, LOW_PRECISION, CPU = int(Fallback.DROP), int(Fallback.LOW_PRECISION), int(Fallback.CPU)


@inline
def sort_key(score_bits, expert):
    """An int32 that orders experts by (selection score, lower id first)."""
    bits = np.int32(score_bits[expert])
    image = bits ^ ((bits >> np.int32(15)) & np.int32(0x7FFF))
    return (image << np.int32(16)) | np.int32(0xFFFF - expert)


@inline
def prepare_stand_ins(cache, rules, step):
    """Fill `cache.order`: a sort key for each resident outside the top-k, `NOBODY` for the others."""
    if rules.fallback == SUBSTITUTE:
        for expert in range(cache.slot_of_expert.size):
            is_candidate = (cache.slot_of_expert[expert] >= 0) & (step.score_bits[expert] != MASKED)
            cache.order[expert] = sort_key(step.score_bits, expert) if is_candidate else np.int32(NOBODY)
    else:
        for expert in range(cache.slot_of_expert.size):
            cache.order[expert] = 0 if cache.slot_of_expert[expert] >= 0 else np.int32(NOBODY)
    for rank in range(step.ids.size):
        cache.order[place(step.ids[rank])] = NOBODY


@inline
def best_stand_in(cache):
    """The id with the highest sort key in `cache.order`, -1 if there is none."""
    best = np.int32(NOBODY)
    for expert in range(cache.order.size):
        best = max(best, cache.order[expert])
    if best == NOBODY:
        return np.int64(-1)
    return np.int64(0xFFFF) - (np.int64(best) & 0xFFFF)


@inline
def take_stand_in(cache, rules, step, rank):
    """Who serves the miss of this rank, removed from `cache.order`; -1 if nobody can."""
    if rules.fallback == SUBSTITUTE:
        chosen = best_stand_in(cache)
        if chosen >= 0 and step.score_bits[chosen] == NOT_RECORDED:
            cache.counts[OUTSIDE_RECORDED] += 1
            return np.int64(-1)
    elif rules.fallback == BUDDY:
        chosen = _first_buddy(cache, np.int64(step.ids[rank]))
    else:
        chosen = _random_candidate(cache, random_number(rules.seed, step.layer, step.now, rank))
    if chosen >= 0:
        cache.order[chosen] = NOBODY
    return chosen


@jit
def _first_buddy(cache, expert):
    for nth in range(cache.buddies.shape[1]):
        buddy = np.int64(cache.buddies[expert, nth])
        if buddy >= 0 and cache.order[buddy] != NOBODY:
            return buddy
    return np.int64(-1)


@jit
def _random_candidate(cache, number):
    for expert in range(cache.order.size):
        cache.is_candidate[expert] = cache.order[expert] != NOBODY
    return draw(cache.is_candidate, number)
