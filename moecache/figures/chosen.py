"""Figures of the two chosen policies: the 2 x 2 of eviction and admission, and who owns each gain.

Each figure takes a tidy table; this module does not know how increases, effects and intervals were computed.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecache.figures.style import (
    FAINT,
    INK,
    Look,
    legend_handles,
    line_handles,
    look_up,
    need_columns,
    new_figure,
    shared_panels,
    stamp,
    styled,
)

ADMISSION_STYLES = {
    "none": Look("#0072B2", "o", "-"),
    "at 0.5": Look("#D55E00", "s", (0, (5, 2))),
    "anyway": Look("#009E73", "^", (0, (1, 1.5))),
}
ADMISSION_WORDS = {"none": "nothing is admitted", "at 0.5": "admitted at mass 0.5", "anyway": "admitted anyway"}
CAPACITY_LOOKS = (Look("#0072B2", "o"), Look("#D55E00", "s"), Look("#009E73", "^"), Look("#CC79A7", "D"), Look("#882255", "v"))


@styled
def two_by_two(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw each rule's perplexity increase under both evictions, one line for each admission.

    Parameters
    ----------
    table : DataFrame
        One model: ``rule``, ``num_slots``, ``eviction``, ``admission``, ``increase``, ``low``, ``high`` (fractions). Lines that are
        parallel mean that eviction and admission add up.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure
        A row of panels for each rule, a column for each capacity.

    Raises
    ------
    ValueError
        For absent columns or an unknown admission.
    """
    need_columns(table, ("rule", "num_slots", "eviction", "admission", "increase", "low", "high"))
    looks = look_up(ADMISSION_STYLES, table["admission"], "admission")
    rules, capacities = list(dict.fromkeys(table["rule"])), sorted(table["num_slots"].unique())
    evictions = list(dict.fromkeys(table["eviction"]))
    figure = new_figure(0.9 + 2.1 * len(rules))
    grid = shared_panels(figure, len(rules), len(capacities), y="Perplexity increase, %", sharex=True, sharey="col")
    for rule, line in zip(rules, grid, strict=True):
        for num_slots, axes in zip(capacities, line, strict=True):
            _draw_cell(axes, table[(table["rule"] == rule) & (table["num_slots"] == num_slots)], evictions, looks)
    for num_slots, axes in zip(capacities, grid[0], strict=True):
        axes.set_title(f"{num_slots} slots", loc="left")
    for rule, line in zip(rules, grid, strict=True):
        line[0].set_ylabel(rule)
    named = {ADMISSION_WORDS[name]: look for name, look in looks.items()}
    figure.legend(handles=line_handles(named), loc="outside lower center", ncols=3)
    stamp(grid[0, -1], kind, is_quick)
    return figure


def _draw_cell(axes: Axes, rows: pd.DataFrame, evictions: list[str], looks: dict[str, Look]) -> None:
    shift = dict(zip(looks, (-0.06, 0.0, 0.06), strict=False))
    for admission, look in looks.items():
        line = rows[rows["admission"] == admission].set_index("eviction").reindex(evictions).dropna(subset=["increase"])
        if line.empty:
            continue
        places = [evictions.index(str(name)) + shift[admission] for name in line.index]
        bounds = [100 * (line["increase"] - line["low"]), 100 * (line["high"] - line["increase"])]
        axes.errorbar(
            places, 100 * line["increase"], yerr=bounds, color=look.colour, marker=look.marker, linestyle=look.dash, elinewidth=1.2,
        )  # fmt: skip
    axes.set_xticks(range(len(evictions)), evictions)
    axes.set_xlim(-0.35, len(evictions) - 0.65)
    axes.grid(True, axis="y")


@styled
def effect_forest(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw every contrast with its interval, one panel a rule and one colour a setting; left of zero is a gain.

    Parameters
    ----------
    table : DataFrame
        ``rule``, ``part``, ``setting`` (a short name), ``effect``, ``low``, ``high`` (nats).
    kind, is_quick
        As in ``two_by_two``.

    Returns
    -------
    Figure
    """
    need_columns(table, ("rule", "part", "setting", "effect", "low", "high"))
    rules, parts, settings = (list(dict.fromkeys(table[name])) for name in ("rule", "part", "setting"))
    looks = {name: CAPACITY_LOOKS[i % len(CAPACITY_LOOKS)] for i, name in enumerate(settings)}
    figure = new_figure(1.2 + (0.24 + 0.13 * len(settings)) * len(parts))
    panels = shared_panels(figure, 1, len(rules), x="Change of the loss, thousandths of a nat a token", sharey=True, sharex=True)[0]
    for rule, axes in zip(rules, panels, strict=True):
        axes.axvline(0.0, color=INK, linewidth=0.8)
        for row in table[table["rule"] == rule].to_dict("records"):
            look = looks[row["setting"]]
            place = settings.index(row["setting"]) - (len(settings) - 1) / 2
            height = len(parts) - 1 - parts.index(row["part"]) - place * 0.7 / len(settings)
            bounds = [[1000 * (row["effect"] - row["low"])], [1000 * (row["high"] - row["effect"])]]
            axes.errorbar(1000 * row["effect"], height, xerr=bounds, color=look.colour, marker=look.marker, markersize=5, elinewidth=1.4)
        axes.set_title(rule, loc="left")
        axes.set_yticks(range(len(parts)), parts[::-1])
        axes.tick_params(axis="y", length=0)
        axes.grid(True, axis="x")
    figure.legend(handles=legend_handles(looks), loc="outside upper center", ncols=min(len(settings), 4), labelcolor=FAINT)
    stamp(panels[-1], kind, is_quick)
    return figure
