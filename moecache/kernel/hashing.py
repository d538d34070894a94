"""Numbers that look random and depend on their arguments only, the same compiled and interpreted."""

from __future__ import annotations

import numpy as np

from moecache.kernel.jit import jit

MODULUS = 2**31 - 1


@jit
def random_number(seed, layer, now, which):
    """An integer below 2^31 - 1 from four others (multiply, shift, modulo; no step exceeds 63 bits)."""
    number = np.int64(seed) % MODULUS
    for value in (layer, now, which, 1):
        number = ((number ^ (number >> 15)) * 48271 + np.int64(value) + 1) % MODULUS
        number = ((number ^ (number >> 13)) * 69621) % MODULUS
    return number
