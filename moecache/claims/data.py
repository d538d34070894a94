"""Reading the claims and the stored results that decide them.

The results are those that are committed with the study, the full runs; what this machine measured for itself
does not move a verdict. Results of another kernel version are not used, since other decisions were measured
then.

This module decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from moecache import results
from moecache.frame_file import read_frame
from moecache.kernel import KERNEL_VERSION
from moecache.stats import unique_documents
from moecache.stats.paired import SETTING

_ROOT = Path(__file__).resolve().parents[2]
_KEYS = {"id", "title", "text", "reported", "chapters", "experiment", "plan", "rule", "rule_text", "parameters",
         "setting", "where", "drawing", "also"}  # fmt: skip
_NEEDED = {"id", "title", "text", "chapters"}
_TOGETHER = {"experiment", "rule", "rule_text", "parameters"}
_OF_A_HALF = _TOGETHER | {"setting", "where", "drawing"}

_PLACE = ("first_document", "num_documents")  # parameters of a block of documents


@dataclass(frozen=True)
class Drawing:
    """How intervals are drawn for verdicts.

    Attributes
    ----------
    unit : {"cluster", "document", "repeat"}
    confidence : float
    num_draws, seed : int
    fewest_units : int
        With fewer, a verdict is inconclusive.
    models : list of str
        A claim that one of these models has not been asked is not called supported.
    """

    unit: str = "cluster"
    confidence: float = 0.95
    num_draws: int = 10_000
    seed: int = 0
    fewest_units: int = 20
    models: Sequence[str] = ()


@dataclass(frozen=True)
class Claim:
    """One claim as the data file states it; see there for the meaning of each field.

    Attributes
    ----------
    setting : tuple of str
        Columns whose values make a setting; by default model, regime and capacity.
    where : mapping of str to value
        The rows that the claim speaks of.
    drawing : mapping
        What this claim draws otherwise.
    also : Claim, optional
        The other half of a claim that says two things: a rule of its own on another experiment. The claim holds where both halves do.
    """

    id: str
    title: str
    text: str
    chapters: tuple[str, ...]
    reported: str = ""
    experiment: str = ""
    plan: str = ""
    rule: str = ""
    rule_text: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    setting: tuple[str, ...] = SETTING
    where: Mapping[str, Any] = field(default_factory=dict)
    drawing: Mapping[str, Any] = field(default_factory=dict)
    also: Claim | None = None

    def drawn(self, drawing: Drawing) -> Drawing:
        """The study's drawing with what this claim draws otherwise."""
        return replace(drawing, **self.drawing)

    @property
    def rule_in_words(self) -> str:
        """The rule's text with its parameters filled in; that of the other half behind it."""
        own = self.rule_text.format(**self.parameters)
        return own if self.also is None else f"{own.strip()} {self.also.rule_in_words}"


def load_claims(path: Path = _ROOT / "data" / "claims.yml") -> tuple[Drawing, tuple[Claim, ...]]:
    """Read the claims.

    Returns
    -------
    Drawing, tuple of Claim

    Raises
    ------
    ValueError
        If the file is not there, a claim lacks a field or has an unknown one, or an id occurs twice.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: claims are read in a clone of the study, not in an installed package")
    content = yaml.safe_load(path.read_text())
    claims = tuple(_claim(entry) for entry in content["claims"])
    ids = [claim.id for claim in claims]
    doubled = sorted({i for i in ids if ids.count(i) > 1})
    if doubled:
        raise ValueError(f"{path.name}: claim {', '.join(doubled)} occurs more than once")
    return Drawing(**content["drawing"]), claims


def _claim(entry: Mapping[str, Any]) -> Claim:
    keys, name = set(entry), entry.get("id", "without id")
    wrong = {"lacks": _NEEDED - keys, "has the unknown": keys - _KEYS}
    if keys & _TOGETHER:
        wrong["has a rule but lacks"] = _TOGETHER - keys
    for what, which in wrong.items():
        if which:
            raise ValueError(f"claim {name} {what} {', '.join(sorted(which))}")
    more: dict[str, Any] = {key: tuple(entry[key]) for key in ("chapters", "setting") if key in entry}
    if "also" in entry:
        more["also"] = _half(entry)
    return Claim(**{**entry, **more})


def _half(entry: Mapping[str, Any]) -> Claim:
    """The other half of a claim, which is a claim with the same id and words."""
    half = entry["also"]
    if unknown := set(half) - _OF_A_HALF:
        raise ValueError(f"claim {entry['id']}, its other half, has the unknown {', '.join(sorted(unknown))}")
    return _claim({**{key: entry[key] for key in _NEEDED}, **half})


def stored_frame(experiment: str, folder: Path | None = None) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Read everything that is stored of an experiment.

    Parameters
    ----------
    experiment : str
    folder : Path, optional
        Where committed results are; by default those of this clone.

    Returns
    -------
    DataFrame
        All stored rows together; empty if nothing is stored.
    list of dict
        The provenance of each stored result.
    """
    folder = results.stored_folder() if folder is None else folder
    parts: dict[str, list[pd.DataFrame]] = {}
    provenances = []
    for path in sorted((folder / experiment).glob("*.csv")) if folder is not None else []:
        frame, header = read_frame(path)
        if header["kernel_version"] == KERNEL_VERSION:
            parts.setdefault(_without_place(header.get("parameters", {})), []).append(frame)
            provenances.append(header["provenance"])
    frames = [_told_apart(pd.concat(blocks, ignore_index=True)) for blocks in parts.values()]
    return (pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()), provenances


def _without_place(parameters: Mapping[str, Any]) -> str:
    """What results have in common that are blocks of documents of one measurement."""
    left_out = _PLACE if _PLACE[0] in parameters else ()
    return json.dumps({key: value for key, value in parameters.items() if key not in left_out}, sort_keys=True, default=str)


def _told_apart(frame: pd.DataFrame) -> pd.DataFrame:
    """Documents of one name told apart, within one measurement: what is stored of two measurements is not two documents."""
    return unique_documents(frame) if "document" in frame.columns else frame
