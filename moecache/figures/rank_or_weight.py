"""Figures of chapter 07: the crossed cells against weight and against e/h, and calls of equal weight or equal rank.

This module does not know how losses and intervals were computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from moecache.figures.style import FAINT, Look, legend_handles, need_columns, new_figure, stamp, styled

LOOKS = (
    Look("#D55E00", "D", "-"),
    Look("#E69F00", "s", (0, (5, 2))),
    Look("#009E73", "^", (0, (3, 1, 1, 1))),
    Look("#56B4E9", "v", (0, (1, 1))),
    Look("#0072B2", "o", (0, (4, 2, 1, 2))),
    Look("#882255", "X", (0, (2, 2))),
    Look("#CC79A7", "P", "-"),
)
LINEAR_BELOW_MNAT = 1.0
BELOW: Any = {"fontsize": 8, "loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "handletextpad": 0.3}
TICKS = (-10, -1, 0, 1, 10, 100, 1000)


@styled
def crossed_cells(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw every cell's loss against its weight, and against its mean (e/h)^2; one row of panels a model.

    Parameters
    ----------
    table : DataFrame
        One row a cell: `model`, `rank`, `multiple` (of 1/K), `loss`, `low`, `high` (nats a site), `relative_error2`.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns or an unknown kind.
    """
    need_columns(table, ("model", "rank", "multiple", "loss", "low", "high", "relative_error2"))
    models = list(dict.fromkeys(table["model"]))
    figure = new_figure(0.9 + 2.9 * len(models))
    panels = figure.subplots(len(models), 2, sharey=True, squeeze=False)
    for (left, right), model in zip(panels, models, strict=True):
        rows = table[table["model"] == model]
        looks = dict(zip(sorted(rows["rank"].unique()), LOOKS, strict=False))
        for rank, look in looks.items():
            cells = rows[rows["rank"] == rank].sort_values("multiple")
            _draw_line(left, cells, "multiple", look, f"rank {rank}")
            _draw_line(right, cells, "relative_error2", look, f"rank {rank}")
        _loss_axis(left, rows)
        left.set(ylabel="Loss a site, mnat", xlabel="Injected weight q, in 1/K")
        left.set_xscale("log")
        left.set_xticks(sorted(rows["multiple"].unique()), [f"{q:g}" for q in sorted(rows["multiple"].unique())])
        left.xaxis.set_minor_formatter(NullFormatter())
        right.set(xlabel="Mean (e/h)² of the sites", xscale="log")
        right.xaxis.set_minor_formatter(NullFormatter())
        left.set_title(model, loc="left")
        left.legend(**BELOW, ncols=3)
    stamp(panels[0, 1], kind, is_quick)
    return figure


def _draw_line(axes: Axes, cells: pd.DataFrame, column: str, look: Look, label: str) -> None:
    middle = 1000 * cells["loss"].to_numpy()
    bounds = [np.maximum(middle - 1000 * cells["low"], 0), np.maximum(1000 * cells["high"] - middle, 0)]
    axes.errorbar(
        cells[column], middle, yerr=bounds, color=look.colour, marker=look.marker, linestyle=look.dash, markersize=5.5, linewidth=1.2,
        elinewidth=1.2, label=label,
    )  # fmt: skip


def _loss_axis(axes: Axes, rows: pd.DataFrame) -> None:
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW_MNAT, linscale=0.5)
    lowest, highest = 1000 * rows["low"].min(), 1000 * rows["high"].max()
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS if 3 * min(lowest, -0.1) <= tick <= 3 * highest]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.axhline(0.0, color=FAINT, linewidth=0.8)
    axes.grid(True, axis="y")


@styled
def kinds_of_calls(bands: pd.DataFrame, missed: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw calls of equal weight and different rank, and missed calls beside hits; one row of panels a model.

    Parameters
    ----------
    bands : DataFrame
        One row a kind: `model`, `family` (the band), `rank`, `loss`, `low`, `high` (nats a site).
    missed : DataFrame
        The same, with `family` missed or hit.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns or an unknown kind.
    """
    for table in (bands, missed):
        need_columns(table, ("model", "family", "rank", "loss", "low", "high"))
    models = list(dict.fromkeys(bands["model"]))
    figure = new_figure(1.0 + 2.7 * len(models))
    panels = figure.subplots(len(models), 2, squeeze=False, width_ratios=(1.6, 1.0))
    for (left, right), model in zip(panels, models, strict=True):
        _draw_groups(left, bands[bands["model"] == model], "family", "rank")
        _draw_groups(right, missed[missed["model"] == model], "rank", "family")
        left.set_title(model, loc="left")
        left.set_ylabel("Loss a site, mnat")
        left.set_xlabel("Band of gate weight, and rank")
        right.set_xlabel("Rank, at equal weight")
    stamp(panels[0, 1], kind, is_quick)
    return figure


def _draw_groups(axes: Axes, rows: pd.DataFrame, outer: str, inner: str) -> None:
    """Points in groups along the axis: the outer column names a group, the inner one a point in it."""
    place, ticks, labels = 0.0, [], []
    looks = dict(zip(sorted(rows[inner].unique()), LOOKS, strict=False))
    for group in rows[outer].unique():
        members = rows[rows[outer] == group]
        for row in members.to_dict("records"):
            look = looks[row[inner]]
            middle = 1000 * row["loss"]
            bounds = [[max(middle - 1000 * row["low"], 0)], [max(1000 * row["high"] - middle, 0)]]
            axes.errorbar(place, middle, yerr=bounds, fmt=look.marker, color=look.colour, markersize=6, elinewidth=1.5)
            place += 0.5
        ticks.append(place - 0.25 * (len(members) + 1))
        labels.append(f"rank {group}" if outer == "rank" else str(group))
        place += 0.6
    axes.set_xticks(ticks, labels)
    _loss_axis(axes, rows)
    named = {f"rank {name}" if inner == "rank" else str(name): look for name, look in looks.items()}
    axes.legend(handles=legend_handles(named), **BELOW, ncols=3)
