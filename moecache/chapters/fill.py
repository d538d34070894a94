"""Numbers in prose: ``{{name}}`` and ``{{name:.1%}}`` become the value of that name.

What stands after the colon is a format as Python's `format` takes it. A name that nobody gave is an error,
never an empty space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{\{\s*([\w.]+)\s*(?::([^{}]*))?\}\}")


def fill(text: str, values: Mapping[str, Any], where: str, *, missing: str | None = None) -> str:
    """Write values into a text.

    Parameters
    ----------
    text : str
        Markdown with placeholders.
    values : mapping of str to int, float, bool or str
    where : str
        Name of the page, for the error.
    missing : str, optional
        Written where a name is unknown; by default that is an error.

    Raises
    ------
    ValueError
        If a name is unknown or a format does not fit its value.
    """

    def written(found: re.Match[str]) -> str:
        name, form = found[1], (found[2] or "").strip()
        if name not in values and missing is not None:
            return missing
        if name not in values:
            raise ValueError(f"{where}: no value {name!r} for {found[0]}; there are: {', '.join(sorted(values))}")
        try:
            return format(values[name], form)
        except (ValueError, TypeError) as fault:
            raise ValueError(f"{where}: {found[0]} does not fit the value {values[name]!r}: {fault}") from fault

    return _PLACEHOLDER.sub(written, text)
