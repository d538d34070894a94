"""Figures of chapter 07: the crossed cells against weight and against e/h, and calls of equal weight or equal rank.

This module does not know how losses and intervals were computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from moecache.figures.style import FAINT, Look, legend_handles, line_handles, need_columns, new_figure, shared_panels, stamp, styled

LOOKS = (
    Look("#D55E00", "D", "-"),
    Look("#E69F00", "s", (0, (5, 2))),
    Look("#009E73", "^", (0, (3, 1, 1, 1))),
    Look("#56B4E9", "v", (0, (1, 1))),
    Look("#0072B2", "o", (0, (4, 2, 1, 2))),
    Look("#882255", "X", (0, (2, 2))),
    Look("#CC79A7", "P", "-"),
    Look("#999933", "*", (0, (5, 2))),
    Look("#332288", "<", (0, (3, 1, 1, 1))),
    Look("#117733", "h", (0, (1, 1))),
)
MISSED_LOOKS = {"hit": Look("#000000", "p"), "missed": Look("#888888", "d")}
LOSS_WORDS = "Loss a site, mnat"
LINEAR_BELOW_MNAT = 1.0
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
        For absent columns, an unknown kind, or more ranks than can be told apart.
    """
    need_columns(table, ("model", "rank", "multiple", "loss", "low", "high", "relative_error2"))
    models, looks = list(dict.fromkeys(table["model"])), _looks(table["rank"])
    figure = new_figure(0.9 + 2.7 * len(models))
    panels = shared_panels(figure, len(models), 2, y=LOSS_WORDS, sharey=True)
    for (left, right), model in zip(panels, models, strict=True):
        rows = table[table["model"] == model]
        for rank in sorted(rows["rank"].unique()):
            cells = rows[rows["rank"] == rank].sort_values("multiple")
            _draw_line(left, cells, "multiple", looks[rank])
            _draw_line(right, cells, "relative_error2", looks[rank])
        _loss_axis(left, rows)
        left.set_xscale("log")
        left.set_xticks(sorted(rows["multiple"].unique()), [f"{q:g}" for q in sorted(rows["multiple"].unique())])
        left.xaxis.set_minor_formatter(NullFormatter())
        right.set_xscale("log")
        right.xaxis.set_minor_formatter(NullFormatter())
        left.set_title(model, loc="left")
    panels[-1, 0].set_xlabel("Injected weight q, in 1/K")
    panels[-1, 1].set_xlabel("Mean (e/h)² of the sites")
    figure.legend(handles=line_handles(_named(looks)), loc="outside lower center", ncols=5)
    stamp(panels[0, 1], kind, is_quick)
    return figure


def _looks(ranks: pd.Series) -> dict[int, Look]:
    """The look of each rank, the same in all panels."""
    different = sorted(int(rank) for rank in ranks.unique())
    if len(different) > len(LOOKS):
        raise ValueError(f"{len(different)} ranks: at most {len(LOOKS)} can be told apart; draw fewer models at once")
    return dict(zip(different, LOOKS, strict=False))


def _named(looks: dict[int, Look]) -> dict[str, Look]:
    return {f"rank {rank}": look for rank, look in looks.items()}


def _draw_line(axes: Axes, cells: pd.DataFrame, column: str, look: Look) -> None:
    middle = 1000 * cells["loss"].to_numpy()
    bounds = [np.maximum(middle - 1000 * cells["low"], 0), np.maximum(1000 * cells["high"] - middle, 0)]
    axes.errorbar(
        cells[column], middle, yerr=bounds, color=look.colour, marker=look.marker, linestyle=look.dash, markersize=5.5, linewidth=1.2,
        elinewidth=1.2,
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
        For absent columns, an unknown kind, or more ranks than can be told apart.
    """
    for table in (bands, missed):
        need_columns(table, ("model", "family", "rank", "loss", "low", "high"))
    models, looks = list(dict.fromkeys(bands["model"])), _looks(bands["rank"])
    figure = new_figure(0.9 + 2.5 * len(models))
    panels = shared_panels(figure, len(models), 2, y=LOSS_WORDS, width_ratios=(1.6, 1.0))
    for (left, right), model in zip(panels, models, strict=True):
        _draw_groups(left, bands[bands["model"] == model], "family", "rank", looks)
        _draw_groups(right, missed[missed["model"] == model], "rank", "family", MISSED_LOOKS)
        left.set_title(model, loc="left")
    panels[-1, 0].set_xlabel("Band of gate weight, and rank")
    panels[-1, 1].set_xlabel("Rank, at equal weight")
    figure.legend(handles=legend_handles(_named(looks) | MISSED_LOOKS), loc="outside lower center", ncols=6, handletextpad=0.3)
    stamp(panels[0, 1], kind, is_quick)
    return figure


def _draw_groups(axes: Axes, rows: pd.DataFrame, outer: str, inner: str, looks: Mapping[Any, Look]) -> None:
    """Points in groups along the axis: the outer column names a group, the inner one a point in it."""
    place, ticks, labels = 0.0, [], []
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
    _loss_axis(axes, rows)  # before the ticks, which fix the limits of both axes
    axes.set_xticks(ticks, labels)
