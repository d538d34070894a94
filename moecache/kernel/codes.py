"""The names of everything the kernel decides or counts, as integers that compiled code can compare."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Outcome(IntEnum):
    """What became of one call."""

    HIT = 0
    """The expert was resident when the calls were looked up."""
    FETCHED = 1
    """A miss that was waited for."""
    FORCED = 2
    """A miss that was not worth waiting for; nobody could stand in, so it was fetched after all."""
    SUBSTITUTED = 3
    """A miss that another expert computed."""
    DROPPED = 4
    """A miss that nobody computed."""
    LOW_PRECISION = 5
    """A miss that the expert's own copy in few bits computed."""
    CPU = 6
    """A miss that was computed where its weights lie."""


class Landing(IntEnum):
    """What became of one arrival (the last column of the arrivals log)."""

    LANDED = 0
    """The expert became resident."""
    ALREADY_RESIDENT = 1
    """Dropped: the expert had become resident meanwhile."""
    NO_VICTIM = 2
    """Dropped: no resident could leave in this step."""
    CANCELLED = 3
    """Dropped: the cache was reset while the copy was under way."""


class ArrivalKind(IntEnum):
    """Who asked for the copy."""

    ADMISSION = 0
    """Background admission: the expert's mass account reached the threshold."""
    PREFETCH = 1
    """Prefetching: the expert was predicted for this step."""


class Count(IntEnum):
    """Columns of the counters, after one for each outcome."""

    EVICTIONS = 7
    """Residents that gave up their slot."""
    BOOKED = 8
    """Background copies that were asked for."""
    ADMITTED = 9
    """Background copies that became resident."""
    ARRIVALS_DROPPED = 10
    """Copies of either kind that arrived and did not become resident."""
    FIRST_SUBSTITUTED = 11
    """First choices that a fallback served."""
    NOT_INSERTED = 12
    """Experts that were fetched and computed, and not made resident."""
    PREFETCHED = 13
    """Prefetches that became resident."""
    PREFETCH_USEFUL = 14
    """Of them, those that were called before they were evicted."""
    PREFETCH_WASTED = 15
    """Of them, those that were evicted without a call."""
    OUTSIDE_RECORDED = 16
    """Stand-ins that the trace's best M scores do not show."""


HIT, FETCHED, FORCED = int(Outcome.HIT), int(Outcome.FETCHED), int(Outcome.FORCED)
SUBSTITUTED, DROPPED = int(Outcome.SUBSTITUTED), int(Outcome.DROPPED)
LOW_PRECISION_OUTCOME, CPU_OUTCOME = int(Outcome.LOW_PRECISION), int(Outcome.CPU)
MISS = 255  # an outcome that is not decided yet; never left in a log

LANDED, ALREADY_RESIDENT, NO_VICTIM = int(Landing.LANDED), int(Landing.ALREADY_RESIDENT), int(Landing.NO_VICTIM)
# NumPy integers where a code is passed on as an argument: numba compiles a function anew for each plain integer it is given.
ADMISSION_KIND, PREFETCH_KIND, FETCH_KIND = np.int64(ArrivalKind.ADMISSION), np.int64(ArrivalKind.PREFETCH), np.int64(-1)

NUM_OUTCOMES = len(Outcome)
EVICTIONS, BOOKED, ADMITTED = int(Count.EVICTIONS), int(Count.BOOKED), int(Count.ADMITTED)
ARRIVALS_DROPPED, FIRST_SUBSTITUTED = int(Count.ARRIVALS_DROPPED), int(Count.FIRST_SUBSTITUTED)
NOT_INSERTED, PREFETCHED = int(Count.NOT_INSERTED), int(Count.PREFETCHED)
PREFETCH_USEFUL, PREFETCH_WASTED = int(Count.PREFETCH_USEFUL), int(Count.PREFETCH_WASTED)
OUTSIDE_RECORDED = int(Count.OUTSIDE_RECORDED)
NUM_COUNTS = NUM_OUTCOMES + len(Count)

NOBODY_EVICTED, NOT_EVICTING = -1, -2  # in evicted_ids: a free slot or no fetch, and fetched but not inserted
