"""A rule about generated answers: does agreement with the exact model follow substituted gate mass?

Two questions to each kind of task, apart: across the listed policies (problems drawn), and across problems within a policy. The rows are
(policy, problem); a problem takes the place of a document.

No rule knows which claim it serves, where results come from, or any number that is not in its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.claims.data import Drawing
from moecache.claims.losses import MASS
from moecache.claims.verdict import State, Verdict, counted


class Answer(StrEnum):
    """What an interval says against its bound."""

    YES = "yes"
    NO = "no"
    OPEN = "open"


def generation_follows_mass_partly(frame: pd.DataFrame, parameters: Mapping[str, Any], drawing: Drawing) -> Verdict:
    """Decide whether agreement fails to follow mass for some kind of task, or mass says nothing problem by problem in some kind."""
    listed = pd.DataFrame(frame[~frame["family"].isin(parameters["left_out"])])
    absent = [kind for kind in parameters["tasks"] if kind not in set(listed["domain"])]
    if absent:
        return Verdict(State.NOT_YET_MEASURED, f"The stored results hold no {', '.join(absent)}.")
    found, told = [], []
    for kind in parameters["tasks"]:
        rows = pd.DataFrame(listed[listed["domain"] == kind])
        follows, across = across_policies(rows, parameters["agreement"], parameters["strong"], drawing)
        nothing, within = within_policies(rows, parameters["agreement"], parameters["weak"], drawing)
        found.append((follows, nothing))
        told.append(
            f"{kind.replace('_', ' ')} (n = {counted(rows['document'].nunique(), 'problem')}): across {across}; problem by problem {within}"
        )
    if any(follows is Answer.NO or nothing is Answer.YES for follows, nothing in found):
        state = State.SUPPORTED
    elif all(follows is Answer.YES and nothing is Answer.NO for follows, nothing in found):
        state = State.NOT_SUPPORTED
    else:
        state = State.INCONCLUSIVE
    return Verdict(state, ". ".join(told))


def across_policies(rows: pd.DataFrame, agreement: str, strong: float, drawing: Drawing) -> tuple[Answer, str]:
    """Whether agreement follows mass across the policies of one kind of task: yes below -`strong`, no above, and the coefficient."""
    num_policies = rows["policy"].nunique()
    if rows.groupby("policy")[agreement].mean().nunique() < 2:
        return Answer.OPEN, f"{num_policies} policies: the same agreement for all"
    row = stats.association(rows, MASS, agreement, unit=drawing.unit, **_bootstrap(drawing)).iloc[0]
    low, high = row["low"], row["high"]
    answer = Answer.YES if high < -strong else Answer.NO if low > -strong else Answer.OPEN
    return answer, f"{num_policies} policies {_interval(row['estimate'], low, high)}"


def within_policies(rows: pd.DataFrame, agreement: str, weak: float, drawing: Drawing) -> tuple[Answer, str]:
    """Whether mass says nothing about agreement problem by problem: yes inside ±`weak`, no beyond, and the mean coefficient."""
    spreads = rows.groupby("policy")[[MASS, agreement]].agg(np.ptp)
    varying = spreads.index[(spreads > 0).all(axis=1)]
    if len(varying) == 0:
        return Answer.OPEN, "every policy agrees equally on all problems"
    kept = pd.DataFrame(rows[rows["policy"].isin(varying)])
    row = stats.correlation_across_documents(kept, MASS, agreement, unit=drawing.unit, **_bootstrap(drawing)).iloc[-1]
    low, high = row["low"], row["high"]
    answer = Answer.YES if -weak < low and high < weak else Answer.NO if low > weak or high < -weak else Answer.OPEN
    return answer, f"{_interval(row['spearman'], low, high)} (mean of {len(varying)} policies)"


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _bootstrap(drawing: Drawing) -> dict[str, Any]:
    return {"confidence": drawing.confidence, "num_draws": drawing.num_draws, "seed": drawing.seed}


GENERATION_RULES = {generation_follows_mass_partly.__name__: generation_follows_mass_partly}
