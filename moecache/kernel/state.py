"""The arrays of the kernel: what one layer's cache is, and what is written about a step.

Letters: L MoE layers, E experts a layer, K top-k, C slots a layer, T tokens. Everything is a named tuple of NumPy arrays that the
kernel fills in place; nothing here decides anything.

The victim search must be a vector pass or two, so each *slot* holds an order-preserving int64 image of its expert's eviction score. A
free slot holds `FREE`, below every score; a pinned one holds `PINNED`, above every score. Where scores are whole numbers (clocks,
counts), `key` packs score, last call and expert id into 24, 24 and 15 bits, and one minimum finds the victim. Elsewhere `key` holds
the bits of the score (a non-negative float64 keeps its order when they are read as an integer; `key_float` is the same memory), and
`tie` orders equal keys by last call, then by expert id: a second pass. Either way the lower id is evicted first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moecache.kernel.codes import NUM_COUNTS
from moecache.kernel.jit import inline

FLOAT16_VALUES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)  # by bit pattern; only read
FREE = -1
PINNED = 2**63 - 1
ID_BITS, TIE_BITS = 15, 39
ID_MASK = 2**ID_BITS - 1
MOST_TOKENS = 2**24 - 2  # clocks and counts must fit their bits


class CacheState(NamedTuple):
    """All layers' caches. The leading axis is the layer, except for the scratch and the tables at the end."""

    slot_of_expert: np.ndarray  # [L,E] int16, -1 = not resident
    expert_in_slot: np.ndarray  # [L,C] int16, -1 = free
    key: np.ndarray  # [L,C] int64, image of the score (packed with last call and id, or not), FREE or PINNED
    key_float: np.ndarray  # [L,C] float64, the same memory
    tie: np.ndarray  # [L,C] int64, (last call + 1) << 15 | expert id, where keys are not packed
    eviction_score: np.ndarray  # [L,E] float64, never negative
    last_call: np.ndarray  # [L,E] int64, -1 = never
    inserted_at: np.ndarray  # [L,E] int64, clock at which the expert last became resident, -1 = never
    frequency: np.ndarray  # [L,E] float64, decayed count of calls (TinyLFU)
    mass_account: np.ndarray  # [L,E] float64
    due: np.ndarray  # [L,E] int64, clock of the landing of the copy under way, -1 = none
    is_untried: np.ndarray  # [L,E] uint8, prefetched and not called since
    arrival_expert: np.ndarray  # [L,E] int16, ring of copies under way, in booking order
    arrival_asked: np.ndarray  # [L,E] int64
    ring: np.ndarray  # [L,2] int64: head, length
    num_protected: np.ndarray  # [L,1] int64, residents of the protected segment (SLRU)
    clock: np.ndarray  # [L] int64, tokens seen minus one
    epoch: np.ndarray  # [L] int64, how often decayed scores were rescaled
    num_slots: np.ndarray  # [L] int64, C of each layer (at most the C axis)
    counts: np.ndarray  # [L,NUM_COUNTS] int64
    mass_sum: np.ndarray  # [L] float64, substituted gate mass so far
    buddies: np.ndarray  # [L,E,H] int16, stand-ins of each expert, best first; [1,1,0] where there is no table
    float16_values: np.ndarray  # [65536] float32, the value of each bit pattern
    order: np.ndarray  # [E] int32, scratch: sort keys of the stand-ins
    landed: np.ndarray  # [E] int16, scratch
    is_candidate: np.ndarray  # [E] uint8, scratch: who takes part in a draw
    missed: np.ndarray  # [K] int16, scratch: the ranks that miss, rising
    waits: np.ndarray  # [K] uint8, scratch: by rank, where it misses


class LayerCache(NamedTuple):
    """Views of one layer of a `CacheState`, its scratch and tables."""

    slot_of_expert: np.ndarray
    expert_in_slot: np.ndarray
    key: np.ndarray
    key_float: np.ndarray
    tie: np.ndarray
    eviction_score: np.ndarray
    last_call: np.ndarray
    inserted_at: np.ndarray
    frequency: np.ndarray
    mass_account: np.ndarray
    due: np.ndarray
    is_untried: np.ndarray
    arrival_expert: np.ndarray
    arrival_asked: np.ndarray
    ring: np.ndarray
    num_protected: np.ndarray
    counts: np.ndarray
    buddies: np.ndarray  # [E,H]
    float16_values: np.ndarray
    order: np.ndarray
    landed: np.ndarray
    is_candidate: np.ndarray
    missed: np.ndarray
    waits: np.ndarray


class Rules(NamedTuple):
    """A policy as numbers (made by `Policy.compile`). Integers are int64, reals float64."""

    miss_rule: int
    wait_ranks: int  # bit r set: a miss of rank r waits
    gate_threshold: float
    budget: float
    bonus: float
    best_ranks: int
    fallback: int
    eviction: int
    only_served_calls_count: int
    stand_ins_count: int
    insertion: int
    insertion_cap: int
    admission: int
    mass_threshold: float
    account_decay: float
    admission_delay: int
    max_in_flight: int
    max_bookings: int
    max_prefetches: int
    is_packed: int  # scores are whole numbers, so keys hold score, last call and id
    seed: int


class Steps(NamedTuple):
    """What the router said about T tokens at l consecutive layers. Read-only, C-contiguous; absent arrays are [1,1,0]."""

    topk_ids: np.ndarray  # [T,l,K] int16, rank order
    gate_weights: np.ndarray  # [T,l,K] float32, rank order
    score_bits: np.ndarray  # [T,l,E] int16: the float16 selection scores, bit for bit
    predicted_ids: np.ndarray  # [T,l,P] int16, -1 = none: what to prefetch for this step
    next_use: np.ndarray  # [T,l,K] int64, clock of each call's next call (Belady)
    is_exact: np.ndarray  # [T] uint8: every miss of this token is waited for
    growth: np.ndarray  # [T] float64: what one call adds to a decayed count
    growth_epoch: np.ndarray  # [T] int64


class Step(NamedTuple):
    """One token at one layer: what the router said, and the rows of the log to fill."""

    layer: int
    now: int  # the layer's clock
    growth: float
    is_exact: bool
    ids: np.ndarray  # [K]
    weights: np.ndarray  # [K]
    score_bits: np.ndarray  # [E] or [0]
    predicted_ids: np.ndarray  # [P] or [0]
    next_use: np.ndarray  # [K] or [0]
    outcome: np.ndarray  # [K], filled
    computed: np.ndarray  # [K], filled
    evicted: np.ndarray  # [K], filled


class StepLog(NamedTuple):
    """Where decisions are written, in place. With one row on the token axis the row is reused (summary only)."""

    outcome: np.ndarray  # [T,l,K] uint8
    computed_ids: np.ndarray  # [T,l,K] int16, -1 = dropped
    evicted_ids: np.ndarray  # [T,l,K] int16, -1 = none, -2 = fetched but not inserted
    substituted_mass: np.ndarray  # [T,l] float32
    arrivals: np.ndarray  # [n,7] int64: asked, landed, layer, expert, victim, kind, reason
    num_arrivals: np.ndarray  # [1] int64


@inline
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
        state.inserted_at[layer],
        state.frequency[layer],
        state.mass_account[layer],
        state.due[layer],
        state.is_untried[layer],
        state.arrival_expert[layer],
        state.arrival_asked[layer],
        state.ring[layer],
        state.num_protected[layer],
        state.counts[layer],
        state.buddies[layer if state.buddies.size > 0 else 0],
        state.float16_values,
        state.order,
        state.landed,
        state.is_candidate,
        state.missed,
        state.waits,
    )


@inline
def pin(cache, slot):
    """Keep a slot from being a victim until `unpin`."""
    cache.key[slot] = PINNED


@inline
def unpin(cache, rules, expert):
    """Give a resident's slot the key that its score and last call ask for; nothing for an expert that is not resident."""
    slot = np.int64(cache.slot_of_expert[expert])
    if slot >= 0:
        set_key(cache, rules, slot, expert, cache.eviction_score[expert], np.int64(cache.last_call[expert]))


@inline
def set_key(cache, rules, slot, expert, score, last_call):
    """The key of a slot whose expert has this score and last call."""
    tie = ((last_call + 1) << ID_BITS) | np.int64(expert)
    if rules.is_packed != 0:
        cache.key[slot] = (np.int64(score) << TIE_BITS) | tie
    else:
        cache.key_float[slot] = score
        cache.tie[slot] = tie


def new_state(num_layers: int, num_experts: int, top_k: int, num_slots: np.ndarray, buddies: np.ndarray) -> CacheState:
    """An empty cache: nobody resident, scores and accounts zero, clock before the first token.

    Parameters
    ----------
    num_layers, num_experts, top_k : L, E, K.
    num_slots : [L] int, slots of each layer.
    buddies : [L,E,H] int16, or [1,1,0].

    Returns
    -------
    CacheState
    """
    layers, experts, slots = num_layers, num_experts, int(num_slots.max())
    key = np.full((layers, slots), FREE, np.int64)
    return CacheState(
        slot_of_expert=np.full((layers, experts), -1, np.int16),
        expert_in_slot=np.full((layers, slots), -1, np.int16),
        key=key,
        key_float=key.view(np.float64),
        tie=np.zeros((layers, slots), np.int64),
        eviction_score=np.zeros((layers, experts)),
        last_call=np.full((layers, experts), -1, np.int64),
        inserted_at=np.full((layers, experts), -1, np.int64),
        frequency=np.zeros((layers, experts)),
        mass_account=np.zeros((layers, experts)),
        due=np.full((layers, experts), -1, np.int64),
        is_untried=np.zeros((layers, experts), np.uint8),
        arrival_expert=np.full((layers, experts), -1, np.int16),
        arrival_asked=np.zeros((layers, experts), np.int64),
        ring=np.zeros((layers, 2), np.int64),
        num_protected=np.zeros((layers, 1), np.int64),
        clock=np.full(layers, -1, np.int64),
        epoch=np.zeros(layers, np.int64),
        num_slots=np.ascontiguousarray(num_slots, dtype=np.int64),
        counts=np.zeros((layers, NUM_COUNTS), np.int64),
        mass_sum=np.zeros(layers),
        buddies=np.ascontiguousarray(buddies, dtype=np.int16),
        float16_values=FLOAT16_VALUES,
        order=np.zeros(experts, np.int32),
        landed=np.zeros(experts, np.int16),
        is_candidate=np.zeros(experts, np.uint8),
        missed=np.zeros(top_k, np.int16),
        waits=np.zeros(top_k, np.uint8),
    )


_SURVIVES_RESET = {"key_float", "clock", "epoch", "num_slots", "counts", "mass_sum", "buddies", "float16_values"}


def forget(state: CacheState) -> None:
    """Back to the empty cache of `new_state`, in place; the clock, the rescale epoch and the counts run on."""
    num_layers, num_experts = state.slot_of_expert.shape
    fresh = new_state(num_layers, num_experts, state.waits.size, state.num_slots, state.buddies)
    for name in CacheState._fields:
        if name not in _SURVIVES_RESET:
            getattr(state, name)[...] = getattr(fresh, name)


def make_resident(state: CacheState, residents: np.ndarray, is_packed: bool) -> None:
    """Put experts into the slots of an empty cache (the cold start); scores stay as they are.

    Parameters
    ----------
    state : an empty cache, filled in place.
    residents : [L,C] int, -1 = leave the slot free.
    is_packed : how the policy's keys are made (`Rules`); scores are 0 where they are packed.
    """
    for layer, row in enumerate(residents):
        wanted = row[: state.num_slots[layer]]
        slots = np.flatnonzero(wanted >= 0)
        experts = wanted[slots]
        state.slot_of_expert[layer, experts] = slots
        state.expert_in_slot[layer, slots] = experts
        state.key_float[layer, slots] = state.eviction_score[layer, experts]
        state.tie[layer, slots] = experts
        if is_packed:
            state.key[layer, slots] = experts
