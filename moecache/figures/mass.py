"""Figures of the mass hypothesis: what predicts the loss of a policy, and what smaller samples would have said.

A row of panels for each model. This module computes nothing beyond what drawing needs.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from moecache.figures.style import (
    FAINT,
    FAMILY_STYLES,
    INK,
    Look,
    legend_handles,
    look_up,
    need_columns,
    new_figure,
    open_handle,
    shared_panels,
    stamp,
    styled,
)

PREDICTORS = {
    "substituted_mass": "Substituted gate mass (mean a step)",
    "squared_weights": "Squared substituted weights (mean a step)",
    "relative_error2": "Relative layer error e² (mean a step)",
}
FAN_COLOURS = {"across policies": "#0072B2", "within policies, mean": "#D55E00", "within one policy": "#888888"}


@styled
def loss_by_predictor(points: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw one point a policy: perplexity increase against three predictors, both logarithmic.

    Parameters
    ----------
    points : DataFrame
        One row per (model, policy): ``model``, ``family``, ``increase``, ``low``, ``high``, ``first_choice_fraction`` and
        the predictors. Policies whose increase is not above zero have no place on the axis and are left out; those that
        substituted first choices are open.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure
    """
    need_columns(points, ("model", "family", "increase", "low", "high", "first_choice_fraction", *PREDICTORS))
    looks = look_up(FAMILY_STYLES, points["family"], "family")
    models = list(dict.fromkeys(points["model"]))
    figure = new_figure(1.2 + 2.8 * len(models))
    panels = shared_panels(figure, len(models), len(PREDICTORS), y="Perplexity increase, %", sharey="row")
    for row, model in zip(panels, models, strict=True):
        drawn = pd.DataFrame(points[(points["model"] == model) & (points["increase"] > 0)])
        for axes, column in zip(row, PREDICTORS, strict=True):
            _draw_points(axes, drawn, column, looks)
        row[0].set_ylabel(model)
    for axes, words in zip(panels[-1], PREDICTORS.values(), strict=True):
        axes.set_xlabel(words.replace(" (", "\n("))
    open_one = open_handle("open: substitutes first choices")
    figure.legend(handles=[*legend_handles(looks), open_one], loc="outside lower center", ncols=3, handletextpad=0.3)
    stamp(panels[0, -1], kind, is_quick)
    return figure


def _draw_points(axes: Axes, drawn: pd.DataFrame, column: str, looks: dict[str, Look]) -> None:
    axes.set(xscale="log", yscale="log")
    for row in drawn.to_dict("records"):
        look, is_open = looks[row["family"]], row["first_choice_fraction"] > 0.0
        # An interval that reaches zero is drawn down to a tenth of the point: the axis has no zero.
        below = row["increase"] - max(row["low"], row["increase"] / 10)
        axes.errorbar(
            row[column], 100 * row["increase"], yerr=[[100 * below], [100 * (row["high"] - row["increase"])]], fmt=look.marker,
            color=look.colour, markersize=5.5, markerfacecolor="white" if is_open else look.colour, elinewidth=1.0,
        )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="both")


@styled
def fan(fans: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw what samples of n documents would have said of a correlation: median and the middle 95 % of samples.

    Parameters
    ----------
    fans : DataFrame
        ``model``, ``kind`` (one panel each), ``num_documents``, ``low``, ``median``, ``high``, ``opposite_fraction``.
    kind, is_quick
        As in `loss_by_predictor`.

    Returns
    -------
    Figure
    """
    need_columns(fans, ("model", "kind", "num_documents", "low", "median", "high", "opposite_fraction"))
    models, kinds = list(dict.fromkeys(fans["model"])), list(dict.fromkeys(fans["kind"]))
    figure = new_figure(0.6 + 2.5 * len(models))
    words = {"x": "Documents in the sample", "y": "Spearman, mass and loss"}
    panels = shared_panels(figure, len(models), len(kinds), **words, sharex=True, sharey=True)
    for row, model in zip(panels, models, strict=True):
        for axes, what in zip(row, kinds, strict=True):
            rows = fans[(fans["model"] == model) & (fans["kind"] == what)]
            _draw_fan(axes, pd.DataFrame(rows), FAN_COLOURS.get(what, INK))
        row[0].set_ylabel(model)
    for axes, what in zip(panels[0], kinds, strict=True):
        axes.set_title(what, loc="left")
    stamp(panels[0, -1], kind, is_quick)
    return figure


def _draw_fan(axes: Axes, rows: pd.DataFrame, colour: str) -> None:
    sizes = rows["num_documents"].to_numpy()
    axes.fill_between(sizes, rows["low"].to_numpy(), rows["high"].to_numpy(), color=colour, alpha=0.25, linewidth=0)
    axes.plot(sizes, rows["median"].to_numpy(), color=colour, marker="o", markersize=4)
    axes.axhline(0.0, color=FAINT, linewidth=0.8)
    for row in rows.to_dict("records")[:-1]:
        axes.annotate(
            f"{100 * row['opposite_fraction']:.0f} %", (row["num_documents"], -0.97), ha="center", va="bottom", fontsize=8, color=INK
        )
    axes.set_xscale("log")
    is_clear = np.append(sizes[1:] >= 1.4 * sizes[:-1], True)  # a label that would touch the next one is left out
    axes.set_xticks(sizes, [str(n) if clear else "" for n, clear in zip(sizes, is_clear, strict=True)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-1.0, 1.05)
    axes.set_yticks(np.linspace(-1, 1, 5))
    axes.grid(True, axis="y")
