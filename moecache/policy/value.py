"""`Policy`: the fields, what they mean together, and their form as JSON and as the kernel's numbers.

What a field may hold is checked in `checks`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

from moecache.kernel import Admission, Eviction, Fallback, Insertion, MissRule, Rules
from moecache.kernel.eviction import PACKED
from moecache.policy.checks import (
    BELADY,
    CountedCalls,
    ThresholdUnit,
    WeightRule,
    check_neutral,
    check_ranges,
    describe,
    parse_enum,
    parse_flag,
    parse_integer,
    parse_ranks,
    parse_real,
)

MAX_TOP_K = 62  # ranks are bits of a signed 64-bit integer
NO_BOUND = 2**62
_NO_BOUNDS: dict[str, Any] = {"max_in_flight": None, "max_bookings": None, "account_half_life": None}


@dataclass(frozen=True)
class Policy:
    """One way of deciding; `Policy()` waits for every miss and evicts the least recently used.

    Parameters
    ----------
    miss_rule : "protect", "mass_budget", "squared_budget", "cache_prior" or "max_rank".
    wait_ranks : ranks whose misses are waited for whatever their weight (0 = first choice).
    gate_threshold : misses of at least this gate weight are waited for. None means 0 (every miss) without `wait_ranks`, and
        infinity (no others) with them.
    threshold_unit : "absolute" or "uniform" (multiples of 1/K).
    budget : gate weight (mass_budget) or sum of squared gate weights (squared_budget) that a step may go without waiting.
    bonus : of residents over others, as a fraction of the range of the step's scores (cache_prior).
    best_ranks : a stand-in must be among this many experts with the highest scores (max_rank).
    fallback : "substitute", "random_resident", "buddy", "drop", "low_precision" or "cpu", for the misses that are not waited for.
    weight_rule : "own", "own_raw", "inherit" or "rescale", see `WeightRule`.
    eviction : "lru", "fifo", "random", "plain_count", "plain_count_forget", "decayed_count", "lfru", "slru", "static", "belady" or
        "belady_bypass" (the last two know the future: simulator only).
    half_life : tokens after which a call counts half (decayed_count, tinylfu).
    insertion : "every", "cap" or "tinylfu": whether a fetched expert becomes resident.
    insertion_cap : experts inserted by fetches in one step at most (cap).
    admission : "none" or "background".
    mass_threshold : gate mass at which a copy is asked for (background only); 0 admits every miss that is not waited for.
    account_half_life : tokens after which an account is worth half (background only); None = accounts do not decay.
    admission_delay : tokens from asking to landing, at least 1 (background only; None means 1).
    max_in_flight : copies under way in a layer at most (background only); None = no bound.
    max_bookings : copies asked for in one step at most (background only); None = no bound.
    max_prefetches : of the trace's predicted experts, how many are brought for a step at most; 0 = no prefetch.
    counted_calls : "all" or "served": which router calls change eviction scores.
    stand_ins_count : whether standing in is a call for the eviction score.
    seed : of random stand-ins and of random eviction.
    label : a short name for tables; it does not take part in comparison.

    Raises
    ------
    ValueError : an unknown name (the right ones are listed), a value out of range, or a value in a field that has no effect.
    """

    miss_rule: MissRule | str = MissRule.PROTECT
    wait_ranks: tuple[int, ...] = ()
    gate_threshold: float | None = None
    threshold_unit: ThresholdUnit | str = ThresholdUnit.ABSOLUTE
    budget: float | None = None
    bonus: float | None = None
    best_ranks: int | None = None
    fallback: Fallback | str = Fallback.SUBSTITUTE
    weight_rule: WeightRule | str = WeightRule.OWN
    eviction: Eviction | str = Eviction.LRU
    half_life: float | None = None
    insertion: Insertion | str = Insertion.EVERY
    insertion_cap: int | None = None
    admission: Admission | str = Admission.NONE
    mass_threshold: float | None = None
    account_half_life: float | None = None
    admission_delay: int | None = None
    max_in_flight: int | None = None
    max_bookings: int | None = None
    max_prefetches: int = 0
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
            is_unused = self.wait_ranks or self.miss_rule != MissRule.PROTECT
            object.__setattr__(self, "gate_threshold", math.inf if is_unused else 0.0)
        if self.admission == Admission.BACKGROUND and self.admission_delay is None:
            object.__setattr__(self, "admission_delay", 1)
        check_ranges(self)
        check_neutral(self)
        if not self.label:
            object.__setattr__(self, "label", describe(self))

    @property
    def waits_for_every_miss(self) -> bool:
        """True when no miss ever reaches the fallback."""
        return self.gate_threshold == 0.0

    @property
    def needs_scores(self) -> bool:
        """True when decisions read selection scores: the policy may ask for the best stand-in."""
        return self.fallback == Fallback.SUBSTITUTE and not self.waits_for_every_miss

    @property
    def needs_future(self) -> bool:
        """True when decisions read each call's next call, which only a recorded trace can tell."""
        return self.eviction in BELADY

    @property
    def needs_growth(self) -> bool:
        """True when decisions read decayed counts."""
        return self.half_life is not None

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
        return self.replace(admission="background", mass_threshold=0.0, admission_delay=1, **_NO_BOUNDS, label=label)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types (enums by name, infinity as a string); `Policy.from_dict` is its inverse.

        The label is in it although equal policies may differ in theirs: a stored table shows labels, so they belong to its key.
        """
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
        if self.best_ranks is not None and self.best_ranks <= top_k:
            raise ValueError(f"best_ranks={self.best_ranks} must exceed top-{top_k}, or nobody can stand in")
        scale = 1.0 / top_k if self.threshold_unit == ThresholdUnit.UNIFORM else 1.0
        return Rules(
            miss_rule=int(self.miss_rule),
            wait_ranks=sum(1 << rank for rank in self.wait_ranks),
            gate_threshold=float(self.gate_threshold * scale),  # type: ignore[operator]
            budget=float(self.budget or 0.0),
            bonus=float(self.bonus or 0.0),
            best_ranks=int(self.best_ranks or 0),
            fallback=int(self.fallback),
            eviction=int(self.eviction),
            only_served_calls_count=int(self.counted_calls == CountedCalls.SERVED),
            stand_ins_count=int(self.stand_ins_count),
            insertion=int(self.insertion),
            insertion_cap=int(self.insertion_cap or 0),
            admission=int(self.admission),
            mass_threshold=float(self.mass_threshold or 0.0),
            account_decay=1.0 if self.account_half_life is None else float(2.0 ** (-1.0 / self.account_half_life)),
            admission_delay=int(self.admission_delay or 1),
            max_in_flight=NO_BOUND if self.max_in_flight is None else int(self.max_in_flight),
            max_bookings=NO_BOUND if self.max_bookings is None else int(self.max_bookings),
            max_prefetches=int(self.max_prefetches),
            is_packed=int(self.eviction in PACKED),
            seed=int(self.seed),
        )


_ENUMS: dict[str, type[IntEnum] | type[StrEnum]] = {
    "miss_rule": MissRule,
    "threshold_unit": ThresholdUnit,
    "fallback": Fallback,
    "weight_rule": WeightRule,
    "eviction": Eviction,
    "insertion": Insertion,
    "admission": Admission,
    "counted_calls": CountedCalls,
}

# Equal policies must also have equal JSON, which is a part of every result's key: 128, 128.0 and NumPy's 128 are one number.
_NUMBERS = {
    "wait_ranks": parse_ranks,
    "gate_threshold": parse_real,
    "budget": parse_real,
    "bonus": parse_real,
    "best_ranks": parse_integer,
    "half_life": parse_real,
    "insertion_cap": parse_integer,
    "mass_threshold": parse_real,
    "account_half_life": parse_real,
    "max_bookings": parse_integer,
    "max_prefetches": parse_integer,
    "admission_delay": parse_integer,
    "max_in_flight": parse_integer,
    "stand_ins_count": parse_flag,
    "seed": parse_integer,
}
