"""Figures of losses estimated from a trace: estimate against measurement, and the front of seconds against increase.

A panel for each model. This module computes nothing beyond what drawing needs.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from moecache.figures.style import FAINT, INK, Look, look_up, need_columns, new_figure, shared_panels, stamp, styled

NOVELTY_STYLES = {
    "family left out": Look("#0072B2", "o"),
    "other capacity": Look("#D55E00", "s"),
    "other eviction": Look("#009E73", "^"),
    "background admission": Look("#CC79A7", "D"),
}
BOUNDS = ("estimated_increase", "estimated_increase_low", "estimated_increase_high")


@styled
def estimated_and_measured(points: pd.DataFrame, *, kind: str = "ESTIMATED", is_quick: bool = False) -> Figure:
    """Draw each judged policy: its estimate with the interval against what was measured, both logarithmic; the line is equality.

    Parameters
    ----------
    points : DataFrame
        ``model``, ``novelty``, ``measured_increase``, ``estimated_increase``, ``estimated_increase_low`` and ``..._high``, and
        ``mass_increase`` (what a model of mass alone estimates). Policies that did not measurably lose have no place and are left out.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure
    """
    need_columns(points, ("model", "novelty", "measured_increase", "mass_increase", *BOUNDS))
    looks, models = look_up(NOVELTY_STYLES, points["novelty"], "novelty"), list(dict.fromkeys(points["model"]))
    figure = new_figure(0.7 + 3.1 * len(models))
    words = {"x": "Measured increase, %", "y": "Estimated increase, %"}
    panels = shared_panels(figure, len(models), 2, **words, sharex="row", sharey="row")
    for row, model in zip(panels, models, strict=True):
        drawn = pd.DataFrame(points[(points["model"] == model) & (points["measured_increase"] > 0)])
        for axes, columns in zip(row, (BOUNDS, ("mass_increase",)), strict=True):
            _draw_points(axes, drawn, columns, looks)
        row[0].set_ylabel(model)
    panels[0, 0].set_title("squared weights", loc="left")
    panels[0, 1].set_title("mass alone", loc="left")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(looks))
    stamp(panels[0, -1], kind, is_quick)
    return figure


def _draw_points(axes: Axes, drawn: pd.DataFrame, columns: tuple[str, ...], looks: dict[str, Look]) -> None:
    axes.set(xscale="log", yscale="log")
    for novelty, look in looks.items():
        part = drawn[drawn["novelty"] == novelty]
        middle = 100 * part[columns[0]].to_numpy()
        whiskers = None
        if len(columns) == 3:
            ends = [100 * part[column].to_numpy() for column in columns[1:]]
            whiskers = np.maximum(np.array([middle - ends[0], ends[1] - middle]), 0.0)
        axes.errorbar(
            100 * part["measured_increase"], middle, yerr=whiskers, fmt=look.marker, color=look.colour, markersize=5, elinewidth=0.8,
            markerfacecolor="none", label=novelty,
        )  # fmt: skip
    ends = 100 * drawn["measured_increase"].min(), 100 * drawn["measured_increase"].max()
    axes.plot(ends, ends, color=INK, linewidth=0.9)
    middles = 100 * drawn[["measured_increase", "mass_increase", BOUNDS[0]]].to_numpy()
    axes.set_ylim(middles[middles > 0].min() / 3, middles.max() * 3)  # an interval may end anywhere; the points decide what is seen
    _plain_numbers(axes)


@styled
def front(swept: pd.DataFrame, emulated: pd.DataFrame, *, kind: str = "ESTIMATED", is_quick: bool = False) -> Figure:
    """Draw every swept policy at its seconds and estimated increase, and what the emulator measured of some.

    Parameters
    ----------
    swept : DataFrame
        ``model``, ``seconds``, ``estimated_increase``.
    emulated : DataFrame
        ``model``, ``seconds``, ``increase``, ``low``, ``high``, ``is_best``, ``is_confirmed``. Filled: one of the best, confirmed; open:
        one of the best, not confirmed; crosses: other policies that were emulated.
    kind, is_quick
        As in `estimated_and_measured`.

    Returns
    -------
    Figure
    """
    need_columns(swept, ("model", "seconds", "estimated_increase"))
    need_columns(emulated, ("model", "seconds", "increase", "low", "high", "is_best", "is_confirmed"))
    models = list(dict.fromkeys(swept["model"]))
    figure = new_figure(0.8 + 3.2 * len(models))
    panels = shared_panels(figure, len(models), 1, x="Simulated milliseconds a token", y="Perplexity increase, %")[:, 0]
    for axes, model in zip(panels, models, strict=True):
        axes.set(xscale="log", yscale="log")
        part = swept[(swept["model"] == model) & (swept["estimated_increase"] > 0)]
        axes.plot(1e3 * part["seconds"], 100 * part["estimated_increase"], ".", color="#bbbbbb", markersize=3, label="estimated")
        _draw_emulated(axes, pd.DataFrame(emulated[(emulated["model"] == model) & (emulated["increase"] > 0)]))
        axes.set_ylabel(model)
        _plain_numbers(axes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    stamp(panels[0], kind, is_quick)
    return figure


def _draw_emulated(axes: Axes, rows: pd.DataFrame) -> None:
    others, is_best = rows[~rows["is_best"]], rows["is_best"]
    axes.plot(1e3 * others["seconds"], 100 * others["increase"], "x", color=FAINT, markersize=5, label="measured, other policies")
    for words, is_shown, face in (
        ("measured, best and confirmed", is_best & rows["is_confirmed"], "#0072B2"),
        ("measured, best and not confirmed", is_best & ~rows["is_confirmed"], "white"),
    ):
        part = rows[is_shown]
        below = 100 * (part["increase"] - np.maximum(part["low"], part["increase"] / 10))
        above = 100 * (part["high"] - part["increase"])
        style = {"fmt": "o", "color": "#0072B2", "markerfacecolor": face, "markersize": 5, "elinewidth": 0.9}
        axes.errorbar(1e3 * part["seconds"], 100 * part["increase"], yerr=[below, above], label=words, **style)


def _plain_numbers(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="both")
