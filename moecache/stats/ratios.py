"""Rates and ratios of rates over few repeats, in logarithms.

A machine's speed errs by factors: twice as fast and half as fast are equally far from the truth. So means are geometric and a ratio of
two engines is judged by the mean of its logarithm over paired repeats. Repeats are few, and a bootstrap of three values knows only those
three; the interval is therefore Student's, which is wide where it must be: with two repeats nearly useless, with one there is none.

This module does not know what ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special


class Ratio(NamedTuple):
    """A geometric mean with its interval.

    Attributes
    ----------
    value, low, high : the mean and its two-sided t-interval; NaN bounds with fewer than two values.
    p : two-sided, of the paired t-test that the mean logarithm is zero; NaN with fewer than two values.
    dz : mean / standard deviation of the logarithms; NaN where it has none.
    detectable : the smallest ratio above 1 that n such values would have shown in 80 % of cases (two-sided 5 %).
    n : values.
    """

    value: float
    low: float
    high: float
    p: float
    dz: float
    detectable: float
    n: int


def geometric_mean(values: Sequence[float], confidence: float = 0.95) -> Ratio:
    """The geometric mean of positive values [n].

    Raises
    ------
    ValueError : no value, or one that is not a positive number.
    """
    logs = np.log(_positive(values))
    n, mean = logs.size, float(logs.mean())
    if n < 2:
        return Ratio(float(np.exp(mean)), np.nan, np.nan, np.nan, np.nan, np.nan, n)
    deviation = float(np.std(logs, ddof=1))
    error = deviation / np.sqrt(n)
    half = float(special.stdtrit(n - 1, 0.5 + confidence / 2)) * error
    if error == 0.0:
        p, dz = float(mean == 0.0), np.nan
    else:
        p, dz = 2 * float(special.stdtr(n - 1, -abs(mean) / error)), mean / deviation
    # The usual approximation of the power of a t-test: quantiles of 97.5 % and 80 %, of Student's distribution.
    detectable = float(np.exp((special.stdtrit(n - 1, 0.975) + special.stdtrit(n - 1, 0.8)) * error))
    return Ratio(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)), p, dz, detectable, n)


def paired_ratio(rates: Sequence[float], against: Sequence[float], confidence: float = 0.95) -> Ratio:
    """How many times as large the first rates are, pair by pair.

    Raises
    ------
    ValueError : sequences of different lengths, or as `geometric_mean`.
    """
    first, second = _positive(rates), _positive(against)
    if first.size != second.size:
        raise ValueError(f"{first.size} rates against {second.size}: pairs need equally many")
    return geometric_mean((first / second).tolist(), confidence)


def _positive(values: Sequence[float]) -> np.ndarray:
    found = np.asarray(values, np.float64)
    if found.size == 0 or not np.all(np.isfinite(found) & (found > 0)):
        raise ValueError(f"{found.tolist()} are not all positive rates: leave out what did not run")
    return found
