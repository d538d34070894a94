"""A verdict: one of four states, and the evidence in a sentence.

An interval decides three ways. Wholly on the claim's side of the bound: supported. Wholly on the other: not
supported. Across it: inconclusive, which is an answer and not a failure. Settings are combined without a
vote: one that disagrees makes the whole inconclusive.

This module does not know any claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What the results say about a claim."""

    SUPPORTED = "supported"
    NOT_SUPPORTED = "not supported"
    INCONCLUSIVE = "inconclusive"
    NOT_YET_MEASURED = "not yet measured"


@dataclass(frozen=True)
class Verdict:
    """A state and why.

    Attributes
    ----------
    state : State
    evidence : str
        A sentence with effect, interval and n; plain Markdown.
    lacking : str
        What is missing before the claim can be decided, where that is not all of the evidence.
    """

    state: State
    evidence: str
    lacking: str = ""


def counted(number: int, one: str, many: str = "") -> str:
    """Say how many there are: 1 repeat, 3 repeats; `many` is the plural that is not made by an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def side_of(low: float, high: float, bound: float = 0.0) -> State:
    """Return supported if the interval lies above the bound, not supported if below, inconclusive if
    across."""
    if low > bound:
        return State.SUPPORTED
    return State.NOT_SUPPORTED if high < bound else State.INCONCLUSIVE


def worst_of(states: Sequence[State]) -> State:
    """Return the state of a conjunction: supported if all parts are, not supported if one is not, otherwise inconclusive."""
    if State.NOT_SUPPORTED in states:
        return State.NOT_SUPPORTED
    return State.SUPPORTED if set(states) == {State.SUPPORTED} else State.INCONCLUSIVE


def both(first: Verdict, second: Verdict | None) -> Verdict:
    """Combine the two halves of a claim in one setting.

    Parameters
    ----------
    first : Verdict
    second : Verdict, optional
        None where the other half was not measured in this setting. Then the first half can refute the claim, and decides nothing else.

    Returns
    -------
    Verdict
    """
    if second is None or State.NOT_YET_MEASURED in (first.state, second.state):
        other = Verdict(State.NOT_YET_MEASURED, "the other half was not measured here") if second is None else second
        told = f"{_told(first)}; {other.evidence}"
        if State.NOT_SUPPORTED in (first.state, other.state):
            return Verdict(State.NOT_SUPPORTED, told)
        open_halves = [half.evidence for half in (first, other) if half.state is State.NOT_YET_MEASURED]
        return Verdict(State.NOT_YET_MEASURED, told, " ".join(open_halves))
    return Verdict(worst_of([first.state, second.state]), f"{_told(first)}. {second.evidence}")


def _told(verdict: Verdict) -> str:
    return verdict.evidence.removesuffix(".")


def combine(verdicts: Mapping[str, Verdict]) -> Verdict:
    """Combine the verdicts of all settings: the common state, or inconclusive where they differ.

    Parameters
    ----------
    verdicts : mapping of str to Verdict
        By setting; settings that were not measured for this claim do not count. Without any, nothing was
        measured, and the evidence says what is lacking.

    Returns
    -------
    Verdict
    """
    measured = [v.state for v in verdicts.values() if v.state is not State.NOT_YET_MEASURED]
    if not measured:
        reasons = dict.fromkeys(v.lacking or v.evidence for v in verdicts.values())
        return Verdict(State.NOT_YET_MEASURED, " ".join(reasons))
    if len(set(measured)) == 1:
        return Verdict(measured[0], f"in {_all_of(len(measured))}")
    counts = ", ".join(f"{state} in {measured.count(state)}" for state in State if state in measured)
    return Verdict(State.INCONCLUSIVE, f"{counts} of {len(measured)} settings")


def _all_of(number: int) -> str:
    return "the one setting measured" if number == 1 else f"all {number} settings"
