"""Figures of simulated time: where it goes, how it moves with the link and the constants, and what is substituted for it.

This module does not know how a time was computed; it draws tidy frames in milliseconds a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from moecache.figures.style import (
    FAINT,
    FAMILY_STYLES,
    Look,
    legend_handles,
    look_up,
    need_columns,
    new_figure,
    open_handle,
    shared_panels,
    stamp,
    styled,
    two_and_five,
)
from moecache.figures.traces import SOURCE_COLOURS, SOURCE_MARKERS

PARTS = {"compute_ms": ("computing", "#bbbbbb"), "waiting_ms": ("waiting for fetches", "#0072B2"), "stall_ms": ("stalls", "#D55E00")}
MACHINE_WORDS = {
    "pcie3": "PCIe 3.0 x16, GPU",
    "pcie4": "PCIe 4.0 x16, GPU",
    "pcie5": "PCIe 5.0 x16, GPU",
    "nvme": "NVMe disk, CPU",
    "sata": "SATA disk, CPU",
}
STYLES = {**FAMILY_STYLES, "routing bias": Look("#999933", "*")}
CONSTANT_WORDS = {
    "link_bytes_per_second": "link rate", "fetch_latency_seconds": "latency of a fetch", "layer_seconds": "fixed time of a layer",
    "device_bytes_per_second": "device's reading rate", "overlap": "overlap",
}  # fmt: skip


def label_times(figure: Figure, panels: Sequence[Axes], words: str) -> None:
    """Name the axis of ratios that panels share, and tell their lines apart below them."""
    panels[0].set_ylabel(words)
    count_in_times(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def count_in_times(axes: Axes) -> None:
    """Label the vertical axis 0.5x, 1x, 2x."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(NullFormatter())


@styled
def time_parts(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw where the time of a token goes, one bar per policy, one panel per machine.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``hardware``, ``ms_per_token`` and its parts ``compute_ms``, ``waiting_ms``, ``stall_ms``; policies from the top in
        the order of their first rows.
    kind, is_quick
        What kind of numbers these are, and whether of a quick run.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("policy", "hardware", "ms_per_token", *PARTS))
    policies, machines = list(dict.fromkeys(frame["policy"])), list(dict.fromkeys(frame["hardware"]))
    figure = new_figure(1.3 + 0.3 * len(policies))
    panels = shared_panels(figure, 1, len(machines), x="ms a token", sharey=True)[0]
    for axes, machine in zip(panels, machines, strict=True):
        rows = pd.DataFrame(frame[frame["hardware"] == machine]).set_index("policy").loc[policies]
        left = np.zeros(len(policies))
        for part, (_, colour) in PARTS.items():
            axes.barh(range(len(policies)), rows[part], left=left, color=colour, height=0.65)
            left += rows[part].to_numpy()
        for place, total in enumerate(rows["ms_per_token"]):
            axes.annotate(_short(total), (total, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.set_xlim(0.0, 1.2 * left.max())
        axes.set_title(MACHINE_WORDS.get(machine, machine), loc="left", pad=8, fontsize=9)
        axes.grid(True, axis="x")
    panels[0].set_yticks(range(len(policies)), policies)
    panels[0].invert_yaxis()
    patches = [Line2D([], [], color=colour, marker="s", markersize=8, linestyle="", label=words) for words, colour in PARTS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, handletextpad=0.3)
    stamp_figure(figure, kind, is_quick)
    return figure


@styled
def speed_up_by_link_rate(
    frame: pd.DataFrame, level: float, marks: dict[str, float] | None = None, *, kind: str = "SIMULATED", is_quick: bool = False
) -> Figure:
    """Draw how many times faster than fetching every miss each policy is, against the rate of the link.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``gigabytes_per_second``, ``speed_up``, ``panel`` (its words stand above the panel).
    level : float
        A speed-up to draw a line at.
    marks : dict, optional
        Names of link rates to mark along the axis.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("policy", "gigabytes_per_second", "speed_up", "panel"))
    words = list(dict.fromkeys(frame["panel"]))
    figure = new_figure(4.1)
    panels = shared_panels(figure, 1, len(words), x="Link, GB/s", sharey=True)[0]
    for axes, panel in zip(panels, words, strict=True):
        draw_lines(axes, pd.DataFrame(frame[frame["panel"] == panel]), "policy", "gigabytes_per_second", "speed_up")
        axes.axhline(level, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        rates = sorted(set(frame["gigabytes_per_second"]))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.xaxis.set_minor_locator(NullLocator())
        _mark_rates(axes, marks or {})
        axes.set_title(panel, loc="left", pad=8, fontsize=9)
        axes.grid(True, axis="y")
    label_times(figure, panels, "Speed-up over fetching every miss")
    stamp_figure(figure, kind, is_quick)
    return figure


@styled
def elasticity_bars(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw by how many percent the time changes for one percent of each constant, policies side by side, one panel per machine.

    Parameters
    ----------
    frame : DataFrame
        ``policy`` (at most four), ``hardware``, ``constant``, ``elasticity``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("policy", "hardware", "constant", "elasticity"))
    policies, machines = list(dict.fromkeys(frame["policy"])), list(dict.fromkeys(frame["hardware"]))
    constants = list(dict.fromkeys(frame["constant"]))
    figure = new_figure(3.6)
    panels = shared_panels(figure, 1, len(machines), x="Change of time in % when the constant grows by 1 %", sharey=True)[0]
    height = 0.8 / len(policies)
    for axes, machine in zip(panels, machines, strict=True):
        for number, (policy, colour) in enumerate(zip(policies, SOURCE_COLOURS, strict=False)):
            rows = frame[(frame["hardware"] == machine) & (frame["policy"] == policy)].set_index("constant")
            heights = rows["elasticity"].reindex(constants).fillna(0.0)
            places = np.arange(len(constants)) + height * (number - (len(policies) - 1) / 2)
            axes.barh(places, heights, height=0.9 * height, color=colour, label=policy)
        axes.axvline(0.0, color=FAINT, linewidth=1.0)
        axes.set_title(machine_words(machine), loc="left", pad=8, fontsize=9)
        axes.grid(True, axis="x")
    panels[0].set_yticks(range(len(constants)), [CONSTANT_WORDS.get(name, name) for name in constants])
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(policies))
    stamp_figure(figure, kind, is_quick)
    return figure


@styled
def time_by_mass(frame: pd.DataFrame, *, names: Sequence[str] = (), kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw one point per policy, time against substituted gate mass, and the line of those that no other beats in both.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``family``, ``hardware`` (a panel each), ``ms_per_token``, ``substituted_mass``, ``is_front``, ``is_admitting`` (drawn
        open).
    names : sequence of str
        Policies whose names are written beside their points.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("policy", "family", "hardware", "ms_per_token", "substituted_mass", "is_front", "is_admitting"))
    looks = look_up(STYLES, frame["family"], "family")
    machines, middle = list(dict.fromkeys(frame["hardware"])), float(np.max(frame["substituted_mass"].to_numpy())) / 2
    figure = new_figure(4.5)
    panels = shared_panels(figure, 1, len(machines), x="Substituted gate mass (mean a step)", y="ms a token")[0]
    for axes, machine in zip(panels, machines, strict=True):
        rows = pd.DataFrame(frame[frame["hardware"] == machine])
        front = pd.DataFrame(rows[rows["is_front"]]).sort_values("substituted_mass")
        axes.step(front["substituted_mass"], front["ms_per_token"], where="post", color=FAINT, linewidth=1.0)
        for row in rows.to_dict("records"):
            look = looks[row["family"]]
            face = "white" if row["is_admitting"] else look.colour
            axes.plot(row["substituted_mass"], row["ms_per_token"], look.marker, color=look.colour, markerfacecolor=face, markersize=6.5)
            if row["policy"] in names:
                _name_point(axes, row["policy"], row["substituted_mass"], row["ms_per_token"], is_left=row["substituted_mass"] > middle)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(two_and_five))
        axes.set_title(machine_words(machine), loc="left", pad=8, fontsize=9)
        axes.grid(True, axis="both", which="both")
    open_one = open_handle("open: decayed count, admission")
    figure.legend(handles=[*legend_handles(looks), open_one], loc="outside lower center", ncols=3, handletextpad=0.3)
    stamp_figure(figure, kind, is_quick)
    return figure


def draw_lines(axes: Axes, frame: pd.DataFrame, group: str, x: str, y: str) -> None:
    """One line per value of `group`, in order of appearance."""
    for number, name in enumerate(dict.fromkeys(frame[group])):
        rows = pd.DataFrame(frame[frame[group] == name]).sort_values(x)
        axes.plot(rows[x], rows[y], color=SOURCE_COLOURS[number], marker=SOURCE_MARKERS[number], markersize=5, label=name)


def _name_point(axes: Axes, name: str, x: float, y: float, is_left: bool) -> None:
    """Write a name above and right of a point, or below and left of it; it may lie over the picture, never change its size."""
    place, side = ((-8, -9), "right") if is_left else ((8, 4), "left")
    text = axes.annotate(name, (x, y), xytext=place, textcoords="offset points", ha=side, fontsize=8.5)
    text.set_in_layout(False)


def _mark_rates(axes: Axes, marks: dict[str, float]) -> None:
    for name, rate in marks.items():
        axes.axvline(rate, color="#dddddd", linewidth=1.0, zorder=0)
        axes.annotate(name, (rate, 1.0), xycoords=("data", "axes fraction"), xytext=(2, -3), textcoords="offset points", rotation=90,
                      va="top", ha="left", fontsize=7.5, color=FAINT)  # fmt: skip


def stamp_figure(figure: Figure, kind: str, is_quick: bool) -> None:
    """The stamp on a line of its own above the panels, whose titles need their width."""
    stamp(figure.axes[-1], kind, is_quick)
    text = figure.axes[-1].get_title(loc="right")
    figure.axes[-1].set_title("", loc="right", pad=8)
    figure.suptitle(text, x=1.0, ha="right", fontsize=8, color=FAINT)


def machine_words(name: str) -> str:
    return MACHINE_WORDS.get(name, name)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"
