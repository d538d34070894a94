"""Figures of one machine: the rate of every part in every round, and the disk over time.

This module does not know how a rate was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from moecache.figures.style import INK, Look, look_up, need_columns, new_figure, stamp, styled

GROUP_LOOKS = {"memory": Look("#009E73", "o"), "disk": Look("#0072B2", "s"), "products": Look("#D55E00", "^")}
LINES = (Look("#0072B2", "s", "-"), Look("#56B4E9", "o", (0, (5, 2))), Look("#332288", "^", (0, (1, 1.5))))


@styled
def rates_by_part(frame: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw the rate of each part, a mark a round and a bar at the median; below, the disk's rates over time.

    Parameters
    ----------
    frame : DataFrame
        ``part`` ("group, what exactly"; groups are memory, disk and products), ``round``, ``minutes``, ``gigabytes_per_second``.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns or an unknown group of parts.
    """
    need_columns(frame, ("part", "round", "minutes", "gigabytes_per_second"))
    parts = list(dict.fromkeys(frame["part"]))
    groups = look_up(GROUP_LOOKS, [part.partition(",")[0] for part in parts], "group of parts")
    looks = {part: groups[part.partition(",")[0]] for part in parts} | dict(zip(_of_disk(parts), LINES, strict=False))
    figure = new_figure(0.3 * len(parts) + 3.2)
    panels: Any = figure.subplots(2, 1, height_ratios=[0.3 * len(parts), 2.0])
    for place, part in enumerate(parts):
        rows, look = frame[frame["part"] == part]["gigabytes_per_second"], looks[part]
        panels[0].plot(rows, [place] * len(rows), look.marker, color=look.colour, markersize=5, alpha=0.6, markeredgewidth=0)
        panels[0].plot([rows.median()] * 2, [place - 0.32, place + 0.32], color=INK, linewidth=1.6)
    panels[0].set_yticks(range(len(parts)), parts)
    panels[0].invert_yaxis()
    panels[0].set_xscale("log")
    panels[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[0].xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_xlabel("GB/s, one mark a round, bar: median")
    panels[0].grid(True, axis="x")
    _draw_disk(panels[1], frame, {part: looks[part] for part in _of_disk(parts)})
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    stamp(panels[0], kind, is_quick)
    return figure


def _of_disk(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if part.startswith("disk")]


def _draw_disk(axes: Axes, frame: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """The disk's rates over time; the axis says that they are the disk's, so the legend's names do not."""
    rows = frame[frame["part"].isin(list(looks))]
    unit, scale = ("Seconds", 60.0) if rows["minutes"].max() < 3 else ("Minutes", 1.0)
    for part, look in looks.items():
        line = rows[rows["part"] == part]
        dash: Any = look.dash
        x, y = scale * line["minutes"], line["gigabytes_per_second"]
        axes.plot(x, y, color=look.colour, marker=look.marker, linestyle=dash, markersize=5, label=part.removeprefix("disk, "))
    axes.set_xlabel(f"{unit} since the first round")
    axes.set_ylabel("Disk, GB/s")
    axes.set_ylim(bottom=0.0)
    axes.grid(True, axis="y")
