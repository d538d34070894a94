"""The page of the book that lists all claims: the table, then the rule and the evidence behind each verdict.

This module computes no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moecache.claims.data import Claim, Drawing, load_claims, stored_frame
from moecache.claims.judge import judge_settings, overall
from moecache.claims.verdict import State, Verdict

_ROOT = Path(__file__).resolve().parents[2]
_MARKS = {
    State.SUPPORTED: "**supported**",
    State.NOT_SUPPORTED: "**not supported**",
    State.INCONCLUSIVE: "**inconclusive**",
    State.NOT_YET_MEASURED: "not yet measured",
}
_COLUMNS = "| | Claim | On our models and machines | At the source's setting | Chapter |\n|---|---|---|---|---|"
_HEAD = """# What is claimed, and what holds

A published study of one large model (80 billion parameters, 512 experts a layer, on a consumer GPU) says the following
about waiting for expert misses and substituting them. The wording is ours. The first verdict is about *our* small
models and machines; the second about the setting of that study, where nobody has run this code yet. What holds for a
small model need not hold for a large one, and the other way round.

A verdict is computed from the results that are stored with the study, the full runs, also where the chapters of this
book show a quick run. Its rule was fixed before the full run was looked at and is written below. *Inconclusive* means
that the interval does not decide, that settings disagree, or that a model which a supported claim must hold for has
not been measured.
"""


def page(notebooks: Path = _ROOT / "notebooks", stored: Path | None = None, built: Collection[str] | None = None) -> str:
    """Return the page as Markdown.

    Parameters
    ----------
    notebooks : Path
        Where the chapters' sources are.
    stored : Path, optional
        Where committed results are; by default those of this clone.
    built : collection of str, optional
        Numbers of the chapters in this edition of the book: a claim links to these, the others are planned.
        By default every chapter that has a source.

    Returns
    -------
    str
    """
    drawing, claims = load_claims()
    names = {path.stem[:2]: path.stem for path in sorted(notebooks.glob("[0-9][0-9]_*.py"))}
    chapters = {number: name for number, name in names.items() if built is None or number in built}
    read = cache(lambda experiment: stored_frame(experiment, stored))
    judged = {c.id: judge_settings(c, drawing, *(read(name)[0] for name in _experiments(c))) if c.rule else {} for c in claims}
    lacking = {claim.id: [name[:2] for name in _experiments(claim) if read(name)[0].empty] for claim in claims}
    rows = [_row(claim, overall(judged[claim.id], claim.drawn(drawing).models), lacking[claim.id], chapters) for claim in claims]
    sources = {c.id: [source for name in _experiments(c) for source in read(name)[1]] for c in claims if c.rule}
    evidence = [_evidence(c, judged[c.id], sources[c.id]) for c in claims if c.rule]
    return "\n".join([_HEAD, _COLUMNS, *rows, "", "## Rules and evidence", "", _how(drawing), *evidence])


def _experiments(claim: Claim) -> list[str]:
    """The experiments that decide a claim, which begin with their chapter's number: its own, and that of its other half."""
    return [half.experiment for half in (claim, claim.also) if half is not None and half.experiment]


def _row(claim: Claim, verdict: Verdict, lacking: list[str], chapters: Mapping[str, str]) -> str:
    """A line of the table; `lacking` are the chapters whose results decide the claim and are not stored."""
    evidence = verdict.evidence
    if verdict.state is State.NOT_YET_MEASURED and lacking:
        evidence = f"no results of chapter{'s' if len(lacking) > 1 else ''} {' and '.join(lacking)} are stored"
    ours = ": ".join(part for part in (_MARKS[verdict.state], evidence) if part)
    links = ", ".join(
        f"[{number}](chapters/{chapters[number]}.ipynb)" if number in chapters else f"{number} (planned)" for number in claim.chapters
    )
    reported = f" *Reported: {claim.reported}*" if claim.reported else ""
    return f"| {claim.id} | {claim.text}{reported} | {ours} | not measured | {links} |"


def _how(drawing: Drawing) -> str:
    unit = "cluster of documents of one origin" if drawing.unit == "cluster" else "document"
    return _spaced(
        f"Unless a rule says otherwise, an interval is a {drawing.confidence:.0%} percentile interval of {drawing.num_draws:,} "
        f"bootstrap draws; the unit is the {unit}. With fewer than {drawing.fewest_units} units a verdict is inconclusive. A rank "
        "correlation over few rules takes few values, so its interval may shrink to a point. Policies are a "
        "design, not a sample, so there is no p-value over policies.\n"
    )


def _evidence(claim: Claim, verdicts: Mapping[str, Verdict], provenances: list[dict[str, Any]]) -> str:
    planned = f" [Planned beforehand](decisions/{claim.plan}.md)." if claim.plan else ""
    lines = [f"### {claim.id}. {claim.title}", "", f"*Rule.* {_spaced(claim.rule_in_words)}{planned}", ""]
    if not verdicts:
        return "\n".join([*lines, "*Evidence.* None stored yet.", ""])
    lines += [f"- {setting}: {_MARKS[v.state]}. {_sentence(v.evidence)}" for setting, v in verdicts.items()]
    return "\n".join([*lines, "", _measured(provenances), ""])


def _spaced(text: str) -> str:
    """Put a space before each percent sign."""
    return re.sub(r"(?<=\d)%", " %", text)


def _sentence(evidence: str) -> str:
    return evidence if evidence.endswith(".") else f"{evidence[0].upper()}{evidence[1:]}."


def _measured(provenances: list[dict[str, Any]]) -> str:
    """Say on what and when the numbers were measured."""
    facts = {(p["device"], p["date"][:10], str(p["commit"] or "unknown")[:10]) for p in provenances}
    told = "; ".join(f"{device}, {date}, commit {commit}" for device, date, commit in sorted(facts))
    return f"*MEASURED* on {told}."
