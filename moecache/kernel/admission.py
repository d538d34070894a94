"""Admission: which experts become resident without anyone waiting for them.

Background admission keeps a mass account per expert: the gate weight of every call that was neither a hit nor fetched. When an account
reaches `mass_threshold` and no copy of that expert is under way, a copy is booked; it lands `admission_delay` tokens later, in booking
order. At threshold 0 every miss that is not waited for is admitted. An account may decay by a factor a token, and returns to zero when
its expert becomes resident. Copies under way in a layer, and bookings in a step, may be bounded.

Prefetches bring what the trace predicts for this very step; they land after the admissions.

Landing takes the victim's slot at the moment it lands. Called residents are pinned by then, and experts that land in the same step
cannot evict each other. An arrival that is already resident, or finds no victim, is dropped and logged.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.codes import (
    ADMISSION_KIND,
    ADMITTED,
    ALREADY_RESIDENT,
    ARRIVALS_DROPPED,
    BOOKED,
    LANDED,
    NO_VICTIM,
    PREFETCH_KIND,
    PREFETCHED,
)
from moecache.kernel.eviction import find_victim, insert
from moecache.kernel.jit import inline, jit
from moecache.kernel.state import unpin


class Admission(IntEnum):
    """Whether experts are admitted in the background."""

    NONE = 0
    BACKGROUND = 1


BACKGROUND = int(Admission.BACKGROUND)


@jit
def land_arrivals(cache, rules, step, log):
    """Land every copy that is due, then the prefetches; what landed and is not called is unpinned again."""
    num_landed = _land_admissions(cache, rules, step, log)
    if rules.max_prefetches > 0:
        num_landed = _land_prefetches(cache, rules, step, log, num_landed)
    for i in range(num_landed):
        if not _is_called(step.ids, cache.landed[i]):
            unpin(cache, rules, np.int64(cache.landed[i]))


@jit
def _land_admissions(cache, rules, step, log):
    num_landed = np.int64(0)
    while cache.ring[1] > 0:
        head = cache.ring[0]
        expert = np.int64(cache.arrival_expert[head])
        if cache.due[expert] > step.now:
            break
        asked = np.int64(cache.arrival_asked[head])
        cache.ring[0] = (head + 1) % cache.arrival_expert.size
        cache.ring[1] -= 1
        cache.due[expert] = -1
        num_landed = _land(cache, rules, step, log, expert, asked, ADMISSION_KIND, num_landed)
    return num_landed


@jit
def _land_prefetches(cache, rules, step, log, num_landed):
    num_asked = 0
    for place in range(step.predicted_ids.size):
        expert = np.int64(step.predicted_ids[place])
        if expert >= 0 and cache.slot_of_expert[expert] < 0 and num_asked < rules.max_prefetches:
            num_asked += 1
            num_landed = _land(cache, rules, step, log, expert, step.now, PREFETCH_KIND, num_landed)
    return num_landed


@jit
def _land(cache, rules, step, log, expert, asked, kind, num_landed):
    """Put one arrival into a slot, pinned, if it needs one and finds one; the number landed so far in this step."""
    victim, reason = np.int64(-2), ALREADY_RESIDENT
    if cache.slot_of_expert[expert] < 0:
        slot = find_victim(cache, rules, step.layer, step.now, expert)
        if slot < 0:
            reason = NO_VICTIM  # the account is kept: the expert asks again at its next addition
        else:
            victim, reason = insert(cache, rules, expert, slot, step.now, kind), LANDED
            cache.landed[num_landed] = expert
            num_landed += 1
            cache.is_untried[expert] = kind == PREFETCH_KIND
    _log_arrival(cache, log, step, asked, expert, victim, kind, reason)
    return num_landed


@inline
def _is_called(ids, expert):
    is_called = False
    for rank in range(ids.size):
        is_called |= ids[rank] == expert
    return is_called


@jit
def _log_arrival(cache, log, step, asked, expert, victim, kind, reason):
    if reason != LANDED:
        cache.counts[ARRIVALS_DROPPED] += 1
    else:
        cache.counts[PREFETCHED if kind == PREFETCH_KIND else ADMITTED] += 1
    row = log.num_arrivals[0]
    if row < log.arrivals.shape[0]:
        log.arrivals[row, 0] = asked
        log.arrivals[row, 1] = step.now
        log.arrivals[row, 2] = step.layer
        log.arrivals[row, 3] = expert
        log.arrivals[row, 4] = victim
        log.arrivals[row, 5] = kind
        log.arrivals[row, 6] = reason
        log.num_arrivals[0] = row + 1


@jit
def decay_accounts(cache, rules):
    """Let every mass account shrink by the policy's factor a token."""
    for expert in range(cache.mass_account.size):
        cache.mass_account[expert] *= rules.account_decay


@inline
def book(cache, rules, expert, weight, now, num_booked):
    """Add a call's gate weight to its account and ask for a copy where that is due; the bookings of this step so far."""
    cache.mass_account[expert] += np.float64(weight)
    if cache.mass_account[expert] < rules.mass_threshold or cache.due[expert] >= 0:
        return num_booked
    if cache.ring[1] >= rules.max_in_flight or num_booked >= rules.max_bookings:
        return num_booked  # asks again at its next addition
    tail = (cache.ring[0] + cache.ring[1]) % cache.arrival_expert.size
    cache.arrival_expert[tail] = expert
    cache.arrival_asked[tail] = now
    cache.ring[1] += 1
    cache.due[expert] = now + rules.admission_delay
    cache.counts[BOOKED] += 1
    return num_booked + 1
