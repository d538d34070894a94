"""One public object as MyST Markdown: its signature, what it is for, and its sections as lists.

Objects become entries of the builder's Python domain, so that they are in the index, in the search and in the page's outline, and other
pages can link to them. Types stand in the lists and not in the signature, where they would not fit a line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from moecache.api_pages.docstrings import SECTIONS, Entry, of_members, read

Linked = Callable[[str], str]
_LONGEST_DEFAULT = 40


def links(names: Collection[str]) -> Linked:
    """A function that makes links of backquoted names of the package, `simulate` or `moecache.stats.compare`."""
    full = {f"moecache.{name}": name for name in names} | {name: name for name in names}

    def linked(text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            name = full.get(match[1])
            return match[0] if name is None else f"{{py:obj}}`{match[1]} <moecache.{name}>`"

        return re.sub(r"(?<!`)`([\w.]+)`(?!`)", replace, text)

    return linked


def write(name: str, described: Any, linked: Linked, constants: dict[int, str]) -> str:
    """The Markdown of one object.

    Parameters
    ----------
    name : str
        Its full name, such as ``moecache.stats.compare``.
    described : object
        A function, class or constant.
    linked : function
        From `links`.
    constants : dict
        Names of documented constants by identity, for defaults.

    Raises
    ------
    ValueError : a docstring that cannot be read, with the object's name.
    """
    try:
        if inspect.isclass(described):
            return _class(name, described, linked, constants)
        if callable(described):
            return _directive("function", name + signature(described, constants), _body(described, linked))
    except ValueError as fault:
        raise ValueError(f"{name}: {fault}") from fault
    return _directive("data", name, f"`{_value(described, {})}`")


def signature(function: Any, constants: dict[int, str], is_method: bool = False) -> str:
    """Parameters and defaults, as Python writes them, without types."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_Written.of(parameter.default, constants))
        for parameter in list(found.parameters.values())[1 if is_method else 0 :]
    ]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Written:
    """A default that shows itself in the words given."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __repr__(self) -> str:
        return self.words

    @classmethod
    def of(cls, value: Any, constants: dict[int, str]) -> Any:
        return value if value is inspect.Parameter.empty else cls(_value(value, constants))


def _value(value: Any, constants: dict[int, str]) -> str:
    if id(value) in constants:
        return constants[id(value)]
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    words = repr(value)
    is_short = len(words) <= _LONGEST_DEFAULT and "<" not in words
    return words if is_short or not constants else "..."


def _class(name: str, described: type, linked: Linked, constants: dict[int, str]) -> str:
    if issubclass(described, Enum):
        return _directive("class", name, f"{_body(described, linked)}\n\n{_enum_members(described, linked)}")
    if issubclass(described, Exception):
        return _directive("exception", name, _body(described, linked))
    is_made_by_hand = is_dataclass(described) or ("__init__" in vars(described) and not getattr(described, "_is_protocol", False))
    head = name + (signature(described, constants) if is_made_by_hand else "")
    members = "\n\n".join(_member(*member, linked, constants) for member in public_members(described))
    return _directive("class", head, f"{_body(described, linked)}\n\n{members}", fence="``````")


def _enum_members(described: type[Enum], linked: Linked) -> str:
    """A line for each member: its name as it is written in a policy, its value, and what it means where that is said."""
    said = of_members(described)
    lines = [(member, linked(said.get(member.name, ""))) for member in described]
    return "\n".join(f"- `{member.name.lower()}` = {member.value!r}" + (f": {text}" if text else "") for member, text in lines)


def public_members(described: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a class defines itself, in order, as (name, raw attribute)."""
    for name, member in vars(described).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))):
            yield name, member


def _member(name: str, member: Any, linked: Linked, constants: dict[int, str]) -> str:
    if isinstance(member, property):
        return _directive("property", name, _body(member.fget, linked))
    function, option = (member.__func__, ":classmethod:") if isinstance(member, (classmethod, staticmethod)) else (member, "")
    option = ":staticmethod:" if isinstance(member, staticmethod) else option
    head = name + signature(function, constants, is_method=not isinstance(member, staticmethod))
    return _directive("method", head, "\n\n".join(filter(None, [option, _body(function, linked)])))


def _directive(kind: str, head: str, body: str, fence: str = "````") -> str:
    return f"{fence}{{py:{kind}}} {head}\n{body.strip()}\n{fence}"


def _body(described: Any, linked: Linked) -> str:
    docstring = read(described)
    parts = [linked(docstring.prose)]
    for section in SECTIONS:
        if entries := docstring.sections.get(section):
            parts.append(f"**{section}**\n\n" + "\n\n".join(_entry(entry, section, described, linked) for entry in entries))
    return "\n\n".join(parts)


def _entry(entry: Entry, section: str, described: Any, linked: Linked) -> str:
    names = ", ".join(f"`{name}`" for name in entry.names)
    kind = entry.kind or _annotation(entry, described)
    text = linked(entry.text.strip()) or ""
    if section in ("Raises", "Warns"):
        return f"`{entry.kind}`\n: {_indented(text)}" if text else f"`{entry.kind}`"
    term = " · ".join(filter(None, [names, kind if entry.kind else f"`{kind}`" if kind else ""]))
    if not term:
        return text
    return f"{term}\n: {_indented(text)}" if text else term


def _annotation(entry: Entry, described: Any) -> str:
    """The type that the signature gives the entry's first name."""
    if not entry.names:
        return ""
    known = getattr(described, "__annotations__", {})
    if inspect.isclass(described) and not is_dataclass(described):
        known = getattr(described.__init__, "__annotations__", {})
    found = known.get(entry.names[0].lstrip("*"), "")
    return found if isinstance(found, str) else getattr(found, "__name__", str(found))


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
