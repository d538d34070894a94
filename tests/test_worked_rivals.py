"""The rivals on four experts and two slots, worked out by hand (how to read it: worked.py)."""

import numpy as np
import pytest
from worked import LANDED, NOBODY, NOT_INSERTED, Step, check, one

import moecache as mc

FIRST, SUBSTITUTE = mc.FIRST_CHOICE, mc.SUBSTITUTE_EVERY_MISS

SLRU_STREAM = [  # one of the two slots may be protected
    one(0, "H", {0, 1}, because="0 is promoted"),
    one(1, "H", {0, 1}, because="1 is promoted, 0 goes back on probation"),
    one(2, "F", {1, 2}, evicted=[0]),
    one(3, "F", {1, 3}, evicted=[2], because="2 was called after 1, but is on probation"),
    one(3, "H", {1, 3}, because="3 is promoted, 1 goes back on probation"),
    one(0, "F", {0, 3}, evicted=[1]),
]

LFRU_STREAM = [
    *[one(0, "H", {0, 1})] * 3,
    one(1, "H", {0, 1}),
    one(2, "F", {0, 2}, evicted=[1], because="0: 3 calls / 3, 1: 1 call / 2"),
    *[one(2, "H", {0, 2})] * 3,
    one(3, "F", {2, 3}, evicted=[0], because="0: 3 calls / 7, 2: 4 calls / 2"),
]

LFRU_AGE_STREAM = [  # substitute; the last token waits
    *[one(1, "H", {0, 1})] * 3,
    *[one(2, "S", {0, 1}, computed=[0], scores=(2, 1, 9, 0))] * 4,
    one(0, "H", {0, 1}),
    one(3, "F", {0, 3}, evicted=[1], is_exact=True, because="0: 1 call / 2 exceeds 1: 3 calls / 7"),
]

STATIC_STREAM = [
    one(2, "F", {0, 1}, evicted=[NOT_INSERTED], because="what a fetch brings is computed and forgotten"),
    one(0, "H", {0, 1}),
    one(2, "F", {0, 1}, evicted=[NOT_INSERTED]),
]

BELADY_STREAM = [
    one(2, "F", {1, 2}, evicted=[0], because="1 comes next, then 0"),
    one(1, "H", {1, 2}),
    one(0, "F", {0, 2}, evicted=[1], because="1 never comes again"),
    one(2, "H", {0, 2}),
]
BYPASS_STREAM = [
    one(2, "F", {0, 1}, evicted=[NOT_INSERTED], because="2 comes again after both residents"),
    one(1, "H", {0, 1}),
    one(0, "H", {0, 1}),
    one(2, "F", {0, 1}, evicted=[NOT_INSERTED], because="nobody comes again"),
]

CAP_STREAM = [
    Step({2: 0.75, 3: 0.25}, "FF", {1, 2}, evicted=[0, NOT_INSERTED], because="one insertion a step, in rank order"),
    Step({2: 0.75, 3: 0.25}, "HF", {2, 3}, evicted=[NOBODY, 1]),
]

TINYLFU_STREAM = [
    one(0, "H", {0, 1}),
    one(0, "H", {0, 1}),
    one(1, "H", {0, 1}),
    one(2, "F", {0, 1}, evicted=[NOT_INSERTED], because="one call against the two of 0, which is the oldest"),
    one(2, "F", {1, 2}, evicted=[0], because="two calls against two, and more recent ones"),
]

BUDDIES = np.array([[[2, 3], [2, 3], [-1, -1], [0, -1]]])  # of experts 0..3
BUDDY_STREAM = [
    Step(
        {2: 0.75, 3: 0.25}, "XX", {2, 3}, evicted=[0, 1],
        because="2 has no buddy and is fetched in place of 0; then 3's only buddy has just left",
    ),
    Step({0: 0.75, 1: 0.25}, "SS", {2, 3}, computed=[2, 3], mass=1.0, because="2 is the first buddy of both, and is used once"),
]  # fmt: skip

HALF_A_MASS = {"admission": "background", "mass_threshold": 0.5}
SAME_EXPERT = [
    Step({0: 0.5, 2: 0.5}, "H?", {0, 1}, because="2 itself computes: nothing is substituted; its account reaches 0.5"),
    Step({0: 0.75, 2: 0.25}, "HH", {0, 2}, arrivals=[(0, 1, 2, 1, LANDED)]),
]


def same_expert(letter):
    first, second = SAME_EXPERT
    return [Step(first.calls, first.outcome.replace("?", letter), first.residents, because=first.because), second]


MASS_BUDGET_STREAM = [
    Step({2: 0.75, 3: 0.25}, "FS", {1, 2}, computed=[2, 1], evicted=[0, NOBODY], mass=0.25, because="0.25 is spent, 1.0 is too much"),
    Step({0: 0.5, 3: 0.5}, "FF", {0, 3}, evicted=[1, 2], because="0.5 is too much"),
]
SQUARED_BUDGET_STREAM = [
    Step({2: 0.5, 3: 0.5}, "FS", {1, 2}, computed=[2, 1], evicted=[0, NOBODY], mass=0.5, because="0.5 squared is spent, twice is not"),
]
ZERO_WEIGHT_STREAM = [Step({0: 1.0, 2: 0.0}, "HF", {0, 2}, evicted=[NOBODY, 1], because="a budget of 0 is exact")]

SCORES = (5, 1, 9, 8)  # the range is 8
BOTH_WAIT = [Step({2: 0.75, 3: 0.25}, "FF", {2, 3}, evicted=[0, 1], scores=SCORES, because="5 + 3 does not exceed 8")]
ONE_WAITS = [
    Step(
        {2: 0.75, 3: 0.25}, "FS", {1, 2}, computed=[2, 1], evicted=[0, NOBODY], mass=0.25, scores=SCORES,
        because="0 may replace 3; 1 may not replace 2, whose fetch then evicts 0",
    ),
]  # fmt: skip

PREFETCH_STREAM = [  # one expert a step
    one(2, "H", {1, 2}, predicted=(2, 3), arrivals=[(0, 0, 2, 0, LANDED, 1)], because="2 comes in time; 3 is one too many"),
    one(2, "H", {2, 3}, predicted=(2, 3), arrivals=[(1, 1, 3, 1, LANDED, 1)], because="2 is resident, so 3 is the one"),
    one(0, "F", {0, 2}, evicted=[3], because="2 and 3 were touched together; 3 was never called"),
]

CASES = {
    "slru": (mc.Policy(eviction="slru"), SLRU_STREAM),
    "lfru": (mc.Policy(eviction="lfru"), LFRU_STREAM),
    "lfru by age": (SUBSTITUTE.replace(eviction="lfru"), LFRU_AGE_STREAM),
    "static": (mc.Policy(eviction="static"), STATIC_STREAM),
    "belady": (mc.Policy(eviction="belady"), BELADY_STREAM),
    "belady with bypass": (mc.Policy(eviction="belady_bypass"), BYPASS_STREAM),
    "insertion cap": (mc.Policy(insertion="cap", insertion_cap=1), CAP_STREAM),
    "tinylfu": (mc.Policy(insertion="tinylfu", half_life=128), TINYLFU_STREAM),
    "low precision": (FIRST.replace(fallback="low_precision", **HALF_A_MASS), same_expert("L")),
    "cpu": (FIRST.replace(fallback="cpu", **HALF_A_MASS), same_expert("C")),
    "mass budget": (mc.mass_budget(0.25), MASS_BUDGET_STREAM),
    "squared budget": (mc.mass_budget(0.25, is_squared=True), SQUARED_BUDGET_STREAM),
    "budget of nothing": (mc.mass_budget(0.0), ZERO_WEIGHT_STREAM),
    "cache prior, bonus too small": (mc.cache_prior(3 / 8, first_choices=0), BOTH_WAIT),
    "cache prior": (mc.cache_prior(4 / 8, first_choices=0), ONE_WAITS),
    "max rank": (mc.max_rank(3, first_choices=0), ONE_WAITS),
    "prefetch": (mc.Policy(max_prefetches=1), PREFETCH_STREAM),
}


@pytest.mark.parametrize("name", CASES)
def test_worked_rival(name):
    check(*CASES[name])


def test_worked_buddies():
    check(SUBSTITUTE.replace(fallback="buddy"), BUDDY_STREAM, buddies=BUDDIES)
