"""Policies: which misses wait, what the others get, who is evicted, who is admitted.

A policy is a value: frozen, hashable, comparable, part of every result's key. It has four parts.

- The *miss rule* picks the misses that are waited for. `protect` waits when the call's rank is in `wait_ranks` or its gate weight is
  at least `gate_threshold` (absolute, or as a multiple of the uniform weight 1/K, since 0.15 means something else at K = 4).
- The *fallback* serves the others, and the *weight rule* says with which routing weight.
- *Eviction* picks the victim when a slot is needed, and *insertion* says whether a fetch may take one.
- *Admission* and *prefetch* make experts resident that nobody waited for.

A field that the policy does not use must have its neutral value, so that two policies that decide alike compare equal.
This module knows no arrays, models or traces.
"""

from moecache.policy.checks import CountedCalls, ThresholdUnit, WeightRule, parse_enum
from moecache.policy.presets import (
    FETCH_EVERY_MISS,
    FIRST_CHOICE,
    GATE_015,
    PRESETS,
    QUALITY_FIRST,
    SPEED_FIRST,
    SUBSTITUTE_EVERY_MISS,
    cache_prior,
    check_policy,
    first_j,
    mass_budget,
    max_rank,
    only_rank_substituted,
    threshold,
)
from moecache.policy.value import Policy

__all__ = [
    "FETCH_EVERY_MISS",
    "FIRST_CHOICE",
    "GATE_015",
    "PRESETS",
    "QUALITY_FIRST",
    "SPEED_FIRST",
    "SUBSTITUTE_EVERY_MISS",
    "CountedCalls",
    "Policy",
    "ThresholdUnit",
    "WeightRule",
    "cache_prior",
    "check_policy",
    "first_j",
    "mass_budget",
    "max_rank",
    "only_rank_substituted",
    "parse_enum",
    "threshold",
]
