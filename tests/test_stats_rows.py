"""Single answers as rows: against scipy, statsmodels and worked values, and against worlds whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as formulas
from paired_frames import SyntheticPolicy, paired_frame
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from moecache import stats
from moecache.stats.rows import COLUMNS

POLICIES = {
    "light": SyntheticPolicy("threshold", 0.01, 0.1, 0.1),
    "middle": SyntheticPolicy("threshold", 0.03, 0.2, 0.2),
    "heavy": SyntheticPolicy("first-J", 0.10, 0.3, 0.3),
    "heaviest": SyntheticPolicy("first-J", 0.30, 0.4, 0.4, first_choice_fraction=0.05),
    "odd": SyntheticPolicy("one rank", 0.20, 0.19, 0.05, first_choice_fraction=0.05),
}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return paired_frame(POLICIES)


def _of(frame: pd.DataFrame, policy: str, column: str = "mean_difference_nats") -> np.ndarray:
    return frame.loc[frame["policy"] == policy, column].to_numpy()


def _spearman(x: Any, y: Any) -> Any:
    return scipy_stats.spearmanr(x, y)


def _pvalue(function: Any, a: np.ndarray, b: np.ndarray) -> float:
    return function(a, b).pvalue


# Rows


def test_every_answer_has_the_same_columns(frame: pd.DataFrame) -> None:
    draws: dict[str, Any] = {"num_draws": 200}
    rows = [
        stats.compare(frame, "heavy", "light", **draws),
        stats.equivalent(frame, "light", "middle", 0.1),
        stats.association(frame, **draws),
        stats.better_association(frame, "substituted", **draws),
        stats.association_within(frame, "heavy", **draws),
        stats.loss_ratio_of_near_pairs(frame, **draws),
        stats.slopes_by_level(frame, model="clustered"),
    ]
    assert all(tuple(row.columns) == COLUMNS for row in rows)
    table = stats.shown(pd.concat(rows, ignore_index=True))
    assert table.shape == (9, 7)
    assert not table.isna().to_numpy().any()


def test_holm_corrects_only_rows_with_a_test(frame: pd.DataFrame) -> None:
    rows = [
        stats.compare(frame, a, b, num_draws=100, is_planned=True) for a, b in (("light", "middle"), ("heavy", "odd"), ("odd", "heaviest"))
    ]
    raw = [row["p"].iloc[0] for row in rows]
    table = stats.holm_family([*rows, stats.association(frame, num_draws=100)])
    corrected: Any = multipletests(raw, method="holm")[1]
    np.testing.assert_allclose(table["p"][:3], corrected)
    assert np.isnan(table["p"].iloc[3])
    assert table["test"].tolist() == ["paired t-test, Holm over 3"] * 3 + [""]
    assert table["status"].tolist() == ["planned"] * 3 + ["exploratory"]
    with pytest.raises(ValueError, match="no family"):
        stats.holm_family(stats.association(frame, num_draws=100))


def test_a_comparison_says_what_scipy_says(frame: pd.DataFrame) -> None:
    a, b = _of(frame, "heavy"), _of(frame, "light")
    for test, function in (("ttest", scipy_stats.ttest_rel), ("wilcoxon", scipy_stats.wilcoxon)):
        row = stats.compare(frame, "heavy", "light", test, num_draws=200).iloc[0]
        assert row["p"] == pytest.approx(_pvalue(function, a, b))
    assert (row["estimate"], row["effect"]) == pytest.approx(((a - b).mean(), (a - b).mean() / (a - b).std(ddof=1)))
    assert (row["n"], row["counted"], row["effect_kind"]) == (48, "documents", "dz")
    same = stats.equivalent(frame, "heavy", "light", 0.1).iloc[0]
    assert same["p"] == pytest.approx(ttost_paired(a, b, -0.1, 0.1)[0])
    assert (same["low"] + same["high"]) / 2 == pytest.approx(same["estimate"]) == pytest.approx(row["estimate"])


def test_paired_tests_equal_values_of_r() -> None:
    """R 4: t.test(x, y, paired = TRUE) on `sleep`, the data of Student's own paper (1908): t = -4.0621, df = 9, p = 0.002833,
    mean of the differences -1.58, 95 percent interval -2.4598858 to -0.7001142."""
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    rows = [
        {"policy": p, "document": f"d{i}", "num_tokens": 1, "mean_difference_nats": x}
        for p, values in (("first", first), ("second", second))
        for i, x in enumerate(values)
    ]
    row = stats.compare(pd.DataFrame(rows), "first", "second", num_draws=100).iloc[0]
    assert row["estimate"] == pytest.approx(-1.58)
    assert row["p"] == pytest.approx(0.002833, abs=5e-7)
    assert row["effect"] == pytest.approx(-4.0621 / np.sqrt(10), abs=5e-5)
    bounds = stats.equivalence_tests(pd.DataFrame(rows), [("first", "second")], 3.0).iloc[0]
    # The 90 % interval has half of R's 95 % width times the quotient of the two t quantiles (9 degrees of freedom).
    half = (2.4598858 - 0.7001142) / 2 * 1.8331129 / 2.2621572
    assert (bounds["low_90"], bounds["high_90"]) == pytest.approx((-1.58 - half, -1.58 + half), abs=1e-6)


# Associations and fans


def test_association_across_policies_and_within_one(frame: pd.DataFrame) -> None:
    row = stats.association(frame, num_draws=300).iloc[0]
    masses, losses = ([_of(frame, p, c).mean() for p in POLICIES] for c in ("substituted_mass", "mean_difference_nats"))
    assert row["estimate"] == pytest.approx(_spearman(masses, losses).statistic)
    assert row["low"] <= row["estimate"] <= row["high"]
    within = stats.association_within(frame, "heavy", num_draws=300).iloc[0]
    expected = _spearman(_of(frame, "heavy", "substituted_mass"), _of(frame, "heavy"))
    assert (within["estimate"], within["p"]) == pytest.approx((expected.statistic, expected.pvalue))


def test_the_better_of_two_predictors_is_found(frame: pd.DataFrame) -> None:
    better = frame.assign(true_cost=frame["mean_difference_nats"] ** 3)
    row = stats.better_association(better, "true_cost", num_draws=300).iloc[0]
    assert row["estimate"] == pytest.approx(1.0 - stats.association(frame, num_draws=300)["estimate"].iloc[0])
    assert row["low"] > 0
    reverse = stats.better_association(better, "substituted_mass", "true_cost", num_draws=300).iloc[0]
    assert reverse["estimate"] == pytest.approx(-row["estimate"])


def test_smallest_detectable_correlation_equals_the_usual_tables() -> None:
    """Two-sided 5 %, power 80 %: n = 84 detects r = 0.30 and n = 29 detects r = 0.50 (Cohen 1988, table 3.4.1: 84 and 28)."""
    assert stats.detectable_correlation(84) == pytest.approx(0.30, abs=0.003)
    assert stats.detectable_correlation(29) == pytest.approx(0.50, abs=0.01)
    with pytest.raises(ValueError, match="at least 4"):
        stats.detectable_correlation(3)


def test_a_fan_closes_on_a_real_relation_and_stays_open_on_none() -> None:
    policies = {"driven": SyntheticPolicy("t", 0.1, 0.4, 0.1, mass_slope=0.6), "undriven": SyntheticPolicy("t", 0.1, 0.4, 0.1)}
    frame = paired_frame(policies, num_documents=100)
    driven, undriven = (stats.fan_within(frame, p, (10, 40, 100), num_samples=500).to_dict("list") for p in policies)
    assert driven["opposite_fraction"][0] < 0.05
    assert driven["low"][1] > 0.4
    assert undriven["opposite_fraction"][0] > 0.25
    assert undriven["low"][0] < -0.4
    assert undriven["high"][0] > 0.4
    assert (np.diff(np.subtract(undriven["high"], undriven["low"])) < 0).all()
    expected = _spearman(_of(frame, "driven", "substituted_mass"), _of(frame, "driven")).statistic
    assert [driven[c][2] for c in ("low", "median", "high")] == pytest.approx([expected] * 3)
    both = stats.fan_within(frame, list(policies), [100], num_samples=4).iloc[0]
    assert both["policy"] == "mean of 2 policies"
    assert both["median"] == pytest.approx((driven["median"][2] + undriven["median"][2]) / 2)


def test_a_fan_across_policies_equals_a_loop_over_its_samples(frame: pd.DataFrame) -> None:
    fan = stats.fan_across(frame, [5, 48], num_samples=300, seed=3).iloc[0]
    rng = np.random.default_rng(3)
    wide = {c: np.array([_of(frame, p, c) for p in POLICIES]) for c in ("substituted_mass", "mean_difference_nats")}
    chosen = np.argsort(rng.random((300, 48)), axis=1)[:, :5]
    found = [_spearman(*[values[:, sample].mean(axis=1) for values in wide.values()]).statistic for sample in chosen]
    assert (fan["low"], fan["high"]) == pytest.approx(tuple(np.quantile(found, [0.025, 0.975])))
    with pytest.raises(ValueError, match=r"sizes \[3, 49\] lie outside 4..48"):
        stats.fan_across(frame, [3, 10, 49])


# Pairs of equal mass


def test_near_pairs_by_hand(frame: pd.DataFrame) -> None:
    pairs = stats.near_pairs(frame, within=0.10, num_draws=200)
    assert pairs[["dearer", "cheaper"]].to_numpy().tolist() == [["odd", "middle"]]
    expected = _of(frame, "odd").mean() / _of(frame, "middle").mean()
    assert pairs["ratio"].iloc[0] == pytest.approx(expected)
    row = stats.loss_ratio_of_near_pairs(frame, num_draws=500).iloc[0]
    assert (row["estimate"], row["n"], row["counted"]) == (pytest.approx(expected), 1, "pairs of policies")
    assert 5 < row["low"] < expected < row["high"] < 9
    wider = stats.near_pairs(frame, within=0.40, num_draws=200)
    assert set(map(frozenset, wider[["dearer", "cheaper"]].to_numpy())) == {
        frozenset(pair) for pair in (("odd", "middle"), ("heavy", "middle"), ("heavy", "odd"), ("heavy", "heaviest"))
    }


def test_where_mass_sets_the_loss_pairs_of_equal_mass_lose_the_same() -> None:
    masses = np.repeat([0.1, 0.2, 0.3], 4)
    policies = {f"p{i}": SyntheticPolicy("t", 0.5 * mass, mass, 0.1, noise_nats=0.02) for i, mass in enumerate(masses)}
    row = stats.loss_ratio_of_near_pairs(paired_frame(policies, num_documents=90), num_draws=500).iloc[0]
    assert row["n"] == 18
    assert 0.95 < row["low"] < row["high"] < 1.25


def test_a_loss_not_clear_of_zero_is_in_no_pair() -> None:
    policies = {"a": SyntheticPolicy("t", 0.1, 0.2, 0.1), "b": SyntheticPolicy("t", 0.0, 0.2, 0.1)}
    frame = paired_frame(policies)
    assert len(stats.near_pairs(frame, num_draws=200)) == 0
    with pytest.raises(ValueError, match="no two policies"):
        stats.loss_ratio_of_near_pairs(frame, num_draws=200)
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats.near_pairs(frame, within=10)


# Levels


def _levelled(slopes: tuple[float, float, float], seed: int = 0, num_policies: int = 12, num_documents: int = 40) -> pd.DataFrame:
    """A frame whose loss follows mass with one slope for each level, under crossed random intercepts."""
    rng = np.random.default_rng(seed)
    of_policy, of_document = rng.normal(0, 0.1, num_policies), rng.normal(0, 0.05, num_documents)
    rest = rng.normal(0, 0.03, (num_policies, num_documents))
    rest -= rest.mean(axis=1, keepdims=True)
    rest -= rest.mean(axis=0, keepdims=True)
    intercepts = rng.normal(0, 0.01, num_policies)[:, None] + rng.normal(0, 0.01, num_documents)
    loss = slopes[0] * of_policy[:, None] + slopes[1] * of_document + slopes[2] * rest + intercepts
    loss = loss + rng.normal(0, 0.01, loss.shape)
    mass = 0.5 + of_policy[:, None] + of_document + rest
    rows = [
        {"policy": f"p{p}", "document": f"d{d}", "num_tokens": 999, "substituted_mass": mass[p, d], "mean_difference_nats": loss[p, d]}
        for p in range(num_policies)
        for d in range(num_documents)
    ]
    return pd.DataFrame(rows)


def test_levels_split_without_remainder_and_uncorrelated() -> None:
    frame = _levelled((1, 1, 1))
    parts = stats.split_levels(frame, ["substituted_mass"])
    levels = parts[[f"substituted_mass_{level}" for level in ("policies", "documents", "interaction")]]
    np.testing.assert_allclose(levels.sum(axis=1) + parts["substituted_mass"].mean(), parts["substituted_mass"])
    np.testing.assert_allclose(levels.corr(), np.eye(3), atol=1e-10)


@pytest.mark.parametrize("model", ["mixed", "clustered"])
def test_slopes_planted_at_three_levels_are_found_apart(model: str) -> None:
    slopes = (2.0, -1.0, 0.5)
    table = stats.slopes_by_level(_levelled(slopes), model=model)
    assert table["question"].str.extract(r", (?:between )?(\w+)$")[0].tolist() == ["policies", "documents", "interaction"]
    for truth, row in zip(slopes, table.to_dict("records"), strict=True):
        assert row["low"] < truth < row["high"]
    assert table["n"].tolist() == [12, 40, 480]
    assert np.isnan(table["p"].iloc[0])
    assert (table["p"].iloc[1:] < 1e-4).all()


def test_both_models_give_least_squares_slopes_and_statsmodels_clustered_errors() -> None:
    frame = _levelled((2.0, -1.0, 0.5), seed=5)
    mixed, clustered = (stats.slopes_by_level(frame, model=model) for model in ("mixed", "clustered"))
    np.testing.assert_allclose(mixed["estimate"], clustered["estimate"], rtol=1e-4)
    data = stats.split_levels(frame, ["substituted_mass", "mean_difference_nats"])
    groups = np.column_stack([pd.factorize(data[c])[0] for c in ("document", "policy")])
    formula = "mean_difference_nats ~ substituted_mass_policies + substituted_mass_documents + substituted_mass_interaction"
    fit = formulas.ols(formula, data).fit(cov_type="cluster", cov_kwds={"groups": groups})
    np.testing.assert_allclose(clustered["estimate"], fit.params.iloc[1:])
    with np.errstate(invalid="ignore"):
        errors = np.sqrt(np.diag(fit.cov_params())[1:])
    half = scipy_stats.t(11).ppf(0.975) * errors
    is_defined = ~np.isnan(errors)
    assert is_defined.sum() >= 2
    np.testing.assert_allclose((clustered["high"] - clustered["estimate"])[is_defined], half[is_defined])


def test_a_level_that_does_not_vary_has_no_slope() -> None:
    frame = _levelled((2.0, -1.0, 0.5))
    of_policy = frame.groupby("policy")["substituted_mass"].transform("mean")
    table = stats.slopes_by_level(frame.assign(substituted_mass=of_policy), model="clustered")
    assert len(table) == 1
    with pytest.raises(ValueError, match="'mixed', 'clustered'"):
        stats.slopes_by_level(frame, model="bayes")
