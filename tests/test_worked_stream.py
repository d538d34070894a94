"""Four experts, two slots: every decision of every step, worked out by hand from the order of events (how to read it: worked.py)."""

import pytest
from worked import ALREADY_RESIDENT, LANDED, NO_ARRIVAL, NO_VICTIM, NOBODY, Step, check, one

import moecache as mc

FIRST_CHOICE_STREAM = [
    Step(
        {2: 0.75, 3: 0.25},
        "FS",
        {1, 2},
        computed=[2, 1],
        evicted=[0, NOBODY],
        mass=0.25,
        scores=(2, 1, 9, 8),
        because="0 and 1 were never called: the lower id leaves, although 0 is the better stand-in",
    ),
    Step({3: 0.75, 2: 0.25}, "FH", {2, 3}, evicted=[1, NOBODY], because="2 is called, so 1 leaves"),
    Step({2: 0.5, 3: 0.5}, "HH", {2, 3}),
    Step({2: 0.75, 1: 0.25}, "HS", {2, 3}, computed=[2, 3], mass=0.25, because="3 is the only resident that is not called"),
]

FIRST_CHOICE_END = [
    Step(
        {0: 0.75, 1: 0.25},
        "FS",
        {0, 2},
        computed=[0, 2],
        evicted=[3, NOBODY],
        mass=0.25,
        because="3 was called at token 2, 2 at token 3: standing in at token 3 does not make 3 younger",
    ),
    Step({1: 0.75, 3: 0.25}, "FS", {0, 1}, computed=[1, 0], evicted=[2, NOBODY], mass=0.25, because="2 was called at 3, 0 at 4"),
    Step({2: 0.5, 3: 0.5}, "FS", {1, 2}, computed=[2, 1], evicted=[0, NOBODY], mass=0.5, because="0 was called at 4, 1 at 5"),
]

STAND_INS_COUNT_END = [
    Step(
        {0: 0.75, 1: 0.25}, "FS", {0, 3}, computed=[0, 3], evicted=[2, NOBODY], mass=0.25,
        because="2 was called and 3 stood in at token 3: a tie, the lower id leaves",
    ),
]  # fmt: skip

FETCH_STREAM = [
    Step({0: 0.75, 2: 0.25}, "HF", {0, 2}, evicted=[NOBODY, 1], because="0 is called"),
    Step({1: 0.75, 3: 0.25}, "FF", {1, 3}, evicted=[0, 2], because="0 and 2 were called together: lower id first; then 1 is pinned"),
    Step({3: 0.75, 1: 0.25}, "HH", {1, 3}),
    Step({1: 0.75, 0: 0.25}, "HF", {0, 1}, evicted=[NOBODY, 3]),
    Step({2: 0.75, 0: 0.25}, "FH", {0, 2}, evicted=[1, NOBODY]),
]

EMPTY_STREAM = [
    Step({0: 0.75, 1: 0.25}, "XX", {0, 1}, because="nobody is resident, so nobody can stand in"),
    Step({2: 0.75, 3: 0.25}, "SS", {0, 1}, computed=[1, 0], mass=1.0, scores=(1, 2, 9, 8), because="the best stand-in serves rank 0"),
    Step({2: 0.5, 3: 0.5}, "SS", {0, 1}, computed=[0, 1], mass=1.0, scores=(5, 5, 9, 9), because="equal scores: the lower id first"),
    Step({1: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[1, 0], mass=0.25),
]

EMPTY_TOP1_STREAM = [
    one(3, "X", {3}, because="no stand-in; a slot is free"),
    one(2, "S", {3}, computed=[3], because="3 can stand in now; the second slot stays free"),
    one(3, "H", {3}),
    one(1, "S", {3}, computed=[3]),
]

EMPTY_FIRST_CHOICE_STREAM = [
    Step({2: 0.75, 3: 0.25}, "FX", {2, 3}, because="the newcomer 2 is called itself and cannot stand in for 3"),
    Step({2: 0.75, 0: 0.25}, "HS", {2, 3}, computed=[2, 3], mass=0.25),
]

DROP_STREAM = [
    Step({2: 0.75, 3: 0.25}, "FD", {1, 2}, computed=[2, -1], evicted=[0, NOBODY], mass=0.25),
    Step({3: 0.75, 1: 0.25}, "FH", {1, 3}, evicted=[2, NOBODY]),
    Step({0: 0.5, 2: 0.5}, "FD", {0, 3}, computed=[0, -1], evicted=[1, NOBODY], mass=0.5, because="1 and 3 were called together"),
]

RANDOM_STREAM = [
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="1 is the only candidate"),
    Step({1: 0.5, 3: 0.5}, "HS", {0, 1}, computed=[1, 0], mass=0.5),
]

HALF_WEIGHT_STREAM = [
    Step({2: 0.5, 3: 0.5}, "FF", {2, 3}, evicted=[0, 1], because="a weight of exactly the threshold waits"),
    Step({0: 0.75, 1: 0.25}, "FS", {0, 3}, computed=[0, 3], evicted=[2, NOBODY], mass=0.25),
]

ONLY_FIRST_SUBSTITUTED_STREAM = [
    Step(
        {2: 0.75, 3: 0.25}, "SF", {1, 3}, computed=[1, 3], evicted=[NOBODY, 0], mass=0.75, scores=(2, 1, 9, 8),
        because="rank 1 is served before a stand-in for rank 0 is chosen, and evicts the better one",
    ),
]  # fmt: skip

EXACT_STREAM = [
    Step({2: 0.75, 3: 0.25}, "FF", {2, 3}, evicted=[0, 1], is_exact=True, because="an exact token waits for every miss"),
    Step({0: 0.75, 1: 0.25}, "SS", {2, 3}, computed=[3, 2], mass=1.0, scores=(9, 8, 1, 2)),
]

ACCOUNT_STREAM = [  # a copy is asked for at 1.5 and lands one token later
    one(2, "S", {0, 1}, computed=[0], scores=(3, 1, 9, 0), because="account of 2: 1"),
    one(2, "S", {0, 1}, computed=[1], scores=(1, 3, 9, 0), because="account of 2: 2, booked for token 2"),
    one(3, "S", {1, 2}, computed=[2], scores=(0, 1, 2, 9), arrivals=[(1, 2, 2, 0, LANDED)], because="2 takes 0's slot and may stand in"),
    one(1, "H", {1, 2}),
    one(3, "S", {1, 2}, computed=[1], scores=(0, 2, 1, 9), because="account of 3: 2, booked for token 5"),
    one(2, "H", {2, 3}, arrivals=[(4, 5, 3, 1, LANDED)], because="2 is older than 1 but called: pinned before anything lands"),
    one(0, "S", {2, 3}, computed=[3], scores=(9, 0, 1, 2)),
    one(3, "H", {2, 3}),
    one(0, "S", {2, 3}, computed=[2], scores=(9, 0, 2, 1), because="account of 0: 2, booked for token 9"),
    one(0, "H", {0, 3}, arrivals=[(8, 9, 0, 2, LANDED)], because="0 lands in the step that calls it: a hit"),
    one(2, "S", {0, 3}, computed=[3], scores=(1, 0, 9, 2), because="account of 2: 1, it was zeroed when 2 landed"),
    one(2, "S", {0, 3}, computed=[0], scores=(2, 0, 9, 1), because="account of 2: 2, booked for token 12"),
    one(1, "S", {0, 2}, computed=[0], scores=(1, 9, 0, 2), arrivals=[(11, 12, 2, 3, LANDED)], because="3 was called at 7, 0 at 9"),
]

ANYWAY_STREAM = [  # every miss is booked at once and lands one token later
    Step({2: 0.75, 3: 0.25}, "SS", {0, 1}, computed=[1, 0], mass=1.0, scores=(1, 2, 9, 8), because="2, then 3 are booked"),
    Step(
        {1: 0.75, 0: 0.25}, "HH", {0, 1}, arrivals=[(0, 1, 2, NO_ARRIVAL, NO_VICTIM), (0, 1, 3, NO_ARRIVAL, NO_VICTIM)],
        because="both residents are called, so neither arrival finds a victim",
    ),
    Step({2: 0.5, 3: 0.5}, "SS", {0, 1}, computed=[0, 1], mass=1.0, scores=(2, 2, 9, 9)),
    Step(
        {2: 0.75, 3: 0.25}, "HH", {2, 3}, arrivals=[(2, 3, 2, 0, LANDED), (2, 3, 3, 1, LANDED)],
        because="booking order; 0 and 1 tie, the lower id leaves first",
    ),
    Step({0: 0.75, 1: 0.25}, "SS", {2, 3}, computed=[3, 2], mass=1.0, scores=(9, 8, 1, 2), because="0, then 1 are booked"),
    Step(
        {3: 0.75, 1: 0.25}, "HS", {0, 3}, computed=[3, 0], mass=0.25,
        arrivals=[(4, 5, 0, 2, LANDED), (4, 5, 1, NO_ARRIVAL, NO_VICTIM)],
        because="1 must not evict its sibling 0, and 3 is called; 0 has just landed and stands in",
    ),
    Step(
        {1: 0.5, 2: 0.5}, "HS", {1, 3}, computed=[1, 3], mass=0.5, arrivals=[(5, 6, 1, 0, LANDED)],
        because="the dropped arrival asked again at token 5; 0 was called at 4, 3 at 5",
    ),
]  # fmt: skip

UNDER_WAY_STREAM = [  # first choice; every other miss is booked and lands two tokens later
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="2 is booked for token 2"),
    Step({2: 0.75, 0: 0.25}, "FH", {0, 2}, evicted=[1, NOBODY], because="2 is fetched while its copy is under way"),
    Step(
        {0: 0.75, 3: 0.25}, "HS", {0, 2}, computed=[0, 2], mass=0.25, arrivals=[(0, 2, 2, NO_ARRIVAL, ALREADY_RESIDENT)],
        because="the copy of 2 is not needed any more; 3 is booked for token 4",
    ),
    Step({2: 0.75, 3: 0.25}, "HS", {0, 2}, computed=[2, 0], mass=0.25, because="a copy of 3 is under way: no second one"),
    Step({2: 0.75, 0: 0.25}, "HH", {0, 2}, arrivals=[(2, 4, 3, NO_ARRIVAL, NO_VICTIM)]),
    Step({0: 0.75, 3: 0.25}, "HS", {0, 2}, computed=[0, 2], mass=0.25, because="3 is booked for token 7"),
    Step({1: 0.75, 2: 0.25}, "FH", {1, 2}, evicted=[0, NOBODY]),
    Step({1: 0.75, 3: 0.25}, "HH", {1, 3}, arrivals=[(5, 7, 3, 2, LANDED)], because="1 is called; 3 lands in time for its call"),
]  # fmt: skip

ONE_IN_FLIGHT_STREAM = [
    Step({2: 0.75, 3: 0.25}, "SS", {0, 1}, computed=[1, 0], mass=1.0, scores=(1, 2, 9, 8), because="2 is booked, 3 has to wait"),
    Step({3: 0.75, 0: 0.25}, "SH", {0, 2}, computed=[2, 0], mass=0.75, arrivals=[(0, 1, 2, 1, LANDED)], because="3 asks again"),
    Step({0: 0.75, 3: 0.25}, "HH", {0, 3}, arrivals=[(1, 2, 3, 2, LANDED)]),
]

ONE_BOOKING_STREAM = [  # every miss is booked, one a step, and lands two tokens later
    Step({2: 0.75, 3: 0.25}, "SS", {0, 1}, computed=[1, 0], mass=1.0, scores=(1, 2, 9, 8), because="2 is booked, 3 has to wait"),
    Step({3: 0.75, 0: 0.25}, "SH", {0, 1}, computed=[1, 0], mass=0.75, because="3 is booked while 2 is under way"),
    Step({0: 0.75, 1: 0.25}, "HH", {0, 1}, arrivals=[(0, 2, 2, NO_ARRIVAL, NO_VICTIM)]),
    Step({0: 0.75, 3: 0.25}, "HH", {0, 3}, arrivals=[(1, 3, 3, 1, LANDED)]),
]

THRESHOLD_STREAM = [  # first choice; a copy at an account of 0.5
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25),
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="exactly 0.5 is enough"),
    Step({0: 0.75, 2: 0.25}, "HH", {0, 2}, arrivals=[(1, 2, 2, 1, LANDED)]),
]

ACCOUNT_KEPT_STREAM = [  # the same policy
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25),
    Step({0: 0.5, 2: 0.5}, "HS", {0, 1}, computed=[0, 1], mass=0.5, because="account of 2: 0.75, booked"),
    Step({0: 0.75, 1: 0.25}, "HH", {0, 1}, arrivals=[(1, 2, 2, NO_ARRIVAL, NO_VICTIM)]),
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="the account was kept: 1.0, booked"),
    Step({0: 0.75, 2: 0.25}, "HH", {0, 2}, arrivals=[(3, 4, 2, 1, LANDED)]),
]

FETCH_ENDS_ACCOUNT_STREAM = [  # the same policy
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25),
    Step({2: 0.75, 0: 0.25}, "FH", {0, 2}, evicted=[1, NOBODY]),
    Step({1: 0.75, 0: 0.25}, "FH", {0, 1}, evicted=[2, NOBODY]),
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="account of 2: 0.25, not 0.5"),
    Step({0: 0.75, 3: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="nothing lands"),
]

EXACT_SUM_STREAM = [  # first choice; a copy at an account of 1/4 + 2^-26, which 32-bit sums would round to 1/4
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25),
    Step({0: 1.0, 2: 2**-26}, "HS", {0, 1}, computed=[0, 1], mass=2**-26, because="the sum is the threshold exactly"),
    Step({0: 0.75, 2: 0.25}, "HH", {0, 2}, arrivals=[(1, 2, 2, 1, LANDED)]),
]

LANDED_AND_CALLED_STREAM = [  # first choice; every other miss is booked and lands two tokens later
    Step({0: 0.75, 2: 0.25}, "HS", {0, 1}, computed=[0, 1], mass=0.25, because="2 is booked for token 2"),
    Step({0: 0.75, 1: 0.25}, "HH", {0, 1}),
    Step(
        {3: 0.75, 2: 0.25}, "FH", {2, 3}, evicted=[1, NOBODY], arrivals=[(0, 2, 2, 0, LANDED)],
        because="2 was called longest ago, but it has landed for this very step and stays pinned",
    ),
]  # fmt: skip

DROP_ACCOUNT_STREAM = [  # first choice, drop, a copy at 0.5
    Step({0: 0.5, 2: 0.5}, "HD", {0, 1}, computed=[0, -1], mass=0.5, because="dropped calls fill accounts too"),
    Step({0: 0.75, 2: 0.25}, "HH", {0, 2}, arrivals=[(0, 1, 2, 1, LANDED)]),
]


def late_copy(end):
    """Plain counts; every miss is booked and lands two tokens later."""
    return [
        one(2, "S", {0, 1}, computed=[0], scores=(2, 1, 9, 0)),
        one(2, "S", {0, 1}, computed=[0], scores=(2, 1, 9, 0)),
        one(1, "H", {1, 2}, arrivals=[(0, 2, 2, 0, LANDED)]),
        one(3, "S", {1, 2}, computed=[1], scores=(0, 2, 1, 9)),
        one(3, "S", {1, 2}, computed=[1], scores=(0, 2, 1, 9)),
        *end,
    ]


ALL_CALLS_COUNT = late_copy([one(3, "H", {2, 3}, arrivals=[(3, 5, 3, 1, LANDED)], because="counts: 1 one, 2 two")])
SERVED_CALLS_COUNT = late_copy([one(3, "H", {1, 3}, arrivals=[(3, 5, 3, 2, LANDED)], because="counts: 1 one, 2 none")])

COUNT_STREAM = [
    one(0, "H", {0, 1}),
    one(1, "H", {0, 1}),
    one(2, "F", {1, 2}, evicted=[0], because="one call each: 0 was called first"),
    one(3, "F", {2, 3}, evicted=[1], because="one call each"),
    one(0, "F", {0, 3}, evicted=[2], because="2 and 3 one call each"),
    one(2, "F", {0, 2}, evicted=[3]),
    one(1, "F", {1, 2}, evicted=[0]),
    one(2, "H", {1, 2}),
    one(0, "F", {0, 2}, evicted=[1]),
]
KEPT_END = [one(3, "F", {0, 3}, evicted=[2], because="0 and 2 three calls each, 2 longer ago")]
FORGOTTEN_END = [one(3, "F", {2, 3}, evicted=[0], because="since it came back, 0 has one call and 2 has two")]

FIFO_STREAM = [
    one(0, "H", {0, 1}),
    one(2, "F", {0, 2}, evicted=[1], because="both were there from the start: 1 was never called"),
    one(0, "H", {0, 2}),
    one(3, "F", {2, 3}, evicted=[0], because="0 came first, although it was just called"),
    one(2, "H", {2, 3}),
    one(1, "F", {1, 3}, evicted=[2]),
]

DECAY_STREAM = [one(0, "H", {0, 1}), one(0, "H", {0, 1}), one(1, "H", {0, 1})]
FAST_DECAY_END = [one(2, "F", {1, 2}, evicted=[0], because="1/8 + 1/4 against 1/2")]
SLOW_DECAY_END = [one(2, "F", {0, 2}, evicted=[1], because="nearly two calls against nearly one")]

HALF = {"mass_threshold": 0.5, "admission": "background"}
ANYWAY = {"mass_threshold": 0.0, "admission": "background"}
SUBSTITUTE, FIRST = mc.SUBSTITUTE_EVERY_MISS, mc.FIRST_CHOICE

CASES = {
    "first choice": (FIRST, FIRST_CHOICE_STREAM + FIRST_CHOICE_END),
    "stand-ins count": (FIRST.replace(stand_ins_count=True), FIRST_CHOICE_STREAM + STAND_INS_COUNT_END),
    "fetch every miss": (mc.FETCH_EVERY_MISS, FETCH_STREAM),
    "drop": (FIRST.replace(fallback="drop"), DROP_STREAM),
    "random resident": (FIRST.replace(fallback="random_resident", seed=7), RANDOM_STREAM),
    "threshold": (mc.threshold(0.5), HALF_WEIGHT_STREAM),
    "threshold in multiples of 1/K": (mc.threshold(1.0, threshold_unit="uniform"), HALF_WEIGHT_STREAM),
    "only the first choice substituted": (mc.only_rank_substituted(0, 2), ONLY_FIRST_SUBSTITUTED_STREAM),
    "exact token": (SUBSTITUTE, EXACT_STREAM),
    "accounts": (SUBSTITUTE.replace(**{**HALF, "mass_threshold": 1.5}), ACCOUNT_STREAM),
    "admitted anyway": (SUBSTITUTE.admitted_anyway(), ANYWAY_STREAM),
    "fetched while a copy is under way": (FIRST.replace(**ANYWAY, admission_delay=2), UNDER_WAY_STREAM),
    "one copy in flight": (SUBSTITUTE.replace(**ANYWAY, max_in_flight=1), ONE_IN_FLIGHT_STREAM),
    "one booking a step": (SUBSTITUTE.replace(**ANYWAY, max_bookings=1, admission_delay=2), ONE_BOOKING_STREAM),
    "mass threshold reached exactly": (FIRST.replace(**HALF), THRESHOLD_STREAM),
    "account kept when no victim is found": (FIRST.replace(**HALF), ACCOUNT_KEPT_STREAM),
    "a fetch ends an account": (FIRST.replace(**HALF), FETCH_ENDS_ACCOUNT_STREAM),
    "accounts are summed in 64 bits": (FIRST.replace(**{**HALF, "mass_threshold": 0.25 + 2**-26}), EXACT_SUM_STREAM),
    "landed and called": (FIRST.replace(**ANYWAY, admission_delay=2), LANDED_AND_CALLED_STREAM),
    "dropped calls fill accounts": (FIRST.replace(**HALF, fallback="drop"), DROP_ACCOUNT_STREAM),
    "all calls count": (SUBSTITUTE.replace(**ANYWAY, admission_delay=2, eviction="plain_count"), ALL_CALLS_COUNT),
    "served calls count": (
        SUBSTITUTE.replace(**ANYWAY, admission_delay=2, eviction="plain_count", counted_calls="served"),
        SERVED_CALLS_COUNT,
    ),
    "plain count": (mc.Policy(eviction="plain_count"), COUNT_STREAM + KEPT_END),
    "plain count, forgotten": (mc.Policy(eviction="plain_count_forget"), COUNT_STREAM + FORGOTTEN_END),
    "fifo": (mc.Policy(eviction="fifo"), FIFO_STREAM),
    "fast decay": (mc.Policy(eviction="decayed_count", half_life=1), DECAY_STREAM + FAST_DECAY_END),
    "slow decay": (mc.Policy(eviction="decayed_count", half_life=128), DECAY_STREAM + SLOW_DECAY_END),
}
EMPTY_CASES = {
    "forced": (SUBSTITUTE, EMPTY_STREAM),
    "forced, top-1": (SUBSTITUTE, EMPTY_TOP1_STREAM),
    "forced after a fetch": (FIRST, EMPTY_FIRST_CHOICE_STREAM),
    "forced, random resident": (FIRST.replace(fallback="random_resident"), EMPTY_FIRST_CHOICE_STREAM),
}


@pytest.mark.parametrize("name", CASES)
def test_worked_stream(name):
    check(*CASES[name], cold_start="first")


@pytest.mark.parametrize("name", EMPTY_CASES)
def test_worked_stream_from_an_empty_cache(name):
    check(*EMPTY_CASES[name], cold_start="empty")
