"""From a claim and stored results to its verdicts, one for each setting and one for all.

This module does not know what a rule does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moecache.claims.data import Claim, Drawing, load_claims
from moecache.claims.rules import RULES
from moecache.claims.verdict import State, Verdict, both, combine, counted

REGIME_WORDS = {"admitted_anyway": "a substituted miss is admitted anyway", "stays_out": "a substituted miss stays out"}


def verdict_on(claim_id: str, frame: pd.DataFrame, also: pd.DataFrame | None = None) -> Verdict:
    """Return the verdict that a frame gives on one claim, over all its settings.

    Parameters
    ----------
    claim_id : str
        For example ``"a"``.
    frame, also : DataFrame
        As for ``judge_settings``.

    Returns
    -------
    Verdict

    Raises
    ------
    ValueError
        If there is no such claim, or no rule decides it yet.
    """
    drawing, claims = load_claims()
    found = [claim for claim in claims if claim.id == claim_id and claim.rule]
    if not found:
        decided = ", ".join(claim.id for claim in claims if claim.rule)
        raise ValueError(f"no rule decides claim {claim_id!r}; there are rules for {decided}")
    return combine(judge_settings(found[0], drawing, frame, also))


def overall(verdicts: Mapping[str, Verdict], models: Sequence[str]) -> Verdict:
    """Return the verdict over all settings and models; one that supports must have asked every model.

    Parameters
    ----------
    verdicts : mapping of str to Verdict
        By setting, as `judge_settings` returns them.
    models : sequence of str
        Every model that a supported claim must hold for.

    Returns
    -------
    Verdict
        As of `combine`; but inconclusive instead of supported where a model was not measured.
    """
    verdict = combine(verdicts)
    measured = {setting.partition(",")[0] for setting, v in verdicts.items() if v.state is not State.NOT_YET_MEASURED}
    missing = [model for model in models if model not in measured]
    if verdict.state is not State.SUPPORTED or not missing:
        return verdict
    return Verdict(State.INCONCLUSIVE, f"supported {verdict.evidence}, but not measured on {', '.join(missing)}")


def judge_settings(claim: Claim, drawing: Drawing, frame: pd.DataFrame, also: pd.DataFrame | None = None) -> dict[str, Verdict]:
    """Return the verdict of every setting of a frame.

    Parameters
    ----------
    claim : Claim
        With a rule.
    drawing : Drawing
    frame : DataFrame
        One row per setting, policy and document (or what the claim names instead); may be empty.
    also : DataFrame, optional
        The rows of the claim's other half, where it has one. A setting of the first half is judged with that setting of the other
        half which has the same value in each of the other's columns.

    Returns
    -------
    dict of str to Verdict
        By setting, in words; in the order of the frame.

    Raises
    ------
    ValueError
        If no rule has the claim's name, or the frame of a setting is incomplete.
    """
    judged = _judged(claim, drawing, frame)
    if claim.also is not None:
        others = _judged(claim.also, drawing, pd.DataFrame() if also is None else also)
        judged = [(setting, both(verdict, _same_setting(others, setting))) for setting, verdict in judged]
    return {_setting_words(setting): verdict for setting, verdict in judged}


def _judged(claim: Claim, drawing: Drawing, frame: pd.DataFrame) -> list[tuple[dict[str, Any], Verdict]]:
    """The verdict of one rule in every setting: (value of each of the setting's columns, verdict)."""
    if claim.rule not in RULES:
        raise ValueError(f"claim {claim.id} asks for the rule {claim.rule!r}; there are {', '.join(RULES)}")
    if len(frame) == 0:
        return []
    rule, found, drawing = RULES[claim.rule], [], claim.drawn(drawing)
    for setting, rows in _where(frame, claim.where).groupby(list(claim.setting), sort=False):
        num_units = len(set(rows[drawing.unit]))
        if num_units < drawing.fewest_units:
            few = f"only {counted(num_units, drawing.unit)} {'was' if num_units == 1 else 'were'} read, {drawing.fewest_units} are needed"
            verdict = Verdict(State.INCONCLUSIVE, few)
        else:
            verdict = rule(rows, claim.parameters, drawing)
        found.append((dict(zip(claim.setting, setting, strict=True)), verdict))  # type: ignore[call-overload]
    return found


def _same_setting(others: list[tuple[dict[str, Any], Verdict]], setting: Mapping[str, Any]) -> Verdict | None:
    return next((verdict for other, verdict in others if all(setting.get(name) == value for name, value in other.items())), None)


def _where(frame: pd.DataFrame, values: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in values.items():
        frame = pd.DataFrame(frame[frame[name] == value])
    return frame


def _setting_words(setting: Mapping[str, Any]) -> str:
    words = {name: str(value) for name, value in setting.items()}
    if regime := words.pop("regime", None):
        words["regime"] = REGIME_WORDS.get(regime, regime)
    if "num_slots" in words:
        words["num_slots"] += " slots"
    return ", ".join(words.values())
