"""Admission: which experts become resident without anyone waiting for them.

Background admission keeps a mass account per expert: the gate weight of every call that was neither a hit nor fetched. When an account
reaches `mass_threshold` and no copy of that expert is under way, a copy is booked; it lands `admission_delay` tokens later, in booking
order. At threshold 0 every miss that is not waited for is admitted. The account returns to zero when its expert becomes resident.

Landing takes the victim's slot at the moment it lands. Called residents are pinned by then, and experts that land in the same step
cannot evict each other. An arrival that is already resident, or finds no victim, is dropped and logged.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.eviction import find_victim, insert
from moecache.kernel.jit import jit
from moecache.kernel.state import (
    ADMISSION_KIND,
    ADMITTED,
    ALREADY_RESIDENT,
    ARRIVALS_DROPPED,
    BOOKED,
    LANDED,
    NO_VICTIM,
    unpin,
)


class Admission(IntEnum):
    """Whether experts are admitted in the background."""

    NONE = 0
    BACKGROUND = 1


BACKGROUND = int(Admission.BACKGROUND)


@jit
def land_arrivals(cache, rules, layer, now, ids, log):
    """Land every copy that is due; what landed and is not called is unpinned again."""
    num_landed = 0
    capacity = cache.arrival_expert.size
    while cache.ring[1] > 0:
        head = cache.ring[0]
        expert = np.int64(cache.arrival_expert[head])
        if cache.due[expert] > now:
            break
        asked = np.int64(cache.arrival_asked[head])
        cache.ring[0] = (head + 1) % capacity
        cache.ring[1] -= 1
        cache.due[expert] = -1
        if _land(cache, rules, layer, now, expert, asked, log):
            cache.landed[num_landed] = expert
            num_landed += 1
    for i in range(num_landed):
        if not _is_called(ids, cache.landed[i]):
            unpin(cache, np.int64(cache.landed[i]))


@jit
def _land(cache, rules, layer, now, expert, asked, log):
    """Put one arrival into a slot (pinned) if it needs one and finds one; True if it did."""
    if cache.slot_of_expert[expert] >= 0:
        _log_arrival(cache, log, asked, now, layer, expert, -2, ALREADY_RESIDENT)
        return False
    slot = find_victim(cache)
    if slot < 0:  # the account is kept: the expert asks again at its next addition
        _log_arrival(cache, log, asked, now, layer, expert, -2, NO_VICTIM)
        return False
    evicted = insert(cache, rules, expert, slot, now)
    _log_arrival(cache, log, asked, now, layer, expert, evicted, LANDED)
    return True


@jit
def _is_called(ids, expert):
    is_called = False
    for rank in range(ids.size):
        is_called |= ids[rank] == expert
    return is_called


@jit
def _log_arrival(cache, log, asked, now, layer, expert, victim, reason):
    cache.counts[ADMITTED if reason == LANDED else ARRIVALS_DROPPED] += 1
    row = log.num_arrivals[0]
    if row < log.arrivals.shape[0]:
        log.arrivals[row, 0] = asked
        log.arrivals[row, 1] = now
        log.arrivals[row, 2] = layer
        log.arrivals[row, 3] = expert
        log.arrivals[row, 4] = victim
        log.arrivals[row, 5] = ADMISSION_KIND
        log.arrivals[row, 6] = reason
        log.num_arrivals[0] = row + 1


@jit
def book(cache, rules, expert, weight, now):
    """Add a call's gate weight to its account; ask for a copy when the threshold is reached and none is under way."""
    cache.mass_account[expert] += np.float64(weight)
    if cache.mass_account[expert] < rules.mass_threshold or cache.due[expert] >= 0:
        return
    if cache.ring[1] >= rules.max_in_flight:
        return
    tail = (cache.ring[0] + cache.ring[1]) % cache.arrival_expert.size
    cache.arrival_expert[tail] = expert
    cache.arrival_asked[tail] = now
    cache.ring[1] += 1
    cache.due[expert] = now + rules.admission_delay
    cache.counts[BOOKED] += 1
