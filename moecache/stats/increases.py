"""What policies cost: perplexity increases with intervals, ratios between them, and what became of the calls.

Perplexity increase = exp(mean paired difference of token losses) - 1, token-weighted. Its interval is the
percentile interval of a bootstrap over units. The effect size is dz = mean / standard deviation of the units'
differences (ddof 1), the one that belongs to a paired design (D. Lakens, Frontiers in Psychology 4:863,
2013). A policy that lost exactly the same on every unit is named as identical: it has no effect size, and
none is invented.

This module knows losses and counts of calls; it does not know how either was obtained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from moecache.stats.paired import DIFFERENCE, PairedUnits, pair_documents
from moecache.stats.resample import NUM_DRAWS, draw_counts, percentile_interval, weighted_mean_draws

IDENTICAL = "identical on every unit"
UNBOUNDED = "denominator not clear of zero"
SHARES = ("hits", "fetched", "forced", "substituted", "dropped", "copies")


def effect_size(differences: np.ndarray) -> float:
    """Return dz = mean / standard deviation (ddof 1) of paired differences [U].

    Zero where every difference is exactly zero, plus or minus infinity where all are the same but not zero.
    """
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if deviation > 1e-12 * abs(mean):
        return mean / deviation
    return math.copysign(math.inf, mean) if mean else 0.0


def perplexity_increases(
    frame: pd.DataFrame,
    unit: str = "document",
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Return each policy's perplexity increase over fetching every miss.

    Parameters
    ----------
    frame : DataFrame
        One setting, one row per (policy, document): ``policy``, ``document``, ``num_tokens``,
        ``mean_difference_nats``, and ``cluster`` where that is the unit.
    unit : {"document", "cluster"}
    confidence, num_draws, seed
        Of the percentile bootstrap.

    Returns
    -------
    DataFrame
        ``policy``, ``increase``, ``low``, ``high`` (fractions: 0.12 is 12 %), ``dz``, ``num_units``,
        ``note``.

    Raises
    ------
    ValueError
        As ``pair_documents``.
    """
    paired = pair_documents(frame, unit)
    draws = _mean_draws(paired, num_draws, seed)
    low, high = percentile_interval(np.expm1(draws), confidence)
    units = paired.contributions()
    is_identical = ~units.any(axis=1)
    return pd.DataFrame(
        {
            "policy": paired.policies,
            "increase": np.expm1(paired.means()),
            "low": low,
            "high": high,
            "dz": [effect_size(row) for row in units],
            "num_units": paired.num_units,
            "note": np.where(is_identical, IDENTICAL, ""),
        }
    )


def policy_table(frame: pd.DataFrame, unit: str = "document", **bootstrap: float) -> pd.DataFrame:
    """Return one row a policy: what it substituted and what that cost.

    Parameters
    ----------
    frame : DataFrame
        As for ``perplexity_increases``, with ``family``, ``calls``, ``substituted``, ``dropped``,
        ``first_choices_substituted`` and ``substituted_mass`` besides.
    unit : {"document", "cluster"}
    **bootstrap
        ``confidence``, ``num_draws``, ``seed``.

    Returns
    -------
    DataFrame
        ``policy``, ``family``, ``increase``, ``low``, ``high``, ``substituted_fraction`` (of the calls:
        substituted or dropped, that is, answered by another expert or by none), ``first_choice_fraction``
        (first choices substituted, of all calls), ``substituted_mass`` (mean a step, 0 to 1).
    """
    increases = perplexity_increases(frame, unit, **bootstrap)  # type: ignore[arg-type]
    table = pd.DataFrame(increases, columns=["policy", "increase", "low", "high"])
    families = frame.drop_duplicates("policy").set_index("policy")["family"]
    table.insert(1, "family", families.loc[table["policy"]].to_numpy())
    shares = _fractions(frame, ("substituted", "dropped", "first_choices_substituted")).loc[table["policy"]]
    table["substituted_fraction"] = (shares["substituted"] + shares["dropped"]).to_numpy()
    table["first_choice_fraction"] = shares["first_choices_substituted"].to_numpy()
    table["substituted_mass"] = pair_documents(frame, columns=("substituted_mass",)).means("substituted_mass")
    return table


def call_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what became of the calls of each policy, as fractions of its calls.

    Parameters
    ----------
    frame : DataFrame
        ``policy``, ``calls``, and the counts ``hits``, ``fetched``, ``forced``, ``substituted``, ``dropped``,
        ``copies`` (background arrivals) of each document.

    Returns
    -------
    DataFrame
        ``policy`` and one fraction for each of the counts; ``copies`` come on top of the calls, the others
        sum to 1.
    """
    return _fractions(frame, SHARES).reset_index()


def _fractions(frame: pd.DataFrame, counts: Sequence[str]) -> pd.DataFrame:
    """Return each count of each policy over its calls, one row a policy in the frame's order."""
    totals = frame.pivot_table(index="policy", values=["calls", *counts], aggfunc="sum", sort=False)
    return pd.DataFrame({c: totals[c] / totals["calls"] for c in counts})


def ratios_of_increases(
    frame: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    unit: str = "document",
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Return how many times one policy's perplexity increase is another's, paired by unit.

    A ratio has no bounded interval where the increase below the line is not clearly above zero; the interval
    is then minus to plus infinity and the note says so.

    Parameters
    ----------
    frame : DataFrame
        As for ``perplexity_increases``.
    pairs : sequence of (numerator, denominator)
        Policy labels.
    unit, confidence, num_draws, seed
        As for ``perplexity_increases``.

    Returns
    -------
    DataFrame
        ``comparison``, ``ratio``, ``low``, ``high``, ``numerator`` and ``denominator`` (increases), ``note``.

    Raises
    ------
    ValueError
        If a label is unknown, or the denominator's increase is exactly zero.
    """
    paired = pair_documents(frame, unit)
    increases = np.expm1(paired.means())
    draws = np.expm1(_mean_draws(paired, num_draws, seed))
    rows = [_ratio_row(pair, paired, increases, draws, confidence) for pair in pairs]
    return pd.DataFrame(rows, columns=["comparison", "ratio", "low", "high", "numerator", "denominator", "note"])


def _ratio_row(
    pair: tuple[str, str], paired: PairedUnits, increases: np.ndarray, draws: np.ndarray, confidence: float
) -> tuple[str, float, float, float, float, float, str]:
    above, below = (paired.index(label) for label in pair)
    if increases[below] == 0.0:
        raise ValueError(f"the increase of {pair[1]!r} is exactly zero: a ratio to it does not exist")
    is_clear = percentile_interval(draws[:, below], confidence)[0] > 0.0
    low, high = -np.inf, np.inf
    if is_clear:
        ratios = np.where(draws[:, below] > 0.0, draws[:, above] / draws[:, below], np.nan)
        low, high = map(float, percentile_interval(ratios, confidence))
    ratio = float(increases[above] / increases[below])
    note = "" if is_clear else UNBOUNDED
    return f"{pair[0]} / {pair[1]}", ratio, low, high, float(increases[above]), float(increases[below]), note


def _mean_draws(paired: PairedUnits, num_draws: int, seed: int) -> np.ndarray:
    counts = draw_counts(paired.num_units, num_draws, seed)
    return weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, counts)
