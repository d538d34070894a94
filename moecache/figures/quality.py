"""Figures of what substitution costs: the forest of policies, and increase against mass.

Increases span orders of magnitude (a light rule costs tenths of a percent, substituting everything a
hundred), so their axis is logarithmic; where an interval reaches zero or below, the axis is linear below a
tenth of a percent and logarithmic above.

This module does not know how increases and intervals were computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

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
    spread,
    stamp,
    styled,
)

NEEDED = ("policy", "family", "increase", "low", "high", "substituted_fraction", "substituted_mass")
LINEAR_BELOW_PERCENT = 0.1
SIGNED_TICKS = (-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100, 1000)
REGIME_WORDS = {"admitted_anyway": "a substituted miss is admitted anyway", "stays_out": "it stays out"}
BAR: Any = {"marker": "|", "markersize": 11, "markeredgewidth": 2.4}


@styled
def forest(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw what each policy costs, sorted, with its interval, beside what it substituted.

    Parameters
    ----------
    table : DataFrame
        From ``stats.policy_table``; with a column ``regime`` (one row per policy and regime) each policy gets
        one line per regime, the first filled and the second open.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool
        Whether the numbers come from a quick run; said in the corner.

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns, an unknown family or kind, or more than two regimes.
    """
    need_columns(table, NEEDED)
    table = _that_cost_something(table)
    looks = look_up(FAMILY_STYLES, table["family"], "family")
    regimes = list(dict.fromkeys(table["regime"])) if "regime" in table.columns else [""]
    if len(regimes) > 2:
        raise ValueError(f"the table holds {len(regimes)} regimes: at most two can share a line")
    order = _by_increase(table)
    figure = new_figure(1.15 + 0.34 * len(order) * (1.0 if len(regimes) == 1 else 1.5))
    costs, shares = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1.0))
    for place, regime in enumerate(regimes):
        rows = table if regime == "" else pd.DataFrame(table[table["regime"] == regime])
        offset = 0.0 if len(regimes) == 1 else (0.2 if place == 0 else -0.2)
        _draw_costs(costs, rows, order, looks, offset, is_filled=place == 0)
        _draw_shares(shares, rows, order, looks, offset, is_filled=place == 0)
    _finish_forest(costs, shares, table, order)
    _forest_legend(figure, regimes)
    stamp(shares, kind, is_quick)
    return figure


@styled
def increase_by_mass(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw one point per policy: perplexity increase against substituted gate mass.

    Parameters
    ----------
    table : DataFrame
        From ``stats.policy_table`` of one setting; policies whose ``first_choice_fraction`` is above zero are
        drawn open, since they substitute first choices.
    kind, is_quick
        As in ``forest``.

    Returns
    -------
    Figure
    """
    need_columns(table, (*NEEDED, "first_choice_fraction"))
    drawn = pd.DataFrame(table[table["substituted_mass"] > 0.0]).sort_values("increase")
    looks = look_up(FAMILY_STYLES, drawn["family"], "family")
    figure = new_figure(4.6)
    axes = figure.subplots()
    for row in drawn.to_dict("records"):
        look, is_open = looks[row["family"]], row["first_choice_fraction"] > 0.0
        bounds = [[100 * (row["increase"] - row["low"])], [100 * (row["high"] - row["increase"])]]
        axes.errorbar(
            row["substituted_mass"], 100 * row["increase"], yerr=bounds, fmt=look.marker, color=look.colour,
            markersize=7, markerfacecolor="white" if is_open else look.colour, elinewidth=1.2,
        )  # fmt: skip
    _percent_axis(axes, "y", drawn)
    axes.set(xlabel="Substituted gate mass (mean a step)", ylabel="Perplexity increase, %")
    axes.set_xlim(0.0, 1.3 * np.max(drawn["substituted_mass"].to_numpy()))
    axes.grid(True, axis="both")
    _label_points(axes, drawn)
    _mass_legend(axes, looks, drawn)
    stamp(axes, kind, is_quick)
    return figure


def _that_cost_something(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out rows that are zero by definition; refuse a table that has no others."""
    is_zero = ~table[["increase", "low", "high"]].to_numpy().any(axis=1)
    if is_zero.all():
        raise ValueError("every policy's increase is exactly zero: there is nothing to draw")
    return pd.DataFrame(table[~is_zero])


def _by_increase(table: pd.DataFrame) -> list[str]:
    """Return the policies from the dearest to the cheapest, by their first row."""
    first = table.drop_duplicates("policy").sort_values("increase", kind="stable")
    return list(first["policy"])


def _draw_costs(axes: Axes, rows: pd.DataFrame, order: list[str], looks: dict[str, Look], offset: float, is_filled: bool) -> None:
    for row in rows.to_dict("records"):
        look, height = looks[row["family"]], order.index(row["policy"]) + offset
        bounds = [[100 * (row["increase"] - row["low"])], [100 * (row["high"] - row["increase"])]]
        axes.errorbar(
            100 * row["increase"], height, xerr=bounds, fmt=look.marker, color=look.colour, markersize=6.5,
            markerfacecolor=look.colour if is_filled else "white", elinewidth=1.6,
        )  # fmt: skip
        axes.annotate(
            _percent(row["increase"]), (100 * row["high"], height), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=INK,
        )  # fmt: skip


def _draw_shares(axes: Axes, rows: pd.DataFrame, order: list[str], looks: dict[str, Look], offset: float, is_filled: bool) -> None:
    for row in rows.to_dict("records"):
        look, height = looks[row["family"]], order.index(row["policy"]) + offset
        share, mass = 100 * row["substituted_fraction"], 100 * row["substituted_mass"]
        axes.plot([share, mass], [height, height], color=look.colour, linewidth=1.0, alpha=0.6)
        axes.plot(
            share, height, marker="o", color=look.colour, markersize=6,
            markerfacecolor=look.colour if is_filled else "white",
        )  # fmt: skip
        axes.plot(mass, height, color=look.colour, **BAR)


def _finish_forest(costs: Axes, shares: Axes, table: pd.DataFrame, order: list[str]) -> None:
    costs.set_yticks(range(len(order)), order)
    costs.set_ylim(-0.7, len(order) - 0.3)
    _percent_axis(costs, "x", table)
    _room_for_numbers(costs, table)
    costs.set_xlabel("Perplexity increase, %, with 95 % interval")
    shares.set_xlabel("Substituted, %")
    shares.set_xlim(left=0.0)
    for axes in (costs, shares):
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)


def _room_for_numbers(axes: Axes, table: pd.DataFrame) -> None:
    """Leave a third of the axis right of the last interval for its number."""
    ends = 100 * np.array([np.min(table["low"].to_numpy()), np.max(table["high"].to_numpy())])
    transform = axes.xaxis.get_transform()
    left, right = transform.transform(ends)
    wanted = np.array([left - 0.05 * (right - left), right + 0.33 * (right - left)])
    axes.set_xlim(*transform.inverted().transform(wanted))


def _forest_legend(figure: Figure, regimes: list[str]) -> None:
    handles = [
        Line2D([], [], color=FAINT, marker="o", linestyle="", label="share of the calls"),
        Line2D([], [], color=FAINT, linestyle="", label="share of the gate mass", **BAR),
    ]
    if len(regimes) == 2:
        handles += [
            Line2D([], [], color=FAINT, marker=marker, linestyle="", markerfacecolor=face, label=label)
            for marker, face, label in (
                ("s", FAINT, f"filled: {REGIME_WORDS.get(regimes[0], regimes[0])}"),
                ("s", "white", f"open: {REGIME_WORDS.get(regimes[1], regimes[1])}"),
            )
        ]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, handletextpad=0.3)


def _percent_axis(axes: Axes, side: str, table: pd.DataFrame) -> None:
    """Make an axis logarithmic in percent, linear near zero where something reaches it."""
    scale = axes.set_xscale if side == "x" else axes.set_yscale
    axis = axes.xaxis if side == "x" else axes.yaxis
    lowest = 100 * float(np.min(table[["low", "increase"]].to_numpy()))
    if lowest > 0.0:
        scale("log")
    else:
        scale("symlog", linthresh=LINEAR_BELOW_PERCENT, linscale=0.8)
        axis.set_major_locator(FixedLocator([t for t in SIGNED_TICKS if t >= lowest]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _label_points(axes: Axes, drawn: pd.DataFrame) -> None:
    """Write each policy's label right of its point, moved apart where labels would overlap."""
    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    points = axes.transData.transform(np.column_stack([drawn["substituted_mass"], 100 * drawn["increase"]]))
    heights = spread([float(y) for y in points[:, 1]], gap=0.155 * figure.dpi)
    for (x, y), height, label in zip(points, heights, drawn["policy"], strict=True):
        scale = 72.0 / figure.dpi
        axes.annotate(
            label, tuple(axes.transData.inverted().transform((x, y))), xytext=(11, (height - y) * scale),
            textcoords="offset points", va="center", fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkB": 4},
        )  # fmt: skip


def _mass_legend(axes: Axes, looks: dict[str, Look], drawn: pd.DataFrame) -> None:
    has_open = np.any(drawn["first_choice_fraction"].to_numpy() > 0.0)
    more = [open_handle("open: substitutes first choices")] if has_open else []
    axes.figure.legend(handles=legend_handles(looks) + more, loc="outside lower center", ncols=3, handletextpad=0.3)  # type: ignore[union-attr]


def _percent(increase: float) -> str:
    """Format an increase with two or three significant digits."""
    percent = 100 * increase
    if percent == 0.0:
        return "0"
    digits = 2 if abs(percent) < 1 else (1 if abs(percent) < 100 else 0)
    return f"{percent:+.{digits}f} %"
