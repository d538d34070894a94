"""Figures of what else the memory could buy: loss against waited-for bytes cell by cell, and the map of winners.

Each figure takes a tidy table; this module does not know how losses and crossings were found.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moecache.figures.style import FAINT, INK, Look, legend_handles, look_up, need_columns, new_figure, shared_panels, stamp, styled

CONTENDER_STYLES = {
    "waiting": Look("#444444", "|", (0, (1, 1))),
    "substitution": Look("#0072B2", "o", "-"),
    "low-bit copies": Look("#D55E00", "s", "-"),
    "copies of some": Look("#E69F00", "D", (0, (3, 1, 1, 1))),
    "prefetch": Look("#CC79A7", "^", (0, (5, 2))),
    "everything in few bits": Look("#009E73", "P", (0, (1, 1.5))),
    "nobody": Look("#dddddd", "", "-"),
}
LEAST_MNAT = 0.1  # what loses less is drawn at this height
_LETTERS = dict(zip(CONTENDER_STYLES, ("W", "S", "C", "c", "P", "Q"), strict=False))


@styled
def loss_by_waited(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw every contender's loss against the bytes that it waits for, a row of panels for each base precision, a column a budget.

    Parameters
    ----------
    table : DataFrame
        One model: ``base_bits``, ``budget``, ``family``, ``contender``, ``waited_kb`` (a token), ``loss``, ``low``, ``high`` (nats). Both
        axes are logarithmic; what waits for nothing stands at the left edge, a loss below a tenth of a thousandth of a nat at the lower.
        Of two contenders of one family (copies in more bits) the second has hollow marks.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns or an unknown family.
    """
    need_columns(table, ("base_bits", "budget", "family", "contender", "waited_kb", "loss", "low", "high"))
    looks = look_up(CONTENDER_STYLES, table["family"], "family")
    bases, budgets = list(dict.fromkeys(table["base_bits"])), sorted(table["budget"].unique())
    nothing = 0.5 * table.loc[table["waited_kb"] > 0, "waited_kb"].min()
    figure = new_figure(0.9 + 1.75 * len(bases))
    words = {"x": "Waited for, thousands of bytes a token (left edge: nothing)", "y": "Loss, thousandths of a nat a token"}
    grid = shared_panels(figure, len(bases), len(budgets), **words, sharex=True, sharey=True)
    for bits, line in zip(bases, grid, strict=True):
        for budget, axes in zip(budgets, line, strict=True):
            rows = table[(table["base_bits"] == bits) & (table["budget"] == budget)]
            _draw_curves(axes, rows, looks, nothing)
            axes.set_title(f"{bits} bits, {budget:.0%}", loc="left", fontsize=9)
    figure.legend(handles=legend_handles(looks), loc="outside upper center", ncols=3, labelcolor=FAINT)
    stamp(grid[-1, -1], kind, is_quick)
    return figure


def _draw_curves(axes: Axes, rows: pd.DataFrame, looks: dict[str, Look], nothing: float) -> None:
    for _, curve in rows.sort_values("waited_kb").groupby("contender", sort=False):
        look, family = looks[str(curve["family"].iloc[0])], curve["family"].iloc[0]
        family_of = list(dict.fromkeys(rows.loc[rows["family"] == family, "contender"]))
        places = curve["waited_kb"].where(curve["waited_kb"] > 0, nothing)
        losses, low, high = (1000 * curve[name].clip(lower=LEAST_MNAT / 1000) for name in ("loss", "low", "high"))
        is_first = family_of.index(str(curve["contender"].iloc[0])) == 0
        fill = look.colour if is_first else "white"
        bars: Any = {"color": look.colour, "marker": look.marker, "markerfacecolor": fill, "markersize": 5, "elinewidth": 1.0}
        axes.errorbar(places, losses, yerr=[losses - low, high - losses], linestyle="", clip_on=False, **bars)
        dash, waits = look.dash, curve["waited_kb"] > 0
        axes.plot(places[waits], losses[waits], color=look.colour, linestyle=dash, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, axis="y")


@styled
def winner_map(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw who has the lowest loss at each budget and number of waited-for bytes, one panel for each base precision.

    Parameters
    ----------
    table : DataFrame
        One model: ``base_bits``, ``budget``, ``family``, ``from_kb``, ``to_kb`` (thousands of bytes a token, the first from 0),
        ``clear_fraction`` (share of the band where the next best family is told apart). Bands below a half are hatched; black lines join
        the same crossing at neighbouring budgets.
    kind, is_quick
        As in ``loss_by_waited``.

    Returns
    -------
    Figure
    """
    need_columns(table, ("base_bits", "budget", "family", "from_kb", "to_kb", "clear_fraction"))
    looks = look_up(CONTENDER_STYLES, table["family"], "family")
    bases, budgets = list(dict.fromkeys(table["base_bits"])), sorted(table["budget"].unique())
    nothing = 0.5 * table.loc[table["from_kb"] > 0, "from_kb"].min() if (table["from_kb"] > 0).any() else 0.5 * table["to_kb"].min()
    figure = new_figure(4.6)
    words = {
        "x": "Memory, share of all experts' bytes at the base precision",
        "y": "May wait for, thousands of bytes a token\n(lower edge: nothing)",
    }
    panels = shared_panels(figure, 1, len(bases), **words, sharey=True)[0]
    for bits, axes in zip(bases, panels, strict=True):
        rows = table[table["base_bits"] == bits]
        _draw_bands(axes, rows, budgets, looks, nothing)
        _join_crossings(axes, rows, budgets)
        axes.set_title(f"{bits} bits", loc="left")
        axes.set_xticks(range(len(budgets)), [f"{budget:.0%}" for budget in budgets])
        axes.set_xlim(-0.5, len(budgets) - 0.5)
    panels[0].set_yscale("log")
    panels[0].set_ylim(nothing, 1.2 * table["to_kb"].max())
    handles: list[Any] = [Patch(facecolor=look.colour, alpha=0.75, label=_named(name)) for name, look in looks.items()]
    handles.append(Patch(facecolor="none", edgecolor=INK, hatch="///", label="next best not told apart"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, labelcolor=FAINT)
    stamp(panels[-1], kind, is_quick)
    return figure


def _named(family: str) -> str:
    return f"{_LETTERS[family]}  {family}" if family in _LETTERS else family


def _draw_bands(axes: Axes, rows: pd.DataFrame, budgets: list[float], looks: dict[str, Look], nothing: float) -> None:
    for band in rows.to_dict("records"):
        bottom, place = max(band["from_kb"], nothing), budgets.index(band["budget"])
        look, hatch = looks[band["family"]], "///" if band["clear_fraction"] < 0.5 else ""
        box: Any = {"width": 0.7, "bottom": bottom, "color": look.colour, "alpha": 0.75, "hatch": hatch, "edgecolor": "white"}
        axes.bar(place, band["to_kb"] - bottom, **box)
        if band["to_kb"] / bottom > 1.3:
            middle = (bottom * band["to_kb"]) ** 0.5
            axes.text(place, middle, _LETTERS.get(band["family"], ""), ha="center", va="center", fontsize=9, color="white", weight="bold")


def _join_crossings(axes: Axes, rows: pd.DataFrame, budgets: list[float]) -> None:
    """A line a crossing (who gives way to whom), through all budgets that have it."""
    before: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for budget, column in rows.groupby("budget", sort=True):
        families, edges = list(column["family"]), list(column["from_kb"])
        for i in range(1, len(families)):
            if families[i] != families[i - 1]:
                before.setdefault((families[i - 1], families[i]), []).append((budgets.index(float(str(budget))), edges[i]))
    for line in before.values():
        axes.plot(*zip(*line, strict=True), color=INK, linewidth=1.2, marker="_", markersize=18, markeredgewidth=1.6)
