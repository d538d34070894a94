"""Figures of the chapter on capacity and eviction, beside `traces.hit_rate_by_capacity`.

This module does not replay anything; it draws tidy frames.
"""

from __future__ import annotations

from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from moecache.figures.style import (
    EVICTION_STYLES,
    EVICTION_WORDS,
    FAINT,
    INK,
    look_up,
    need_columns,
    new_figure,
    shared_panels,
    stamp,
    styled,
)
from moecache.figures.traces import SOURCE_COLOURS, SOURCE_MARKERS

POINT_MARKERS = "x+1"
GAP_PARTS = {
    "unavoidable": ("even the best must miss", "#bbbbbb"),
    "bypass": ("keeping newcomers out", "#E69F00"),
    "future": ("knowing the future", "#0072B2"),
}


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
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
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


@styled
def gap_parts(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False, source: str = "") -> Figure:
    """Draw each policy's misses as the part that nobody can avoid, the part that bypass explains, and the part that the future does.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``num_slots`` (a panel each), ``unavoidable``, ``bypass``, ``future`` (shares of the calls).
    kind, is_quick, source
        As in ``gain_by_half_life``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("policy", "num_slots", *GAP_PARTS))
    policies, capacities = list(dict.fromkeys(frame["policy"])), sorted(frame["num_slots"].unique())
    figure = new_figure(1.5 + 0.28 * len(policies))
    panels = figure.subplots(1, len(capacities), sharey=True, squeeze=False)[0]
    for axes, slots in zip(panels, capacities, strict=True):
        rows, left = _where(frame, "num_slots", slots).set_index("policy").loc[policies], 0.0
        for part, (words, colour) in GAP_PARTS.items():
            axes.barh(range(len(policies)), rows[part], left=left, color=colour, height=0.65, label=words)
            left = left + rows[part].to_numpy()
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=" %"))
        axes.set_xlabel(f"Misses (of the calls) at {slots} slots")
        axes.grid(True, axis="x")
    panels[0].set_yticks(range(len(policies)), policies)
    panels[0].invert_yaxis()
    panels[0].set_title(source, loc="left", pad=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    stamp(panels[-1], kind, is_quick)
    return figure


@styled
def gain_maps(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw what decayed counts gain over LRU as heat maps of capacity and half-life, one panel per trace (at most six).

    Parameters
    ----------
    frame : DataFrame
        ``panel`` (words above it), ``num_slots``, ``half_life_tokens`` (0 = never decays), ``gain`` (a difference of hit rates).

    Returns
    -------
    Figure
    """
    need_columns(frame, ("panel", "num_slots", "half_life_tokens", "gain"))
    words = list(dict.fromkeys(frame["panel"]))
    columns = min(3, len(words))
    rows = -(-len(words) // columns)
    figure = new_figure(0.9 + 2.6 * rows)
    panels = shared_panels(figure, rows, columns, x="Slots a layer", y="Half-life, tokens").ravel()
    limit = 100 * float(frame["gain"].abs().max())
    image = None
    for axes, panel in zip(panels, words, strict=False):
        image = _heat_map(axes, _where(frame, "panel", panel), limit)
        axes.set_title(panel, loc="left", pad=6, fontsize=9)
    for axes in panels[len(words) :]:
        axes.set_visible(False)
    assert image is not None
    figure.colorbar(image, ax=list(panels), label="Hit rate minus LRU's, points", shrink=0.7, pad=0.02)
    figure.suptitle(f"{kind}, QUICK RUN" if is_quick else kind, x=1.0, ha="right", fontsize=8, color=FAINT)
    return figure


def _heat_map(axes: Axes, frame: pd.DataFrame, limit: float) -> AxesImage:
    """One panel, with its numbers written in; half-lives from the shortest at the bottom to "never decays" at the top."""
    grid = frame.pivot(index="half_life_tokens", columns="num_slots", values="gain") * 100
    grid = grid.loc[[*[value for value in grid.index if value > 0], *[value for value in grid.index if value == 0]]]
    values = grid.to_numpy()
    image = axes.imshow(values, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower")
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value = values[row, column]
            colour = "white" if abs(value) > 0.65 * limit else INK
            axes.annotate(f"{value:+.1f}", (column, row), ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(grid.shape[1]), [f"{slots:g}" for slots in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [f"{value:g}" if value else "never" for value in grid.index])
    axes.tick_params(length=0)
    return image


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
