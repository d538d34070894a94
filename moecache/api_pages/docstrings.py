"""A docstring in numpydoc's order, taken apart: purpose, sections, and their entries.

Two forms of an entry are in use, and both are read:

- ``name : type`` with the meaning indented below, and
- ``name : meaning``, which goes on, indented, when it is longer than a line.

They are told apart by the length of the first line: one that is continued is full. An entry may name several parameters (``low, high``).

What a member of an enum means is said by the string below it, which Python throws away: `of_members` reads it from the source.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Warns")
_FULL_LINE = 95  # characters; a shorter first line that something follows is a type
_NAMES = re.compile(r"\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*")


@dataclass(frozen=True)
class Entry:
    """One row of a section; `names` is empty where the section names nothing (Returns)."""

    names: tuple[str, ...]
    kind: str
    text: str


@dataclass(frozen=True)
class Docstring:
    """A docstring's prose (Markdown) and its sections by name."""

    prose: str
    sections: dict[str, list[Entry]] = field(default_factory=dict)

    def names(self, *sections: str) -> set[str]:
        """All names that these sections describe, without asterisks."""
        return {name.lstrip("*") for section in sections for entry in self.sections.get(section, []) for name in entry.names}


def read(described: Any) -> Docstring:
    """Take the docstring of an object apart; a class that has none of its own has an empty one.

    Raises
    ------
    ValueError : a heading underlined like a section that is none of SECTIONS.
    """
    own = (described.__doc__ if inspect.isclass(described) else inspect.getdoc(described)) or ""
    return parse("" if own.startswith(f"{getattr(described, '__name__', '')}(") else own)  # what dataclasses write by themselves


def parse(text: str) -> Docstring:
    """`read` for the text itself."""
    lines = inspect.cleandoc(text).splitlines()
    prose: list[str] = []
    found: dict[str, list[str]] = {}
    into = prose
    for line, below in zip(lines, [*lines[1:], ""], strict=False):
        if line and re.fullmatch(r"-{3,}", below) and len(line) == len(below):
            if line not in SECTIONS:
                raise ValueError(f"section {line!r} of a docstring is unknown; use {', '.join(SECTIONS)}")
            into = found.setdefault(line, [])
        elif not (into is not prose and not into and re.fullmatch(r"-{3,}", line)):
            into.append(line)
    after = [line for body in found.values() for line in _split_off_prose(body)]
    return Docstring("\n".join([*prose, *after]).strip(), {name: _entries(body, name) for name, body in found.items()})


def of_members(described: type[Enum]) -> dict[str, str]:
    """What the string below each member of an enum says, by the member's name; members without one are left out."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(described))).body
    assert isinstance(definition, ast.ClassDef)
    said: dict[str, str] = {}
    for statement, below in pairwise(definition.body):
        if isinstance(statement, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            said |= {target.id: inspect.cleandoc(str(below.value.value)) for target in statement.targets if isinstance(target, ast.Name)}
    return said


def _split_off_prose(body: list[str]) -> list[str]:
    """Take paragraphs that follow a section's last entry after an empty line out of it, and return them."""
    for place, line in enumerate(body):
        if place and not body[place - 1] and line and not line.startswith(" ") and not _is_entry(line):
            rest = body[place:]
            del body[place:]
            return ["", *rest]
    return []


def _is_entry(line: str) -> bool:
    head, colon, _ = line.partition(" : ")
    return bool(colon) and _NAMES.fullmatch(head) is not None


def _entries(body: list[str], section: str) -> list[Entry]:
    groups: list[list[str]] = []
    for line in body:
        if line and not line.startswith(" "):
            groups.append([line])
        elif groups:
            groups[-1].append(line)
    return [_entry(lines[0], inspect.cleandoc("\n".join(["", *lines[1:]])), section) for lines in groups]


def _entry(first: str, rest: str, section: str) -> Entry:
    head, colon, told = first.partition(" : ")
    if section in ("Parameters", "Attributes"):
        names = tuple(head.split(", "))
        is_kind = (bool(rest) and len(first) < _FULL_LINE) or _is_type(told)
        return Entry(names, told.removesuffix("."), rest) if is_kind else Entry(names, "", _joined(told, rest))
    if colon:
        return Entry((), head, _joined(told, rest))
    return Entry((), first, rest) if (rest and len(first) < _FULL_LINE) or _is_type(first) else Entry((), "", _joined(first, rest))


def _is_type(words: str) -> bool:
    """Whether these words are nothing but a type: `Policy`, `list of Run`."""
    return re.fullmatch(r"[A-Za-z_]+(\.\w+)*\.?|list of \w+|sequence of \w+|tuple of \w+|dict of \w+|array \[[^\]]*\]", words) is not None


def _joined(first: str, rest: str) -> str:
    return f"{first}\n{rest}".strip()
