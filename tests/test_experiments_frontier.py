"""The frontier on a tiny model: what waits in each family, and ratios of curves with a known answer."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models

from moecache import figures, stats
from moecache.experiments import frontier, frontier_report, misses_ranks_report, misses_that_matter

TOP_K = 10
SLOTS = 13


def texts(num_documents=7, num_tokens=60):
    generator = np.random.default_rng(1)
    return [
        SimpleNamespace(tokens=generator.integers(0, 60, num_tokens), domain="code", cluster=f"c{i // 2}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_models.qwen3_next(num_experts=32, top_k=TOP_K)


@pytest.fixture(scope="module")
def measured(model):
    groups = {**frontier.frontier_groups(TOP_K), **{f"rank {n}": g for n, g in frontier.rank_groups(TOP_K).items()}}
    main = frontier.Group(tuple(misses_that_matter.miss_rules(TOP_K)))
    wanted = ("threshold", "first J", "mass budget", "random misses", "true contribution", "rank one rank", "rank last J")
    exact = frontier.exact_losses_of(model, [d.tokens for d in texts()])
    parts = [frontier.measure(model, texts(), group, SLOTS, "stays_out", 2, exact) for group in [main, *(groups[w] for w in wanted)]]
    return frontier_report.prepare(*(part.assign(model="tiny") for part in parts))


def test_every_family_has_five_points_with_those_of_the_first_experiment():
    for top_k in (8, 10):
        main = misses_that_matter.miss_rules(top_k)
        pairs = [*main, *(pair for group in frontier.frontier_groups(top_k).values() for pair in group.policies)]
        rows = pd.DataFrame([{"policy": policy.label, "family": family} for family, policy in pairs])
        assert not rows["policy"].duplicated().any()
        found = frontier_report.curves(rows)
        assert set(found) == set(frontier_report.FAMILIES)
        assert min(len(names) for names in found.values()) >= 5
        ranks = [*main, *(pair for group in frontier.rank_groups(top_k).values() for pair in group.policies)]
        places = [place for _, policy in ranks for place in misses_ranks_report.place_of(policy.label, top_k)]
        assert {rank for series, rank in places if series == misses_ranks_report.ALONE} == set(range(top_k))
        assert len(places) == len(set(places))


def test_a_share_of_the_misses_waits_at_random(measured):
    rows = measured[measured["policy"] == "random 45 % of the misses wait"][["fetched", "substituted"]].sum()
    assert rows["fetched"] / rows.sum() == pytest.approx(0.45, abs=0.03)
    mass = measured.groupby("policy")["substituted_mass"].mean()
    assert mass["random 80 % of the misses wait"] < 0.6 * mass["random 3 % of the misses wait"]


def test_contributions_are_ranked_in_the_warm_up_of_the_exact_model(model, measured):
    """The largest 90 % of the exact model's contributions wait; a twin that computes the threshold by itself waits for the same calls."""
    documents = texts()
    values = frontier.exact_contributions(model, [d.tokens for d in documents[:2]])
    assert values.shape == (120, 4, TOP_K)
    number = float(np.sort(values.ravel())[round(0.1 * (values.size - 1))])
    group = frontier.frontier_groups(TOP_K)["true contribution"]
    thresholds, _ = frontier._wait_values(model, [d.tokens for d in documents], group, 2)
    assert thresholds[-1] == pytest.approx(number, rel=0.02)
    assert thresholds == sorted(thresholds, reverse=True)
    rows = measured[measured["policy"] == "the 90 % largest contributions wait"]
    assert rows["fetched"].sum() > 0
    with pytest.raises(ValueError, match="read at least one"):
        frontier.measure(model, documents, group, SLOTS, num_warmup_documents=0, exact_losses=np.zeros(420))


def test_the_rows_are_those_of_the_first_experiment(model, measured, monkeypatch):
    """A rule measured here and there gives the same rows."""
    rules = [pair for pair in misses_that_matter.miss_rules(TOP_K) if pair[1].label in ("0.15 rule", "only rank 0 substituted")]
    monkeypatch.setattr(misses_that_matter, "miss_rules", lambda top_k: rules)
    there = misses_that_matter.measure(model, texts(), "tiny", num_warmup_documents=2, num_slots=SLOTS, regimes=["stays_out"])
    columns = ["document", "mean_difference_nats", "substituted", "fetched", "substituted_mass", "num_slots", "regime"]
    for rule in (policy.label for _, policy in rules):
        left, right = (frame[frame["policy"] == rule][columns].reset_index(drop=True) for frame in (there, measured))
        pd.testing.assert_frame_equal(left, right)


def synthetic(curves, num_clusters=30, noise=0.0):
    """Rows of policies whose loss and fetches are given; with noise, clusters differ."""
    generator = np.random.default_rng(0)
    size = 1 + noise * generator.standard_normal(num_clusters)
    rows = []
    for family, places in curves.items():
        for i, (fetches, loss) in enumerate(places):
            for cluster in range(num_clusters):
                rows.append(
                    {
                        "policy": f"{family} {i}", "family": family, "document": f"d{cluster}", "cluster": f"c{cluster}", "num_tokens": 100,
                        "mean_difference_nats": loss * size[cluster], "fetched": 1000 * fetches, "forced": 0, "steps": 1000,
                        "substituted": 500 - 100 * fetches, "dropped": 0, "calls": 10_000,
                    }
                )  # fmt: skip
    return frontier_report.prepare(pd.DataFrame(rows))


def test_ratios_of_power_laws_are_exact_between_the_points():
    """Curves straight in logarithms: the ratio at any place is known, whatever the points."""
    plain = [(x, 0.01 / x) for x in (0.1, 0.5, 1.1, 3.0)]
    better = [(x, 0.006 / x) for x in (0.15, 0.3, 2.0, 2.9)]
    worse = [(x, 0.02 / x**0.5) for x in (0.3, 0.9, 1.5)]
    found = frontier_report.ratios(synthetic({"threshold": plain, "first J": better, "mass budget": worse}, noise=0.2))
    table = found.set_index(["family", "target"])
    for target in (0.2, 0.7, 2.4):
        assert table.loc[("first J", target), "ratio"] == pytest.approx(0.6)
        assert table.loc[("first J", target), "verdict"] == "beats"
    assert table.loc[("mass budget", 0.7), "ratio"] == pytest.approx(2 * 0.7**0.5)
    assert table.loc[("mass budget", 0.7), "verdict"] == "loses"
    for target in (0.2, 2.4):  # outside its points
        assert table.loc[("mass budget", target), "verdict"] == "not reached"
    assert "lose less than a plain threshold: first J (at 0.2 and 0.7 and 2.4)" in frontier_report.sentence(found)
    shown = frontier_report.ratio_table(found)
    assert shown.shape == (2, 4)
    assert shown.iloc[1, 1] == "not reached"


def test_equal_curves_are_undecided_when_clusters_disagree():
    """Two families that lose the same on average, on different texts."""
    plain, other = ([(x, 0.01 / x) for x in (0.1, 1.0, 3.0)] for _ in range(2))
    frame = synthetic({"threshold": plain, "first J": other})
    generator = np.random.default_rng(3)
    wiggle = pd.Series(1 + 0.5 * generator.standard_normal(30), index=[f"d{i}" for i in range(30)])
    wiggle /= wiggle.mean()
    is_other = frame["family"] == "first J"
    frame.loc[is_other, "mean_difference_nats"] *= frame.loc[is_other, "document"].map(wiggle)
    found = frontier_report.ratios(frame)
    assert set(found["verdict"]) == {"undecided"}
    assert (found["low"] < 1).all()
    assert (found["high"] > 1).all()


def test_tables_and_figures_of_a_measured_frame(measured):
    alone = misses_ranks_report.alone_table(measured)
    assert alone["rank"].tolist() == list(range(TOP_K))
    assert alone["share of these, %"].sum() == pytest.approx(100)
    shares = misses_ranks_report.concentration(measured)
    assert 0 < shares["heavy_share_of_calls"] < 0.3
    assert shares["heavy_share_low"] <= shares["heavy_share_of_loss"] <= shares["heavy_share_high"]
    pairs = misses_ranks_report.matched_pairs(measured)
    assert pairs == [("last 5", "first 5"), ("last 7", "first 7"), ("only rank 0 substituted", "only rank 9 substituted")]
    assert len(misses_ranks_report.matched_table(measured)) == 3
    drawn = frontier_report.every_model(frontier_report.points, {"tiny": measured, "again": measured})
    figure = figures.miss_rule_frontier(drawn, targets=(0.2, 0.7), bound="true contribution")
    assert [axes.get_ylabel() for axes in figure.axes] == ["tiny", "again"]
    assert len(figure.axes[0].containers) == drawn.loc[drawn["loss_nats"] > 0, "family"].nunique()
    ranks = frontier_report.every_model(misses_ranks_report.points, {"tiny": measured})
    assert [len(axes.containers) for axes in figures.loss_by_rank(ranks).axes] == [1, 2]
    assert "only this rank is substituted: 0 " in misses_ranks_report.describe(measured)
    with pytest.raises(ValueError, match="no colour is kept for series 'sideways'"):
        figures.loss_by_rank(ranks.assign(series="sideways"))


def test_controls_stand_beside_their_rule(model):
    groups = frontier.control_groups(TOP_K)
    few = frontier.few_groups(TOP_K)["few"]
    assert len(few.policies) == 6
    exact = frontier.exact_losses_of(model, [d.tokens for d in texts()])
    parts = [frontier.measure(model, texts(), group, SLOTS, "admitted_anyway", 2, exact) for group in [few, *groups.values()]]
    frame = frontier_report.prepare(*parts)
    table = misses_ranks_report.controls_table(frame)
    assert table["rule"].tolist() == ["0.15 rule"] * 3 + ["only rank 0 substituted"] * 3
    dropped = frame[frame["policy"] == "0.15 rule, dropped"]
    assert dropped["dropped"].sum() > 0
    assert dropped["substituted"].sum() == 0
    side = misses_ranks_report.increases_side_by_side({"one": frame, "two": frame})
    assert side.columns.tolist() == ["rule", "one", "two"]
    shown = frontier_report.every_model(lambda rows: stats.policy_table(rows, "cluster"), {"tiny": frame})
    assert len(figures.loss_by_count_and_mass(shown).axes) == 2
