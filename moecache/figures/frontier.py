"""Figures of miss rules compared: loss against waiting by family, against the rank that is substituted, against count and mass.

Losses span orders of magnitude, so their axes are logarithmic; an interval that reaches zero is drawn down to a tenth of its point.
This module does not know how losses and intervals were computed.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from moecache.figures.style import (
    FAMILY_STYLES,
    GRID,
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

RANK_LOOKS = {
    "only this rank is substituted": FAMILY_STYLES["one rank"],
    "the first ranks are waited for": FAMILY_STYLES["first J"],
    "the last ranks are waited for": FAMILY_STYLES["last J"],
}


LOSS_WORDS = "Loss, thousandths of a nat a token"


@styled
def miss_rule_frontier(
    points: pd.DataFrame, *, targets: tuple[float, ...] = (), bound: str = "", kind: str = "MEASURED", is_quick: bool = False
) -> Figure:
    """Draw loss against waited-for fetches, one curve a family of rules, one panel a model.

    Parameters
    ----------
    points : DataFrame
        One row per (model, family, policy): ``model``, ``family``, ``fetches_per_step``, ``loss_nats``, ``low``, ``high``.
        Points without loss or fetches have no place on the axes and are left out.
    targets : tuple of float
        Numbers of fetches that are marked.
    bound : str
        The family that is out of reach, drawn dashed.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure
    """
    need_columns(points, ("model", "family", "fetches_per_step", "loss_nats", "low", "high"))
    drawn = pd.DataFrame(points[(points["loss_nats"] > 0) & (points["fetches_per_step"] > 0)])
    looks = look_up(FAMILY_STYLES, drawn["family"], "family")
    models = list(dict.fromkeys(drawn["model"]))
    figure = new_figure(0.9 + 3.6 * len(models))
    panels = shared_panels(figure, len(models), 1, x="Waited-for fetches a step (one token at one layer)", y=LOSS_WORDS)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        for target in targets:
            axes.axvline(target, color=GRID, linewidth=6, zorder=0)
        for family, look in looks.items():
            rows = pd.DataFrame(drawn[(drawn["model"] == model) & (drawn["family"] == family)]).sort_values("fetches_per_step")
            _draw_curve(axes, rows, "fetches_per_step", look, "--" if family == bound else "-")
        _logarithmic(axes)
        axes.set_ylabel(model)
    _legend(figure, looks)
    stamp(panels[0], kind, is_quick)
    return figure


@styled
def loss_by_rank(points: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw the loss when one rank alone is substituted, and when first or last ranks are waited for; one row of panels a model.

    Parameters
    ----------
    points : DataFrame
        One row per (model, rule): ``model``, ``series`` (of `RANK_LOOKS`), ``rank`` (the rank, or how many are waited for), ``loss_nats``,
        ``low``, ``high``.
    kind, is_quick
        As in `miss_rule_frontier`.

    Returns
    -------
    Figure
    """
    need_columns(points, ("model", "series", "rank", "loss_nats", "low", "high"))
    look_up(RANK_LOOKS, points["series"], "series")
    drawn = pd.DataFrame(points[points["loss_nats"] > 0])
    models = list(dict.fromkeys(drawn["model"]))
    figure = new_figure(0.7 + 2.9 * len(models))
    panels = shared_panels(figure, len(models), 2, y=LOSS_WORDS, sharey="row")
    alone, *protecting = RANK_LOOKS
    for row, model in zip(panels, models, strict=True):
        for axes, shown in zip(row, ([alone], protecting), strict=True):
            for series in shown:
                rows = pd.DataFrame(drawn[(drawn["model"] == model) & (drawn["series"] == series)]).sort_values("rank")
                _draw_curve(axes, rows, "rank", RANK_LOOKS[series], "-")
            _logarithmic(axes, is_log=False)
        row[0].set_ylabel(model)
    panels[-1, 0].set_xlabel("Rank that is substituted (0 = first choice)")
    panels[-1, 1].set_xlabel("Ranks that are waited for")
    _legend(figure, RANK_LOOKS)
    stamp(panels[0, 1], kind, is_quick)
    return figure


@styled
def loss_by_count_and_mass(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw one point a rule: perplexity increase against how many calls are substituted, and against their gate mass.

    Parameters
    ----------
    table : DataFrame
        ``stats.policy_table`` of one setting for each ``model``. Rules that substitute first choices are open; those that
        raised nothing are left out.
    kind, is_quick
        As in `miss_rule_frontier`.

    Returns
    -------
    Figure
    """
    sides = {"substituted_fraction": "Calls substituted, %", "substituted_mass": "Gate mass substituted, %"}
    need_columns(table, ("model", "family", "increase", "low", "high", "first_choice_fraction", *sides))
    drawn = pd.DataFrame(table[(table["increase"] > 0) & (table["substituted_mass"] > 0)])
    looks = look_up(FAMILY_STYLES, drawn["family"], "family")
    models = list(dict.fromkeys(drawn["model"]))
    figure = new_figure(1.1 + 2.9 * len(models))
    panels = shared_panels(figure, len(models), 2, y="Perplexity increase, %", sharey="row")
    for row, model in zip(panels, models, strict=True):
        for axes, column in zip(row, sides, strict=True):
            _draw_rules(axes, pd.DataFrame(drawn[drawn["model"] == model]), column, looks)
            _logarithmic(axes, is_log=False)
        row[0].set_ylabel(model)
    for axes, words in zip(panels[-1], sides.values(), strict=True):
        axes.set_xlabel(words)
    _legend(figure, looks, [open_handle("open: substitutes first choices")])
    stamp(panels[0, 1], kind, is_quick)
    return figure


def _draw_curve(axes: Axes, rows: pd.DataFrame, column: str, look: Look, dash: str) -> None:
    middle, low, high = (1000 * rows[name].to_numpy(np.float64) for name in ("loss_nats", "low", "high"))
    bounds = np.stack([middle - np.maximum(low, middle / 10), np.maximum(high - middle, 0.0)])
    axes.errorbar(
        rows[column].to_numpy(), middle, yerr=bounds, color=look.colour, marker=look.marker, markersize=5.5, linestyle=dash,
        linewidth=1.4, elinewidth=1.0,
    )  # fmt: skip


def _draw_rules(axes: Axes, rows: pd.DataFrame, column: str, looks: dict[str, Look]) -> None:
    for row in rows.to_dict("records"):
        look, is_open = looks[row["family"]], row["first_choice_fraction"] > 0.0
        below = row["increase"] - max(row["low"], row["increase"] / 10)
        axes.errorbar(
            100 * row[column], 100 * row["increase"], yerr=[[100 * below], [100 * (row["high"] - row["increase"])]], fmt=look.marker,
            color=look.colour, markersize=6, markerfacecolor="white" if is_open else look.colour, elinewidth=1.0,
        )  # fmt: skip
    axes.set_xlim(left=0.0)


def _logarithmic(axes: Axes, is_log: bool = True) -> None:
    """Losses on a logarithmic axis, with plain numbers; `is_log` also the other axis."""
    axes.set_yscale("log")
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="both")


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def _legend(figure: Figure, looks: dict[str, Look], more: list[Line2D] | None = None) -> None:
    figure.legend(handles=legend_handles(looks) + (more or []), loc="outside lower center", ncols=3, handletextpad=0.3, labelcolor=INK)
