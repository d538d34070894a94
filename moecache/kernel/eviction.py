"""Eviction: which resident leaves when a slot is needed.

A policy is a score per expert; the victim is the unpinned resident with the smallest (score, last call, id). A policy therefore only
says how a score changes when its expert is called (`on_call`), becomes resident (`on_insert`) or leaves (`on_evict`):

| member | score |
|---|---|
| lru | clock of the last call |
| fifo | clock of the insertion |
| plain_count | calls so far, kept after eviction |
| plain_count_forget | calls since the expert became resident |
| decayed_count | sum over calls of 2^(-age / half_life) |

Calls by the router count whether the expert is resident or not. A decayed count needs no sweep: instead of letting old calls shrink, each
new call weighs `growth` = 2^(clock / half_life), which keeps the order. `growth` comes from a table made by NumPy (no power is
taken here: LLVM may round it differently from the interpreter), and all scores are rescaled by an exact power of two
before they overflow.

A new policy is a member, a few lines in the three functions, and a twin in the tests.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.jit import jit
from moecache.kernel.state import EMPTY_TIE, EVICTIONS, FREE, PINNED, unpin

EPOCH_BITS = 512  # growth stays below 2^512, a rescale multiplies by 2^-512
EPOCH_SCALE = 2.0**-EPOCH_BITS


class Eviction(IntEnum):
    """Which resident leaves."""

    LRU = 0
    FIFO = 1
    PLAIN_COUNT = 2
    PLAIN_COUNT_FORGET = 3
    DECAYED_COUNT = 4


LRU, FIFO = int(Eviction.LRU), int(Eviction.FIFO)
PLAIN_COUNT, PLAIN_COUNT_FORGET = int(Eviction.PLAIN_COUNT), int(Eviction.PLAIN_COUNT_FORGET)
DECAYED_COUNT = int(Eviction.DECAYED_COUNT)


@jit
def on_call(cache, rules, expert, now, growth):
    """The router called `expert` (resident or not) at clock `now`."""
    if rules.eviction == LRU:
        cache.eviction_score[expert] = np.float64(now + 1)
    elif rules.eviction == PLAIN_COUNT or rules.eviction == PLAIN_COUNT_FORGET:
        cache.eviction_score[expert] += 1.0
    elif rules.eviction == DECAYED_COUNT:
        cache.eviction_score[expert] += growth
    cache.last_call[expert] = now


@jit
def on_insert(cache, rules, expert, now):
    """`expert` becomes resident at clock `now`."""
    if rules.eviction == FIFO:
        cache.eviction_score[expert] = np.float64(now + 1)


@jit
def on_evict(cache, rules, expert):
    """`expert` leaves."""
    if rules.eviction == PLAIN_COUNT_FORGET:
        cache.eviction_score[expert] = 0.0


@jit
def find_victim(cache):
    """The slot to take: a free one, else the unpinned one with the smallest (score, last call, id); -1 if all are pinned."""
    lowest = np.int64(PINNED)
    for slot in range(cache.key.size):
        lowest = min(lowest, cache.key[slot])
    if lowest == PINNED:
        return np.int64(-1)
    tie = np.int64(EMPTY_TIE)
    for slot in range(cache.key.size):
        tie = min(tie, cache.tie[slot] if cache.key[slot] == lowest else np.int64(EMPTY_TIE))
    last = tie & 0xFFFF
    return last if lowest == FREE else np.int64(cache.slot_of_expert[last])


@jit
def insert(cache, rules, expert, slot, now):
    """Put `expert` into `slot` and pin it. Returns the evicted expert's id, -1 if the slot was free."""
    evicted = np.int64(cache.expert_in_slot[slot])
    if evicted >= 0:
        cache.slot_of_expert[evicted] = -1
        on_evict(cache, rules, evicted)
        cache.counts[EVICTIONS] += 1
    cache.expert_in_slot[slot] = expert
    cache.slot_of_expert[expert] = slot
    cache.mass_account[expert] = 0.0  # an account ends when its expert becomes resident, however it got there
    on_insert(cache, rules, expert, now)
    cache.key[slot] = PINNED
    return evicted


@jit
def rescale_scores(cache, num_epochs):
    """Divide decayed counts by 2^(512 x num_epochs), exactly, and refresh the keys of the residents."""
    for _ in range(num_epochs):
        for expert in range(cache.eviction_score.size):
            cache.eviction_score[expert] *= EPOCH_SCALE
    for slot in range(cache.expert_in_slot.size):
        expert = np.int64(cache.expert_in_slot[slot])
        if expert >= 0:
            unpin(cache, expert)


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
