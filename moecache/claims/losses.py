"""Losses of one setting, drawn once, and the questions that rules ask of them.

All rules of a setting share the draws, so that shares, differences and multiples of losses stay paired.
Losses are mean differences of token losses in nats: they add up, perplexity increases do not.

This module does not know any claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moecache.claims.data import Drawing
from moecache.claims.verdict import counted
from moecache.stats import PairedUnits, draw_counts, pair_documents, percentile_interval, weighted_mean_draws
from moecache.stats.paired import DIFFERENCE

MASS = "substituted_mass"


@dataclass(frozen=True, eq=False)
class Losses:
    """What P policies lost on the same units.

    Attributes
    ----------
    paired : PairedUnits
        Of P policies.
    draws : float64 array [num_draws, P]
        Mean loss of each policy in each bootstrap sample, nats.
    substituted : dict of str to int
        Calls substituted or dropped, by policy.
    first_choices : dict of str to int
        First choices substituted, by policy.
    families : dict of str to str
    confidence : float
    """

    paired: PairedUnits
    draws: np.ndarray
    substituted: dict[str, int]
    first_choices: dict[str, int]
    families: dict[str, str]
    confidence: float

    @property
    def num_units(self) -> int:
        """n of every interval."""
        return self.paired.num_units

    @property
    def n(self) -> str:
        """n and what it counts, in words."""
        return f"n = {counted(self.num_units, self.paired.unit)}"

    def loss(self, policy: str) -> float:
        """Return a policy's mean loss, nats a token."""
        return float(self.paired.means()[self.paired.index(policy)])

    def mass(self, policy: str) -> float:
        """Return a policy's substituted gate mass, mean a step."""
        return float(self.paired.means(MASS)[self.paired.index(policy)])

    def drawn(self, policy: str) -> np.ndarray:
        """Return a policy's loss in every draw, [num_draws]."""
        return self.draws[:, self.paired.index(policy)]

    def interval(self, drawn: np.ndarray) -> tuple[float, float]:
        """Return the percentile interval of a drawn quantity."""
        low, high = percentile_interval(drawn, self.confidence)
        return float(low), float(high)

    def increase(self, policy: str) -> str:
        """Return a policy's perplexity increase in words."""
        return f"{np.expm1(self.loss(policy)):+.2%}".replace("%", " %")

    def lacking(self, *policies: str) -> list[str]:
        """Return which of these policies were not measured."""
        return [label for label in policies if label not in self.paired.policies]

    def always_fetching_first_choices(self, without_families: Sequence[str]) -> list[str]:
        """Return the policies that substituted something but no first choice, lightest mass first."""
        kept = [
            label
            for label in self.paired.policies
            if self.substituted[label] > 0 and self.first_choices[label] == 0 and self.families[label] not in without_families
        ]
        return sorted(kept, key=self.mass)


def gather_losses(frame: pd.DataFrame, drawing: Drawing) -> Losses:
    """Pair the frame of one setting and draw its units.

    Parameters
    ----------
    frame : DataFrame
        One row per (policy, document) of one setting. Without a column ``family`` each policy is its own.
    drawing : Drawing

    Returns
    -------
    Losses

    Raises
    ------
    ValueError
        As ``stats.pair_documents``.
    """
    paired = pair_documents(frame, drawing.unit, (DIFFERENCE, MASS))
    counts = draw_counts(paired.num_units, drawing.num_draws, drawing.seed)
    totals = frame.pivot_table(index="policy", values=["substituted", "dropped", "first_choices_substituted"], aggfunc="sum")
    return Losses(
        paired=paired,
        draws=weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, counts),
        substituted=_by_policy(totals["substituted"] + totals["dropped"]),
        first_choices=_by_policy(totals["first_choices_substituted"]),
        families=_by_policy(frame.get("family", frame["policy"]).groupby(frame["policy"]).first()),
        confidence=drawing.confidence,
    )


def _by_policy(column: pd.Series) -> dict[str, Any]:
    return {str(policy): value for policy, value in column.items()}
