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

from moecache.kernel.admission import BACKGROUND, book, decay_accounts, land_arrivals
from moecache.kernel.codes import (
    CPU_OUTCOME,
    DROPPED,
    FETCHED,
    FIRST_SUBSTITUTED,
    FORCED,
    HIT,
    LOW_PRECISION_OUTCOME,
    SUBSTITUTED,
)
from moecache.kernel.commonest import is_plain_lru, plain_lru
from moecache.kernel.eviction import on_call, rescale_scores
from moecache.kernel.fallback import BUDDY, DROP, LOW_PRECISION, NOBODY, RANDOM_RESIDENT, SUBSTITUTE, prepare_stand_ins, take_stand_in
from moecache.kernel.insertion import TINYLFU, fetch
from moecache.kernel.jit import entry, inline, jit, place
from moecache.kernel.miss_rule import mark_waits, waits_for_all
from moecache.kernel.state import Step, layer_cache, pin, set_key, unpin

TOKEN_BLOCK = 64  # tokens of one layer handled before the next layer: its arrays stay in the processor's cache


@entry
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
    if is_plain_lru(rules):
        _replay_plain_lru(state, steps, log, first_layer)
    else:
        _replay_any(state, rules, steps, log, first_layer)


# Two functions, because one of this size keeps everything on the stack.
@jit
def _replay_plain_lru(state, steps, log, first_layer):
    _replay_blocks(state, plain_lru(), steps, log, first_layer)


@jit
def _replay_any(state, rules, steps, log, first_layer):
    _replay_blocks(state, rules, steps, log, first_layer)


@inline
def _replay_blocks(state, rules, steps, log, first_layer):
    num_tokens, num_layers, _ = steps.topk_ids.shape
    for start in range(0, num_tokens, TOKEN_BLOCK):
        stop = min(start + TOKEN_BLOCK, num_tokens)
        for i in range(num_layers):
            _replay_layer(state, rules, steps, log, place(first_layer + i), place(i), start, stop)


@inline
def _replay_layer(state, rules, steps, log, layer, i, start, stop):
    cache = layer_cache(state, layer)
    last_row = log.outcome.shape[0] - 1
    # An absent array is [1,1,0]: its only row is empty.
    has_scores, has_predictions = int(steps.score_bits.size > 0), int(steps.predicted_ids.size > 0)
    has_future = int(steps.next_use.size > 0)
    for number in range(start, stop):
        token = place(number)
        now = int(state.clock[layer]) + 1
        state.clock[layer] = now
        if steps.growth_epoch[token] > state.epoch[layer]:
            rescale_scores(cache, rules, steps.growth_epoch[token] - state.epoch[layer])
            state.epoch[layer] = steps.growth_epoch[token]
        row = place(min(token, last_row))
        step = Step(
            layer,
            now,
            steps.growth[token],
            steps.is_exact[token] != 0,
            steps.topk_ids[token, i],
            steps.gate_weights[token, i],
            steps.score_bits[token * has_scores, i * has_scores],
            steps.predicted_ids[token * has_predictions, i * has_predictions],
            steps.next_use[token * has_future, i * has_future],
            log.outcome[row, i],
            log.computed_ids[row, i],
            log.evicted_ids[row, i],
        )
        mass = decide(cache, rules, step, log)
        log.substituted_mass[row, i] = mass
        if mass != 0.0:
            state.mass_sum[layer] += mass


@inline
def decide(cache, rules, step, log):
    """Decide one token at one layer; fills the step's rows [K], returns the substituted gate mass."""
    if rules.account_decay != 1.0:
        decay_accounts(cache, rules)
    if (rules.admission == BACKGROUND and cache.ring[1] > 0) or rules.max_prefetches > 0:
        _pin_called(cache, step)
        land_arrivals(cache, rules, step, log)
    num_misses, mass = _split(cache, step), 0.0
    if num_misses > 0:
        mark_waits(cache, rules, step, num_misses)
        num_left = _serve_waits(cache, rules, step, num_misses)
        if num_left > 0 and not waits_for_all(rules):
            _serve_others(cache, rules, step, num_misses)
    _update_scores(cache, rules, step)
    if num_misses > 0 and not waits_for_all(rules):
        mass = _add_mass(cache, rules, step, num_misses)
    return mass


@inline
def _pin_called(cache, step):
    for rank in range(step.ids.size):
        slot = np.int64(cache.slot_of_expert[place(step.ids[rank])])
        if slot >= 0:
            pin(cache, slot)


@inline
def _split(cache, step):
    """Mark hits, and pin them, and list the misses; the number of misses."""
    num_misses = np.int64(0)
    for rank in range(step.ids.size):
        expert = place(step.ids[rank])
        step.computed[rank] = expert
        step.evicted[rank] = -1
        step.outcome[rank] = HIT
        cache.missed[num_misses] = rank  # stands only if the next line moves on: a miss is hard to foretell for the processor
        slot = np.int64(cache.slot_of_expert[expert])
        num_misses += slot < 0
        if slot >= 0:
            pin(cache, slot)
    cache.counts[HIT] += step.ids.size - num_misses
    return num_misses


@inline
def _serve_waits(cache, rules, step, num_misses):
    """Fetch the misses marked by the miss rule; the number of misses left."""
    num_left = num_misses
    for i in range(num_misses):
        rank = place(cache.missed[i])
        if waits_for_all(rules) or cache.waits[rank] != 0:
            step.evicted[rank] = fetch(cache, rules, step, rank)
            step.outcome[rank] = FETCHED
            num_left -= 1
    cache.counts[FETCHED] += num_misses - num_left
    return num_left


@inline
def _serve_others(cache, rules, step, num_misses):
    """The fallback for every miss that is not waited for, in rank order."""
    needs_stand_in = rules.fallback == SUBSTITUTE or rules.fallback == RANDOM_RESIDENT or rules.fallback == BUDDY
    if needs_stand_in:
        prepare_stand_ins(cache, rules, step)
    for i in range(num_misses):
        rank = place(cache.missed[i])
        if cache.waits[rank] != 0:
            continue
        if needs_stand_in:
            _substitute(cache, rules, step, rank)
        elif rules.fallback == DROP:
            step.outcome[rank] = DROPPED
            step.computed[rank] = -1
        else:
            step.outcome[rank] = LOW_PRECISION_OUTCOME if rules.fallback == LOW_PRECISION else CPU_OUTCOME
        cache.counts[np.int64(step.outcome[rank])] += 1
        if rank == 0 and step.outcome[rank] != FORCED:
            cache.counts[FIRST_SUBSTITUTED] += 1


@inline
def _substitute(cache, rules, step, rank):
    stand_in = take_stand_in(cache, rules, step, rank)
    if stand_in >= 0:
        pin(cache, np.int64(cache.slot_of_expert[stand_in]))
        step.computed[rank] = stand_in
        step.outcome[rank] = SUBSTITUTED
    else:
        step.evicted[rank] = fetch(cache, rules, step, rank)
        step.outcome[rank] = FORCED
        if step.evicted[rank] >= 0:
            cache.order[step.evicted[rank]] = NOBODY  # who has just left cannot stand in


@inline
def _update_scores(cache, rules, step):
    """Score the calls, and unpin everything that this step pinned."""
    has_next_use = step.next_use.size > 0
    for rank in range(step.ids.size):
        expert = place(step.ids[rank])
        is_served = waits_for_all(rules) or step.outcome[rank] <= FORCED  # hit, fetched, forced
        if is_served or rules.only_served_calls_count == 0:
            next_use = step.next_use[rank] if has_next_use else np.int64(0)
            score = on_call(cache, rules, expert, step.now, step.growth, next_use)
            if rules.insertion == TINYLFU:
                cache.frequency[expert] += step.growth
            slot = np.int64(cache.slot_of_expert[expert])
            if is_served and slot >= 0:  # not where the fetch was not inserted
                set_key(cache, rules, slot, expert, score, step.now)
        if not is_served and step.outcome[rank] == SUBSTITUTED:
            stand_in = np.int64(step.computed[rank])
            if rules.stand_ins_count != 0:
                on_call(cache, rules, stand_in, step.now, step.growth, np.int64(0))
            unpin(cache, rules, stand_in)


@inline
def _add_mass(cache, rules, step, num_misses):
    """Mass accounts and bookings in rank order; the gate mass of substituted and dropped calls."""
    mass, num_booked = 0.0, np.int64(0)
    for i in range(num_misses):
        rank = place(cache.missed[i])
        if step.outcome[rank] > FORCED:
            if step.outcome[rank] == SUBSTITUTED or step.outcome[rank] == DROPPED:
                mass += np.float64(step.weights[rank])
            if rules.admission == BACKGROUND:
                num_booked = book(cache, rules, place(step.ids[rank]), step.weights[rank], step.now, num_booked)
    return mass
