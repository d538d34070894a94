"""Numbers that look random and depend on their arguments only, the same compiled and interpreted."""

from __future__ import annotations

import numpy as np

from moecache.kernel.jit import jit

MODULUS = 2**31 - 1


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
    """One of the candidates, counted off by id from a number of `random_number`; -1 if there is none."""
    candidates = 0
    for which in range(is_candidate.size):
        candidates += is_candidate[which] != 0
    if candidates == 0:
        return np.int64(-1)
    skip = number % candidates
    for which in range(is_candidate.size):
        if is_candidate[which] != 0:
            if skip == 0:
                return np.int64(which)
            skip -= 1
    return np.int64(-1)
