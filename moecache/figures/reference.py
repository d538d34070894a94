"""Figures of the reference models: training curve, bits a byte, hot sets, hit rates beside public ones, controls.

This module knows tidy frames; it does not know models or texts.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pandas as pd
import seaborn
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator, PercentFormatter

from moecache.figures.style import FAINT, INK, need_columns, new_figure, stamp, styled
from moecache.figures.traces import SOURCE_COLOURS, SOURCE_MARKERS

SMOOTHED_ROWS = 15
METHOD_LOOKS = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#CC79A7", "^"),
    ("#888888", "d"),
    ("#009E73", "v"),
    ("#E69F00", "P"),
    ("#56B4E9", "X"),
)
TICK_FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)


@styled
def training_curve(log: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw the training loss and the learning rate against the tokens read.

    Parameters
    ----------
    log : DataFrame
        ``model``, ``num_tokens``, ``loss_nats`` (one batch: drawn faint, with a moving median), ``learning_rate``.
    kind : {"MEASURED", "SIMULATED", "ESTIMATED"}
    is_quick : bool

    Returns
    -------
    Figure
    """
    need_columns(log, ("model", "num_tokens", "loss_nats", "learning_rate"))
    figure = new_figure(4.2)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1.0))
    for colour, (name, rows) in zip(cycle(SOURCE_COLOURS), log.groupby("model", sort=False), strict=False):
        tokens = rows["num_tokens"].to_numpy() / 1e6
        losses.plot(tokens, rows["loss_nats"], color=colour, alpha=0.25, linewidth=0.8)
        smooth = rows["loss_nats"].rolling(SMOOTHED_ROWS, center=True, min_periods=1).median()
        losses.plot(tokens, smooth, color=colour, label=str(name))
        rates.plot(tokens, rows["learning_rate"], color=colour)
    losses.set_ylabel("Training loss, nats a token")
    losses.grid(True, axis="y")
    losses.legend(loc="upper right")
    rates.set(xlabel="Training tokens, millions", ylabel="Learning rate", ylim=(0.0, None))
    stamp(losses, kind, is_quick)
    return figure


@styled
def bits_per_byte(frame: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw bits a byte of each domain, one marker per method; fewer is better.

    Parameters
    ----------
    frame : DataFrame
        ``domain``, ``method`` (at most seven; the first is drawn on top), ``bits``, ``low`` and ``high`` (NaN: no interval).
    kind, is_quick
        As in ``training_curve``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("domain", "method", "bits", "low", "high"))
    names = list(dict.fromkeys(frame["domain"]))[::-1]
    figure = new_figure(1.2 + 0.36 * len(names))
    axes = figure.subplots()
    methods = list(frame.groupby("method", sort=False))
    if len(methods) > len(METHOD_LOOKS):
        raise ValueError(f"{len(methods)} methods, more than {len(METHOD_LOOKS)} that can be told apart: draw fewer at once")
    for order, ((colour, marker), (method, rows)) in enumerate(zip(METHOD_LOOKS, methods, strict=False)):
        places = [names.index(domain) for domain in rows["domain"]]
        axes.hlines(places, rows["low"], rows["high"], color=colour, linewidth=2.0, zorder=9 - order)
        axes.plot(rows["bits"], places, marker, color=colour, label=str(method), markersize=7, zorder=10 - order)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set(xlabel="Bits a byte of held-out text (fewer is better)", xlim=(0.0, None))
    axes.grid(True, axis="both")
    figure.legend(loc="outside lower center", ncols=4)
    stamp(axes, kind, is_quick)
    return figure


@styled
def hot_set_overlap(frame: pd.DataFrame, *, chance: float, title: str = "", kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw how much the hot sets of every two domains have in common, as a table of shades with its numbers.

    Parameters
    ----------
    frame : DataFrame
        ``domain``, ``other``, ``overlap`` (0 to 1); rows of several layers are averaged.
    chance : float
        Overlap of two sets drawn at random: the pale end.
    title : str
        Left above the picture, for example the model.
    kind, is_quick
        As in ``training_curve``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("domain", "other", "overlap"))
    table = frame.pivot_table(index="domain", columns="other", values="overlap", aggfunc="mean", sort=False)
    words = [name.replace("_", " ") for name in table.index]
    figure = new_figure(1.4 + 0.42 * len(table))
    axes = figure.subplots()
    seaborn.heatmap(
        100 * table.loc[table.index, table.index], ax=axes, cmap="Blues", vmin=100 * chance, vmax=100.0, annot=True, fmt=".0f",
        xticklabels=words, yticklabels=words, linewidths=1.0, cbar_kws={"label": "experts in common, %", "pad": 0.02},
    )  # fmt: skip
    axes.set(xlabel="", ylabel="")
    axes.tick_params(axis="x", rotation=30, length=0)
    axes.tick_params(axis="y", rotation=0, length=0)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right")
    axes.set_title(title, loc="left", pad=8)
    stamp(axes, kind, is_quick)
    return figure


@styled
def hit_rate_by_share(frame: pd.DataFrame, *, kind: str = "SIMULATED", is_quick: bool = False) -> Figure:
    """Draw LRU's hit rate against the share of a layer's experts that is resident.

    Parameters
    ----------
    frame : DataFrame
        ``source``, ``kind`` ("own": heavy line with a band; "replayed": thin line; "reported": single marks), ``resident_fraction``,
        ``hit_rate``, ``low``, ``high``.
    kind, is_quick
        As in ``training_curve``.

    Returns
    -------
    Figure
    """
    need_columns(frame, ("source", "kind", "resident_fraction", "hit_rate", "low", "high"))
    figure = new_figure(4.6)
    axes = figure.subplots()
    colours = dict(zip(dict.fromkeys(frame["source"]), zip(cycle(SOURCE_COLOURS), cycle(SOURCE_MARKERS), strict=False), strict=False))
    for (source, how), rows in frame.groupby(["source", "kind"], sort=False):
        line = rows.sort_values("resident_fraction")
        (colour, marker), is_own = colours[source], how == "own"
        dash = "none" if how == "reported" else "-" if is_own else (0, (4, 2))
        axes.plot(
            line["resident_fraction"], line["hit_rate"], color=colour, marker=marker, linestyle=dash, linewidth=2.4 if is_own else 1.3,
            markersize=6, markerfacecolor=colour if is_own else "white", label=source if is_own else f"{source}, {how}",
        )  # fmt: skip
        if is_own:
            axes.fill_between(line["resident_fraction"], line["low"], line["high"], color=colour, alpha=0.15, linewidth=0)
    shares = sorted(set(frame.loc[frame["kind"] == "own", "resident_fraction"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [f"{100 * share:.3g} %" for share in shares])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0, symbol=" %"))
    axes.set(xlabel="Share of a layer's experts that is resident", ylabel="LRU hit rate (of the calls)", ylim=(0.0, 1.0))
    axes.grid(True, axis="both")
    figure.legend(loc="outside lower center", ncols=2)
    stamp(axes, kind, is_quick)
    return figure


@styled
def controls(table: pd.DataFrame, *, kind: str = "MEASURED", is_quick: bool = False) -> Figure:
    """Draw by what factor each control raises the perplexity, with its interval, on a logarithmic axis.

    Parameters
    ----------
    table : DataFrame
        ``model``, ``policy``, ``factor`` (1 = unchanged), ``low``, ``high``; controls are drawn from top to bottom in the order of the
        first model's, the models of one control below each other.
    kind, is_quick
        As in ``training_curve``.

    Returns
    -------
    Figure
    """
    need_columns(table, ("model", "policy", "factor", "low", "high"))
    names, models = list(dict.fromkeys(table["policy"])), list(dict.fromkeys(table["model"]))
    spread = 0.8 * (1 - 1 / len(models))
    figure = new_figure(1.2 + 0.4 * len(table))
    axes = figure.subplots()
    for model, offset, colour in zip(models, np.linspace(spread / 2, -spread / 2, len(models)), cycle(SOURCE_COLOURS), strict=False):
        rows = table[table["model"] == model]
        places = [len(names) - 1 - names.index(name) + offset for name in rows["policy"]]
        axes.hlines(places, rows["low"], rows["high"], color=colour, linewidth=2.0)
        axes.plot(rows["factor"], places, "o", color=colour, markersize=8, label=str(model))
        for place, factor in zip(places, rows["factor"], strict=True):
            axes.annotate(f"x {factor:.3g}", (factor, place), xytext=(0, 6), textcoords="offset points", ha="center", color=INK, fontsize=9)
    axes.axvline(1.0, color=FAINT, linewidth=1.2)
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set_xscale("log")
    axes.set(xlabel="Perplexity, times that of the unchanged model", ylim=(-0.6, len(names) - 0.2))
    if len(models) > 1:
        figure.legend(loc="outside lower center", ncols=len(models))
    highest = float(table["high"].max())
    axes.set_xlim(min(0.9, float(table["low"].min()) * 0.95), highest * 1.15)
    axes.xaxis.set_major_locator(FixedLocator([factor for factor in TICK_FACTORS if factor <= highest * 1.15]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="x")
    stamp(axes, kind, is_quick)
    return figure
