"""Planned comparisons of two policies: paired tests, equivalence, and what the sample could have seen.

This is the only place that reads pingouin's tables (R. Vallat, *Pingouin: statistics in Python*, JOSS
3(31):1026, 2018): its column names differ from function to function, its intervals come rounded, and its
effect size of a paired test is not the paired one. So only p-values are taken from it; effects, intervals and
effect sizes are computed here, and every p stands beside an effect, an interval and the smallest difference
the sample could have detected.

All tests run on the units' contributions (see ``paired``). p-values of one call are one family and corrected
together by Holm's method. Equivalence is two one-sided t-tests (D. Schuirmann, J. Pharmacokinet. Biopharm.
15:657, 1987), shown with the interval it is equivalent to: p < 0.05 exactly where the 90 % t-interval lies
inside the bound.

This module does not know which comparisons were planned: name them before looking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pingouin
from scipy import special

from moecache.stats.increases import IDENTICAL, effect_size
from moecache.stats.paired import DIFFERENCE, PairedUnits, pair_documents
from moecache.stats.resample import NUM_DRAWS, draw_counts, percentile_interval, weighted_mean_draws

TESTS = ("ttest", "wilcoxon")


def paired_tests(
    frame: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    test: str = "ttest",
    unit: str = "document",
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Test whether two policies lose the same, pair by pair, with Holm's correction over the pairs.

    Parameters
    ----------
    frame : DataFrame
        One setting, one row per (policy, document), as for ``pair_documents``.
    pairs : sequence of (policy, against)
        Labels; the difference is the first minus the second.
    test : {"ttest", "wilcoxon"}
        The t-test asks about the mean difference, the Wilcoxon signed-rank test about its symmetry around
        zero.
    unit, confidence, num_draws, seed
        Of the percentile bootstrap for the interval.

    Returns
    -------
    DataFrame
        ``comparison``, ``difference_nats``, ``low``, ``high``, ``dz``, ``smallest_detectable_nats`` (80 %
        power, paired t-test, two-sided 5 %), ``p_holm``. Policies that lost the same on every unit get p = 1
        and say so in ``comparison``. The number of units is in ``.attrs["num_units"]``.

    Raises
    ------
    ValueError
        For an unknown test or label, or no pairs.
    """
    if test not in TESTS:
        raise ValueError(f"test is {test!r}: use one of {', '.join(map(repr, TESTS))}")
    paired = pair_documents(frame, unit)
    counts = draw_counts(paired.num_units, num_draws, seed)
    p_value = _ttest_p if test == "ttest" else _wilcoxon_p
    rows = []
    for name, sums in _differences(paired, pairs):
        units = sums / paired.num_tokens.mean()
        draws = weighted_mean_draws(sums[None], paired.num_tokens, counts)[:, 0]
        low, high = percentile_interval(draws, confidence)
        bound = smallest_detectable(float(np.std(units, ddof=1)), paired.num_units)
        rows.append((name, units.mean(), low, high, effect_size(units), bound, _or_one(p_value, units)))
    columns = ["comparison", "difference_nats", "low", "high", "dz", "smallest_detectable_nats", "p_holm"]
    return _with_holm(pd.DataFrame(rows, columns=columns), paired)


def equivalence_tests(frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], bound_nats: float, unit: str = "document") -> pd.DataFrame:
    """Test whether two policies lose the same to within a bound (TOST), with Holm's correction.

    Parameters
    ----------
    frame : DataFrame
        As for ``paired_tests``.
    pairs : sequence of (policy, against)
    bound_nats : float
        The largest difference that still counts as the same, fixed beforehand; above 0.
    unit : {"document", "cluster"}

    Returns
    -------
    DataFrame
        ``comparison``, ``difference_nats``, ``low_90``, ``high_90`` (t-interval), ``bound_nats``, ``p_holm``,
        ``is_equivalent`` (p_holm below 0.05). ``.attrs["num_units"]`` holds n.

    Raises
    ------
    ValueError
        If the bound is not positive, a label is unknown, or there are no pairs.
    """
    if not bound_nats > 0.0:
        raise ValueError(f"bound_nats is {bound_nats}: name the largest difference that counts as none, above 0")
    paired = pair_documents(frame, unit)
    rows = []
    for name, sums in _differences(paired, pairs):
        units = sums / paired.num_tokens.mean()
        half = _t_half_width(units, 0.90)
        # Policies that are identical everywhere are equivalent within any bound.
        p_value = float(_tost_p(units, bound_nats)) if units.any() else 0.0
        rows.append((name, units.mean(), units.mean() - half, units.mean() + half, bound_nats, p_value))
    columns = ["comparison", "difference_nats", "low_90", "high_90", "bound_nats", "p_holm"]
    table = _with_holm(pd.DataFrame(rows, columns=columns), paired)
    return table.assign(is_equivalent=table["p_holm"] < 0.05)


def smallest_detectable(standard_deviation: float, num_units: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest mean paired difference that a two-sided paired t-test would detect with this power.

    Parameters
    ----------
    standard_deviation : float
        Of the units' differences; the result has its unit.
    num_units : int
        At least 3.
    power, alpha : float
        Between 0 and 1.

    Returns
    -------
    float
        Zero where the differences do not vary.

    Raises
    ------
    ValueError
        For a negative or undefined standard deviation, or too few units.
    """
    if not standard_deviation >= 0.0:
        raise ValueError(f"standard_deviation is {standard_deviation}: it must be 0 or more")
    if num_units < 3:
        raise ValueError(f"num_units is {num_units}: a paired test needs at least 3")
    return standard_deviation * _detectable_dz(num_units, power, alpha)


def _detectable_dz(num_units: int, power: float, alpha: float) -> float:
    found: Any = pingouin.power_ttest(n=num_units, power=power, alpha=alpha, contrast="paired")
    if not np.isfinite(found):
        raise ValueError(f"no effect size reaches power {power} at alpha {alpha} with {num_units} units")
    return float(found)


def _differences(paired: PairedUnits, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, np.ndarray]]:
    """Return (name, sums over each unit of first minus second) for every pair."""
    if not pairs:
        raise ValueError("pairs is empty: name at least one (policy, against)")
    named = []
    for policy, against in pairs:
        sums = paired.sums[DIFFERENCE][paired.index(policy)] - paired.sums[DIFFERENCE][paired.index(against)]
        name = f"{policy} − {against}"
        if sums.any() and math.isinf(effect_size(sums / paired.num_tokens.mean())):
            raise ValueError(f"{name} is the same {sums[0]:g} nats on every {paired.unit}: no test is needed")
        named.append((name if sums.any() else f"{name} ({IDENTICAL})", sums))
    return named


def _or_one(p_value: Callable[[np.ndarray], float], units: np.ndarray) -> float:
    """Return the p-value, or 1 where every difference is exactly zero (no test statistic exists)."""
    return float(p_value(units)) if units.any() else 1.0


def _ttest_p(units: np.ndarray) -> float:
    return pingouin.ttest(units, 0.0)["p_val"].iloc[0]


def _wilcoxon_p(units: np.ndarray) -> float:
    return pingouin.wilcoxon(units, np.zeros_like(units))["p_val"].iloc[0]


def _tost_p(units: np.ndarray, bound_nats: float) -> float:
    zeros = np.zeros_like(units)
    return pingouin.tost(units, zeros, bound=bound_nats, paired=True)["pval"].iloc[0]  # type: ignore[arg-type]


def _t_half_width(units: np.ndarray, confidence: float) -> float:
    quantile: Any = special.stdtrit(len(units) - 1, (1.0 + confidence) / 2.0)
    return float(quantile) * float(np.std(units, ddof=1)) / math.sqrt(len(units))


def _with_holm(table: pd.DataFrame, paired: PairedUnits) -> pd.DataFrame:
    table["p_holm"] = pingouin.multicomp(table["p_holm"].to_list(), method="holm")[1]
    table.attrs["num_units"] = paired.num_units
    return table
