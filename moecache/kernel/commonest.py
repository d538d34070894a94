"""The commonest policy as numbers that the compiler knows: wait for every miss, evict the least recently used.

The step is written once and compiled twice. Given these constants in place of the policy's own numbers, the compiler leaves out every
stage that such a policy never enters (landing, stand-ins, accounts) and every choice between policies, which halves the time of a
step. The decisions are the same: nothing here decides anything.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from moecache.kernel.admission import BACKGROUND
from moecache.kernel.eviction import LRU
from moecache.kernel.insertion import EVERY
from moecache.kernel.jit import inline
from moecache.kernel.miss_rule import waits_for_all
from moecache.kernel.state import Rules

# NumPy's, because numba would take plain ones for types of their own.
NO, YES = cast(int, np.int64(0)), cast(int, np.int64(1))


@inline
def is_plain_lru(rules):
    """Whether `plain_lru` are these rules."""
    is_bare = rules.admission != BACKGROUND and rules.max_prefetches == 0 and rules.account_decay == 1.0
    return waits_for_all(rules) and rules.eviction == LRU and rules.insertion == EVERY and is_bare


@inline
def plain_lru():
    """`Policy()` as constants; the fields that it does not read are 0."""
    return Rules(
        miss_rule=NO,
        wait_ranks=NO,
        gate_threshold=0.0,
        budget=0.0,
        bonus=0.0,
        best_ranks=NO,
        fallback=NO,
        eviction=NO,
        only_served_calls_count=NO,
        stand_ins_count=NO,
        insertion=NO,
        insertion_cap=NO,
        admission=NO,
        mass_threshold=0.0,
        account_decay=1.0,
        admission_delay=YES,
        max_in_flight=YES,
        max_bookings=YES,
        max_prefetches=NO,
        is_packed=YES,
        seed=NO,
    )
