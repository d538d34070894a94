"""What the fields of a policy may hold, which of them belong together, and how a policy is named.

A field that a policy does not use must have its neutral value, so that two policies that decide alike compare equal.
This module knows the fields of a policy, but makes none.
"""

from __future__ import annotations

import math
import operator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from moecache.kernel import Admission, Eviction, Fallback, Insertion, MissRule

if TYPE_CHECKING:
    from moecache.policy import Policy

BUDGETS = (MissRule.MASS_BUDGET, MissRule.SQUARED_BUDGET)
SCORE_WALKS = (MissRule.CACHE_PRIOR, MissRule.MAX_RANK)
BELADY = (Eviction.BELADY, Eviction.BELADY_BYPASS)


class WeightRule(StrEnum):
    """The routing weight of a stand-in.

    `own`: its own, then the family's normalisation over the final set. `own_raw`: its own, never renormalised. `inherit`: the missed
    expert's. `rescale`: its own, then all weights rescaled to the original routed sum. For dropped calls (weight 0) `own`
    renormalises what is left where the family does, `own_raw` never, `rescale` always; `inherit` has no meaning.
    """

    OWN = "own"
    OWN_RAW = "own_raw"
    INHERIT = "inherit"
    RESCALE = "rescale"


class ThresholdUnit(StrEnum):
    """What `gate_threshold` is measured in: gate weight, or multiples of 1/K."""

    ABSOLUTE = "absolute"
    UNIFORM = "uniform"


class CountedCalls(StrEnum):
    """Which of the router's calls change eviction scores: all, or hits and fetches only."""

    ALL = "all"
    SERVED = "served"


def parse_enum(kind: type, value: Any, name: str) -> Any:
    """A member of `kind` from a member or its lower-case name; otherwise a ValueError that lists the right ones."""
    if isinstance(value, kind):
        return value
    members = {member.name.lower(): member for member in kind}  # type: ignore[attr-defined]
    if isinstance(value, str) and value.lower() in members:
        return members[value.lower()]
    raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(members)}")


def parse_integer(value: Any, name: str) -> int | None:
    """A plain int from any kind of integer; None stays."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be an integer") from None


def parse_real(value: Any, name: str) -> float | None:
    """A plain float from any kind of number; None stays."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} must be a number") from None


def parse_flag(value: Any, name: str) -> bool:
    """A plain bool from any kind of bool."""
    if value not in (True, False):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def parse_ranks(value: Any, name: str) -> tuple[int, ...]:
    """Ranks in rising order, each once."""
    try:
        return tuple(sorted({operator.index(rank) for rank in value}))
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a tuple of ranks such as (0,) (0 = first choice)") from None


def check_ranges(policy: Policy) -> None:
    """Refuse values out of range, and fields that lack the value they need."""

    def require(is_right: bool, name: str, bound: str) -> None:
        if not is_right:
            raise ValueError(f"{name}={getattr(policy, name)!r} must be {bound}")

    def in_range(name: str, low: float, high: float, bound: str) -> None:
        value = getattr(policy, name)
        require(value is None or low <= value < high, name, bound)

    require(not policy.wait_ranks or policy.wait_ranks[0] >= 0, "wait_ranks", "ranks of 0 or more (0 = first choice)")
    require(policy.gate_threshold >= 0, "gate_threshold", "0 or more")  # type: ignore[operator]
    in_range("budget", 0, math.inf, "0 or more and finite (gate weight a step, or its square)")
    in_range("bonus", 0, math.inf, "0 or more and finite (a fraction of the range of the step's scores)")
    in_range("best_ranks", 1, 2**31, "at least 1 expert")
    in_range("half_life", 1, math.inf, "at least 1 token and finite")
    in_range("insertion_cap", 0, 2**31, "0 or more experts a step")
    in_range("mass_threshold", 0, math.inf, "0 or more and finite")
    in_range("account_half_life", 1, math.inf, "at least 1 token and finite, or None for accounts that do not decay")
    in_range("admission_delay", 1, 2**31, "at least 1 token")
    in_range("max_in_flight", 1, 2**31, "at least 1, or None for no bound")
    in_range("max_bookings", 1, 2**31, "at least 1, or None for no bound")
    require(policy.max_prefetches is not None and policy.max_prefetches >= 0, "max_prefetches", "0 or more experts a step")
    require(policy.seed is not None and 0 <= policy.seed < 2**31, "seed", "in 0..2^31 - 1")
    _check_needs(policy)


def _check_needs(policy: Policy) -> None:
    needs = [
        (policy.eviction == Eviction.DECAYED_COUNT, "half_life", "eviction='decayed_count' needs half_life, in tokens (try 128)"),
        (policy.insertion == Insertion.TINYLFU, "half_life", "insertion='tinylfu' needs half_life, in tokens, for its counts"),
        (policy.insertion == Insertion.CAP, "insertion_cap", "insertion='cap' needs insertion_cap, experts a step"),
        (
            policy.admission == Admission.BACKGROUND,
            "mass_threshold",
            "admission='background' needs mass_threshold (0.5 is the study's, 0 admits every miss)",
        ),
        (policy.miss_rule in BUDGETS, "budget", "a budget rule needs budget, the gate weight (or its square) a step may go without"),
        (policy.miss_rule == MissRule.CACHE_PRIOR, "bonus", "miss_rule='cache_prior' needs bonus (0.2 in arXiv 2412.00099)"),
        (policy.miss_rule == MissRule.MAX_RANK, "best_ranks", "miss_rule='max_rank' needs best_ranks, more than top-k"),
    ]
    for is_used, name, message in needs:
        if is_used and getattr(policy, name) is None:
            raise ValueError(message)
    if policy.fallback == Fallback.DROP and policy.weight_rule == WeightRule.INHERIT:
        raise ValueError("weight_rule='inherit' has no meaning with fallback='drop'; use own, own_raw or rescale")
    if policy.miss_rule in SCORE_WALKS and policy.fallback != Fallback.SUBSTITUTE:
        raise ValueError(f"miss_rule={policy.miss_rule.name.lower()!r} chooses stand-ins by score; it needs fallback='substitute'")  # type: ignore[union-attr]
    if policy.eviction == Eviction.STATIC and (policy.admission == Admission.BACKGROUND or policy.max_prefetches):
        raise ValueError("eviction='static' never changes its residents: background admission and prefetch contradict it")
    if policy.eviction in BELADY and (policy.counted_calls != CountedCalls.ALL or policy.stand_ins_count):
        raise ValueError("belady knows when the router calls an expert next: leave counted_calls='all' and stand_ins_count=False")


def check_neutral(policy: Policy) -> None:
    """Refuse values in fields that the rest of the policy never reads."""
    for name, (neutral, reason) in _unused_fields(policy).items():
        if getattr(policy, name) != neutral:
            raise ValueError(f"{name}={getattr(policy, name)!r} has no effect: {reason}; leave it at {neutral!r}")


def _unused_fields(policy: Policy) -> dict[str, tuple[Any, str]]:
    """The fields that this policy does not read, with their neutral values and why."""
    unused: dict[str, tuple[Any, str]] = {}

    def leave(is_unused: bool, reason: str, **neutral: Any) -> None:
        if is_unused:
            unused.update({name: (value, reason) for name, value in neutral.items() if name not in unused})

    leave(
        policy.waits_for_every_miss,
        "every miss is waited for (gate_threshold=0)",
        wait_ranks=(),
        fallback=Fallback.SUBSTITUTE,
        weight_rule=WeightRule.OWN,
        admission=Admission.NONE,
        counted_calls=CountedCalls.ALL,
        stand_ins_count=False,
    )
    leave(policy.miss_rule != MissRule.PROTECT, "only miss_rule='protect' reads it", gate_threshold=math.inf)
    leave(policy.gate_threshold in (0.0, math.inf), "the threshold is 0 or infinite", threshold_unit=ThresholdUnit.ABSOLUTE)
    leave(policy.miss_rule not in BUDGETS, "only mass_budget and squared_budget read it", budget=None)
    leave(policy.miss_rule != MissRule.CACHE_PRIOR, "only miss_rule='cache_prior' reads it", bonus=None)
    leave(policy.miss_rule != MissRule.MAX_RANK, "only miss_rule='max_rank' reads it", best_ranks=None)
    counts_decay = policy.eviction == Eviction.DECAYED_COUNT or policy.insertion == Insertion.TINYLFU
    leave(not counts_decay, "only eviction='decayed_count' and insertion='tinylfu' read it", half_life=None)
    leave(policy.insertion != Insertion.CAP, "only insertion='cap' reads it", insertion_cap=None)
    leave(policy.eviction == Eviction.STATIC, "eviction='static' inserts nothing", insertion=Insertion.EVERY)
    leave(
        policy.admission != Admission.BACKGROUND,
        "only admission='background' reads it",
        mass_threshold=None,
        admission_delay=None,
        max_in_flight=None,
        max_bookings=None,
        account_half_life=None,
    )
    leave(policy.mass_threshold == 0.0, "an account that asks at 0 never waits to fill", account_half_life=None)
    draws = policy.fallback == Fallback.RANDOM_RESIDENT or policy.eviction == Eviction.RANDOM
    leave(not draws, "only fallback='random_resident' and eviction='random' read it", seed=0)
    has_stand_ins = policy.fallback in (Fallback.SUBSTITUTE, Fallback.RANDOM_RESIDENT, Fallback.BUDDY)
    leave(not has_stand_ins, "the fallback has no stand-ins", stand_ins_count=False)
    same_expert = policy.fallback in (Fallback.LOW_PRECISION, Fallback.CPU)
    leave(same_expert, "the called expert computes the call itself", weight_rule=WeightRule.OWN)
    return unused


def describe(policy: Policy) -> str:
    """A short name made from the fields that differ from `Policy()`."""
    parts = [_describe_miss_rule(policy)]
    if not policy.waits_for_every_miss and policy.fallback != Fallback.SUBSTITUTE:
        is_seeded = policy.fallback == Fallback.RANDOM_RESIDENT and policy.seed
        parts.append(_plain(policy.fallback) + (f" (seed {policy.seed})" if is_seeded else ""))
    if policy.weight_rule != WeightRule.OWN:
        parts.append(f"{policy.weight_rule} weight")
    parts.append(_describe_eviction(policy))
    if policy.insertion == Insertion.CAP:
        parts.append(f"insert at most {policy.insertion_cap} a step")
    elif policy.insertion == Insertion.TINYLFU:
        parts.append(f"tinylfu insertion ({policy.half_life:g})")
    if policy.admission == Admission.BACKGROUND:
        parts.append(_describe_admission(policy))
    if policy.max_prefetches:
        parts.append(f"prefetch {policy.max_prefetches}")
    if policy.counted_calls != CountedCalls.ALL:
        parts.append("served calls count")
    if policy.stand_ins_count:
        parts.append("stand-ins count")
    return ", ".join(parts)


def _describe_eviction(policy: Policy) -> str:
    if policy.eviction == Eviction.DECAYED_COUNT:
        return f"decayed count ({policy.half_life:g})"
    if policy.eviction == Eviction.RANDOM and policy.seed:
        return f"random (seed {policy.seed})"
    return _plain(policy.eviction)


def _plain(member: Any) -> str:
    return member.name.lower().replace("_", " ")


def _describe_admission(policy: Policy) -> str:
    decay = f" decaying over {policy.account_half_life:g} tokens" if policy.account_half_life is not None else ""
    delay = f" after {policy.admission_delay} tokens" if policy.admission_delay != 1 else ""
    bound = f" at most {policy.max_in_flight} under way" if policy.max_in_flight is not None else ""
    bookings = f" at most {policy.max_bookings} a step" if policy.max_bookings is not None else ""
    return f"admit at {policy.mass_threshold:g}{decay}{delay}{bound}{bookings}"


def _describe_miss_rule(policy: Policy) -> str:
    parts = [_describe_ranks(policy.wait_ranks)] if policy.wait_ranks else []
    if policy.waits_for_every_miss:
        return "fetch every miss"
    if policy.miss_rule in BUDGETS:
        parts.append(f"{_plain(policy.miss_rule)} {policy.budget:g}")
    elif policy.miss_rule == MissRule.CACHE_PRIOR:
        parts.append(f"cache prior {policy.bonus:g}")
    elif policy.miss_rule == MissRule.MAX_RANK:
        parts.append(f"max rank {policy.best_ranks}")
    elif policy.gate_threshold != math.inf:
        parts.append(f"gate weight {policy.gate_threshold:g}{'/K' if policy.threshold_unit == ThresholdUnit.UNIFORM else ''}")
    return " or ".join(parts) if parts else "substitute every miss"


def _describe_ranks(ranks: tuple[int, ...]) -> str:
    return "first choice" if ranks == (0,) else "ranks " + " ".join(map(str, ranks))
