"""Policies by name: makers of the common miss rules, and the presets of the study."""

from __future__ import annotations

import math
from typing import Any

from moecache.policy.value import Policy


def check_policy(policy: Any) -> Policy:
    """The policy itself; a name or anything else is a ValueError that lists the presets."""
    if isinstance(policy, Policy):
        return policy
    names = ", ".join(f"moecache.{name}" for name in PRESET_NAMES)
    raise ValueError(f"{policy!r} is no Policy; use a preset ({names}) or make one with moecache.Policy(...)")


def threshold(gate_threshold: float, first_choice: bool = False, **rest: Any) -> Policy:
    """Wait for misses of at least `gate_threshold`, and with `first_choice` for every first choice.

    Parameters
    ----------
    gate_threshold : gate weight, 0 or more; in multiples of 1/K with `threshold_unit="uniform"`.
    first_choice : whether misses of rank 0 are waited for whatever their weight.
    **rest : further fields of `Policy`.

    Returns
    -------
    Policy

    Raises
    ------
    ValueError : as `Policy`.
    """
    return Policy(wait_ranks=(0,) if first_choice else (), gate_threshold=gate_threshold, **rest)


def first_j(num_ranks: int, **rest: Any) -> Policy:
    """Wait for misses of the first `num_ranks` ranks (1 = first choice).

    Parameters
    ----------
    num_ranks : how many ranks, by falling gate weight, are waited for; 0 = no miss.
    **rest : further fields of `Policy`.

    Returns
    -------
    Policy

    Raises
    ------
    ValueError : a negative number, or as `Policy`.
    """
    if num_ranks < 0:
        raise ValueError(f"num_ranks={num_ranks} must be 0 or more ranks")
    return Policy(wait_ranks=tuple(range(num_ranks)), gate_threshold=math.inf, **rest)


def only_rank_substituted(rank: int, top_k: int, **rest: Any) -> Policy:
    """Wait for every miss except those of one rank.

    Parameters
    ----------
    rank : the rank that is never waited for, 0 = first choice.
    top_k : K of the router that the policy is for.
    **rest : further fields of `Policy`.

    Returns
    -------
    Policy

    Raises
    ------
    ValueError : a rank outside 0..K-1, or as `Policy`.
    """
    if not 0 <= rank < top_k:
        raise ValueError(f"rank={rank} is outside 0..{top_k - 1}")
    return Policy(wait_ranks=tuple(r for r in range(top_k) if r != rank), gate_threshold=math.inf, **rest)


def mass_budget(budget: float, is_squared: bool = False, **rest: Any) -> Policy:
    """Do not wait for the lightest misses while their gate weights (or squared gate weights) sum to at most `budget` a step.

    Parameters
    ----------
    budget : gate weight a step (one token at one layer), of the 1 that its calls have together; squared gate weight with `is_squared`.
    is_squared : whether squares are summed.
    **rest : further fields of `Policy`.

    Returns
    -------
    Policy

    Raises
    ------
    ValueError : as `Policy`.
    """
    return Policy(miss_rule="squared_budget" if is_squared else "mass_budget", budget=budget, **rest)


def cache_prior(bonus: float = 0.2, first_choices: int = 2, **rest: Any) -> Policy:
    """Residents get a bonus in the choice of experts, and the true first choices are always kept.

    Parameters
    ----------
    bonus : what a resident's selection score gains, as a share of the range of the step's scores.
    first_choices : ranks that are kept and waited for.
    **rest : further fields of `Policy`.

    Returns
    -------
    Policy

    Raises
    ------
    ValueError : as `Policy`.

    The rule is that of arXiv 2412.00099.
    """
    return Policy(miss_rule="cache_prior", bonus=bonus, wait_ranks=tuple(range(first_choices)), **rest)


def max_rank(best_ranks: int, first_choices: int = 1, **rest: Any) -> Policy:
    """Residents among the best `best_ranks` experts replace misses; the true first choices are always kept.

    Parameters
    ----------
    best_ranks : how many of a step's best experts may serve it, more than top-k.
    first_choices : ranks that are kept and waited for.
    **rest : further fields of `Policy`.

    Returns
    -------
    Policy

    Raises
    ------
    ValueError : as `Policy`.

    The rule is that of arXiv 2412.00099.
    """
    return Policy(miss_rule="max_rank", best_ranks=best_ranks, wait_ranks=tuple(range(first_choices)), **rest)


FETCH_EVERY_MISS = Policy(label="fetch every miss")
GATE_015 = threshold(0.15, first_choice=True, label="0.15 rule")
FIRST_CHOICE = first_j(1, label="first choice")
SUBSTITUTE_EVERY_MISS = Policy(gate_threshold=math.inf, label="substitute every miss")
_STUDY = {"eviction": "decayed_count", "half_life": 128, "admission": "background", "mass_threshold": 0.5}
QUALITY_FIRST = GATE_015.replace(**_STUDY, label="quality-first")
SPEED_FIRST = FIRST_CHOICE.replace(**_STUDY, label="speed-first")
PRESET_NAMES = ("FETCH_EVERY_MISS", "GATE_015", "FIRST_CHOICE", "SUBSTITUTE_EVERY_MISS", "QUALITY_FIRST", "SPEED_FIRST")
PRESETS = (FETCH_EVERY_MISS, GATE_015, FIRST_CHOICE, SUBSTITUTE_EVERY_MISS, QUALITY_FIRST, SPEED_FIRST)
