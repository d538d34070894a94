"""Figures of measured seconds: where a token's time goes, the gain against the link's rate, and the simulator beside the clock.

This module does not know how anything was timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from moecache.figures.seconds import count_in_times, stamp_figure
from moecache.figures.style import (
    FAINT,
    INK,
    Look,
    legend_handles,
    look_up,
    need_columns,
    new_figure,
    open_handle,
    shared_panels,
    styled,
    two_and_five,
)

PARTS = {
    "rest_seconds_per_token": ("head", "#f0e442"),
    "dense_seconds_per_token": ("dense layers", "#bdbdbd"),
    "experts_seconds_per_token": ("experts", "#7f7f7f"),
    "routing_seconds_per_token": ("routing", "#CC79A7"),
    "overhead_seconds_per_token": ("keeping books", "#882255"),
    "waiting_seconds_per_token": ("waiting", "#0072B2"),
}
POLICY_LOOKS = {
    "fetch every miss": Look("#000000", "|"),
    "0.15 rule": Look("#56B4E9", "s"),
    "first choice": Look("#009E73", "^"),
    "substitute every miss": Look("#882255", "X"),
    "quality-first": Look("#0072B2", "o"),
    "speed-first": Look("#D55E00", "v"),
    "all hits": Look("#888888", "d"),
}


@styled
def time_parts(frame: pd.DataFrame, titles: Sequence[str] = (), *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw where the time of a token goes, one bar a policy, one panel a link; the whisker is the interval of the whole.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``link``, ``seconds_per_token`` with ``_low`` and ``_high``, and its parts (see `PARTS`), in seconds.
    titles : sequence of str
        Words for the links, by default their names.
    kind, is_quick
        What kind of numbers these are, and whether of a quick run.

    Returns
    -------
    Figure
    """
    whole = [f"seconds_per_token{end}" for end in ("", "_low", "_high")]
    need_columns(frame, ("policy", "link", *whole, *PARTS))
    policies, links = list(dict.fromkeys(frame["policy"])), list(dict.fromkeys(frame["link"]))
    figure = new_figure(1.5 + 0.3 * len(policies))
    panels = shared_panels(figure, 1, len(links), x="ms a token", sharey=True)[0]
    for axes, link, title in zip(panels, links, titles or links, strict=True):
        rows = 1e3 * pd.DataFrame(frame[frame["link"] == link]).set_index("policy").loc[policies, [*PARTS, *whole]]
        left = np.zeros(len(policies))
        for part, (_, colour) in PARTS.items():
            axes.barh(range(len(policies)), rows[part], left=left, color=colour, height=0.65, edgecolor="white", linewidth=0.4)
            left += rows[part].to_numpy()
        middle, low, high = (rows[name].to_numpy() for name in whole)
        axes.errorbar(middle, range(len(policies)), xerr=[middle - low, high - middle], fmt="none", ecolor=INK, elinewidth=1.0, capsize=2)
        for place, (end, total) in enumerate(zip(np.maximum(high, left), middle, strict=True)):
            axes.annotate(f"{total:.3g}", (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.set_xlim(0.0, 1.25 * max(high.max(), left.max()))
        axes.set_title(title, loc="left", pad=8, fontsize=9)
        axes.grid(True, axis="x")
    panels[0].set_yticks(range(len(policies)), policies)
    panels[0].invert_yaxis()
    patches = [Line2D([], [], color=colour, marker="s", markersize=8, linestyle="", label=words) for words, colour in PARTS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(PARTS), handletextpad=0.2, columnspacing=1.2, fontsize=8.5)
    stamp_figure(figure, kind, is_quick)
    return figure


@styled
def ratio_by_link(
    points: pd.DataFrame, formula: pd.DataFrame, band: tuple[float, float], *, kind: str = "MEASURED", is_quick: bool = False
) -> Figure:
    """Draw how many times as fast as fetching every miss each policy is, against the rate of the link, and the formula's line.

    Parameters
    ----------
    points : DataFrame
        ``policy``, ``link_bytes_per_second``, ``ratio`` with ``_low`` and ``_high``, ``is_disk`` (drawn open).
    formula : DataFrame
        ``bytes_per_second``, ``ratio``: the line.
    band : (float, float)
        Ratios to draw a band between.
    kind, is_quick
        As in ``time_parts``.

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns or an unknown policy.
    """
    need_columns(points, ("policy", "link_bytes_per_second", "ratio", "ratio_low", "ratio_high", "is_disk"))
    need_columns(formula, ("bytes_per_second", "ratio"))
    looks = look_up(POLICY_LOOKS, points["policy"], "policy")
    figure = new_figure(4.4)
    axes = figure.subplots()
    axes.axhspan(*band, color="#eeeeee", zorder=0)
    axes.plot(formula["bytes_per_second"] / 1e9, formula["ratio"], color=INK, linewidth=1.2)
    _draw_points(axes, points, looks)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    count_in_times(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="Link, GB/s", ylabel="Times as fast as fetching every miss")
    axes.grid(True, axis="both")
    line = Line2D([], [], color=INK, linewidth=1.2, label="1 + W / T (ESTIMATED)")
    figure.legend(handles=[*legend_handles(looks), open_handle("open: the disk"), line], loc="outside lower center", ncols=3)
    stamp_figure(figure, kind, is_quick)
    return figure


def _draw_points(axes: Axes, points: pd.DataFrame, looks: dict[str, Look]) -> None:
    """Ratios with their intervals, policies a little apart; those of the disk are open."""
    shifts = np.exp(np.linspace(-0.06, 0.06, len(looks)))
    for (policy, look), shift in zip(looks.items(), shifts, strict=True):
        for is_disk, rows in points[points["policy"] == policy].groupby("is_disk"):
            bars = [rows["ratio"] - rows["ratio_low"], rows["ratio_high"] - rows["ratio"]]
            axes.errorbar(
                rows["link_bytes_per_second"] / 1e9 * shift, rows["ratio"], yerr=bars, fmt=look.marker, color=look.colour, markersize=6,
                markerfacecolor="white" if is_disk else look.colour, elinewidth=1.1,
            )  # fmt: skip


@styled
def predicted_by_measured(frame: pd.DataFrame, share: float, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw the simulator's time of a token against the measured one, with the diagonal and a band of so many percent around it.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``seconds_per_token`` (MEASURED), ``predicted_seconds`` (SIMULATED), ``is_disk`` (drawn open).
    share : float
        Half width of the band, a fraction.
    kind, is_quick
        As in ``time_parts``; the kind is that of the horizontal axis.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("policy", "seconds_per_token", "predicted_seconds", "is_disk"))
    looks = look_up(POLICY_LOOKS, frame["policy"], "policy")
    both = 1e3 * frame[["seconds_per_token", "predicted_seconds"]].to_numpy()
    ends = np.array([both.min() / 1.2, both.max() * 1.2])
    figure = new_figure(4.4)
    axes = figure.subplots()
    axes.fill_between(ends, ends * (1 - share), ends * (1 + share), color="#eeeeee", zorder=0)
    axes.plot(ends, ends, color=FAINT, linewidth=1.0)
    for row, (x, y) in zip(frame.to_dict("records"), both, strict=True):
        look = looks[row["policy"]]
        face = "white" if row["is_disk"] else look.colour
        axes.plot(x, y, look.marker, color=look.colour, markerfacecolor=face, markersize=7)
    axes.set(xscale="log", yscale="log", xlabel="Measured, ms a token", ylabel="SIMULATED, ms a token")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(two_and_five))
    axes.grid(True, axis="both")
    figure.legend(handles=[*legend_handles(looks), open_handle("open: the disk")], loc="outside lower center", ncols=4)
    stamp_figure(figure, kind, is_quick)
    return figure
