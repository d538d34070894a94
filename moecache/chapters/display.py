"""What a chapter hands over to its page: figures, tables, and the numbers of its prose.

A figure is shown with its alternative text, for those who do not see it. Numbers are not typed into prose
but named here and written into the markdown cells (``{{name}}``) when the page is assembled, so a sentence
cannot disagree with the table beside it.

It does not know how pages are made: what it hands over travels inside the executed notebook.
"""

from __future__ import annotations

import base64
import io
import json
import math
import numbers
from collections.abc import Callable
from typing import Any

import pandas as pd

RECORD_TYPE = "application/vnd.moecache.record+json"
MAX_COLUMNS = 8
_SHORTEST_ALT = 20
_values: dict[str, Any] = {}


def values(**named: Any) -> None:
    """Name values that the chapter's prose uses as ``{{name}}`` or ``{{name:.1%}}``.

    Parameters
    ----------
    **named : int, float, bool or str
        Plain or numpy scalars. A name given again takes its new value.

    Raises
    ------
    ValueError
        For anything else, and for a number that is not finite.
    """
    _values.update({name: _scalar(name, value) for name, value in named.items()})


def show(figure: Any, *, alt: str) -> None:
    """Show a figure with its alternative text, and close it.

    Parameters
    ----------
    figure : matplotlib Figure, Axes, or a seaborn grid
    alt : str
        What is to be seen, in a sentence: the finding, not the kind of plot.

    Raises
    ------
    ValueError
        If `alt` says next to nothing.
    """
    from IPython.display import display
    from matplotlib import pyplot

    if len(alt) < _SHORTEST_ALT:
        raise ValueError(f"alt text {alt!r} is too short: say in a sentence what the figure shows")
    drawn = getattr(figure, "figure", figure)
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=144, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(drawn)
    bundle = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": alt}
    display(bundle, raw=True, metadata={"image/png": {"alt": alt}})


def show_table(frame: pd.DataFrame, *, digits: int = 3) -> None:
    """Show a small table without its index, its floats rounded.

    Parameters
    ----------
    frame : pandas.DataFrame
        At most eight columns: those that matter to the question.
    digits : int
        Significant digits of floats.

    Raises
    ------
    ValueError
        If there are more columns.
    """
    from IPython.display import display

    if frame.shape[1] > MAX_COLUMNS:
        raise ValueError(f"the table has {frame.shape[1]} columns, more than {MAX_COLUMNS}: choose those that matter")
    rounded = _rounding(digits)
    html = frame.to_html(index=False, border=0, float_format=rounded, na_rep="", justify="left")
    plain = frame.to_string(index=False, float_format=rounded, na_rep="")
    display({"text/html": html, "text/plain": plain}, raw=True)


def record() -> None:
    """Hand over the named values and the provenance of every result used; the pipeline calls this last."""
    from IPython.display import display

    from moecache import results
    from moecache.provenance import provenance

    used = [
        {
            "experiment": result.experiment,
            "key": result.key,
            "is_loaded": result.is_loaded,
            "file": result.path.name,
            "provenance": result.provenance,
        }
        for result in results.used()
    ]
    content = {"values": _values, "results": used, "provenance": provenance()}
    display({RECORD_TYPE: json.loads(json.dumps(content))}, raw=True)


def _scalar(name: str, value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        raise ValueError(f"the value {name!r} is {value}: prose needs a finite number, or a word")
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"the value {name!r} is a {type(value).__name__}: use a number, a boolean or a string")
    return value


def _rounding(digits: int) -> Callable[[float], str]:
    def rounded(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"

    return rounded
