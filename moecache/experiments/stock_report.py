"""Tables, tests and words of the chapter against stock engines, from the rows that `stock` measures.

The unit is the repeat. Rates are averaged and compared in logarithms (`stats.ratios`). What has no rate (killed, too small, out of time)
is told in its own words. This module starts nothing and times nothing.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from moecache.claims.data import load_claims
from moecache.experiments.stock import ENGINES, STOCK
from moecache.experiments.stock_place_report import is_on_gpu
from moecache.experiments.stock_runs import RAN
from moecache.stats.ratios import Ratio, geometric_mean, paired_ratio
from moecache.stats.rows import holm_family, tidy_row

NO_RATE = Ratio(np.nan, np.nan, np.nan, np.nan, np.nan, np.nan, 0)
SAME_RATE = 1.1  # engines that differ by less have no order worth keeping
FEWEST_FOR_INTERVAL = 3  # with two repeats a t-interval says next to nothing
UNSHOWN_FLAGS = ("system", "slots")  # llama.cpp's list of instruction sets, and what differs from cap to cap
MEBIBYTES_PER_GIBIBYTE = 1024


def cells_in(frame: pd.DataFrame) -> list[str]:
    """The cells in words, in the order of the frame."""
    return list(dict.fromkeys(frame["cell"]))


def engines_in(frame: pd.DataFrame) -> list[str]:
    """The engines in the order of the study's list."""
    found = set(frame["engine"])
    return [name for name in ENGINES if name in found]


def is_ours(engine: str) -> bool:
    """Whether an engine is this project's runtime."""
    return bool(ENGINES[engine].policy)


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (cell, engine) that was asked for.

    Returns
    -------
    DataFrame : `cell`, `engine`, `is_ours`, `rate` (geometric mean of tokens per second, NaN where no repeat has one), `low`, `high` (95 %;
        NaN with fewer than three repeats), `n`, `outcome` (of the repeats without a rate, otherwise "ran"), `cap_gibibytes`,
        `peak_gibibytes`,
        `rss_gibibytes` (the largest of the repeats; NaN where unknown), `threads`, `read_ahead_kib`, `hit_rate`, `read_mebibytes`
        (a token). On a GPU `cap_gibibytes` is what may be placed there, and `gpu_peak_gibibytes` says what was.
    """
    rows = []
    for cell in cells_in(frame):
        part = pd.DataFrame(frame[frame["cell"] == cell])
        for engine in engines_in(part):
            rows.append({"cell": cell, "engine": engine, "is_ours": is_ours(engine), **_summary(part[part["engine"] == engine])})
    return pd.DataFrame(rows)


def _summary(runs: pd.DataFrame) -> dict[str, object]:
    ran = runs[runs["outcome"] == RAN]
    mean = geometric_mean(ran["tokens_per_second"].to_list()) if len(ran) else NO_RATE
    has_interval = mean.n >= FEWEST_FOR_INTERVAL
    others = [str(outcome) for outcome in runs["outcome"] if outcome != RAN]
    last = runs.iloc[-1]
    budget = "gpu_budget_mebibytes" if is_on_gpu(runs) else "cap_mebibytes"
    peaks = ("peak_mebibytes", "rss_mebibytes", *(["gpu_peak_mebibytes"] if is_on_gpu(runs) else []))
    return {
        "rate": mean.value,
        "low": mean.low if has_interval else np.nan,
        "high": mean.high if has_interval else np.nan,
        "n": mean.n,
        "outcome": f"{others[0]}{f' in {len(others)} of {len(runs)}' if len(ran) else ''}" if others else RAN,
        "cap_gibibytes": last[budget] / MEBIBYTES_PER_GIBIBYTE,
        **{name.replace("mebibytes", "gibibytes"): runs[name].max() / MEBIBYTES_PER_GIBIBYTE for name in peaks},
        "threads": int(last["threads"]),
        "read_ahead_kib": int(last["read_ahead_kib"]),
        "hit_rate": float(ran["hit_rate"].mean()) if len(ran) else np.nan,
        "read_mebibytes": float(ran["read_mebibytes_per_token"].mean()) if len(ran) else np.nan,
    }


def shown_rates(table: pd.DataFrame) -> pd.DataFrame:
    """`rates` as a page shows it."""
    rows = table.to_dict("records")
    second = {"GPU peak, GiB": "gpu_peak_gibibytes"} if "gpu_peak_gibibytes" in table else {"resident, GiB": "rss_gibibytes"}
    return pd.DataFrame(
        {
            "cap": [f"{cell} ({size:.2f} GiB)" for cell, size in zip(table["cell"], table["cap_gibibytes"], strict=True)],
            "engine": table["engine"],
            "tokens/s [95 %]": [_rate_words(row) for row in rows],
            "peak, GiB": table["peak_gibibytes"],
            **{shown: table[name] for shown, name in second.items()},
            "read, MiB a token": table["read_mebibytes"],
            "hits": ["" if np.isnan(value) else f"{100 * value:.0f} %" for value in table["hit_rate"]],
            "set": [_set_words(row) for row in rows],
        }
    )


def _rate_words(row: dict[Any, Any]) -> str:
    if np.isnan(row["rate"]):
        return row["outcome"]
    interval = f" [{row['low']:.3g}, {row['high']:.3g}]" if np.isfinite(row["low"]) else ""
    return f"{row['rate']:.3g}{interval}" + ("" if row["outcome"] == RAN else f" ({row['outcome']})")


def _set_words(row: dict[Any, Any]) -> str:
    threads = f"{row['threads']} threads" if row["threads"] > 1 else "1 thread" if row["threads"] else ""
    has_ahead = ENGINES[row["engine"]].maps_files and row["read_ahead_kib"] >= 0
    return ", ".join(part for part in (threads, f"read-ahead {row['read_ahead_kib']} KiB" if has_ahead else "") if part)


def ratio_between(frame: pd.DataFrame, cell: str, engine: str, against: str) -> Ratio | None:
    """How many times as fast one engine is as another, over the repeats in which both have a rate; None where there is none."""
    part = frame[(frame["cell"] == cell) & (frame["outcome"] == RAN)]
    wide = part[part["engine"].isin([engine, against])].pivot(index="repeat", columns="engine", values="tokens_per_second")
    if not {engine, against} <= set(wide.columns):
        return None
    both = wide.dropna()
    return paired_ratio(both[engine].to_list(), both[against].to_list()) if len(both) else None


def baseline_of(frame: pd.DataFrame) -> str:
    """The stock engine that others are compared with: llama.cpp where it was run, otherwise the first that was.

    Raises
    ------
    ValueError : no stock engine was run.
    """
    stock = [engine for engine in engines_in(frame) if not is_ours(engine)]
    if not stock:
        raise ValueError(f"the rows hold no stock engine; run one of {', '.join(name for name in ENGINES if not is_ours(name))}")
    return stock[0]


def tests(frame: pd.DataFrame) -> pd.DataFrame | None:
    """Ratios of this project's runtime to the baseline in every cell, in the form of `stats.rows`; None where no pair has two repeats.

    Planned are the engines that the claim names, against llama.cpp, where not all experts fit into main memory; they are corrected
    together. On a GPU nothing is planned.
    """
    against, factors = baseline_of(frame), {} if is_on_gpu(frame) else claimed_factors()
    fitting = set(frame.loc[frame["is_fitting"], "cell"])
    rows = []
    for cell in cells_in(frame):
        for engine in engines_in(frame):
            found = ratio_between(frame, cell, engine, against) if is_ours(engine) else None
            if found is None or found.n < 2:
                continue
            is_planned = against == STOCK and engine in factors and cell not in fitting
            rows.append(_test_row(f"{engine} / {against}, {cell}", found, is_planned))
    return _corrected(rows) if rows else None


def _test_row(question: str, found: Ratio, is_planned: bool) -> pd.DataFrame:
    p = found.p if is_planned else np.nan
    return tidy_row(
        question, found.value, (found.low, found.high), found.n, "repeats", test="paired t-test of logs" if is_planned else "",
        p=p, effect=found.dz, effect_kind="dz", smallest_detectable=found.detectable, is_planned=is_planned,
    )  # fmt: skip


def _corrected(rows: list[pd.DataFrame]) -> pd.DataFrame:
    table = pd.concat(rows, ignore_index=True)
    return holm_family(table) if table["p"].notna().any() else table


def claimed_factors() -> dict[str, float]:
    """What the claim asks of each engine."""
    claim = next(claim for claim in load_claims()[1] if claim.id == "j")
    return dict(claim.parameters["factors"])


def order_words(frame: pd.DataFrame) -> str:
    """Whether the order of the engines is the same in all repeats, in words; swaps of engines within 10 % of each other do not count."""
    repeats = sorted(set(frame["repeat"]))
    if len(repeats) < 2:
        return "There is one repeat, so there is no test, and nothing can be said about whether the order of the engines holds."
    swaps = [(cell, *pair) for cell in cells_in(frame) for pair in _swapped(frame[(frame["cell"] == cell) & (frame["outcome"] == RAN)])]
    if not swaps:
        return f"The order of the engines is the same in all {len(repeats)} repeats, in every cap (pairs within 10 % of each other aside)."
    told = "; ".join(f"{first} and {second} ({cell})" for cell, first, second in swaps)
    return f"Over {len(repeats)} repeats the order changes for: {told}. All other pairs keep theirs, or lie within 10 % of each other."


def _swapped(ran: pd.DataFrame) -> list[tuple[str, str]]:
    """Pairs of engines of which each is at least 10 % faster than the other in some repeat."""
    wide = ran.pivot(index="repeat", columns="engine", values="tokens_per_second")
    found = []
    for first, second in combinations([name for name in ENGINES if name in wide.columns], 2):
        ratios = (wide[first] / wide[second]).dropna()
        if (ratios > SAME_RATE).any() and (ratios < 1 / SAME_RATE).any():
            found.append((first, second))
    return found


def sweep_table(swept: pd.DataFrame) -> pd.DataFrame:
    """What was tried beforehand: a row per run."""
    return pd.DataFrame(
        {
            "engine": swept["engine"],
            "cap": swept["cell"],
            "threads": swept["threads"],
            "read-ahead, KiB": swept["read_ahead_kib"],
            "tokens/s": swept["tokens_per_second"],
            "how it ended": swept["outcome"],
        }
    )


def flags_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The flags with which each engine ran, one row per engine and distinct set of flags."""
    ran = frame[frame["outcome"] == RAN].drop_duplicates(["engine", "bits", "flags"])
    table = pd.DataFrame({"engine": ran["engine"], "bits": ran["bits"], "flags": [_flag_words(text) for text in ran["flags"]]})
    return table.drop_duplicates(ignore_index=True)


def _flag_words(flags: str) -> str:
    return ", ".join(f"{name}={value}" for name, value in json.loads(flags).items() if name not in UNSHOWN_FLAGS)
