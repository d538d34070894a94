"""One look for all figures: colours, markers, sizes, and the label in the corner.

Colours are those of M. Okabe and K. Ito (*Color Universal Design*, 2008) with two from P. Tol's muted set;
each has its own marker or dash, so that a figure survives print in grey. A page shows figures about 700
pixels wide; at the width used here the base size of 10 points is then about 13 pixels.

This module does not know what is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

KINDS = ("MEASURED", "SIMULATED", "ESTIMATED")
WIDTH_INCHES = 7.2
INK, FAINT, GRID = "#222222", "#6b6b6b", "#dddddd"

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "axes.titlesize": 10.0,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "figure.labelsize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


class Look(NamedTuple):
    """How one family, eviction or outcome is drawn everywhere."""

    colour: str
    marker: str = "o"
    dash: str | tuple[float, tuple[float, ...]] = "-"


FAMILY_STYLES: Mapping[str, Look] = {
    "fetch every miss": Look("#000000", "|"),
    "substitute every miss": Look("#882255", "X"),
    "threshold": Look("#0072B2", "o"),
    "threshold and first choice": Look("#56B4E9", "s"),
    "first J": Look("#009E73", "^"),
    "last J": Look("#E69F00", "v"),
    "one rank": Look("#D55E00", "D"),
    "mass budget": Look("#CC79A7", "P"),
    "squared budget": Look("#AA4499", "p"),
    "routing bias": Look("#117733", "h"),
    "random misses": Look("#999933", "*"),
    "true contribution": Look("#332288", "<"),
    "control": Look("#888888", "d"),
}

EVICTION_STYLES: Mapping[str, Look] = {
    "lru": Look("#0072B2", "o", "-"),
    "decayed_count": Look("#D55E00", "s", "-"),
    "plain_count": Look("#E69F00", "^", (0, (5, 2))),
    "plain_count_forget": Look("#CC79A7", "v", (0, (5, 2))),
    "fifo": Look("#009E73", "D", (0, (3, 1, 1, 1))),
    "random": Look("#888888", "d", (0, (1, 1))),
    "static": Look("#999933", "P", (0, (1, 1))),
    "lfru": Look("#882255", "X", (0, (3, 1, 1, 1))),
    "slru": Look("#56B4E9", "p", (0, (3, 1, 1, 1))),
    "belady": Look("#000000", "", (0, (2, 2))),
    "belady_bypass": Look("#666666", "", (0, (4, 2, 1, 2))),
}

EVICTION_WORDS = {"lru": "LRU", "fifo": "FIFO", "slru": "SLRU", "lfru": "LFRU", "belady": "Belady"}

_Arguments = ParamSpec("_Arguments")


def styled(draw: Callable[_Arguments, Figure]) -> Callable[_Arguments, Figure]:
    """Draw under the study's style and leave the global settings as they were."""

    @functools.wraps(draw)
    def drawn(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> Figure:
        with matplotlib.rc_context(RC):
            figure = draw(*arguments, **named)
            _centre_shared_words(figure)
            return figure

    return drawn


def new_figure(height_inches: float, **layout: Any) -> Figure:
    """Return an empty figure of the page's width that pyplot does not know of."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", **layout)
    FigureCanvasAgg(figure)
    return figure


def shared_panels(figure: Figure, num_rows: int, num_columns: int, *, x: str = "", y: str = "", **layout: Any) -> Any:
    """Return panels [rows, columns] whose axes have words in common: `x` stands once below all of them, `y` once at their left.

    The panels lie in a figure within the figure, so that a legend of the whole figure finds its place outside the words.
    """
    inner: Any = figure.subfigures()
    if x:
        inner.supxlabel(x)
    if y:
        inner.supylabel(y)
    return inner.subplots(num_rows, num_columns, squeeze=False, **layout)


def _centre_shared_words(figure: Figure) -> None:
    """Put the words of `shared_panels` at the middle of the panels: the names of their ticks may take a third of the width."""
    if figure.subfigs:
        figure.draw_without_rendering()
    for inner in figure.subfigs:
        boxes = [axes.get_position() for axes in inner.axes if axes.get_subplotspec() is not None]
        if words := inner.get_supxlabel():
            inner.supxlabel(words, x=(min(box.x0 for box in boxes) + max(box.x1 for box in boxes)) / 2)
        if words := inner.get_supylabel():
            inner.supylabel(words, y=(min(box.y0 for box in boxes) + max(box.y1 for box in boxes)) / 2)


def stamp(axes: Axes, kind: str, is_quick: bool = False) -> None:
    """Print in the upper right corner what kind of numbers the figure shows.

    Raises
    ------
    ValueError
        If the kind is none of MEASURED, SIMULATED and ESTIMATED.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: a figure shows numbers that are one of {', '.join(KINDS)}")
    text = f"{kind}, QUICK RUN" if is_quick else kind
    axes.set_title(text, loc="right", fontsize=8, color=FAINT, pad=8)


def look_up(styles: Mapping[str, Look], names: Iterable[str], what: str) -> dict[str, Look]:
    """Return the look of each name.

    Raises
    ------
    ValueError
        If a name has no look; the message lists those that have one.
    """
    unknown = sorted({str(name) for name in names} - set(styles))
    if unknown:
        raise ValueError(
            f"no colour is kept for {what} {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(map(repr, styles))}: use one of them or add a row to moecache/figures/style.py"
        )
    return {str(name): styles[str(name)] for name in names}


def legend_handles(looks: Mapping[str, Look]) -> list[Line2D]:
    """Return a legend's handle for each name: its colour and marker, without a line."""
    return [Line2D([], [], color=look.colour, marker=look.marker, linestyle="", label=name) for name, look in looks.items()]


def line_handles(looks: Mapping[str, Look]) -> list[Line2D]:
    """Return a legend's handle for each name: its colour, marker and dash."""
    dashes: dict[str, Any] = {name: look.dash for name, look in looks.items()}
    return [Line2D([], [], color=look.colour, marker=look.marker, linestyle=dashes[name], label=name) for name, look in looks.items()]


def open_handle(words: str) -> Line2D:
    """Return a legend's handle that says what an open point means."""
    return Line2D([], [], color=FAINT, marker="o", markerfacecolor="white", linestyle="", label=words)


def need_columns(frame: Any, columns: Iterable[str]) -> None:
    """Check a frame before anything is drawn.

    Raises
    ------
    ValueError
        If a column is absent or the frame is empty.
    """
    absent = [c for c in columns if c not in frame.columns]
    if absent:
        raise ValueError(f"the frame lacks {', '.join(absent)}; it has {', '.join(map(str, frame.columns))}")
    if len(frame) == 0:
        raise ValueError("the frame has no rows: there is nothing to draw")


def two_and_five(value: float, _: object) -> str:
    """Minor labels of a logarithmic axis: 2 and 5 of each decade."""
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def spread(places: list[float], gap: float) -> list[float]:
    """Move sorted label places apart until neighbours are at least `gap` away, staying close to their
    points."""
    # Labels that touch move as a block; it starts where its labels, each going back its distance, want it on average.
    blocks: list[list[float]] = []  # sum of the wanted starts, number of labels
    for place in places:
        blocks.append([place, 1.0])
        while len(blocks) > 1 and _bottom(blocks[-1]) < _bottom(blocks[-2]) + blocks[-2][1] * gap:
            total, number = blocks.pop()
            below = blocks[-1]
            below[0] += total - below[1] * gap * number
            below[1] += number
    return [_bottom(block) + i * gap for block in blocks for i in range(int(block[1]))]


def _bottom(block: list[float]) -> float:
    return block[0] / block[1]
