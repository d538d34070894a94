"""Figure of chapter 06: one heavy call against light calls of the same summed weight, by rank and stand-in.

Losses span two orders of magnitude and light ones may be nothing, so the axis is linear near zero and logarithmic
beyond. This module does not know how losses and intervals were computed.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from moecache.figures.style import FAINT, INK, Look, legend_handles, need_columns, new_figure, stamp, styled

LOOKS = {"heavy": Look("#D55E00", "s"), "light": Look("#0072B2", "o")}
NEEDED = ("model", "rank", "stand_in", "heavy", "heavy_low", "heavy_high", "light", "light_low", "light_high", "ratio")
LINEAR_BELOW_MNAT = 1.0
TICKS = (-10, -1, 0, 1, 3, 10, 30, 100, 300, 1000)


@styled
def heavy_and_light(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw both sides of every comparison with their intervals, one panel a model.

    Parameters
    ----------
    table : DataFrame
        One row per (model, rank, stand_in): `heavy`, `light` with `_low` and `_high` (nats a token), `ratio`.
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
    need_columns(table, NEEDED)
    models = list(dict.fromkeys(table["model"]))
    order = sorted({(int(rank), str(stand_in)) for rank, stand_in in zip(table["rank"], table["stand_in"], strict=True)}, reverse=True)
    figure = new_figure(1.1 + 0.3 * len(order) * len(models))
    panels = np.atleast_1d(figure.subplots(len(models), 1, sharex=True))
    for axes, model in zip(panels, models, strict=True):
        _draw_model(axes, table[table["model"] == model], order)
        axes.set_title(model, loc="left")
    panels[-1].set_xlabel("Loss over the exact model, thousandths of a nat a token, with 95 % interval")
    stamp(panels[0], kind, is_quick)
    looks = {"one heavy call": LOOKS["heavy"], "light calls of equal summed weight": LOOKS["light"]}
    figure.legend(handles=legend_handles(looks), loc="outside lower right", ncols=2, handletextpad=0.3)
    return figure


def _draw_model(axes: Axes, rows: pd.DataFrame, order: list[tuple[int, str]]) -> None:
    for row in rows.to_dict("records"):
        height = order.index((int(row["rank"]), str(row["stand_in"])))
        for side, look in LOOKS.items():
            middle, low, high = (1000 * row[f"{side}{end}"] for end in ("", "_low", "_high"))
            axes.errorbar(
                middle, height, xerr=[[max(middle - low, 0)], [max(high - middle, 0)]], fmt=look.marker, color=look.colour,
                markersize=6.5, elinewidth=1.6,
            )  # fmt: skip
        told = "" if np.isnan(row["ratio"]) else f"×{row['ratio']:.3g}"
        axes.annotate(
            told, (1000 * row["heavy_high"], height), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK
        )
    axes.set_yticks(range(len(order)), [f"rank {rank}, {stand_in}" for rank, stand_in in order])
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW_MNAT, linscale=0.6)
    lowest, highest = 1000 * rows["light_low"].min(), 1000 * rows["heavy_high"].max()
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if 3 * min(lowest, -0.1) <= tick <= 3 * highest]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(right=3 * max(highest, LINEAR_BELOW_MNAT))
    axes.axvline(0.0, color=FAINT, linewidth=0.8)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
