"""Statistics in worlds whose truth is known: coverage of intervals, size and power of tests.

With R repeats a share p is known to about 2 sqrt(p (1 - p) / R): 0.01 at 2,000 repeats of a 95 % interval, 0.03 at 200.
The long versions repeat 2,000 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from moecache import stats

QUICK, LONG = 50, 2000
REPEATS = pytest.mark.parametrize("repeats", [QUICK, pytest.param(LONG, marks=pytest.mark.long)])


def _margin(share: float, repeats: int) -> float:
    """Three standard errors of a share, and one hundredth for what percentile intervals lack at these n."""
    return 3.0 * float(np.sqrt(share * (1.0 - share) / repeats)) + 0.01


def _frame(losses: np.ndarray, masses: np.ndarray | None = None) -> pd.DataFrame:
    """Rows from arrays [policies, documents]."""
    num_policies, num_documents = losses.shape
    return pd.DataFrame(
        {
            "policy": np.repeat([f"p{i}" for i in range(num_policies)], num_documents),
            "document": np.tile([f"d{i}" for i in range(num_documents)], num_policies),
            "num_tokens": 999,
            "mean_difference_nats": losses.ravel(),
            "substituted_mass": 0.0 if masses is None else masses.ravel(),
        }
    )


def _share(repeats: int, seed: int, holds: Callable[[np.random.Generator], bool]) -> float:
    rng = np.random.default_rng(seed)
    return float(np.mean([holds(rng) for _ in range(repeats)]))


def test_intervals_of_two_thousand_policies_cover_their_mean() -> None:
    """Each policy is a repeat: 60 documents around a true loss of 0.05 nats."""
    losses = 0.05 + 0.1 * np.random.default_rng(3).normal(size=(2000, 60))
    table = stats.perplexity_increases(_frame(losses), num_draws=1000)
    covered = ((table["low"] <= np.expm1(0.05)) & (np.expm1(0.05) <= table["high"])).mean()
    assert covered == pytest.approx(0.95, abs=_margin(0.95, 2000))


@REPEATS
@pytest.mark.parametrize("test", ["ttest", "wilcoxon"])
def test_paired_tests_have_their_size_and_the_power_that_is_stated(test: str, repeats: int) -> None:
    """Where nothing differs 5 % are called different; at the smallest detectable difference 80 % are (Wilcoxon: 78 %)."""
    detectable = stats.smallest_detectable(0.1, 24)

    def rejects(effect: float) -> Callable[[np.random.Generator], bool]:
        def once(rng: np.random.Generator) -> bool:
            frame = _frame(np.stack([effect + 0.1 * rng.normal(size=24), np.zeros(24)]))
            return bool(stats.paired_tests(frame, [("p0", "p1")], test, num_draws=100)["p_holm"].iloc[0] < 0.05)

        return once

    assert _share(repeats, 1, rejects(0.0)) == pytest.approx(0.05, abs=_margin(0.05, repeats))
    expected = 0.80 if test == "ttest" else 0.78
    assert _share(repeats, 2, rejects(detectable)) == pytest.approx(expected, abs=_margin(0.80, repeats))


@REPEATS
def test_equivalence_is_wrongly_claimed_at_most_one_time_in_twenty(repeats: int) -> None:
    """A difference as large as the bound is called none in 5 % of samples; a difference of zero nearly always."""

    def claims_equivalence(effect: float) -> Callable[[np.random.Generator], bool]:
        def once(rng: np.random.Generator) -> bool:
            frame = _frame(np.stack([effect + 0.1 * rng.normal(size=40), np.zeros(40)]))
            return bool(stats.equivalence_tests(frame, [("p0", "p1")], 0.06)["is_equivalent"].iloc[0])

        return once

    assert _share(repeats, 3, claims_equivalence(0.06)) == pytest.approx(0.05, abs=_margin(0.05, repeats))
    assert _share(repeats, 4, claims_equivalence(0.0)) > 0.9


@REPEATS
def test_holm_keeps_false_alarms_of_a_family_below_five_percent(repeats: int) -> None:
    pairs = [(f"p{i}", "p5") for i in range(5)]

    def any_alarm(rng: np.random.Generator) -> bool:
        frame = _frame(np.vstack([0.1 * rng.normal(size=(5, 24)), np.zeros(24)]))
        return bool((stats.paired_tests(frame, pairs, num_draws=100)["p_holm"] < 0.05).any())

    assert _share(min(repeats, 500), 5, any_alarm) < 0.05 + _margin(0.05, min(repeats, 500))


@REPEATS
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_intervals_of_a_correlation_across_documents_cover_the_true_one(rho: float, repeats: int) -> None:
    """Spearman's coefficient of a bivariate normal is 6/pi asin(rho/2)."""
    truth = 6.0 / math.pi * math.asin(rho / 2.0)

    def covers(rng: np.random.Generator) -> bool:
        x = rng.normal(size=100)
        y = rho * x + np.sqrt(1 - rho**2) * rng.normal(size=100)
        row = stats.association_within(_frame(y[None], 5 + x[None]), "p0", num_draws=400).iloc[0]
        return bool(row["low"] <= truth <= row["high"])

    assert _share(repeats, 6, covers) == pytest.approx(0.95, abs=_margin(0.95, repeats) + 0.01)


@REPEATS
def test_intervals_of_a_correlation_across_policies_cover_the_true_one(repeats: int) -> None:
    """Twelve fixed policies, 60 documents; Pearson's coefficient of their true means."""
    means = np.random.default_rng(9).normal(size=(2, 12))
    truth = float(np.corrcoef(means)[0, 1])  # type: ignore[index]

    def covers(rng: np.random.Generator) -> bool:
        shared = rng.normal(size=60)
        losses = means[0][:, None] + shared + rng.normal(size=(12, 60))
        masses = means[1][:, None] + rng.normal(size=(12, 60))
        row = stats.association(_frame(losses, masses), method="pearson", num_draws=400).iloc[0]
        return bool(row["low"] <= truth <= row["high"])

    assert _share(repeats, 7, covers) == pytest.approx(0.95, abs=_margin(0.95, repeats) + 0.01)


@REPEATS
def test_intervals_of_the_loss_ratio_of_near_pairs_cover_the_true_one(repeats: int) -> None:
    """Three pairs of equal mass that lose 2, 3 and 5 times the other: the median is 3."""
    losses, masses = np.array([0.1, 0.2, 0.1, 0.3, 0.1, 0.5]), np.array([0.1, 0.1, 0.2, 0.2, 0.4, 0.4])

    def covers(rng: np.random.Generator) -> bool:
        frame = _frame(losses[:, None] + 0.1 * rng.normal(size=(6, 60)), masses[:, None] + np.zeros((6, 60)))
        row = stats.loss_ratio_of_near_pairs(frame, num_draws=400).iloc[0]
        return bool(row["low"] <= 3.0 <= row["high"])

    # The median of few noisy ratios is drawn to the middle: its interval is somewhat too wide, never too short.
    assert _share(repeats, 8, covers) > 0.95 - _margin(0.95, repeats)


@REPEATS
def test_two_way_clustered_intervals_cover_the_slope_of_the_interaction(repeats: int) -> None:
    def covers(rng: np.random.Generator) -> bool:
        masses = 5 + rng.normal(size=(20, 30))
        shift = 0.3 * rng.normal(size=(20, 1)) + 0.3 * rng.normal(size=30)
        row = stats.slopes_by_level(_frame(2.0 * masses + shift + rng.normal(size=(20, 30)), masses), model="clustered").to_dict("records")[
            2
        ]
        return bool(row["low"] <= 2.0 <= row["high"])

    assert _share(repeats // 3, 10, covers) == pytest.approx(0.95, abs=_margin(0.95, repeats // 3) + 0.02)
