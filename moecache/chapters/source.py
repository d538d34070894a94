"""Chapters as they are written: sources, parameters, and the profiles in which they run.

A source is a Python file with cells, numbered by the first two digits of its name. One cell, tagged
``parameters``, holds plain assignments of literals; the comment behind each is its documentation.
``runs.yml`` beside the sources says what a chapter's numbers are (measured, simulated, estimated) and which
parameters its quick and its full profile have. The quick parameters are the source's own.

It does not know how a chapter is run.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROFILES = ("quick", "full")
LABELS = ("MEASURED", "SIMULATED", "ESTIMATED")


class ChapterError(ValueError):
    """A chapter's source, entry or parameters are not as they must be."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a chapter: its default is what the source says."""

    name: str
    default: Any
    meaning: str

    def accept(self, value: Any) -> Any:
        """Return the value in the default's type, or say why it does not fit."""
        wanted = type(self.default)
        if self.default is None or (type(value) is wanted):
            return value
        if wanted is float and type(value) is int:
            return float(value)
        if wanted in (list, tuple) and type(value) in (list, tuple):
            return wanted(value)
        raise ChapterError(f"{self.name} is {value!r}, but must be of type {wanted.__name__} as {self.default!r} is")

    def read(self, text: str) -> Any:
        """Return the value that a word of the command line stands for."""
        if isinstance(self.default, str):
            return text
        try:
            return self.accept(ast.literal_eval(text))
        except (ValueError, SyntaxError) as fault:
            if isinstance(fault, ChapterError):
                raise
            return self.accept({"true": True, "false": False}.get(text.lower(), text))


@dataclass(frozen=True)
class Chapter:
    """One chapter and how it runs.

    Attributes
    ----------
    number : str
        Two digits.
    path : Path
        The source.
    title : str
    parameters : tuple of Parameter
    labels : tuple of str
        How its numbers were made, from `LABELS`.
    profiles : dict
        For each of `PROFILES` the parameters that differ from the defaults.
    budgets_seconds : dict
        For each of `PROFILES` the processor seconds it may take on one core.
    is_alone : bool
        Whether nothing may run beside it, because it measures time.
    is_pending : bool
        Whether its full run has not been stored yet: the book from stored results then only names it.
    """

    number: str
    path: Path
    title: str
    parameters: tuple[Parameter, ...]
    labels: tuple[str, ...]
    profiles: dict[str, dict[str, Any]]
    budgets_seconds: dict[str, float]
    is_alone: bool
    is_pending: bool = False

    def values(self, profile: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return every parameter's value in a profile, with changes of one's own."""
        given = self.profiles[profile] | dict(changes or {})
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                raise ChapterError(f"chapter {self.number} has no parameter {name!r}; it has:\n{self.describe()}")
        return {name: known[name].accept(given.get(name, known[name].default)) for name in known}

    def describe(self) -> str:
        """Return a line for each parameter: name, default, type and meaning."""
        lines = [
            f"  {parameter.name} = {parameter.default!r} ({type(parameter.default).__name__}) {parameter.meaning}"
            for parameter in self.parameters
        ]
        return "\n".join(lines) or "  (none)"


def find_chapters(notebooks: Path) -> dict[str, Chapter]:
    """Return every chapter of a folder by its number, in order.

    Raises
    ------
    ChapterError
        If sources and the entries of ``runs.yml`` do not match, or one of them is wrong.
    """
    import yaml

    entries = yaml.safe_load((notebooks / "runs.yml").read_text()) or {}
    sources = {path.name[:2]: path for path in sorted(notebooks.glob("[0-9][0-9]_*.py"))}
    without = {"an entry in runs.yml": set(sources) - set(entries), "a source": set(entries) - set(sources)}
    for what, numbers in without.items():
        if numbers:
            raise ChapterError(f"chapter {', '.join(sorted(map(repr, numbers)))} lacks {what} (numbers are strings)")
    return {number: _chapter(number, path, entries[number]) for number, path in sources.items()}


def read_parameters(source: str) -> tuple[Parameter, ...]:
    """Read the assignments of a parameters cell.

    Raises
    ------
    ChapterError
        If a line is anything but ``name = literal  # meaning``.
    """
    comments = _comments(source)
    found = []
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.append(Parameter(name, _literal(name, value), comments.get(value.end_lineno or 0, "")))
            case _:
                raise ChapterError(f"a parameters cell holds only `name = literal`, got {ast.unparse(node)!r}")
    return tuple(found)


def parameters_cell(notebook: Any) -> Any:
    """Return the one cell that is tagged ``parameters``."""
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ChapterError(f"a chapter needs exactly one cell tagged `parameters`, got {len(cells)}")
    return cells[0]


def _chapter(number: str, path: Path, entry: Mapping[str, Any]) -> Chapter:
    import jupytext

    try:
        notebook = jupytext.read(path)
        parameters = read_parameters(parameters_cell(notebook).source)
        title = notebook.cells[0].source.partition("\n")[0]
        if not title.startswith("# "):
            raise ChapterError(f"the first cell must begin with a title (`# ...`), got {title!r}")
        chapter = Chapter(number, path, title[2:].strip(), parameters, **_entry(entry))
        for profile in PROFILES:
            chapter.values(profile)
    except (ValueError, KeyError, TypeError) as fault:
        raise ChapterError(f"chapter {number} ({path.name} and its entry in runs.yml): {fault}") from fault
    return chapter


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(entry) - {"labels", "alone", "pending", *PROFILES}
    labels = tuple(entry.get("labels", ()))
    if unknown or not labels or not set(labels) <= set(LABELS):
        raise ChapterError(f"an entry has labels (from {', '.join(LABELS)}), quick, full, alone and pending; got {dict(entry)}")
    return {
        "labels": labels,
        "profiles": {profile: dict(entry[profile].get("parameters") or {}) for profile in PROFILES},
        "budgets_seconds": {profile: float(entry[profile]["seconds"]) for profile in PROFILES},
        "is_alone": bool(entry.get("alone", False)),
        "is_pending": bool(entry.get("pending", False)),
    }


def _literal(name: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as fault:
        raise ChapterError(f"parameter {name} must be a literal, got {ast.unparse(node)!r}") from fault


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("#").strip() for token in tokens if token.type == tokenize.COMMENT}
