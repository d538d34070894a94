"""Hit rates in another currency: how many slots LRU needs to hit as often.

An eviction costs next to nothing and a slot costs memory, so the worth of an eviction is the number of slots that it saves. LRU's hit rate
never falls when slots are added (a larger LRU cache holds what a smaller one does), so that number is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from moecache.experiments.capacity import label, replay, warm_start
from moecache.policy import FETCH_EVERY_MISS, Policy
from moecache.simulate import simulate
from moecache.trace import RouterTrace


def slots_for_hit_rate(trace: RouterTrace, hit_rate: float, warmup_tokens: int = 0, policy: Policy = FETCH_EVERY_MISS) -> int:
    """The fewest slots a layer at which a fetching policy hits at least this share of the warm window's calls, by bisection.

    Returns
    -------
    int : between top-k and E; E also when even that is not enough.
    """
    start = warm_start(trace, warmup_tokens)
    low, high = trace.shape.top_k, trace.shape.num_experts
    while low < high:
        middle = (low + high) // 2
        run = simulate(trace, policy, middle, keep="summary", warmup_tokens=start)
        low, high = (low, middle) if run.summary(start)["hit_rate"] >= hit_rate else (middle + 1, high)
    return low


def worth_in_slots(trace: RouterTrace, compared: Sequence[Policy], num_slots: Sequence[int], warmup_tokens: int) -> pd.DataFrame:
    """How many slots LRU would need to hit as often as each policy does.

    Returns
    -------
    DataFrame : `policy`, `num_slots`, `hit_rate` (warm), `lru_slots`.
    """
    start, rows = warm_start(trace, warmup_tokens), []
    for slots in num_slots:
        for policy in compared:
            run = replay(trace, policy, slots, start, keep="summary", warmup_tokens=start)
            rate = float(run.summary(start)["hit_rate"])
            rows.append((policy.label, slots, rate, slots_for_hit_rate(trace, rate, warmup_tokens)))
    return pd.DataFrame(rows, columns=["policy", "num_slots", "hit_rate", "lru_slots"])


def target_slots(trace: RouterTrace, targets: Sequence[float], warmup_tokens: int) -> pd.DataFrame:
    """The fewest slots at which LRU reaches each hit rate.

    Returns
    -------
    DataFrame : `policy`, `target`, `num_slots`, `hit_rate` there, `resident_fraction`, `fewest_evictions` (warm, a layer).
    """
    start, rows = warm_start(trace, warmup_tokens), []
    for target in targets:
        slots = slots_for_hit_rate(trace, target, warmup_tokens)
        totals = simulate(trace, FETCH_EVERY_MISS, slots, keep="summary", warmup_tokens=start).summary(start)
        rate, fewest = float(totals["hit_rate"]), int(totals["fewest_evictions_a_layer"])
        rows.append((label("lru"), target, slots, rate, slots / trace.shape.num_experts, fewest))
    return pd.DataFrame(rows, columns=["policy", "target", "num_slots", "hit_rate", "resident_fraction", "fewest_evictions"])
