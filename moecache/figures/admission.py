"""Figures of background admission: effects by distance from a topic change, and loss against experts moved.

Each figure takes a tidy table; this module does not know how effects and intervals were computed.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecache.figures.style import INK, Look, look_up, need_columns, new_figure, shared_panels, spread, stamp, styled, two_and_five

KIND_STYLES = {
    "threshold curve": Look("#0072B2", "o", "-"),
    "bare rule": Look("#000000", "P"),
    "0.15 rule and admission": Look("#D55E00", "s"),
    "first choice and admission": Look("#009E73", "^"),
    "decayed count": Look("#CC79A7", "D"),
    "caps": Look("#999933", "X"),
}
LINE_LOOKS = (
    Look("#0072B2", "o", "-"),
    Look("#D55E00", "s", "-"),
    Look("#56B4E9", "o", (0, (4, 2))),
    Look("#E69F00", "s", (0, (4, 2))),
)


@styled
def by_distance(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw effects by distance from a document's start, a panel for each question and a line for each policy.

    Parameters
    ----------
    table : DataFrame
        ``panel`` (its title), ``line``, ``span`` (words), ``effect``, ``low``, ``high`` (nats); spans in order of distance.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns, or more than four lines in a panel.
    """
    need_columns(table, ("panel", "line", "span", "effect", "low", "high"))
    panels = list(dict.fromkeys(table["panel"]))
    figure = new_figure(3.9)
    words = {"x": "Tokens from the document's start", "y": "Change of the loss, thousandths of a nat"}
    grid = shared_panels(figure, 1, len(panels), **words)[0]
    for title, axes in zip(panels, grid, strict=True):
        _draw_lines(axes, table[table["panel"] == title])
        axes.set_title(title, loc="left", fontsize=9)
    stamp(grid[-1], kind, is_quick)
    return figure


def _draw_lines(axes: Axes, rows: pd.DataFrame) -> None:
    lines, spans = list(dict.fromkeys(rows["line"])), list(dict.fromkeys(rows["span"]))
    if len(lines) > len(LINE_LOOKS):
        raise ValueError(f"{len(lines)} lines in one panel: at most {len(LINE_LOOKS)} can be told apart")
    axes.axhline(0.0, color=INK, linewidth=0.8)
    for place, (line, look) in enumerate(zip(lines, LINE_LOOKS, strict=False)):
        points = rows[rows["line"] == line]
        shifted = [spans.index(span) + 0.09 * (place - (len(lines) - 1) / 2) for span in points["span"]]
        bounds = [1000 * (points["effect"] - points["low"]), 1000 * (points["high"] - points["effect"])]
        axes.errorbar(
            shifted, 1000 * points["effect"], yerr=bounds, color=look.colour, marker=look.marker, linestyle=look.dash, markersize=5,
            elinewidth=1.2, markerfacecolor=look.colour if look.dash == "-" else "white", label=line,
        )  # fmt: skip
    axes.set_xticks(range(len(spans)), spans)
    axes.grid(True, axis="y")
    axes.legend(fontsize=8, loc="best")


@styled
def loss_by_moved(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw perplexity increase against experts moved a step, the threshold curve as a line and every other policy as a point.

    Parameters
    ----------
    table : DataFrame
        ``policy``, ``kind``, ``moved``, ``increase``, ``low``, ``high`` (fractions).
    kind, is_quick
        As in ``by_distance``.

    Returns
    -------
    Figure
        Both axes logarithmic (below 1 % linear, where an interval reaches zero). What lies above the line buys less with its bytes
        than a lower threshold would.
    """
    need_columns(table, ("policy", "kind", "moved", "increase", "low", "high"))
    looks = look_up(KIND_STYLES, table["kind"], "kind")
    figure = new_figure(4.8)
    axes = figure.subplots()
    for name, look in looks.items():
        points = table[table["kind"] == name].sort_values("moved")
        is_curve = name == "threshold curve"
        bounds = [100 * (points["increase"] - points["low"]), 100 * (points["high"] - points["increase"])]
        axes.errorbar(
            points["moved"], 100 * points["increase"], yerr=bounds, color=look.colour, marker=look.marker, markersize=6,
            linestyle=look.dash if is_curve else "", elinewidth=0.9, label=name,
        )  # fmt: skip
    axes.set_xscale("log")
    is_positive = float(table[["low", "increase"]].min().min()) > 0.0
    axes.set_yscale("log" if is_positive else "symlog", **({} if is_positive else {"linthresh": 1.0}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    if is_positive:
        axes.yaxis.set_minor_formatter(two_and_five)
    axes.set(xlabel="Experts moved a step: fetches waited for, and copies", ylabel="Perplexity increase, %")
    axes.grid(True, which="both", axis="both")
    _label(axes, table)
    figure.legend(loc="outside lower center", ncols=3)
    stamp(axes, kind, is_quick)
    return figure


def _label(axes: Axes, table: pd.DataFrame) -> None:
    """Name the threshold curve's points and the bare rules; a page's table names the others."""
    named = table[table["kind"].isin(["threshold curve", "bare rule"])].sort_values("increase")
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    points = axes.transData.transform(named[["moved", "increase"]].to_numpy() * [1.0, 100.0])
    scale = 72.0 / axes.figure.dpi
    heights = spread([float(y) for y in points[:, 1]], gap=0.15 * axes.figure.dpi)
    for (x, y), height, label in zip(points, heights, named["policy"], strict=True):
        at = axes.transData.inverted().transform((x, y))
        axes.annotate(label, tuple(at), xytext=(8, (height - y) * scale), textcoords="offset points", va="center", fontsize=8)
