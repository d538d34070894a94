"""A worked stream: steps of four experts and two slots with what must come of them, and the check.

A step is written as its calls in rank order with their gate weights. Outcomes by letter: H hit, F fetched, X forced, S substituted,
D dropped, L low precision, C cpu. Weights are multiples of powers of two, so that all sums are exact. `because` says why.
"""

from dataclasses import dataclass, field

import numpy as np

import moecache as mc
from moecache.calibrate import future_calls

LETTERS = {
    "H": mc.Outcome.HIT, "F": mc.Outcome.FETCHED, "X": mc.Outcome.FORCED, "S": mc.Outcome.SUBSTITUTED, "D": mc.Outcome.DROPPED,
    "L": mc.Outcome.LOW_PRECISION, "C": mc.Outcome.CPU,
}  # fmt: skip
LANDED, ALREADY_RESIDENT, NO_VICTIM = mc.Landing.LANDED, mc.Landing.ALREADY_RESIDENT, mc.Landing.NO_VICTIM
NOBODY, NO_ARRIVAL, NOT_INSERTED = -1, -2, -2


@dataclass
class Step:
    """One token: what the router says, and what follows."""

    calls: dict  # expert: gate weight, in rank order
    outcome: str  # a letter a rank
    residents: set  # after the step
    computed: list | None = None  # None: the called experts themselves
    evicted: list | None = None  # None: nobody
    mass: float = 0.0
    arrivals: list = field(default_factory=list)  # (asked, landed, expert, victim, what became of it), prefetches with a 1 at the end
    scores: tuple | None = None  # of experts 0..3, where it matters
    predicted: tuple = ()  # to prefetch, at most two
    is_exact: bool = False
    because: str = ""


def one(expert, outcome, residents, **rest):
    """A step of a top-1 router."""
    return Step({expert: 1.0}, outcome, residents, mass=1.0 if outcome in "SD" else 0.0, **rest)


def arrays_of(step):
    """The step as the kernel reads it: ids, weights, scores, and who is predicted."""
    scores = step.scores or tuple(step.calls.get(expert, -1.0) for expert in range(4))
    predicted = [*step.predicted, -1, -1][:2]
    weights = np.array([[list(step.calls.values())]], np.float32)
    return np.array([[list(step.calls)]]), weights, np.array([[scores]], np.float16), np.array([[predicted]])


def check(policy, stream, cold_start="first", buddies=None):
    """Decide a stream token by token, and compare everything that a step decides."""
    top_k = len(stream[0].calls)
    cache = mc.ExpertCache(mc.ModelShape(1, 4, top_k), policy, 2, cold_start, buddies=buddies)
    next_use, first_use = future_calls(np.array([[list(step.calls)] for step in stream]), 4, np.array([0]))
    if policy.needs_future:
        cache.reset(first_use[0])
    for token, step in enumerate(stream):
        ids, weights, scores, predicted = arrays_of(step)
        log = cache.decide(
            ids, weights, scores, is_exact=np.array([step.is_exact]), predicted_ids=predicted, next_use=next_use[token : token + 1]
        )
        place = f"token {token}: {step.because}"
        assert log.outcome[0, 0].tolist() == [LETTERS[letter] for letter in step.outcome], place
        assert log.computed_ids[0, 0].tolist() == (step.computed or list(step.calls)), place
        assert log.evicted_ids[0, 0].tolist() == (step.evicted or [NOBODY] * top_k), place
        assert log.substituted_mass[0, 0] == step.mass, place
        rows = [(*row[:2], 0, *row[2:4], *(row[5:] or [0]), row[4]) for row in step.arrivals]
        assert [tuple(row) for row in log.arrivals.tolist()] == rows, place
        assert {int(e) for e in cache.state.expert_in_slot[0]} - {-1} == step.residents, place
