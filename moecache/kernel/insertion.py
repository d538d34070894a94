"""Insertion: whether what a fetch brings becomes resident.

An expert that was waited for is computed in any case. Inserting it evicts somebody, and that is not always worth it:

| member | a fetched expert is inserted |
|---|---|
| every | always |
| cap | while fewer than `insertion_cap` were inserted in this step, in rank order |
| tinylfu | if its decayed count (this call included) exceeds the victim's (Einziger, Friedman and Manes, ACM ToS 13:35, 2017) |

Two evictions bring a rule of their own: `static` never inserts, `belady_bypass` inserts only what is called again before the victim.
A free slot is always taken, except by `static`. What is refused is computed from a staging block and forgotten.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.codes import FETCH_KIND, FETCHED, FORCED, NOT_EVICTING, NOT_INSERTED
from moecache.kernel.eviction import BELADY_BYPASS, HORIZON, STATIC, find_victim, insert
from moecache.kernel.jit import inline, place


class Insertion(IntEnum):
    """What a fetch inserts."""

    EVERY = 0
    CAP = 1
    TINYLFU = 2


EVERY, CAP, TINYLFU = int(Insertion.EVERY), int(Insertion.CAP), int(Insertion.TINYLFU)


@inline
def fetch(cache, rules, step, rank):
    """Bring the expert of this rank: insert it if it may be. Returns the evicted id, -1 for a free slot, -2 if not inserted.

    There is a victim: every call of a step pins one slot at most, and there are at least K slots.
    """
    expert = place(step.ids[rank])
    slot = find_victim(cache, rules, step.layer, step.now, expert)
    if not _may_insert(cache, rules, step, rank, expert, np.int64(cache.expert_in_slot[slot])):
        cache.counts[NOT_INSERTED] += 1
        return np.int64(NOT_EVICTING)
    return insert(cache, rules, expert, slot, step.now, FETCH_KIND)


@inline
def _may_insert(cache, rules, step, rank, expert, victim):
    if rules.eviction == STATIC:
        return False
    if victim < 0:
        return True
    if rules.eviction == BELADY_BYPASS and HORIZON - np.float64(step.next_use[rank]) <= cache.eviction_score[victim]:
        return False
    if rules.insertion == CAP:
        return _num_inserted(step) < rules.insertion_cap
    if rules.insertion == TINYLFU:
        return cache.frequency[expert] + step.growth > cache.frequency[victim]
    return True


@inline
def _num_inserted(step):
    number = 0
    for rank in range(step.ids.size):
        if (step.outcome[rank] == FETCHED or step.outcome[rank] == FORCED) and step.evicted[rank] != NOT_EVICTING:
            number += 1
    return number
