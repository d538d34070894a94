"""Numbers that look random and depend on their arguments only, the same compiled and interpreted."""

from __future__ import annotations

import numpy as np

from moecache.kernel.jit import inline, jit

MODULUS = 2**31 - 1
DRAW_BLOCK = 64  # ids counted at once when candidates are counted off


def random_numbers(seed, layer, now, which):
    """Integers below 2^31 - 1 from four others, or from arrays of them (multiply, shift, modulo; no step exceeds 63 bits)."""
    number = np.int64(seed) % MODULUS
    for value in (layer, now, which, 1):
        number = ((number ^ (number >> 15)) * 48271 + np.int64(value) + 1) % MODULUS
        number = ((number ^ (number >> 13)) * 69621) % MODULUS
    return number


random_number = jit(random_numbers)


@jit
def draw(is_candidate, number):
    """One of those marked 1, counted off by id from a number of `random_number`; -1 if there is none."""
    candidates = _count(is_candidate, 0, is_candidate.size)
    if candidates == 0:
        return np.int64(-1)
    skip, start = number % candidates, np.int64(0)
    inside = _count(is_candidate, start, min(DRAW_BLOCK, is_candidate.size))
    while skip >= inside:
        skip, start = skip - inside, start + DRAW_BLOCK
        inside = _count(is_candidate, start, min(start + DRAW_BLOCK, is_candidate.size))
    for which in range(start, is_candidate.size):
        skip -= np.int64(is_candidate[which])
        if skip < 0:
            return np.int64(which)
    return np.int64(-1)


@inline
def _count(is_candidate, start, stop):
    candidates = np.int64(0)
    for which in range(start, stop):
        candidates += np.int64(is_candidate[which])
    return candidates
