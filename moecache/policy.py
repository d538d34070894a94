"""Policies: which misses wait, what the others get, who is evicted, who is admitted.

A policy is a value: frozen, hashable, comparable, part of every result's key. It has four parts.

- The *miss rule* picks the misses that are waited for. `protect` waits when the call's rank is in `wait_ranks` or its gate weight is
  at least `gate_threshold` (absolute, or as a multiple of the uniform weight 1/K, since 0.15 means something else at K = 4).
- The *fallback* serves the others, and the *weight rule* says with which routing weight.
- *Eviction* picks the victim when a slot is needed.
- *Admission* makes experts resident that were not waited for.

A field that the policy does not use must have its neutral value, so that two policies that decide alike compare equal.
This module knows no arrays, models or traces.
"""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

from moecache.kernel import Admission, Eviction, Fallback, MissRule, Rules

MAX_TOP_K = 62  # ranks are bits of a signed 64-bit integer


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


@dataclass(frozen=True)
class Policy:
    """One way of deciding; `Policy()` waits for every miss and evicts the least recently used.

    Parameters
    ----------
    miss_rule : "protect".
    wait_ranks : ranks whose misses are waited for whatever their weight (0 = first choice).
    gate_threshold : misses of at least this gate weight are waited for. None means 0 (every miss) without `wait_ranks`, and
        infinity (no others) with them.
    threshold_unit : "absolute" or "uniform" (multiples of 1/K).
    fallback : "substitute", "random_resident" or "drop", for the misses that are not waited for.
    weight_rule : "own", "own_raw", "inherit" or "rescale", see `WeightRule`.
    eviction : "lru", "fifo", "plain_count", "plain_count_forget" or "decayed_count".
    half_life : tokens after which a call counts half (decayed_count only).
    admission : "none" or "background".
    mass_threshold : gate mass at which a copy is asked for (background only); 0 admits every miss that is not waited for.
    admission_delay : tokens from asking to landing, at least 1 (background only; None means 1).
    max_in_flight : copies under way in a layer at most (background only); None = no bound.
    counted_calls : "all" or "served": which router calls change eviction scores.
    stand_ins_count : whether standing in is a call for the eviction score.
    seed : of the random stand-ins (random_resident only).
    label : a short name for tables; it does not take part in comparison.

    Raises
    ------
    ValueError : an unknown name (the right ones are listed), a value out of range, or a value in a field that has no effect.
    """

    miss_rule: MissRule | str = MissRule.PROTECT
    wait_ranks: tuple[int, ...] = ()
    gate_threshold: float | None = None
    threshold_unit: ThresholdUnit | str = ThresholdUnit.ABSOLUTE
    fallback: Fallback | str = Fallback.SUBSTITUTE
    weight_rule: WeightRule | str = WeightRule.OWN
    eviction: Eviction | str = Eviction.LRU
    half_life: float | None = None
    admission: Admission | str = Admission.NONE
    mass_threshold: float | None = None
    admission_delay: int | None = None
    max_in_flight: int | None = None
    counted_calls: CountedCalls | str = CountedCalls.ALL
    stand_ins_count: bool = False
    seed: int = 0
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, kind in _ENUMS.items():
            object.__setattr__(self, name, parse_enum(kind, getattr(self, name), name))
        for name, convert in _NUMBERS.items():
            object.__setattr__(self, name, convert(getattr(self, name), name))
        if self.gate_threshold is None:
            object.__setattr__(self, "gate_threshold", math.inf if self.wait_ranks else 0.0)
        if self.admission == Admission.BACKGROUND and self.admission_delay is None:
            object.__setattr__(self, "admission_delay", 1)
        _check_ranges(self)
        _check_neutral(self)
        if not self.label:
            object.__setattr__(self, "label", describe(self))

    @property
    def waits_for_every_miss(self) -> bool:
        """True when no miss ever reaches the fallback."""
        return self.gate_threshold == 0.0

    @property
    def couples_layers(self) -> bool:
        """True when a decision at one layer depends on another layer's; no policy here does."""
        return False

    def replace(self, **changes: Any) -> Policy:
        """A copy with other field values; the label is made anew unless it is given."""
        return replace(self, **{"label": "", **changes})

    def admitted_anyway(self) -> Policy:
        """The same rule where every miss that is not waited for is resident from the next token on."""
        label = f"{self.label}, admitted anyway"
        return self.replace(admission="background", mass_threshold=0.0, admission_delay=1, max_in_flight=None, label=label)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types (enums by name, infinity as a string); `Policy.from_dict` is its inverse."""
        values = asdict(self)
        for name in _ENUMS:
            values[name] = values[name].name.lower()
        values["wait_ranks"] = list(self.wait_ranks)
        values["gate_threshold"] = "inf" if self.gate_threshold == math.inf else self.gate_threshold
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Policy:
        """The policy that `to_dict` described; an unknown key is a ValueError."""
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"unknown policy fields {sorted(unknown)}; known are {sorted(known)}")
        threshold = values.get("gate_threshold")
        threshold = None if threshold is None else float(threshold)
        return cls(**{**values, "wait_ranks": tuple(values.get("wait_ranks", ())), "gate_threshold": threshold})

    def compile(self, top_k: int) -> Rules:
        """The policy as the kernel's numbers, for a router that calls `top_k` experts.

        Raises
        ------
        ValueError : `top_k` outside 1..62, or a rank in `wait_ranks` that does not exist.
        """
        if not 1 <= top_k <= MAX_TOP_K:
            raise ValueError(f"top_k={top_k} is outside 1..{MAX_TOP_K}")
        if self.wait_ranks and self.wait_ranks[-1] >= top_k:
            raise ValueError(f"wait_ranks={self.wait_ranks} names rank {self.wait_ranks[-1]}, but top-{top_k} has ranks 0..{top_k - 1}")
        scale = 1.0 / top_k if self.threshold_unit == ThresholdUnit.UNIFORM else 1.0
        is_background = self.admission == Admission.BACKGROUND
        return Rules(
            miss_rule=int(self.miss_rule),
            wait_ranks=sum(1 << rank for rank in self.wait_ranks),
            gate_threshold=float(self.gate_threshold * scale),  # type: ignore[operator]
            fallback=int(self.fallback),
            eviction=int(self.eviction),
            only_served_calls_count=int(self.counted_calls == CountedCalls.SERVED),
            stand_ins_count=int(self.stand_ins_count),
            admission=int(self.admission),
            mass_threshold=float(self.mass_threshold or 0.0),
            admission_delay=int(self.admission_delay or 1),
            max_in_flight=2**62 if not is_background or self.max_in_flight is None else int(self.max_in_flight),
            seed=int(self.seed),
        )


_ENUMS: dict[str, type[IntEnum] | type[StrEnum]] = {
    "miss_rule": MissRule,
    "threshold_unit": ThresholdUnit,
    "fallback": Fallback,
    "weight_rule": WeightRule,
    "eviction": Eviction,
    "admission": Admission,
    "counted_calls": CountedCalls,
}

# Equal policies must also have equal JSON, which is a part of every result's key: 128, 128.0 and NumPy's 128 are one number.
_NUMBERS = {
    "wait_ranks": parse_ranks,
    "gate_threshold": parse_real,
    "half_life": parse_real,
    "mass_threshold": parse_real,
    "admission_delay": parse_integer,
    "max_in_flight": parse_integer,
    "stand_ins_count": parse_flag,
    "seed": parse_integer,
}


def _check_ranges(policy: Policy) -> None:
    def require(is_right: bool, name: str, bound: str) -> None:
        if not is_right:
            raise ValueError(f"{name}={getattr(policy, name)!r} must be {bound}")

    require(not policy.wait_ranks or policy.wait_ranks[0] >= 0, "wait_ranks", "ranks of 0 or more (0 = first choice)")
    require(policy.gate_threshold >= 0, "gate_threshold", "0 or more")  # type: ignore[operator]
    require(policy.half_life is None or 1 <= policy.half_life < math.inf, "half_life", "at least 1 token and finite")
    require(policy.mass_threshold is None or 0 <= policy.mass_threshold < math.inf, "mass_threshold", "0 or more and finite")
    require(policy.admission_delay is None or policy.admission_delay >= 1, "admission_delay", "at least 1 token")
    require(policy.max_in_flight is None or policy.max_in_flight >= 1, "max_in_flight", "at least 1, or None for no bound")
    require(policy.seed is not None and 0 <= policy.seed < 2**31, "seed", "in 0..2^31 - 1")
    if policy.eviction == Eviction.DECAYED_COUNT and policy.half_life is None:
        raise ValueError("eviction='decayed_count' needs half_life, in tokens (128 is the study's)")
    if policy.admission == Admission.BACKGROUND and policy.mass_threshold is None:
        raise ValueError("admission='background' needs mass_threshold (0.5 is the study's, 0 admits every miss)")
    if policy.fallback == Fallback.DROP and policy.weight_rule == WeightRule.INHERIT:
        raise ValueError("weight_rule='inherit' has no meaning with fallback='drop'; use own, own_raw or rescale")


def _check_neutral(policy: Policy) -> None:
    """Refuse values in fields that the rest of the policy never reads."""
    unused: dict[str, tuple[Any, str]] = {}
    if policy.waits_for_every_miss:
        reason = "every miss is waited for (gate_threshold=0)"
        unused |= {"wait_ranks": ((), reason), "fallback": (Fallback.SUBSTITUTE, reason)}
        unused |= {"weight_rule": (WeightRule.OWN, reason), "admission": (Admission.NONE, reason)}
        unused |= {"counted_calls": (CountedCalls.ALL, reason), "stand_ins_count": (False, reason)}
    if policy.gate_threshold in (0.0, math.inf):
        unused["threshold_unit"] = (ThresholdUnit.ABSOLUTE, "the threshold is 0 or infinite")
    if policy.eviction != Eviction.DECAYED_COUNT:
        unused["half_life"] = (None, "only eviction='decayed_count' reads it")
    if policy.admission != Admission.BACKGROUND:
        for name in ("mass_threshold", "admission_delay", "max_in_flight"):
            unused[name] = (None, "only admission='background' reads it")
    if policy.fallback != Fallback.RANDOM_RESIDENT:
        unused["seed"] = (0, "only fallback='random_resident' reads it")
    if policy.fallback == Fallback.DROP:
        unused.setdefault("stand_ins_count", (False, "fallback='drop' has no stand-ins"))
    for name, (neutral, reason) in unused.items():
        if getattr(policy, name) != neutral:
            raise ValueError(f"{name}={getattr(policy, name)!r} has no effect: {reason}; leave it at {neutral!r}")


def describe(policy: Policy) -> str:
    """A short name made from the fields that differ from `Policy()`."""
    parts = [_describe_miss_rule(policy)]
    if not policy.waits_for_every_miss and policy.fallback != Fallback.SUBSTITUTE:
        parts.append(policy.fallback.name.lower().replace("_", " ") + (f" (seed {policy.seed})" if policy.seed else ""))  # type: ignore[union-attr]
    if policy.weight_rule != WeightRule.OWN:
        parts.append(f"{policy.weight_rule} weight")
    half_life = f" ({policy.half_life:g})" if policy.half_life else ""
    parts.append(policy.eviction.name.lower().replace("_", " ") + half_life)  # type: ignore[union-attr]
    if policy.admission == Admission.BACKGROUND:
        parts.append(_describe_admission(policy))
    if policy.counted_calls != CountedCalls.ALL:
        parts.append("served calls count")
    if policy.stand_ins_count:
        parts.append("stand-ins count")
    return ", ".join(parts)


def _describe_admission(policy: Policy) -> str:
    delay = f" after {policy.admission_delay} tokens" if policy.admission_delay != 1 else ""
    bound = f" at most {policy.max_in_flight} under way" if policy.max_in_flight is not None else ""
    return f"admit at {policy.mass_threshold:g}{delay}{bound}"


def _describe_miss_rule(policy: Policy) -> str:
    threshold, ranks = policy.gate_threshold, policy.wait_ranks
    if threshold == 0.0:
        return "fetch every miss"
    parts = []
    if ranks == (0,):
        parts.append("first choice")
    elif ranks:
        parts.append("ranks " + " ".join(map(str, ranks)))
    if threshold != math.inf:
        unit = "/K" if policy.threshold_unit == ThresholdUnit.UNIFORM else ""
        parts.append(f"gate weight {threshold:g}{unit}")
    return " or ".join(parts) if parts else "substitute every miss"


def threshold(gate_threshold: float, first_choice: bool = False, **rest: Any) -> Policy:
    """Wait for misses of at least `gate_threshold`, and with `first_choice` for every first choice."""
    return Policy(wait_ranks=(0,) if first_choice else (), gate_threshold=gate_threshold, **rest)


def first_j(num_ranks: int, **rest: Any) -> Policy:
    """Wait for misses of the first `num_ranks` ranks (1 = first choice)."""
    if num_ranks < 0:
        raise ValueError(f"num_ranks={num_ranks} must be 0 or more ranks")
    return Policy(wait_ranks=tuple(range(num_ranks)), gate_threshold=math.inf, **rest)


def only_rank_substituted(rank: int, top_k: int, **rest: Any) -> Policy:
    """Wait for every miss except those of one rank."""
    if not 0 <= rank < top_k:
        raise ValueError(f"rank={rank} is outside 0..{top_k - 1}")
    return Policy(wait_ranks=tuple(r for r in range(top_k) if r != rank), gate_threshold=math.inf, **rest)


FETCH_EVERY_MISS = Policy(label="fetch every miss")
GATE_015 = threshold(0.15, first_choice=True, label="0.15 rule")
FIRST_CHOICE = first_j(1, label="first choice")
SUBSTITUTE_EVERY_MISS = Policy(gate_threshold=math.inf, label="substitute every miss")
_STUDY = {"eviction": "decayed_count", "half_life": 128, "admission": "background", "mass_threshold": 0.5}
QUALITY_FIRST = GATE_015.replace(**_STUDY, label="quality-first")
SPEED_FIRST = FIRST_CHOICE.replace(**_STUDY, label="speed-first")
PRESETS = (FETCH_EVERY_MISS, GATE_015, FIRST_CHOICE, SUBSTITUTE_EVERY_MISS, QUALITY_FIRST, SPEED_FIRST)
