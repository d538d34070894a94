"""Miss rules: which misses of a step are worth waiting for.

`protect` covers nearly all of the field: a miss waits when its rank is in `wait_ranks` or its gate weight reaches
`gate_threshold`. Every miss is threshold 0; none is no ranks and an infinite threshold; first choice is rank 0; the 0.15 rule is rank 0 and
0.15; first J, rank tail, and one rank alone are masks.

The others look at the whole step, and wait for `wait_ranks` as well:

| member | walks the other misses from the worst, and does not wait while |
|---|---|
| mass_budget | the gate weight not waited for stays at most `budget` |
| squared_budget | the sum of squared gate weights not waited for stays at most `budget` |
| cache_prior | the next stand-in's score + `bonus` x (range of the step's scores) exceeds the missed expert's (arXiv 2412.00099) |
| max_rank | the next stand-in is among the `best_ranks` experts with the highest scores |

Cache-prior and max-rank are known as biases added to the router before its top-k; the sets they choose are the same. They walk by
selection score, the budgets by gate weight. A new rule is a member, a function, and its line in `mark_waits`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from moecache.kernel.fallback import MASKED, NOBODY, best_stand_in, prepare_stand_ins, sort_key
from moecache.kernel.jit import inline, jit, place


class MissRule(IntEnum):
    """How the misses to wait for are chosen."""

    PROTECT = 0
    MASS_BUDGET = 1
    SQUARED_BUDGET = 2
    CACHE_PRIOR = 3
    MAX_RANK = 4


PROTECT, SQUARED_BUDGET = int(MissRule.PROTECT), int(MissRule.SQUARED_BUDGET)
MASS_BUDGET, CACHE_PRIOR = int(MissRule.MASS_BUDGET), int(MissRule.CACHE_PRIOR)


@inline
def waits_for_all(rules):
    """Whether the policy waits for every miss of every step (only `protect` has a finite threshold)."""
    return rules.gate_threshold == 0.0


@inline
def mark_waits(cache, rules, step, num_misses):
    """Set `cache.waits[rank]` for every miss of the step; an exact step waits for all of them."""
    for i in range(num_misses):
        cache.waits[cache.missed[i]] = 1
    if step.is_exact or waits_for_all(rules):
        return
    if rules.miss_rule == PROTECT:
        _protect(cache, rules, step, num_misses)
    elif rules.miss_rule == MASS_BUDGET or rules.miss_rule == SQUARED_BUDGET:
        _spend_budget(cache, rules, step, num_misses)
    else:
        _walk_by_score(cache, rules, step, num_misses)


@inline
def _is_wait_rank(rules, rank):
    return (rules.wait_ranks >> rank) & 1 == 1


@inline
def _protect(cache, rules, step, num_misses):
    for i in range(num_misses):
        rank = np.int64(cache.missed[i])
        is_heavy = np.float64(step.weights[rank]) >= rules.gate_threshold
        cache.waits[rank] = is_heavy or _is_wait_rank(rules, rank)


@jit
def _spend_budget(cache, rules, step, num_misses):
    spent = 0.0
    for i in range(num_misses - 1, -1, -1):
        rank = np.int64(cache.missed[i])
        if _is_wait_rank(rules, rank):
            continue
        weight = np.float64(step.weights[rank])
        spent += weight * weight if rules.miss_rule == SQUARED_BUDGET else weight
        if spent > rules.budget or rules.budget == 0.0:  # a weight of 0 does not pass a budget of 0
            return
        cache.waits[rank] = 0


@jit
def _walk_by_score(cache, rules, step, num_misses):
    """Pair the worst miss with the best stand-in, then the next worst with the next best, while the rule agrees."""
    prepare_stand_ins(cache, rules, step)
    allowance = 0.0
    if rules.miss_rule == CACHE_PRIOR:
        allowance = rules.bonus * _score_range(cache, step)
    while True:
        worst, stand_in = _worst_miss(cache, rules, step, num_misses), best_stand_in(cache)
        if worst < 0 or stand_in < 0:
            return
        missed = np.int64(step.ids[worst])
        if rules.miss_rule == CACHE_PRIOR:
            is_good = _score(cache, step, stand_in) + allowance > _score(cache, step, missed)
        else:
            is_good = step.ids.size + _num_better(step, stand_in) < rules.best_ranks
        if not is_good:
            return
        cache.waits[worst] = 0
        cache.order[stand_in] = NOBODY


@jit
def _worst_miss(cache, rules, step, num_misses):
    """The rank of the waiting miss with the lowest selection score (the higher id among equals), -1 if none is left."""
    worst, lowest = np.int64(-1), np.int64(2**31)
    for i in range(num_misses):
        rank = np.int64(cache.missed[i])
        if cache.waits[rank] != 0 and not _is_wait_rank(rules, rank):
            key = np.int64(sort_key(step.score_bits, place(step.ids[rank])))
            if key < lowest:
                worst, lowest = rank, key
    return worst


@jit
def _score(cache, step, expert):
    return np.float64(cache.float16_values[np.int64(step.score_bits[expert]) & 0xFFFF])


@jit
def _score_range(cache, step):
    """Highest minus lowest score of the experts that the router may choose."""
    low, high = np.inf, -np.inf
    for expert in range(step.score_bits.size):
        if step.score_bits[expert] != MASKED:
            score = _score(cache, step, expert)
            low, high = min(low, score), max(high, score)
    return max(high - low, 0.0)


@jit
def _num_better(step, stand_in):
    """How many experts outside the top-k have a better sort key than the stand-in."""
    mine, number = sort_key(step.score_bits, stand_in), 0
    for expert in range(step.score_bits.size):
        number += sort_key(step.score_bits, np.int64(expert)) > mine
    for rank in range(step.ids.size):
        number -= sort_key(step.score_bits, np.int64(step.ids[rank])) > mine
    return number
