"""Figures of copies that nobody asked to wait for, in simulated time: background admission and prefetching.

This module does not know how a time was computed; it draws tidy frames.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from moecache.figures.seconds import count_in_times, draw_lines, label_times, machine_words, stamp_figure
from moecache.figures.style import FAINT, INK, need_columns, new_figure, shared_panels, stamp, styled
from moecache.figures.traces import SOURCE_COLOURS, SOURCE_MARKERS


@styled
def time_by_threshold(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw time (left) and substituted gate mass (right) against the mass threshold of background admission.

    Parameters
    ----------
    frame : DataFrame
        ``hardware``, ``mass_threshold``, ``substituted_mass``, ``ratio`` (time over that of the same rule without admission).

    Returns
    -------
    Figure
    """
    need_columns(frame, ("hardware", "mass_threshold", "ratio", "substituted_mass"))
    figure = new_figure(3.5)
    ((times, masses),) = shared_panels(figure, 1, 2, x="Mass threshold (0 = every miss)", width_ratios=(1.5, 1.0))
    draw_lines(times, frame.assign(hardware=frame["hardware"].map(machine_words)), "hardware", "mass_threshold", "ratio")
    times.axhline(1.0, color=FAINT, linewidth=1.0)
    times.set_yscale("log", base=2)
    count_in_times(times)
    times.set_ylabel("Time / time without admission")
    times.legend(loc="upper right")
    one = pd.DataFrame(frame.drop_duplicates("mass_threshold")).sort_values("mass_threshold")
    masses.plot(one["mass_threshold"], one["substituted_mass"], color=INK, marker="o")
    masses.set(ylabel="Substituted gate mass", ylim=(0.0, None))
    for axes in (times, masses):
        places = sorted(set(frame["mass_threshold"]))
        axes.set_xscale("symlog", base=2, linthresh=min(place for place in places if place > 0))
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True, axis="y")
    stamp(masses, kind, is_quick)
    return figure


@styled
def time_by_accuracy(frame: pd.DataFrame, points: pd.DataFrame | None = None, *, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw the time with prefetching over the time without, against the accuracy of the predictor.

    Parameters
    ----------
    frame : DataFrame
        ``panel``, ``hardware``, ``accuracy``, ``ratio`` (time with / without).
    points : DataFrame, optional
        The same columns, and ``predictor``: predictors that exist, drawn as open points.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("panel", "hardware", "accuracy", "ratio"))
    words = list(dict.fromkeys(frame["panel"]))
    figure = new_figure(4.1)
    panels = shared_panels(figure, 1, len(words), x="Predictions that come true", sharey=True)[0]
    for axes, panel in zip(panels, words, strict=True):
        rows = pd.DataFrame(frame[frame["panel"] == panel])
        draw_lines(axes, rows.assign(hardware=rows["hardware"].map(machine_words)), "hardware", "accuracy", "ratio")
        if points is not None:
            _open_points(axes, pd.DataFrame(points[points["panel"] == panel]), list(dict.fromkeys(frame["hardware"])))
        axes.axhline(1.0, color=FAINT, linewidth=1.0)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        axes.set_title(panel, loc="left", pad=8, fontsize=9)
        axes.grid(True, axis="both")
    label_times(figure, panels, "Time / time without prefetching")
    stamp_figure(figure, kind, is_quick)
    return figure


def _open_points(axes: Axes, points: pd.DataFrame, machines: list[str]) -> None:
    for row in points.to_dict("records"):
        number = machines.index(row["hardware"])
        axes.plot(
            row["accuracy"], row["ratio"], SOURCE_MARKERS[number], color=SOURCE_COLOURS[number], markerfacecolor="white", markersize=9
        )
