"""Figures of the chapter on capacity and eviction, beside `traces.hit_rate_by_capacity`.

This module does not replay anything; it draws tidy frames.
"""

from __future__ import annotations

from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from moecache.figures.style import EVICTION_STYLES, EVICTION_WORDS, FAINT, INK, look_up, need_columns, new_figure, stamp, styled
from moecache.figures.traces import SOURCE_COLOURS, SOURCE_MARKERS

POINT_MARKERS = "x+1"


def add_public_points(figure: Figure, points: pd.DataFrame) -> Figure:
    """Mark published hit rates (`source`, `num_slots`, `hit_rate`) in a figure of `hit_rate_by_capacity`, one marker a source."""
    axes = figure.axes[-1]
    for marker, (source, rows) in zip(cycle(POINT_MARKERS), points.groupby("source", sort=False), strict=False):
        axes.plot(rows["num_slots"], rows["hit_rate"], marker, color=INK, markersize=8, markeredgewidth=1.6, label=f"LRU, {source}")
    handles, labels = axes.get_legend_handles_labels()
    for panel in figure.axes:
        legend = panel.get_legend()
        if legend is not None:
            legend.remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.set_figheight(figure.get_figheight() + 0.6)
    return figure


@styled
def gain_by_half_life(
    frame: pd.DataFrame, plain: pd.DataFrame | None = None, *, kind: str = "SIMULATED", is_quick: bool = False, source: str = ""
) -> Figure:
    """Draw what decayed counts gain over LRU, in points of hit rate, against their half-life, one line per capacity.

    Parameters
    ----------
    frame : DataFrame
        ``half_life_tokens``, ``num_slots``, ``difference``, ``low``, ``high`` (fractions of the calls).
    plain : DataFrame, optional
        The same columns but the half-life, for counts that never decay: drawn at the right, as an infinite half-life.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool
    source : str
        The trace, above the picture.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("half_life_tokens", "num_slots", "difference", "low", "high"))
    figure = new_figure(3.8)
    axes = figure.subplots()
    half_lives = sorted(frame["half_life_tokens"].unique())
    never = 4 * half_lives[-1]
    for colour, marker, slots in zip(SOURCE_COLOURS, SOURCE_MARKERS, sorted(frame["num_slots"].unique()), strict=False):
        rows = _where(frame, "num_slots", slots).sort_values("half_life_tokens")
        axes.plot(rows["half_life_tokens"], rows["difference"], color=colour, marker=marker, label=f"{slots} slots")
        axes.fill_between(rows["half_life_tokens"], rows["low"], rows["high"], color=colour, alpha=0.15, linewidth=0)
        for row in [] if plain is None else _where(plain, "num_slots", slots).to_dict("records"):
            bounds = [[row["difference"] - row["low"]], [row["high"] - row["difference"]]]
            axes.errorbar(never, row["difference"], yerr=bounds, color=colour, marker=marker, elinewidth=1.2)
    axes.axhline(0.0, color=FAINT, linewidth=1.0)
    _name_line(axes, 0.0, "LRU")
    axes.set_xscale("log", base=2)
    ticks = [*half_lives, *([] if plain is None else [never])]
    axes.set_xticks(ticks, [f"{value:g}" if value in half_lives else "never\ndecays" for value in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Half-life of a call, tokens", ylabel="Hit rate minus LRU's, points")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g}"))
    return _finish(figure, axes, source, kind, is_quick)


@styled
def hit_rate_by_layer(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False, source: str = "") -> Figure:
    """Draw the hit rate of each layer, one line per eviction.

    Parameters
    ----------
    frame : DataFrame
        ``layer``, ``eviction``, ``hit_rate`` (0 to 1).
    kind, is_quick, source
        As in ``gain_by_half_life``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("layer", "eviction", "hit_rate"))
    looks = look_up(EVICTION_STYLES, frame["eviction"], "eviction")
    figure = new_figure(3.4)
    axes = figure.subplots()
    for eviction, look in looks.items():
        rows = _where(frame, "eviction", eviction).sort_values("layer")
        axes.plot(rows["layer"], rows["hit_rate"], color=look.colour, marker=look.marker, linestyle=look.dash, label=_words(eviction))
    axes.set(xlabel="MoE layer (0 = nearest the input)", ylabel="Hit rate (of the calls)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=" %"))
    return _finish(figure, axes, source, kind, is_quick)


@styled
def inflation_by_capacity(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False, source: str = "") -> Figure:
    """Draw how many times the right number of misses a replay of single calls reports, one line per eviction.

    Parameters
    ----------
    frame : DataFrame
        ``num_slots``, ``eviction``, ``inflation`` (1 = right).
    kind, is_quick, source
        As in ``gain_by_half_life``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("num_slots", "eviction", "inflation"))
    looks = look_up(EVICTION_STYLES, frame["eviction"], "eviction")
    figure = new_figure(3.4)
    axes = figure.subplots()
    for eviction, look in looks.items():
        rows = _where(frame, "eviction", eviction).sort_values("num_slots")
        axes.plot(rows["num_slots"], rows["inflation"], color=look.colour, marker=look.marker, linestyle=look.dash, label=_words(eviction))
    axes.axhline(1.0, color=FAINT, linewidth=1.0)
    _name_line(axes, 1.0, "right")
    slots = sorted(frame["num_slots"].unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, [str(number) for number in slots])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Slots a layer", ylabel="Misses one by one / misses")
    return _finish(figure, axes, source, kind, is_quick)


def _where(frame: pd.DataFrame, column: str, value: object) -> pd.DataFrame:
    return pd.DataFrame(frame[frame[column] == value])


def _words(eviction: str) -> str:
    return EVICTION_WORDS.get(eviction, eviction.replace("_", " "))


def _name_line(axes: Axes, height: float, name: str) -> None:
    """Write what a level line stands for, right of the picture."""
    axes.annotate(name, (1.0, height), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", va="center",
                  color=FAINT, fontsize=9)  # fmt: skip


def _finish(figure: Figure, axes: Axes, source: str, kind: str, is_quick: bool) -> Figure:
    axes.grid(True, axis="y")
    axes.legend(loc="best")
    axes.set_title(source, loc="left", pad=8)
    stamp(axes, kind, is_quick)
    return figure
