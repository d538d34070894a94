"""The statistics against hand-worked cases, against scipy and statsmodels, and against simulated truth."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from paired_frames import SyntheticPolicy, paired_frame
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from moecache import stats
from moecache.stats.increases import effect_size
from moecache.stats.resample import correlation_under_counts, midranks_under_counts

POLICIES = {
    "fetch every miss": SyntheticPolicy("none", 0.0, 0.0, 0.0),
    "light": SyntheticPolicy("threshold", 0.01, 0.1, 0.1),
    "middle": SyntheticPolicy("threshold", 0.03, 0.2, 0.2),
    "heavy": SyntheticPolicy("first-J", 0.10, 0.3, 0.3),
    "heaviest": SyntheticPolicy("first-J", 0.30, 0.4, 0.4, first_choice_fraction=0.05),
}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return paired_frame(POLICIES)


def _tiny(differences: dict[str, list[float]], tokens: list[int]) -> pd.DataFrame:
    rows = [
        {
            "policy": p,
            "document": f"d{d}",
            "cluster": f"c{d // 2}",
            "num_tokens": tokens[d],
            "mean_difference_nats": x,
        }
        for p, values in differences.items()
        for d, x in enumerate(values)
    ]
    return pd.DataFrame(rows)


def _differences(frame: pd.DataFrame, policy: str, against: str) -> tuple[np.ndarray, np.ndarray]:
    wide = frame.pivot(index="document", columns="policy", values="mean_difference_nats")
    return wide[policy].to_numpy(), wide[against].to_numpy()


# Hand-worked


def test_the_increase_is_the_exponential_of_the_token_weighted_mean() -> None:
    frame = _tiny({"p": [0.1, 0.4, 0.2]}, [100, 200, 100])
    row = stats.perplexity_increases(frame).iloc[0]
    assert row["increase"] == pytest.approx(np.exp((10 + 80 + 20) / 400) - 1)
    contributions = np.array([10, 80, 20]) / (400 / 3)
    assert row["dz"] == pytest.approx(contributions.mean() / contributions.std(ddof=1))
    assert row["num_units"] == 3


def test_clusters_pool_their_documents_before_anything_is_drawn() -> None:
    frame = _tiny({"p": [0.0, 0.3, 0.1, 0.1, 0.2, 0.0]}, [100, 300, 100, 100, 50, 150])
    paired = stats.pair_documents(frame, "cluster")
    np.testing.assert_allclose(paired.num_tokens, [400, 200, 200])
    np.testing.assert_allclose(paired.sums["mean_difference_nats"], [[90, 20, 10]])
    by_cluster = stats.perplexity_increases(frame, "cluster").iloc[0]
    by_document = stats.perplexity_increases(frame, "document").iloc[0]
    assert by_cluster["increase"] == pytest.approx(by_document["increase"])
    assert (by_cluster["num_units"], by_document["num_units"]) == (3, 6)


def test_dz_of_three_differences_by_hand() -> None:
    assert effect_size(np.array([1.0, 2.0, 3.0])) == pytest.approx(2.0)
    assert effect_size(np.zeros(4)) == 0.0
    assert effect_size(np.full(4, -0.1)) == -np.inf


def test_shares_of_the_calls_by_hand() -> None:
    counts = {
        "calls": 100,
        "hits": 50,
        "fetched": 20,
        "forced": 5,
        "substituted": 15,
        "dropped": 10,
        "copies": 25,
    }
    frame = pd.DataFrame([{"policy": "p", "document": d, **counts} for d in ("a", "b")])
    row = stats.call_shares(frame).iloc[0]
    expected = {"hits": 0.5, "fetched": 0.2, "forced": 0.05, "substituted": 0.15, "dropped": 0.1, "copies": 0.25}
    assert row.to_dict() == {"policy": "p", **expected}


def test_a_policy_table_has_few_columns_and_the_shares_of_its_policies(frame: pd.DataFrame) -> None:
    table = stats.policy_table(frame.sample(frac=1.0, random_state=0), num_draws=200).set_index("policy")
    assert len(table.columns) == 7
    assert table.loc["heaviest", "first_choice_fraction"] == pytest.approx(0.05)
    assert table.loc["middle", "family"] == "threshold"
    assert table.loc["middle", "substituted_fraction"] == pytest.approx(0.2)
    assert table.loc["middle", "substituted_mass"] == pytest.approx(0.2, abs=0.01)
    assert table.loc["middle", "low"] < table.loc["middle", "increase"] < table.loc["middle", "high"]


# Against scipy and statsmodels


def test_t_test_and_wilcoxon_equal_scipy_with_holm_from_statsmodels(frame: pd.DataFrame) -> None:
    pairs = [("light", "fetch every miss"), ("middle", "light"), ("heavy", "middle")]
    samples = [_differences(frame, *pair) for pair in pairs]
    for test, function in (("ttest", scipy_stats.ttest_rel), ("wilcoxon", scipy_stats.wilcoxon)):
        table = stats.paired_tests(frame, pairs, test, num_draws=200)
        raw = [function(a, b).pvalue for a, b in samples]
        np.testing.assert_allclose(table["p_holm"], multipletests(raw, method="holm")[1])
    np.testing.assert_allclose(table["difference_nats"], [(a - b).mean() for a, b in samples])
    np.testing.assert_allclose(table["dz"], [(a - b).mean() / (a - b).std(ddof=1) for a, b in samples])
    assert table.attrs["num_units"] == 48


def test_small_differences_keep_their_digits() -> None:
    policies = {
        "exact": POLICIES["fetch every miss"],
        "p": SyntheticPolicy("t", 0.0004, 0.1, 0.1, noise_nats=0.001),
    }
    row = stats.paired_tests(paired_frame(policies), [("p", "exact")]).iloc[0]
    assert 0 < row["high"] - row["low"] < 0.001


def test_equivalence_equals_statsmodels_and_agrees_with_its_interval(frame: pd.DataFrame) -> None:
    pair = ("light", "fetch every miss")
    a, b = _differences(frame, *pair)
    for bound in (0.005, 0.011, 0.012, 0.02):
        row = stats.equivalence_tests(frame, [pair], bound).iloc[0]
        assert row["p_holm"] == pytest.approx(ttost_paired(a, b, -bound, bound)[0])
        assert row["is_equivalent"] == (-bound < row["low_90"] and row["high_90"] < bound)
    interval = scipy_stats.ttest_rel(a, b).confidence_interval(0.90)
    np.testing.assert_allclose([row["low_90"], row["high_90"]], [interval.low, interval.high])


def test_equivalence_can_be_refused_and_granted(frame: pd.DataFrame) -> None:
    verdicts = [stats.equivalence_tests(frame, [("light", "fetch every miss")], b)["is_equivalent"].iloc[0] for b in (0.005, 0.05)]
    assert verdicts == [False, True]


def test_smallest_detectable_equals_statsmodels() -> None:
    for n in (5, 24, 96):
        expected = TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8)
        assert stats.smallest_detectable(2.0, n) == pytest.approx(2.0 * expected, rel=1e-4)
    assert stats.smallest_detectable(0.0, 24) == 0.0


def test_interval_agrees_with_scipy_bootstrap(frame: pd.DataFrame) -> None:
    a, _ = _differences(frame, "heavy", "light")
    found = stats.perplexity_increases(frame).set_index("policy").loc["heavy"]
    other = scipy_stats.bootstrap(
        (a,), lambda x, axis: np.expm1(x.mean(axis)), method="percentile", n_resamples=10_000, rng=1
    ).confidence_interval
    width = other.high - other.low
    assert found["low"] == pytest.approx(other.low, abs=0.05 * width)
    assert found["high"] == pytest.approx(other.high, abs=0.05 * width)


# Correlations


def test_ranks_and_correlations_of_a_draw_equal_those_of_the_drawn_sample() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.integers(0, 6, size=12).astype(float), rng.normal(size=12)
    counts = stats.draw_counts(12, 100, seed=3)
    ranks = midranks_under_counts(x, counts), midranks_under_counts(y, counts)
    pearson, spearman = correlation_under_counts(x, y, counts), correlation_under_counts(*ranks, counts)
    for row in range(100):
        drawn = np.repeat(np.arange(12), counts[row].astype(int))
        assert spearman[row] == pytest.approx(scipy_stats.spearmanr(x[drawn], y[drawn]).statistic)
        assert pearson[row] == pytest.approx(scipy_stats.pearsonr(x[drawn], y[drawn]).statistic)


def test_correlation_of_a_constant_is_undefined_not_noise() -> None:
    counts = stats.draw_counts(5, 100)
    assert np.isnan(correlation_under_counts(np.full(5, 0.1), np.arange(5.0), counts)).all()


def test_across_policies_the_order_of_losses_is_found_and_its_reversal_too(frame: pd.DataFrame) -> None:
    substituting = frame[frame["policy"] != "fetch every miss"]
    table = stats.correlation_across_policies(substituting, num_draws=300).set_index("method")
    assert table.loc["spearman", "r"] == 1.0
    assert table.loc["spearman", "num_policies"] == 4
    means = substituting.groupby("policy")[["substituted_mass", "mean_difference_nats"]].mean()
    assert table.loc["pearson", "r"] == pytest.approx(means.corr().iloc[0, 1])
    reversed_ = substituting.assign(substituted_mass=1.0 - substituting["substituted_mass"])
    assert stats.correlation_across_policies(reversed_, num_draws=300)["r"].iloc[0] == -1.0


def test_leaving_out_the_family_that_carries_a_correlation_removes_it() -> None:
    policies = {f"t{i}": SyntheticPolicy("threshold", 0.01 * i, 0.1 * i, 0.1) for i in range(1, 6)}
    policies |= {f"r{i}": SyntheticPolicy("one rank", 0.06 - 0.01 * i, 0.6 + 0.05 * i, 0.1) for i in range(1, 6)}
    table = stats.leaving_families_out(paired_frame(policies)).set_index("left_out")
    assert table.loc["one rank", "r"] == pytest.approx(1.0)
    assert table.loc["threshold", "r"] == pytest.approx(-1.0)
    assert set(table["num_policies"]) == {5}


@pytest.mark.parametrize("unit", ["document", "cluster"])
def test_across_documents_a_planted_slope_is_found_and_its_absence_too(unit: str) -> None:
    policies = {
        "exact": POLICIES["fetch every miss"],
        "driven": SyntheticPolicy("t", 0.1, 0.4, 0.1, mass_slope=5.0),
        "undriven": SyntheticPolicy("t", 0.1, 0.4, 0.1),
    }
    frame = paired_frame(policies, num_documents=60)
    table = stats.correlation_across_documents(frame, unit=unit, num_draws=500).set_index("policy")
    assert table.loc["driven", "low"] > 0.9
    assert table.loc["undriven", "low"] < 0.0 < table.loc["undriven", "high"]
    assert table.loc["exact", "note"] == "substituted_mass is the same for all documents"
    one = frame[frame["policy"] == "driven"]
    expected = scipy_stats.spearmanr(one["substituted_mass"], one["mean_difference_nats"]).statistic
    assert table.loc["driven", "spearman"] == pytest.approx(expected)
    mean = table.loc[["driven", "undriven"], "spearman"].mean()
    assert table.loc["mean of the policies", "spearman"] == pytest.approx(mean)


# Ratios


def test_ratio_of_increases_and_its_interval(frame: pd.DataFrame) -> None:
    row = stats.ratios_of_increases(frame, [("heaviest", "heavy")]).iloc[0]
    increases = stats.perplexity_increases(frame).set_index("policy")["increase"]
    assert row["ratio"] == pytest.approx(increases["heaviest"] / increases["heavy"])
    assert 2.8 < row["low"] < row["ratio"] < row["high"] < 3.9


def test_ratio_to_an_increase_not_clear_of_zero_has_no_bounds() -> None:
    policies = {"a": SyntheticPolicy("t", 0.1, 0.2, 0.1), "none": SyntheticPolicy("t", 0.0, 0.1, 0.1)}
    row = stats.ratios_of_increases(paired_frame(policies, seed=2), [("a", "none")]).iloc[0]
    assert (row["low"], row["high"]) == (-np.inf, np.inf)
    assert row["note"] == "denominator not clear of zero"


def test_ratio_to_exactly_zero_is_refused(frame: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="exactly zero"):
        stats.ratios_of_increases(frame, [("heavy", "fetch every miss")])


# Identical inputs and bad inputs


def test_identical_policies_are_named_as_identical_and_never_nan(frame: pd.DataFrame) -> None:
    pair = ("light", "light")
    for table in (stats.paired_tests(frame, [pair], test, num_draws=100) for test in ("ttest", "wilcoxon")):
        assert table["p_holm"].iloc[0] == 1.0
        assert "identical on every unit" in table["comparison"].iloc[0]
        assert not table.isna().to_numpy().any()
    row = stats.perplexity_increases(frame, num_draws=100).set_index("policy").loc["fetch every miss"]
    assert (row["increase"], row["low"], row["high"], row["dz"]) == (0.0, 0.0, 0.0, 0.0)
    assert row["note"] == "identical on every unit"
    assert stats.equivalence_tests(frame, [pair], 0.01)["is_equivalent"].iloc[0]


def test_a_constant_shift_needs_no_test() -> None:
    frame = _tiny({"a": [0.1, 0.2, 0.3], "b": [0.2, 0.3, 0.4]}, [10, 10, 10])
    with pytest.raises(ValueError, match=r"the same .* nats on every document"):
        stats.paired_tests(frame.round(3), [("b", "a")], num_draws=100)


def test_bad_frames_are_answered_with_what_is_wrong(frame: pd.DataFrame) -> None:
    lacking = frame.drop(frame.index[(frame["policy"] == "light") & (frame["document"] == "document 007")])
    nan = frame.assign(mean_difference_nats=frame["mean_difference_nats"].where(frame.index != 60))
    tokens = frame.assign(num_tokens=frame["num_tokens"] + (frame.index == 60))
    two = pd.concat([frame, frame.assign(num_slots=256)])
    torn = frame.assign(cluster=frame["cluster"].where(frame.index != 60, "cluster 99"))
    cases = [
        (frame[frame["document"] < "document 002"], "document", "2 documents: at least 3"),
        (
            frame[frame["document"] < "document 006"],
            "cluster",
            "2 clusters: at least 3 .* use unit='document'",
        ),
        (frame.drop(columns="num_tokens"), "document", "lacks num_tokens"),
        (frame, "token", "unit is 'token': use one of 'document', 'cluster'"),
        (frame[:0], "document", "no rows"),
        (lacking, "document", "'light' lacks document 'document 007'"),
        (nan, "document", "mean_difference_nats is nan for policy 'light', document 'document 012'"),
        (tokens, "document", "different number of scored tokens"),
        (two, "document", "mixes 2 settings"),
        (pd.concat([frame, frame[:1]]), "document", "more than once"),
        (torn, "cluster", "more than one cluster"),
    ]
    for bad, unit, message in cases:
        with pytest.raises(ValueError, match=message):
            stats.pair_documents(bad, unit)


def test_bad_arguments_are_answered_with_what_is_wrong(frame: pd.DataFrame) -> None:
    pair = [("light", "heavy")]
    cases = [
        (lambda: stats.paired_tests(frame, [("light", "lighter")]), "'lighter'; the frame has .*'heaviest'"),
        (lambda: stats.paired_tests(frame, []), "pairs is empty"),
        (lambda: stats.paired_tests(frame, pair, "sign"), "'ttest', 'wilcoxon'"),
        (lambda: stats.equivalence_tests(frame, pair, 0.0), "bound_nats is 0"),
        (lambda: stats.perplexity_increases(frame, confidence=95), "between 0 and 1"),
        (lambda: stats.perplexity_increases(frame, num_draws=10), "at least 100 draws"),
        (lambda: stats.smallest_detectable(np.nan, 10), "standard_deviation is nan"),
        (lambda: stats.smallest_detectable(1.0, 2), "at least 3"),
        (
            lambda: stats.correlation_across_policies(frame[frame["family"] == "threshold"]),
            "2 policies: .* at least 4",
        ),
        (lambda: stats.correlation_across_policies(frame, x="num_tokens"), "same for all 5 policies"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


# Simulated truth


def test_equal_seeds_give_equal_intervals_and_others_nearly(frame: pd.DataFrame) -> None:
    tables = [stats.perplexity_increases(frame, seed=seed).set_index("policy") for seed in (0, 0, 1)]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert tables[0].loc["heavy", "low"] != tables[2].loc["heavy", "low"]
    assert tables[0].loc["heavy", "low"] == pytest.approx(tables[2].loc["heavy", "low"], rel=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """2,000 studies of 60 skewed documents of unequal lengths: 95 % intervals cover the truth 92.5-96.5 %."""
    rng = np.random.default_rng(7)
    counts = stats.draw_counts(60, 1000, seed=1)
    tokens = rng.integers(200, 1000, size=60).astype(float)
    truth = 0.05
    covered = 0
    for _ in range(2000):
        differences = truth * rng.gamma(1.5, 1 / 1.5, size=60)
        low, high = stats.percentile_interval(stats.weighted_mean_draws((differences * tokens)[None], tokens, counts), 0.95)
        covered += bool(low[0] <= truth <= high[0])
    assert 0.925 <= covered / 2000 <= 0.965


def test_drawing_tokens_of_one_cluster_apart_would_be_too_sure() -> None:
    """Documents of a cluster share their shift: intervals over clusters are wider than over documents."""
    rng = np.random.default_rng(5)
    shift = np.repeat(rng.normal(size=20), 3) * 0.05
    rows = [
        {
            "policy": "p",
            "document": f"d{d:02d}",
            "cluster": f"c{d // 3}",
            "num_tokens": 500,
            "mean_difference_nats": s,
        }
        for d, s in enumerate(shift + rng.normal(scale=0.005, size=60))
    ]
    widths = {
        unit: np.ptp(stats.perplexity_increases(pd.DataFrame(rows), unit)[["low", "high"]].to_numpy()) for unit in ("document", "cluster")
    }
    assert 1.4 < widths["cluster"] / widths["document"] < 2.1


def test_documents_of_one_name_are_numbered_within_a_policy():
    frame = pd.DataFrame({"policy": ["a", "a", "a", "b", "b", "b"], "document": ["x", "x", "y", "x", "x", "y"]})
    assert stats.unique_documents(frame)["document"].tolist() == ["x", "x #2", "y"] * 2
