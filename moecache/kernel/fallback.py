"""Fallbacks: what a call gets whose expert is not waited for.

| member | the call is computed by |
|---|---|
| substitute | the best resident outside the token's top-k by selection score, each used once a token |
| random_resident | a seeded random resident outside the top-k, each used once a token (the control) |
| drop | nobody |

Selection scores are float16, which numba cannot compute with on a CPU. Their bits can be compared as integers after one step:
for a negative number flip all bits but the sign. Packed above the inverted expert id, one vector maximum finds the best
stand-in, and among equals the lower id.

When nobody can stand in, the caller fetches the expert after all.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.jit import jit

NOBODY = -(2**31)
MODULUS = 2**31 - 1


class Fallback(IntEnum):
    """What replaces an expert that is not waited for."""

    SUBSTITUTE = 0
    RANDOM_RESIDENT = 1
    DROP = 2


SUBSTITUTE, RANDOM_RESIDENT = int(Fallback.SUBSTITUTE), int(Fallback.RANDOM_RESIDENT)
DROP = int(Fallback.DROP)


@jit
def prepare_stand_ins(cache, rules, ids, score_bits):
    """Fill `cache.stand_in_order`: a sort key per resident outside the top-k, `NOBODY` for the others."""
    if rules.fallback == SUBSTITUTE:
        for expert in range(cache.slot_of_expert.size):
            bits = np.int32(score_bits[expert])
            image = bits ^ ((bits >> np.int32(15)) & np.int32(0x7FFF))
            packed = (image << np.int32(16)) | np.int32(0xFFFF - expert)
            cache.stand_in_order[expert] = packed if cache.slot_of_expert[expert] >= 0 else np.int32(NOBODY)
    else:
        for expert in range(cache.slot_of_expert.size):
            cache.stand_in_order[expert] = 0 if cache.slot_of_expert[expert] >= 0 else np.int32(NOBODY)
    for rank in range(ids.size):
        cache.stand_in_order[ids[rank]] = NOBODY


@jit
def take_stand_in(cache, rules, layer, now, rank):
    """The next stand-in of this step, removed from the order; -1 if nobody is left."""
    if rules.fallback == SUBSTITUTE:
        best = np.int32(NOBODY)
        for expert in range(cache.stand_in_order.size):
            best = max(best, cache.stand_in_order[expert])
        if best == NOBODY:
            return np.int64(-1)
        chosen = np.int64(0xFFFF) - (np.int64(best) & 0xFFFF)
    else:
        chosen = _random_candidate(cache, random_number(rules.seed, layer, now, rank))
        if chosen < 0:
            return np.int64(-1)
    cache.stand_in_order[chosen] = NOBODY
    return chosen


@jit
def _random_candidate(cache, number):
    candidates = 0
    for expert in range(cache.stand_in_order.size):
        candidates += cache.stand_in_order[expert] != NOBODY
    if candidates == 0:
        return np.int64(-1)
    skip = number % candidates
    for expert in range(cache.stand_in_order.size):
        if cache.stand_in_order[expert] != NOBODY:
            if skip == 0:
                return np.int64(expert)
            skip -= 1
    return np.int64(-1)


@jit
def random_number(seed, layer, now, rank):
    """A number below 2^31 - 1 that depends on its four arguments only (multiply, shift, modulo; never overflows 63 bits)."""
    number = np.int64(seed) % MODULUS
    for value in (layer, now, rank, 1):
        number = ((number ^ (number >> 15)) * 48271 + np.int64(value) + 1) % MODULUS
        number = ((number ^ (number >> 13)) * 69621) % MODULUS
    return number
