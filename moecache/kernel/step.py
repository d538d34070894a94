"""One step: one token at one MoE layer, in the order that every instrument shares.

All K calls are classified against residency at the start of the step. Only then are misses served and victims chosen. Replaying the calls
one after the other instead lets one call of a token evict what the next one needs, which inflates misses and can invert rankings.

1. Pin the called residents, then land what is due.
2. Split the top-k into hits and misses.
3. The miss rule marks the misses that are waited for.
4. Fetch those, in rank order. A fetch may evict the best stand-in: as meant.
5. Give every other miss its fallback, in rank order. If nobody can stand in, the miss is fetched and counted as forced.
6. Update eviction scores: the router's calls count, standing in does not (both can be switched).
7. Add the gate weights of the calls neither hit nor fetched to their mass accounts, and book copies.
8. The decision row has been written on the way.

The kernel knows no devices, no tensors, no texts: only the arrays of `state.py`.
"""

from __future__ import annotations

import numpy as np

from moecache.kernel.admission import BACKGROUND, book, land_arrivals
from moecache.kernel.eviction import find_victim, insert, on_call, rescale_scores
from moecache.kernel.fallback import DROP, prepare_stand_ins, take_stand_in
from moecache.kernel.jit import jit
from moecache.kernel.miss_rule import mark_waits
from moecache.kernel.state import (
    DROPPED,
    FETCHED,
    FIRST_SUBSTITUTED,
    FORCED,
    HIT,
    MISS,
    SUBSTITUTED,
    layer_cache,
    pin,
    unpin,
)

TOKEN_BLOCK = 64  # tokens of one layer handled before the next layer: its arrays stay in the processor's cache


@jit
def replay(state, rules, steps, log, first_layer):
    """Advance layers first_layer .. first_layer + l - 1 by T tokens.

    Parameters
    ----------
    state : CacheState, changed in place.
    rules : Rules.
    steps : Steps, of T tokens at l layers.
    log : StepLog, filled in place; with one token row the row is reused.
    first_layer : index of the first layer in `state`.
    """
    num_tokens, num_layers, _ = steps.topk_ids.shape
    for start in range(0, num_tokens, TOKEN_BLOCK):
        stop = min(start + TOKEN_BLOCK, num_tokens)
        for i in range(num_layers):
            _replay_layer(state, rules, steps, log, first_layer, i, start, stop)


@jit
def _replay_layer(state, rules, steps, log, first_layer, i, start, stop):
    layer = first_layer + i
    cache = layer_cache(state, layer)
    last_row = log.outcome.shape[0] - 1
    for token in range(start, stop):
        state.clock[layer] += 1
        if steps.growth_epoch[token] > state.epoch[layer]:
            rescale_scores(cache, steps.growth_epoch[token] - state.epoch[layer])
            state.epoch[layer] = steps.growth_epoch[token]
        row = min(token, last_row)
        scores = steps.score_bits[token, i] if steps.score_bits.size > 0 else steps.score_bits[0, 0]
        mass = step(
            cache, rules, layer, state.clock[layer], steps.growth[token], steps.topk_ids[token, i],
            steps.gate_weights[token, i], scores, steps.is_exact[token] != 0,
            log.outcome[row, i], log.computed_ids[row, i], log.evicted_ids[row, i], log,
        )
        log.substituted_mass[row, i] = mass
        state.mass_sum[layer] += mass


@jit
def step(cache, rules, layer, now, growth, ids, weights, score_bits, is_exact, outcome, computed, evicted, log):
    """Decide one token at one layer; fills the three rows [K], returns the substituted gate mass."""
    _pin_called(cache, ids)
    if cache.ring[1] > 0:
        land_arrivals(cache, rules, layer, now, ids, log)
    num_misses = _split(cache, ids, outcome, computed, evicted)
    if num_misses > 0:
        mark_waits(cache, rules, weights, outcome, is_exact)
        num_left = _serve_waits(cache, rules, now, ids, outcome, computed, evicted, num_misses)
        if num_left > 0:
            _serve_others(cache, rules, layer, now, ids, score_bits, outcome, computed, evicted)
    _update_scores(cache, rules, now, growth, ids, outcome, computed)
    mass = 0.0
    if num_misses > 0:
        mass = _add_mass(cache, rules, now, ids, weights, outcome)
    return mass


@jit
def _pin_called(cache, ids):
    for rank in range(ids.size):
        slot = np.int64(cache.slot_of_expert[ids[rank]])
        if slot >= 0:
            pin(cache, slot)


@jit
def _split(cache, ids, outcome, computed, evicted):
    """Mark hits (pinned already, also those that just landed) and misses; the number of misses."""
    num_misses = 0
    for rank in range(ids.size):
        computed[rank] = ids[rank]
        evicted[rank] = -1
        if cache.slot_of_expert[ids[rank]] >= 0:
            outcome[rank] = HIT
        else:
            outcome[rank] = MISS
            num_misses += 1
    cache.counts[HIT] += ids.size - num_misses
    return num_misses


@jit
def _fetch(cache, rules, now, expert):
    """Evict and insert. There is a victim: every call of the step pins one slot at most, and slots are at least K."""
    return insert(cache, rules, expert, find_victim(cache), now)


@jit
def _serve_waits(cache, rules, now, ids, outcome, computed, evicted, num_misses):
    """Fetch the misses marked by the miss rule; the number of misses left."""
    for rank in range(ids.size):
        if outcome[rank] == MISS and cache.waits[rank] != 0:
            evicted[rank] = _fetch(cache, rules, now, np.int64(ids[rank]))
            outcome[rank] = FETCHED
            cache.counts[FETCHED] += 1
            num_misses -= 1
    return num_misses


@jit
def _serve_others(cache, rules, layer, now, ids, score_bits, outcome, computed, evicted):
    """The fallback for every miss that is not waited for, in rank order."""
    if rules.fallback != DROP:
        prepare_stand_ins(cache, rules, ids, score_bits)
    for rank in range(ids.size):
        if outcome[rank] != MISS:
            continue
        if rules.fallback == DROP:
            outcome[rank] = DROPPED
            computed[rank] = -1
        else:
            _substitute(cache, rules, layer, now, rank, ids, outcome, computed, evicted)
        cache.counts[np.int64(outcome[rank])] += 1
        if rank == 0 and outcome[rank] != FORCED:
            cache.counts[FIRST_SUBSTITUTED] += 1


@jit
def _substitute(cache, rules, layer, now, rank, ids, outcome, computed, evicted):
    stand_in = take_stand_in(cache, rules, layer, now, rank)
    if stand_in >= 0:
        pin(cache, np.int64(cache.slot_of_expert[stand_in]))
        computed[rank] = stand_in
        outcome[rank] = SUBSTITUTED
    else:
        evicted[rank] = _fetch(cache, rules, now, np.int64(ids[rank]))
        outcome[rank] = FORCED


@jit
def _update_scores(cache, rules, now, growth, ids, outcome, computed):
    """Score the calls, and unpin everything that this step pinned."""
    for rank in range(ids.size):
        expert = np.int64(ids[rank])
        is_served = outcome[rank] <= FORCED  # hit, fetched, forced
        if is_served or rules.only_served_calls_count == 0:
            on_call(cache, rules, expert, now, growth)
        if is_served:
            unpin(cache, expert)
        elif outcome[rank] == SUBSTITUTED:
            stand_in = np.int64(computed[rank])
            if rules.stand_ins_count != 0:
                on_call(cache, rules, stand_in, now, growth)
            unpin(cache, stand_in)


@jit
def _add_mass(cache, rules, now, ids, weights, outcome):
    """Mass accounts and bookings in rank order; the gate mass of substituted and dropped calls."""
    mass = 0.0
    for rank in range(ids.size):
        if outcome[rank] > FORCED:
            if outcome[rank] == SUBSTITUTED or outcome[rank] == DROPPED:
                mass += np.float64(weights[rank])
            if rules.admission == BACKGROUND:
                book(cache, rules, np.int64(ids[rank]), weights[rank], now)
    return mass
