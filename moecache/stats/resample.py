"""The bootstrap over units, in a few matrix products.

A bootstrap draw takes U units out of U with replacement. Only how often each unit was taken matters, so a
draw is a row of counts, and a token-weighted mean of that draw is (counts . sums) / (counts . tokens). All
policies share the counts of a draw, which keeps the comparison paired. The interval is the percentile
interval (B. Efron and R. Tibshirani, *An Introduction to the Bootstrap*, 1993, chapter 13): plain,
transformation-respecting, and slightly too short for few units, which is why fewer than three are refused and
n is shown beside every interval.

This module knows arrays only: not what a unit is, nor what is averaged.
"""

from __future__ import annotations

import numpy as np

NUM_DRAWS = 10_000
FEWEST_UNITS = 3


def draw_counts(num_units: int, num_draws: int = NUM_DRAWS, seed: int = 0) -> np.ndarray:
    """Draw bootstrap samples as counts.

    Parameters
    ----------
    num_units : int
        U, at least 3.
    num_draws : int
        Number of bootstrap samples, at least 100.
    seed : int
        Seed of the draws: equal arguments give equal draws.

    Returns
    -------
    float64 array [num_draws, U]
        How often each unit was taken; every row sums to U.

    Raises
    ------
    ValueError
        For fewer than three units or fewer than 100 draws.
    """
    if num_units < FEWEST_UNITS:
        raise ValueError(
            f"{num_units} units cannot carry an interval: at least {FEWEST_UNITS} are needed; score more documents or use a finer unit"
        )
    if num_draws < 100:
        raise ValueError(f"num_draws is {num_draws}: an interval needs at least 100 draws (10,000 is usual)")
    shares = np.full(num_units, 1.0 / num_units)
    return np.random.default_rng(seed).multinomial(num_units, shares, size=num_draws).astype(np.float64)


def weighted_mean_draws(sums: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the weighted mean of every row of sums in every draw.

    Parameters
    ----------
    sums : float64 array [P, U]
        Sums over each unit's tokens.
    weights : float64 array [U]
        Number of tokens of each unit.
    counts : float64 array [num_draws, U]
        From ``draw_counts``.

    Returns
    -------
    float64 array [num_draws, P]
    """
    return (counts @ sums.T) / (counts @ weights)[:, None]


def percentile_interval(draws: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper end of the percentile interval along the first axis.

    Draws in which the quantity is undefined (NaN) are left out.

    Parameters
    ----------
    draws : float64 array [num_draws, ...]
    confidence : float
        Between 0 and 1, for example 0.95.

    Returns
    -------
    low, high : float64 arrays [...]

    Raises
    ------
    ValueError
        If the confidence does not lie between 0 and 1.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}: it must lie between 0 and 1, for example 0.95")
    tail = (1.0 - confidence) / 2.0
    low, high = np.nanquantile(draws, [tail, 1.0 - tail], axis=0)
    return low, high


def midranks_under_counts(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rank the values of every draw; values that are equal or drawn twice share their mean rank.

    Parameters
    ----------
    values : float64 array [D]
    counts : float64 array [num_draws, D]
        How often each value occurs in the draw.

    Returns
    -------
    float64 array [num_draws, D]
        The rank that each value has in the draw (meaningless where its count is zero).
    """
    order = np.argsort(values, kind="stable")
    _, starts, group = np.unique(values[order], return_index=True, return_inverse=True)
    in_group = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks = np.cumsum(in_group, axis=1) - in_group + (in_group + 1.0) / 2.0
    unsorted = np.empty_like(counts)
    unsorted[:, order] = ranks[:, group]
    return unsorted


def correlation_under_counts(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return Pearson's r of every draw, NaN where one side is constant in it.

    Parameters
    ----------
    x, y : float64 arrays [D] or [num_draws, D]
    counts : float64 array [num_draws, D]

    Returns
    -------
    float64 array [num_draws]
    """
    total = counts.sum(axis=1, keepdims=True)
    x_centred = x - (counts * x).sum(axis=1, keepdims=True) / total
    y_centred = y - (counts * y).sum(axis=1, keepdims=True) / total
    covariance = (counts * x_centred * y_centred).sum(axis=1)
    x_square = (counts * x_centred**2).sum(axis=1)
    y_square = (counts * y_centred**2).sum(axis=1)
    # A constant side leaves rounding noise, not zero: compare with the size of the values themselves.
    is_defined = (x_square > 1e-20 * (counts * x**2).sum(axis=1)) & (y_square > 1e-20 * (counts * y**2).sum(axis=1))
    denominator = np.sqrt(np.where(is_defined, x_square * y_square, 1.0))
    return np.where(is_defined, covariance / denominator, np.nan)
