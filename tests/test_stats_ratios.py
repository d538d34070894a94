"""Ratios over few repeats: against scipy, exact cases, and what cannot be said."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from moecache.stats.ratios import geometric_mean, paired_ratio


def test_interval_and_p_equal_scipy():
    rng = np.random.default_rng(3)
    for n in (2, 3, 9):
        first, second = np.exp(rng.normal(1.0, 0.3, (2, n)))
        found, expected = paired_ratio(first, second), scipy_stats.ttest_rel(np.log(first), np.log(second))
        low, high = np.exp(expected.confidence_interval(0.95))
        assert (found.low, found.high, found.p) == pytest.approx((low, high, expected.pvalue), rel=1e-9)
        assert found.value == pytest.approx(scipy_stats.gmean(first / second))
        assert found.dz == pytest.approx(np.mean(np.log(first / second)) / np.std(np.log(first / second), ddof=1))
        assert found.n == n


def test_what_repeats_share_does_not_widen_a_ratio():
    moods = np.array([1.0, 3.0, 0.2])  # the machine's
    found = paired_ratio(6 * moods, 2 * moods)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0, 3.0))
    assert found.p < 1e-9
    assert paired_ratio([2.0, 5.0], [2.0, 5.0]).p == 1.0


def test_the_detectable_ratio_is_found_in_about_four_fifths_of_samples():
    rng = np.random.default_rng(5)
    n, deviation = 4, 0.1
    probe = np.exp(deviation * np.array([-1.0, -1.0, 1.0, 1.0]) / np.std([-1.0, -1.0, 1.0, 1.0], ddof=1))
    true = np.log(geometric_mean(probe.tolist()).detectable)
    seen = [geometric_mean(np.exp(rng.normal(true, deviation, n)).tolist()).p < 0.05 for _ in range(1000)]
    assert 0.7 < np.mean(seen) < 0.9


def test_one_value_has_no_interval_and_no_rate_is_refused():
    assert np.isnan(geometric_mean([4.0])[1:6]).all()
    for wrong in ([], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="not all positive rates"):
            geometric_mean(wrong)
    with pytest.raises(ValueError, match="2 rates against 1"):
        paired_ratio([1.0, 2.0], [1.0])
