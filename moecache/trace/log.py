"""Decision logs: what a policy made of a trace, call by call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moecache.kernel import Outcome


@dataclass(frozen=True)
class DecisionLog:
    """What became of every call, in rank order.

    Attributes
    ----------
    outcome : [T,L,K] uint8, see `Outcome`.
    computed_ids : [T,L,K] int16, the expert that computed the call, -1 = dropped.
    evicted_ids : [T,L,K] int16, whom a fetch evicted, -1 = nobody.
    arrivals : [n,7] int64: asked, landed (clocks), layer, expert, victim (-1 a free slot, -2 dropped), kind, reason.
    substituted_mass : [T,L] float32, gate weight of the step's substituted and dropped calls.
    """

    outcome: np.ndarray
    computed_ids: np.ndarray
    evicted_ids: np.ndarray
    arrivals: np.ndarray
    substituted_mass: np.ndarray

    def is_equal(self, other: DecisionLog) -> bool:
        """True when every decision and every arrival is the same, bit for bit (arrivals in any order of layers)."""
        mine, theirs = (log.arrivals[np.lexsort(log.arrivals.T[::-1])] for log in (self, other))
        names = ("outcome", "computed_ids", "evicted_ids", "substituted_mass")
        return np.array_equal(mine, theirs) and all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    def count(self, outcome: Outcome | int) -> int:
        """Number of calls with this outcome."""
        return int((self.outcome == int(outcome)).sum())


def concatenate_tokens(logs: list[DecisionLog]) -> DecisionLog:
    """One log from logs of consecutive tokens of the same layers (the order of `arrivals` is theirs)."""
    names = ("outcome", "computed_ids", "evicted_ids", "arrivals", "substituted_mass")
    return DecisionLog(**{name: np.concatenate([getattr(log, name) for log in logs]) for name in names})


def concatenate_layers(logs: list[DecisionLog]) -> DecisionLog:
    """One log from logs of consecutive layers of the same tokens."""
    names = ("outcome", "computed_ids", "evicted_ids", "substituted_mass")
    arrays = {name: np.concatenate([getattr(log, name) for log in logs], axis=1) for name in names}
    return DecisionLog(arrivals=np.concatenate([log.arrivals for log in logs]), **arrays)
