"""Eviction: which resident leaves when a slot is needed.

A policy is a score per expert; the victim is the unpinned resident with the smallest (score, last call, id). A policy therefore only
says how a score changes when its expert is called (`on_call`), becomes resident (`on_insert`) or leaves (`on_evict`):

| member | score |
|---|---|
| lru | clock of the last call |
| fifo | clock of the insertion |
| random | none: one of the unpinned residents, drawn by seed |
| plain_count | calls so far, kept after eviction |
| plain_count_forget | calls since the expert became resident |
| decayed_count | sum over calls of 2^(-age / half_life) |
| lfru | calls / (age of the last call + 1), computed at the search |
| slru | clock of the last call, and above all others while in the protected segment |
| static | none: what a fetch brings is never inserted |
| belady, belady_bypass | how soon the next call comes, told by the trace |

Calls by the router count whether the expert is resident or not. A decayed count needs no sweep: instead of letting old calls shrink, each
new call weighs `growth` = 2^(clock / half_life), which keeps the order. `growth` comes from a table made by NumPy (no power is
taken here: LLVM may round it differently from the interpreter), and all scores are rescaled by an exact power of two
before they overflow.

SLRU: a newcomer enters on probation; a later call to a resident promotes it; the protected segment holds 80 % of the slots, and when it
overflows, its least recently used expert goes back to the fresh end of probation. LFRU's order changes without a call, so its scores
are computed at the search. A new policy is a member, a few lines in these functions, and a twin in the tests.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.codes import EVICTIONS, PREFETCH_KIND, PREFETCH_USEFUL, PREFETCH_WASTED
from moecache.kernel.hashing import draw, random_number
from moecache.kernel.jit import inline, jit, place
from moecache.kernel.state import FREE, ID_MASK, PINNED, unpin

EPOCH_BITS = 512  # growth stays below 2^512, a rescale multiplies by 2^-512
EPOCH_SCALE = 2.0**-EPOCH_BITS
NEVER = 2**50  # clock of a next call that does not come
HORIZON = 2.0**51  # Belady's score is HORIZON - clock of the next call: the farthest is the smallest
PROTECTED = 2.0**50  # added to the scores of SLRU's protected segment, which are therefore not packed
PROTECTED_TENTHS = 8


class Eviction(IntEnum):
    """Which resident leaves."""

    LRU = 0
    FIFO = 1
    PLAIN_COUNT = 2
    PLAIN_COUNT_FORGET = 3
    DECAYED_COUNT = 4
    RANDOM = 5
    LFRU = 6
    SLRU = 7
    STATIC = 8
    BELADY = 9
    BELADY_BYPASS = 10


LRU, FIFO, RANDOM = int(Eviction.LRU), int(Eviction.FIFO), int(Eviction.RANDOM)
PLAIN_COUNT, PLAIN_COUNT_FORGET = int(Eviction.PLAIN_COUNT), int(Eviction.PLAIN_COUNT_FORGET)
PACKED = (Eviction.LRU, Eviction.FIFO, Eviction.PLAIN_COUNT, Eviction.PLAIN_COUNT_FORGET)  # whole numbers below 2^24
DECAYED_COUNT, LFRU, SLRU = int(Eviction.DECAYED_COUNT), int(Eviction.LFRU), int(Eviction.SLRU)
STATIC, BELADY, BELADY_BYPASS = int(Eviction.STATIC), int(Eviction.BELADY), int(Eviction.BELADY_BYPASS)


@inline
def on_call(cache, rules, expert, now, growth, next_use):
    """The router called `expert` (resident or not) at clock `now`; its new score."""
    eviction, score = rules.eviction, np.float64(cache.eviction_score[expert])
    if eviction == LRU:
        score = np.float64(now + 1)
    elif eviction == DECAYED_COUNT:
        score += growth
    elif eviction in (PLAIN_COUNT, PLAIN_COUNT_FORGET, LFRU):
        score += 1.0
    elif eviction == SLRU:
        if cache.slot_of_expert[expert] >= 0 and cache.inserted_at[expert] != now:
            score = _promote(cache, rules, expert, now)
    elif eviction in (BELADY, BELADY_BYPASS):
        score = HORIZON - np.float64(next_use)
    cache.eviction_score[expert] = score
    cache.last_call[expert] = now
    if rules.max_prefetches > 0 and cache.is_untried[expert] != 0:
        cache.is_untried[expert] = 0
        cache.counts[PREFETCH_USEFUL] += 1
    return score


@inline
def on_insert(cache, rules, expert, now, kind):
    """`expert` becomes resident at clock `now`."""
    eviction = rules.eviction
    if eviction in (FIFO, SLRU) or (eviction == LRU and kind == PREFETCH_KIND):  # or a prefetched expert is the next victim
        cache.eviction_score[expert] = np.float64(now + 1)
    cache.inserted_at[expert] = now


@inline
def on_evict(cache, rules, expert):
    """`expert` leaves."""
    if rules.eviction == PLAIN_COUNT_FORGET:
        cache.eviction_score[expert] = 0.0
    elif rules.eviction == SLRU and cache.eviction_score[expert] >= PROTECTED:
        cache.num_protected[0] -= 1
    if rules.max_prefetches > 0 and cache.is_untried[expert] != 0:
        cache.is_untried[expert] = 0
        cache.counts[PREFETCH_WASTED] += 1


@jit
def _promote(cache, rules, expert, now):
    """Move a resident to the fresh end of the protected segment; the segment's oldest, which goes back on probation if it overflows,
    may be the newcomer itself (a step promotes several at one clock). Returns the newcomer's score.
    """
    if cache.eviction_score[expert] < PROTECTED:
        cache.num_protected[0] += 1
    cache.eviction_score[expert] = PROTECTED + np.float64(now + 1)
    cache.last_call[expert] = now
    if cache.num_protected[0] <= max(1, cache.key.size * PROTECTED_TENTHS // 10):
        return np.float64(cache.eviction_score[expert])
    oldest = np.int64(-1)
    for slot in range(cache.expert_in_slot.size):
        candidate = np.int64(cache.expert_in_slot[slot])
        if candidate >= 0 and cache.eviction_score[candidate] >= PROTECTED and (oldest < 0 or _is_older(cache, candidate, oldest)):
            oldest = candidate
    cache.num_protected[0] -= 1
    cache.eviction_score[oldest] = np.float64(now + 1)
    if cache.key[cache.slot_of_expert[oldest]] != PINNED:
        unpin(cache, rules, oldest)
    return np.float64(cache.eviction_score[expert])


@jit
def _is_older(cache, expert, other):
    """Smaller in (score, last call, id)."""
    mine, theirs = cache.eviction_score[expert], cache.eviction_score[other]
    if mine != theirs:
        return mine < theirs
    if cache.last_call[expert] != cache.last_call[other]:
        return cache.last_call[expert] < cache.last_call[other]
    return expert < other


@inline
def find_victim(cache, rules, layer, now, newcomer):
    """The slot to take: a free one, else the unpinned one with the smallest (score, last call, id); -1 if all are pinned."""
    if rules.eviction == LFRU:
        return _search_lfru(cache, now)
    lowest = np.int64(PINNED)
    for slot in range(cache.key.size):
        lowest = min(lowest, cache.key[slot])
    if lowest == PINNED:
        return np.int64(-1)
    if lowest == FREE:
        return _first_free(cache)
    if rules.eviction == RANDOM:
        return _draw(cache, random_number(rules.seed, layer, now, newcomer))
    tie = lowest
    if rules.is_packed == 0:
        tie = np.int64(PINNED)
        for slot in range(cache.key.size):
            tie = min(tie, cache.tie[slot] if cache.key[slot] == lowest else np.int64(PINNED))
    return np.int64(cache.slot_of_expert[tie & ID_MASK])


@jit
def _first_free(cache):
    for slot in range(cache.key.size):
        if cache.key[slot] == FREE:
            return np.int64(slot)
    return np.int64(-1)


@jit
def _draw(cache, number):
    """The slot of one of the unpinned residents, where no slot is free."""
    for expert in range(cache.is_candidate.size):
        cache.is_candidate[expert] = 0
    for slot in range(cache.key.size):
        cache.is_candidate[place(cache.expert_in_slot[slot])] = cache.key[slot] != PINNED
    return np.int64(cache.slot_of_expert[draw(cache.is_candidate, number)])


@jit
def _search_lfru(cache, now):
    """`find_victim` by calls / (age of the last call + 1)."""
    best, lowest = np.int64(-1), np.inf
    for slot in range(cache.key.size):
        if cache.key[slot] == FREE:
            return np.int64(slot)
        if cache.key[slot] == PINNED:
            continue
        expert = np.int64(cache.expert_in_slot[slot])
        score = cache.eviction_score[expert] / np.float64(now - cache.last_call[expert] + 1)
        if score < lowest or (score == lowest and cache.tie[slot] < cache.tie[best]):
            best, lowest = np.int64(slot), score
    return best


@inline
def insert(cache, rules, expert, slot, now, kind):
    """Put `expert` into `slot` and pin it. Returns the evicted expert's id, -1 if the slot was free."""
    evicted = np.int64(cache.expert_in_slot[slot])
    if evicted >= 0:
        cache.slot_of_expert[evicted] = -1
        on_evict(cache, rules, evicted)
        cache.counts[EVICTIONS] += 1
    cache.expert_in_slot[slot] = expert
    cache.slot_of_expert[expert] = slot
    cache.mass_account[expert] = 0.0  # an account ends when its expert becomes resident, however it got there
    on_insert(cache, rules, expert, now, kind)
    cache.key[slot] = PINNED
    return evicted


@jit
def rescale_scores(cache, rules, num_epochs):
    """Divide decayed counts by 2^(512 x num_epochs), exactly, and refresh the keys of the residents."""
    for _ in range(num_epochs):
        for expert in range(cache.eviction_score.size):
            cache.frequency[expert] *= EPOCH_SCALE
            if rules.eviction == DECAYED_COUNT:
                cache.eviction_score[expert] *= EPOCH_SCALE
    for slot in range(cache.expert_in_slot.size):
        if cache.expert_in_slot[slot] >= 0:
            unpin(cache, rules, np.int64(cache.expert_in_slot[slot]))


def growth_table(half_life: float, first_clock: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """What one call at each clock adds to a decayed count, and how many rescales came before.

    Parameters
    ----------
    half_life : tokens after which a call counts half.
    first_clock, num_tokens : the clocks first_clock .. first_clock + num_tokens - 1.

    Returns
    -------
    growth [T] float64 in [1, 2^512), epoch [T] int64, with 2^(clock / half_life) = growth x 2^(512 x epoch).
    """
    exponent = np.arange(first_clock, first_clock + num_tokens, dtype=np.float64) / half_life
    epoch = np.floor(exponent / EPOCH_BITS)
    return np.exp2(exponent - epoch * EPOCH_BITS), epoch.astype(np.int64)
