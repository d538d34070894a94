"""Figures of routers and caches: hit rate by capacity, gate weight by rank, use of experts by domain.

This module does not know traces or models, only tidy frames made from them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from moecache.figures.style import EVICTION_STYLES, EVICTION_WORDS, look_up, need_columns, new_figure, stamp, styled

SOURCE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
SOURCE_MARKERS = "osD^vPX"
LARGEST_FACTOR = 8.0


@styled
def hit_rate_by_capacity(frame: pd.DataFrame, *, num_experts: int | None = None, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw the hit rate against the number of slots a layer, one line per eviction, one panel per trace.

    Parameters
    ----------
    frame : DataFrame
        ``num_slots``, ``eviction``, ``hit_rate`` (0 to 1); with ``low`` and ``high`` a band is drawn, with
        ``source`` one panel per source (at most three).
    num_experts : int, optional
        E: the slots are then also given as a share of the experts.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure

    Raises
    ------
    ValueError
        For absent columns, an unknown eviction or kind, or more than three sources.
    """
    need_columns(frame, ("num_slots", "eviction", "hit_rate"))
    looks = look_up(EVICTION_STYLES, frame["eviction"], "eviction")
    sources = list(dict.fromkeys(frame["source"])) if "source" in frame.columns else [None]
    if len(sources) > 3:
        raise ValueError(f"the frame holds {len(sources)} sources: draw at most three side by side")
    figure = new_figure(4.0)
    panels = figure.subplots(1, len(sources), sharey=True, squeeze=False)[0]
    for axes, source in zip(panels, sources, strict=True):
        rows = frame if source is None else pd.DataFrame(frame[frame["source"] == source])
        for eviction, look in looks.items():
            line = pd.DataFrame(rows[rows["eviction"] == eviction]).sort_values("num_slots")
            label = EVICTION_WORDS.get(eviction, eviction.replace("_", " "))
            axes.plot(
                line["num_slots"], line["hit_rate"], color=look.colour, marker=look.marker, linestyle=look.dash, label=label, markersize=5.5
            )
            if {"low", "high"} <= set(frame.columns):
                axes.fill_between(line["num_slots"], line["low"], line["high"], color=look.colour, alpha=0.15, linewidth=0)
        _capacity_axis(axes, sorted(set(rows["num_slots"])), num_experts, len(sources))
        axes.set_title(source or "", loc="left", pad=8)
    panels[0].set_ylabel("Hit rate (of the calls)")
    panels[0].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=" %"))
    panels[-1].legend(loc="lower right")
    stamp(panels[-1], kind, is_quick)
    return figure


@styled
def gate_weight_by_rank(frame: pd.DataFrame, *, highlight: str | None = None, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw the mean gate weight of each rank, one line per model.

    Parameters
    ----------
    frame : DataFrame
        ``source`` (model), ``rank`` (from 0), ``gate_weight`` (mean; a model's ranks sum to 1).
    highlight : str, optional
        The source whose line is heavier.
    kind, is_quick
        As in ``hit_rate_by_capacity``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("source", "rank", "gate_weight"))
    sources = list(dict.fromkeys(frame["source"]))
    if len(sources) > len(SOURCE_COLOURS):
        raise ValueError(f"the frame holds {len(sources)} sources: draw at most {len(SOURCE_COLOURS)}")
    figure = new_figure(3.9)
    axes = figure.subplots()
    for source, colour, marker in zip(sources, SOURCE_COLOURS, SOURCE_MARKERS, strict=False):
        line = pd.DataFrame(frame[frame["source"] == source]).sort_values("rank")
        is_main = source == highlight
        axes.plot(
            line["rank"], line["gate_weight"], color=colour, marker=marker, markersize=7 if is_main else 5,
            linewidth=2.6 if is_main else 1.3, label=source, zorder=3 if is_main else 2,
        )  # fmt: skip
    axes.set(xlabel="Rank of the call (0 = first choice)", ylabel="Mean gate weight", ylim=(0.0, None))
    axes.set_xticks(range(1 + max(frame["rank"].to_list())))
    axes.grid(True, axis="y")
    axes.legend(loc="upper right")
    stamp(axes, kind, is_quick)
    return figure


@styled
def expert_use(frame: pd.DataFrame, *, title: str = "", kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw how often each domain calls each expert, against an even spread over the experts.

    Experts are ordered by the domain that uses them most, then by how much: blocks along the diagonal are
    experts that belong to one domain.

    Parameters
    ----------
    frame : DataFrame
        One layer: ``domain``, ``expert``, ``calls``; pairs that do not occur count as zero.
    title : str
        Left above the picture, for example the layer.
    kind, is_quick
        As in ``hit_rate_by_capacity``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("domain", "expert", "calls"))
    calls = frame.pivot_table(index="domain", columns="expert", values="calls", aggfunc="sum", fill_value=0, sort=False)
    factors = calls.div(calls.sum(axis=1), axis=0) * calls.shape[1]
    owner, most = factors.to_numpy().argmax(axis=0), factors.to_numpy().max(axis=0)
    ordered = factors.iloc[:, np.lexsort((-most, owner))]
    logs = np.log2(ordered.clip(lower=1 / LARGEST_FACTOR, upper=LARGEST_FACTOR))
    figure = new_figure(1.5 + 0.36 * len(calls))
    axes = figure.subplots()
    limit = np.log2(LARGEST_FACTOR)
    seaborn.heatmap(
        logs, ax=axes, cmap="PuOr_r", norm=TwoSlopeNorm(0.0, -limit, limit), xticklabels=False, rasterized=True,
        cbar_kws={"label": "use, times an even spread", "format": FuncFormatter(_as_factor), "pad": 0.02},
    )  # fmt: skip
    axes.set(xlabel=f"{calls.shape[1]} experts, ordered by the domain that uses them most", ylabel="")
    axes.tick_params(axis="y", rotation=0, length=0)
    axes.set_title(title, loc="left", pad=8)
    stamp(axes, kind, is_quick)
    return figure


def _as_factor(power: float, _: object) -> str:
    return f"{2**power:g}" if power >= 0 else f"1/{2**-power:g}"


def _capacity_axis(axes: Axes, slots: list[int], num_experts: int | None, num_panels: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, _slots_labels(slots, num_experts, num_panels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Slots a layer" if num_experts is None else f"Slots a layer (of {num_experts} experts)")
    axes.grid(True, axis="both")


def _slots_labels(slots: list[int], num_experts: int | None, num_panels: int) -> list[str]:
    """Label the ticks, with the share of the experts below; a tick too close to the last label stays bare."""
    closest = 0.09 * num_panels * np.log2(slots[-1] / slots[0])
    labels, last = [], 0.0
    for number in slots:
        is_clear = not last or np.log2(number / last) >= closest
        last = number if is_clear else last
        share = "" if num_experts is None else f"\n{100 * number / num_experts:.3g} %"
        labels.append(f"{number}{share}" if is_clear else "")
    return labels
