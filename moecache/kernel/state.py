"""The arrays of the kernel: what one layer's cache is, and what is written about a step.

Letters: L MoE layers, E experts a layer, K top-k, C slots a layer, T tokens. Everything is a named tuple of NumPy arrays that the
kernel fills in place; nothing here decides anything.

The victim search must be one vector pass, so each *slot* holds an order-preserving int64 image of its expert's eviction score:
a non-negative float64 keeps its order when its bits are read as an integer. `key` and `key_float` are two views of the same memory.
A free slot holds `FREE`, below every score; a pinned one holds `PINNED`, above every score. `tie` orders equal keys by last call, then
by expert id (the lower id is evicted first).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from moecache.kernel.jit import jit

FREE = -1
PINNED = 2**63 - 1
EMPTY_TIE = 2**63 - 1


class Outcome(IntEnum):
    """What became of one call."""

    HIT = 0
    FETCHED = 1
    FORCED = 2  # nobody could stand in, so the miss was fetched after all
    SUBSTITUTED = 3
    DROPPED = 4
    LOW_PRECISION = 5
    CPU = 6


class Landing(IntEnum):
    """What became of one arrival (the last column of the arrivals log)."""

    LANDED = 0
    ALREADY_RESIDENT = 1
    NO_VICTIM = 2
    CANCELLED = 3  # the cache was reset while the copy was under way


class ArrivalKind(IntEnum):
    """Who asked for the copy."""

    ADMISSION = 0
    PREFETCH = 1


HIT, FETCHED, FORCED = int(Outcome.HIT), int(Outcome.FETCHED), int(Outcome.FORCED)
SUBSTITUTED, DROPPED = int(Outcome.SUBSTITUTED), int(Outcome.DROPPED)
LANDED, ALREADY_RESIDENT = int(Landing.LANDED), int(Landing.ALREADY_RESIDENT)
NO_VICTIM, ADMISSION_KIND = int(Landing.NO_VICTIM), int(ArrivalKind.ADMISSION)
MISS = 255  # an outcome that is not decided yet; never left in a log

# Columns of `counts`: the first seven are the outcomes.
NUM_OUTCOMES = 7
EVICTIONS, BOOKED, ADMITTED, ARRIVALS_DROPPED, FIRST_SUBSTITUTED = 7, 8, 9, 10, 11
NUM_COUNTS = 12


class CacheState(NamedTuple):
    """All layers' caches. The leading axis of every array is the layer."""

    slot_of_expert: np.ndarray  # [L,E] int16, -1 = not resident
    expert_in_slot: np.ndarray  # [L,C] int16, -1 = free
    key: np.ndarray  # [L,C] int64, image of the eviction score, FREE or PINNED
    key_float: np.ndarray  # [L,C] float64, the same memory
    tie: np.ndarray  # [L,C] int64, (last call + 1) << 16 | expert id
    eviction_score: np.ndarray  # [L,E] float64, never negative
    last_call: np.ndarray  # [L,E] int64, -1 = never
    mass_account: np.ndarray  # [L,E] float64
    due: np.ndarray  # [L,E] int64, clock of the landing of the copy under way, -1 = none
    arrival_expert: np.ndarray  # [L,E] int16, ring of copies under way, in booking order
    arrival_asked: np.ndarray  # [L,E] int64
    ring: np.ndarray  # [L,2] int64: head, length
    clock: np.ndarray  # [L] int64, tokens seen minus one
    epoch: np.ndarray  # [L] int64, how often decayed scores were rescaled
    num_slots: np.ndarray  # [L] int64, C of each layer (at most the C axis)
    counts: np.ndarray  # [L,NUM_COUNTS] int64
    mass_sum: np.ndarray  # [L] float64, substituted gate mass so far
    stand_in_order: np.ndarray  # [E] int32, scratch
    landed: np.ndarray  # [E] int16, scratch
    waits: np.ndarray  # [K] uint8, scratch


class LayerCache(NamedTuple):
    """Views of one layer of a `CacheState`, and its scratch."""

    slot_of_expert: np.ndarray
    expert_in_slot: np.ndarray
    key: np.ndarray
    key_float: np.ndarray
    tie: np.ndarray
    eviction_score: np.ndarray
    last_call: np.ndarray
    mass_account: np.ndarray
    due: np.ndarray
    arrival_expert: np.ndarray
    arrival_asked: np.ndarray
    ring: np.ndarray
    counts: np.ndarray
    stand_in_order: np.ndarray
    landed: np.ndarray
    waits: np.ndarray


class Rules(NamedTuple):
    """A policy as numbers (made by `Policy.compile`). Integers are int64, reals float64."""

    miss_rule: int
    wait_ranks: int  # bit r set: a miss of rank r waits
    gate_threshold: float
    fallback: int
    eviction: int
    only_served_calls_count: int
    stand_ins_count: int
    admission: int
    mass_threshold: float
    admission_delay: int
    max_in_flight: int
    seed: int


class Steps(NamedTuple):
    """What the router said about T tokens at l consecutive layers. Read-only, C-contiguous; absent arrays have size 0."""

    topk_ids: np.ndarray  # [T,l,K] int16, rank order
    gate_weights: np.ndarray  # [T,l,K] float32, rank order
    score_bits: np.ndarray  # [T,l,E] int16: the float16 selection scores, bit for bit
    is_exact: np.ndarray  # [T] uint8: every miss of this token is waited for
    growth: np.ndarray  # [T] float64: what one call adds to a decayed count
    growth_epoch: np.ndarray  # [T] int64


class StepLog(NamedTuple):
    """Where decisions are written, in place. With one row on the token axis the row is reused (summary only)."""

    outcome: np.ndarray  # [T,l,K] uint8
    computed_ids: np.ndarray  # [T,l,K] int16, -1 = dropped
    evicted_ids: np.ndarray  # [T,l,K] int16, -1 = none
    substituted_mass: np.ndarray  # [T,l] float32
    arrivals: np.ndarray  # [n,7] int64: asked, landed, layer, expert, victim, kind, reason
    num_arrivals: np.ndarray  # [1] int64


@jit
def layer_cache(state, layer):
    """The views of one layer; slots beyond its own number are cut off."""
    num_slots = state.num_slots[layer]
    return LayerCache(
        state.slot_of_expert[layer],
        state.expert_in_slot[layer, :num_slots],
        state.key[layer, :num_slots],
        state.key_float[layer, :num_slots],
        state.tie[layer, :num_slots],
        state.eviction_score[layer],
        state.last_call[layer],
        state.mass_account[layer],
        state.due[layer],
        state.arrival_expert[layer],
        state.arrival_asked[layer],
        state.ring[layer],
        state.counts[layer],
        state.stand_in_order,
        state.landed,
        state.waits,
    )


@jit
def pin(cache, slot):
    """Keep a slot from being a victim until `unpin`."""
    cache.key[slot] = PINNED


@jit
def unpin(cache, expert):
    """Give a resident's slot the key and tie that its score and last call ask for."""
    slot = np.int64(cache.slot_of_expert[expert])
    cache.key_float[slot] = cache.eviction_score[expert]
    cache.tie[slot] = ((np.int64(cache.last_call[expert]) + 1) << 16) | np.int64(expert)


def new_state(num_layers: int, num_experts: int, top_k: int, num_slots: np.ndarray) -> CacheState:
    """An empty cache: nobody resident, scores and accounts zero, clock before the first token.

    Parameters
    ----------
    num_layers, num_experts, top_k : L, E, K.
    num_slots : [L] int, slots of each layer.

    Returns
    -------
    CacheState
    """
    layers, experts, slots = num_layers, num_experts, int(num_slots.max())
    key = np.full((layers, slots), FREE, np.int64)
    tie = np.broadcast_to(np.arange(slots, dtype=np.int64), (layers, slots)).copy()
    return CacheState(
        slot_of_expert=np.full((layers, experts), -1, np.int16),
        expert_in_slot=np.full((layers, slots), -1, np.int16),
        key=key,
        key_float=key.view(np.float64),
        tie=tie,
        eviction_score=np.zeros((layers, experts)),
        last_call=np.full((layers, experts), -1, np.int64),
        mass_account=np.zeros((layers, experts)),
        due=np.full((layers, experts), -1, np.int64),
        arrival_expert=np.full((layers, experts), -1, np.int16),
        arrival_asked=np.zeros((layers, experts), np.int64),
        ring=np.zeros((layers, 2), np.int64),
        clock=np.full(layers, -1, np.int64),
        epoch=np.zeros(layers, np.int64),
        num_slots=np.ascontiguousarray(num_slots, dtype=np.int64),
        counts=np.zeros((layers, NUM_COUNTS), np.int64),
        mass_sum=np.zeros(layers),
        stand_in_order=np.zeros(experts, np.int32),
        landed=np.zeros(experts, np.int16),
        waits=np.zeros(top_k, np.uint8),
    )


def forget(state: CacheState) -> None:
    """Back to the empty cache of `new_state`, in place; the clock, the rescale epoch and the counts run on."""
    num_layers, num_experts = state.slot_of_expert.shape
    fresh = new_state(num_layers, num_experts, state.waits.size, state.num_slots)
    for name in ("slot_of_expert", "expert_in_slot", "key", "tie", "eviction_score", "last_call",
                 "mass_account", "due", "arrival_expert", "arrival_asked", "ring"):
        getattr(state, name)[...] = getattr(fresh, name)


def make_resident(state: CacheState, residents: np.ndarray) -> None:
    """Put experts into the slots of an empty cache (the cold start); scores stay zero.

    Parameters
    ----------
    state : an empty cache, filled in place.
    residents : [L,C] int, -1 = leave the slot free.
    """
    for layer, row in enumerate(residents):
        wanted = row[: state.num_slots[layer]]
        slots = np.flatnonzero(wanted >= 0)
        experts = wanted[slots]
        state.slot_of_expert[layer, experts] = slots
        state.expert_in_slot[layer, slots] = experts
        state.key[layer, slots] = 0
        state.tie[layer, slots] = experts
