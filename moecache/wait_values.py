"""Waiting decided by another number than the gate weight: bounds, oracles, and rules still to be invented.

Under `protect` a miss is waited for when its gate weight reaches `gate_threshold`. `wait_values` put another value per call in the weight's
place, for this comparison only: substituted mass is still gate weight, and so is what stand-ins get. `wait_ranks` hold as before.

The kernel compares the numbers that it is given as weights, so it is given the values, and the mass is summed here from its decisions and
the true weights. Two things in the kernel read weights beside the comparison, and policies that use them are refused by name: budgets,
and mass accounts that wait for a mass to gather (admission at `mass_threshold` 0 asks at the first call whatever its weight).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.cache import ExpertCache
from moecache.kernel import Admission, MissRule, Outcome
from moecache.policy import Policy
from moecache.trace import DecisionLog


def check_waits_by_value(policy: Policy) -> None:
    """Refuse a policy whose decisions read gate weights elsewhere, or which compares nothing.

    Raises
    ------
    ValueError : the field's name, and what would work.
    """
    if policy.miss_rule != MissRule.PROTECT:
        name = policy.miss_rule.name.lower()  # type: ignore[union-attr]
        raise ValueError(
            f"wait_values take the gate weight's place under gate_threshold, which miss_rule={name!r} does not read; use 'protect'"
        )
    if policy.gate_threshold in (0.0, math.inf):
        raise ValueError(f"wait_values are compared with gate_threshold, but {policy.gate_threshold} compares nothing; give it a number")
    if policy.admission == Admission.BACKGROUND and policy.mass_threshold:
        raise ValueError(
            f"wait_values cannot be carried out with mass_threshold={policy.mass_threshold}: mass accounts gather gate weight; "
            "use mass_threshold=0 (every miss admitted), or no admission"
        )


def checked_values(values: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values [T, L, K] in rank order as float32.

    Raises
    ------
    ValueError : another shape, or a value that is negative or not a number.
    """
    array = np.asarray(values, np.float32)
    if array.shape != tuple(shape):
        raise ValueError(f"wait_values are {list(array.shape)}, but the calls are {list(shape)}: tokens, layers, ranks")
    if not (array >= 0).all():
        raise ValueError("wait_values must be 0 or more; they hold a negative value or NaN")
    return array


def decide_by_values(
    cache: ExpertCache,
    wait_values: np.ndarray,
    topk_ids: np.ndarray,
    gate_weights: np.ndarray,
    *rest: Any,
    keep_log: bool = True,
    **named: Any,
) -> DecisionLog | None:
    """`ExpertCache.decide`, with `wait_values` [T,l,K] in the place of `gate_weights` where waiting is decided."""
    first = named.get("first_layer", 0)
    layers = slice(first, first + topk_ids.shape[1])
    before = cache.state.mass_sum[layers].copy()
    log = cache.decide(topk_ids, wait_values, *rest, **named)
    assert log is not None
    is_replaced = (log.outcome == Outcome.SUBSTITUTED) | (log.outcome == Outcome.DROPPED)
    mass = np.zeros(log.substituted_mass.shape)
    for rank in range(topk_ids.shape[2]):  # one after the other in float64, as the kernel adds
        mass += np.where(is_replaced[..., rank], gate_weights[..., rank].astype(np.float64), 0.0)
    cache.state.mass_sum[layers] = np.add.accumulate(np.concatenate([before[None], mass]), axis=0)[-1]
    return replace(log, substituted_mass=mass.astype(np.float32)) if keep_log else None
