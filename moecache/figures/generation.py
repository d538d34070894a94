"""Figures of generated answers: agreement with the exact model by mass, and the coefficient of the two problem by problem.

Each takes a tidy table and computes nothing; a panel for each kind of task.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moecache.figures.style import (
    FAINT,
    FAMILY_STYLES,
    Look,
    legend_handles,
    look_up,
    need_columns,
    new_figure,
    shared_panels,
    stamp,
    styled,
)

STYLES: Mapping[str, Look] = {**FAMILY_STYLES, "chosen policy": Look("#888888", "d")}


@styled
def agreement_by_mass(points: pd.DataFrame, words: Mapping[str, str], *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw one point a policy: agreement up to the first difference against substituted gate mass.

    Parameters
    ----------
    points : DataFrame
        ``kind`` (one panel each), ``family``, ``mass``, ``agreement``, ``low``, ``high`` (fractions).
    words : mapping of kind to its title.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure
    """
    need_columns(points, ("kind", "family", "mass", "agreement", "low", "high"))
    looks, tasks = look_up(STYLES, points["family"], "family"), list(dict.fromkeys(points["kind"]))
    figure = new_figure(3.7)
    panels = shared_panels(figure, 1, len(tasks), x="Substituted gate mass (mean a step)", sharey=True)[0]
    for task, axes in zip(tasks, panels, strict=True):
        _draw_points(axes, pd.DataFrame(points[points["kind"] == task]), looks)
        axes.set_title(words[task], loc="left")
    panels[0].set_ylabel("Agreement up to the\nfirst difference, %")
    figure.legend(handles=legend_handles(looks), loc="outside lower center", ncols=3, handletextpad=0.3)
    stamp(panels[-1], kind, is_quick)
    return figure


def _draw_points(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    for row in rows.to_dict("records"):
        look = looks[row["family"]]
        axes.plot([row["mass"]] * 2, [100 * row["low"], 100 * row["high"]], color=look.colour, linewidth=1.0)
        axes.plot(row["mass"], 100 * row["agreement"], marker=look.marker, color=look.colour, markersize=6)
    axes.set_xlim(left=0.0)
    axes.grid(True, axis="both")


@styled
def mass_by_problem(
    table: pd.DataFrame, words: Mapping[str, str], weak: float, *, kind: str = "MEASURED", is_quick: bool = False
) -> Figure:
    """Draw, for each policy, the coefficient of mass and agreement across problems, with the band that counts as nothing.

    Parameters
    ----------
    table : DataFrame
        ``kind`` (one panel each), ``policy``, ``family``, ``r``, ``low``, ``high``.
    words : mapping of kind to its title.
    weak : float
        Half the width of the band around zero.
    kind, is_quick
        As in `agreement_by_mass`.

    Returns
    -------
    Figure
    """
    need_columns(table, ("kind", "policy", "family", "r", "low", "high"))
    looks, tasks = look_up(STYLES, table["family"], "family"), list(dict.fromkeys(table["kind"]))
    policies = list(dict.fromkeys(table["policy"]))
    figure = new_figure(1.0 + 0.26 * len(policies))
    panels = shared_panels(figure, 1, max(len(tasks), 1), x="Spearman, mass and agreement", sharey=True)[0]
    for task, axes in zip(tasks, panels, strict=False):
        axes.axvspan(-weak, weak, color="#eeeeee", zorder=0)
        axes.axvline(0.0, color=FAINT, linewidth=0.8)
        for row in table[table["kind"] == task].to_dict("records"):
            look, place = looks[row["family"]], policies.index(row["policy"])
            axes.plot([row["low"], row["high"]], [place, place], color=look.colour, linewidth=1.2)
            axes.plot(row["r"], place, marker=look.marker, color=look.colour, markersize=6)
        axes.set_xlim(-1.05, 1.05)
        axes.set_title(words[task], loc="left")
    panels[0].set_yticks(range(len(policies)), policies)
    panels[0].invert_yaxis()
    stamp(panels[-1], kind, is_quick)
    return figure
