"""Miss rules: which misses of a step are worth waiting for.

`protect` covers nearly all of the field: a miss waits when its rank is in `wait_ranks` or its gate weight reaches
`gate_threshold`. Every miss is threshold 0; none is no ranks and an infinite threshold; first choice is rank 0; the 0.15 rule is rank 0 and
0.15; first J, rank tail, and one rank alone are masks.

A rule looks at the whole step and marks each miss, so that rules over a step's total (a mass budget) fit in the same hole.
A new rule is a member, a function, and its line in `mark_waits`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.jit import jit
from moecache.kernel.state import MISS


class MissRule(IntEnum):
    """How the misses to wait for are chosen."""

    PROTECT = 0


PROTECT = int(MissRule.PROTECT)


@jit
def mark_waits(cache, rules, weights, outcome, is_exact):
    """Set `cache.waits[rank]` for every miss of the step; `is_exact` waits for all of them."""
    if rules.miss_rule == PROTECT:
        _protect(cache, rules, weights, outcome, is_exact)


@jit
def _protect(cache, rules, weights, outcome, is_exact):
    for rank in range(outcome.size):
        if outcome[rank] == MISS:
            is_protected = (rules.wait_ranks >> rank) & 1 == 1
            is_heavy = np.float64(weights[rank]) >= rules.gate_threshold
            cache.waits[rank] = is_exact or is_protected or is_heavy
