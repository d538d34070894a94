"""Figures of engines compared at equal memory: tokens per second, one panel per cap.

This module does not know engines, caps or how an interval was computed; it draws a tidy table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from moecache.figures.seconds import stamp_figure
from moecache.figures.style import Look, need_columns, new_figure, shared_panels, styled

LOOKS = {True: Look("#0072B2", "s"), False: Look("#D55E00", "o")}
WORDS = {True: "this project's runtime", False: "stock engine"}
COLUMNS_OF_PANELS = 2


@styled
def rates_by_cap(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw tokens per second of each engine, a panel for each cap, with the peak of its memory beside it.

    Parameters
    ----------
    table : DataFrame
        ``cell`` (its words stand above the panel), ``engine``, ``is_ours``, ``rate``, ``low``, ``high`` (tokens per second; no interval
        is drawn where the bounds are NaN), ``peak_gibibytes`` (or NaN), ``outcome`` (written where there is no rate).
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns, or if no engine has a rate.
    """
    need_columns(table, ("cell", "engine", "is_ours", "rate", "low", "high", "peak_gibibytes", "outcome"))
    if not table["rate"].notna().any():
        raise ValueError("no engine has a rate: there is nothing to draw")
    cells, engines = list(dict.fromkeys(table["cell"])), list(dict.fromkeys(table["engine"]))
    num_columns = min(COLUMNS_OF_PANELS, len(cells))
    num_rows = math.ceil(len(cells) / num_columns)
    figure = new_figure(0.9 + num_rows * (0.7 + 0.27 * len(engines)))
    grid = shared_panels(figure, num_rows, num_columns, x="Tokens per second", sharex=True, sharey=True)
    panels = list(grid.flat)
    for axes, cell in zip(panels, cells, strict=False):
        _draw_cell(axes, table[table["cell"] == cell], engines)
        axes.set_title(cell, loc="left", pad=6, fontsize=9)
    for axes in panels[len(cells) :]:
        axes.set_visible(False)
    _scale(panels[0], table, engines)
    figure.legend(handles=_handles(table), loc="outside lower center", ncols=2, handletextpad=0.3)
    stamp_figure(figure, kind, is_quick)
    return figure


def _draw_cell(axes: Axes, rows: pd.DataFrame, engines: list[str]) -> None:
    for row in rows.to_dict("records"):
        place, look = engines.index(row["engine"]), LOOKS[bool(row["is_ours"])]
        if np.isnan(row["rate"]):
            axes.annotate(
                f"✕ {row['outcome']}", (0.0, place), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=8, color=look.colour,
            )  # fmt: skip
            continue
        end = row["rate"]
        if np.isfinite(row["low"]) and np.isfinite(row["high"]):
            axes.plot([row["low"], row["high"]], [place, place], color=look.colour, linewidth=1.4)
            end = row["high"]
        axes.plot(row["rate"], place, look.marker, color=look.colour, markersize=6)
        axes.annotate(_label(row), (end, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
    axes.grid(True, axis="x")


def _label(row: dict[Any, Any]) -> str:
    """The rate, and the peak where the system told it."""
    rate = f"{row['rate']:.0f}" if row["rate"] >= 99.5 else f"{row['rate']:.2g}" if row["rate"] < 9.95 else f"{row['rate']:.1f}"
    return rate if np.isnan(row["peak_gibibytes"]) else f"{rate}, {row['peak_gibibytes']:.2g} GiB"


def _scale(axes: Axes, table: pd.DataFrame, engines: list[str]) -> None:
    """A logarithmic axis with room for the labels on its right."""
    bounds = table[["rate", "low", "high"]].to_numpy(np.float64)
    lowest, highest = np.nanmin(bounds), np.nanmax(bounds)
    axes.set_xscale("log")
    axes.set_xlim(lowest / 1.6, highest * (4 * highest / lowest) ** 0.55)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if highest > 10 * lowest else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(engines)), engines)
    axes.set_ylim(len(engines) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _handles(table: pd.DataFrame) -> list[Line2D]:
    kinds = [is_ours for is_ours in (False, True) if (table["is_ours"] == is_ours).any()]
    return [
        Line2D([], [], color=LOOKS[kind].colour, marker=LOOKS[kind].marker, linestyle="", label=f"{WORDS[kind]} (with its peak of memory)")
        for kind in kinds
    ]
