"""The figure of sensitivity: what each setting of each open choice changes, as a forest.

Changes span from tenths to hundreds of a thousandth of a nat, so the axis is logarithmic outside ten thousandths on both sides and linear
inside. This module does not know how changes and intervals were computed.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from moecache.figures.style import FAINT, INK, Look, legend_handles, need_columns, new_figure, stamp, styled

LOOKS = (Look("#0072B2", "o"), Look("#D55E00", "s"), Look("#009E73", "^"), Look("#CC79A7", "D"))
LINEAR_BELOW = 10.0
TICKS = (-1000, -100, -10, 0, 10, 100, 1000)


@styled
def change_forest(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw every setting's change with its interval, grouped by choice; inert settings are marked by a cross.

    Parameters
    ----------
    table : DataFrame
        ``choice``, ``setting``, ``series`` (a model and rule, in words), ``effect``, ``low``, ``high`` (nats), ``is_inert``.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns, or more than four series.
    """
    need_columns(table, ("choice", "setting", "series", "effect", "low", "high", "is_inert"))
    series = list(dict.fromkeys(table["series"]))
    if len(series) > len(LOOKS):
        raise ValueError(f"{len(series)} series: at most {len(LOOKS)} can be told apart")
    rows = table.drop_duplicates(["choice", "setting"]).sort_values("choice", key=lambda c: c.map(_first_places(table)), kind="stable")
    names = list(zip(rows["choice"], rows["setting"], strict=True))
    figure = new_figure(1.4 + 0.27 * len(names) * (1 + 0.2 * (len(series) - 1)))
    axes = figure.subplots()
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for row in table.to_dict("records"):
        place = series.index(row["series"])
        height = len(names) - 1 - names.index((row["choice"], row["setting"])) - 0.22 * (place - (len(series) - 1) / 2)
        look = LOOKS[place]
        if row["is_inert"]:
            axes.plot(0.0, height, marker="x", color=look.colour, markersize=7, linestyle="")
            continue
        bounds = [[1000 * (row["effect"] - row["low"])], [1000 * (row["high"] - row["effect"])]]
        axes.errorbar(1000 * row["effect"], height, xerr=bounds, color=look.colour, marker=look.marker, markersize=5, elinewidth=1.4)
    axes.set_xscale("symlog", linthresh=LINEAR_BELOW, linscale=1.2)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(names)), [f"{choice}: {setting}" for choice, setting in names[::-1]], fontsize=8.5)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("Change of the loss, thousandths of a nat a token")
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")
    inert = Line2D([], [], color=FAINT, marker="x", linestyle="", label="inert: changed no decision")
    figure.legend(handles=[*legend_handles(dict(zip(series, LOOKS, strict=False))), inert], loc="outside lower center", ncols=2)
    stamp(axes, kind, is_quick)
    return figure


def _first_places(table: pd.DataFrame) -> dict[str, int]:
    return {choice: place for place, choice in enumerate(dict.fromkeys(table["choice"]))}
