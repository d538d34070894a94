"""Chapter 13: its policies, its halves, and what it concludes of rows whose truth is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moecache.experiments import loss_from_trace as experiment
from moecache.experiments import loss_from_trace_judged as judging
from moecache.experiments import loss_from_trace_report as report
from moecache.figures import loss_from_trace as drawn
from moecache.quality.sums import cell_columns
from moecache.substituted_calls import RANK_GROUPS
from moecache.trace import ModelShape

LAYERS, WEIGHTS = 2, np.array([8.0, 3.0, 1.0, 0.4])
SHAPE = ModelShape(LAYERS, 512, 10)


@pytest.mark.parametrize("top_k", [8, 10])
def test_candidates_are_different_policies_of_the_fitted_kind(top_k: int) -> None:
    found = experiment.candidates(top_k, 1000)
    assert len({policy for _, policy in found}) == len({policy.label for _, policy in found}) == 1000
    assert {(str(p.weight_rule), p.fallback) for _, p in found} == {("own", found[0][1].fallback)}
    with pytest.raises(ValueError, match="num_policies=100000 must be 1 to"):
        experiment.candidates(top_k, 100000)


def test_what_is_simulated_is_what_is_emulated() -> None:
    groups = experiment.all_policies("reference-512", 7)
    assert [len(group) for group in groups.values()] == [25, 14, 16]
    assert len(experiment.judged_rules(10, 7)) == 7
    labels = [policy.label for _, _, policy in groups["varied"]]
    assert len(set(labels)) == 16
    assert sum(label.endswith(experiment.DECAYED) for label in labels) == 7


def rows_of(novelty: str, num_policies: int, seed: int, slots: int = 128, prefix: str = "p", scale: float = 1.0) -> pd.DataFrame:
    """Losses that follow squared weights by rank group; mass counts all ranks alike."""
    rng, rows = np.random.default_rng(seed), []
    documents = np.random.default_rng(99).normal(0, 0.1, 24)
    for i in range(num_policies):
        shares = np.where(np.arange(4) == i % 4, 5.0, 0.5) * np.exp(rng.normal(0, 0.2, (LAYERS, 4)))
        amounts = 0.02 * np.exp(rng.normal(0, 1)) * shares
        loss = scale * (WEIGHTS * amounts).sum() ** 1.2
        for j, level in enumerate(documents):
            row = {"policy": f"{prefix}{i}", "family": f"f{i % 4}", "novelty": novelty, "num_slots": slots, "num_tokens": 100}
            row |= {"document": f"d{j}", "cluster": f"d{j}", "domain": f"domain {j % 3}"}
            row |= {f"squared_{c}": a for c, a in zip(cell_columns(LAYERS), amounts.ravel(), strict=True)}
            row |= {f"log_age_{c}": 8.0 for c in cell_columns(LAYERS)}
            noise = rng.normal(0, 0.05)
            rows.append(
                row | {"substituted_mass": amounts.sum(), "mean_difference_nats": loss * np.exp(level + noise), "seconds": 0.1 / loss}
            )
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    parts = [rows_of(experiment.FAMILY, 20, 0), rows_of(experiment.CAPACITY, 8, 1, 64), rows_of(experiment.EVICTION, 8, 2, prefix="e")]
    return judging.with_halves(pd.concat([*parts, rows_of(experiment.ADMISSION, 8, 3, prefix="a", scale=4.0)], ignore_index=True))


@pytest.fixture(scope="module")
def fits(measured: pd.DataFrame) -> judging.Fits:
    return judging.fit_models(measured, SHAPE, 60)


@pytest.fixture(scope="module")
def judged(measured: pd.DataFrame, fits: judging.Fits) -> list[judging.Judged]:
    return [judging.judge(measured, fits, novelty, 300) for novelty in experiment.NOVELTIES]


def test_halves_share_no_cluster_and_every_domain_is_in_both(measured: pd.DataFrame) -> None:
    assert (measured.groupby("cluster")["half"].nunique() == 1).all()
    assert (measured.groupby("domain")["half"].nunique() == 2).all()
    assert measured.drop_duplicates("cluster")["half"].value_counts().tolist() == [12, 12]


def test_judged_documents_teach_the_fit_nothing(measured: pd.DataFrame, fits: judging.Fits) -> None:
    spoiled = measured.copy()
    spoiled.loc[(spoiled["half"] == judging.JUDGED) | (spoiled["novelty"] != experiment.FAMILY), "mean_difference_nats"] = 7.0
    again = judging.fit_models(spoiled, SHAPE, 60)
    np.testing.assert_array_equal(again.chosen.fitted.weights, fits.chosen.fitted.weights)


def test_a_true_formula_is_called_useful_and_better_than_mass_and_a_shifted_one_dishonest(judged: list[judging.Judged]) -> None:
    decided = judging.decisions(judged)
    assert decided[experiment.CAPACITY] == ("yes", "yes", "yes")
    assert decided[experiment.EVICTION][2] == "yes"
    assert decided[experiment.ADMISSION][0] == "yes"  # the order is right where every loss is four times the estimate
    assert decided[experiment.ADMISSION][2] == "no"
    table = judging.summary(judged).set_index("novelty")
    assert table.loc[experiment.ADMISSION, "estimate / loss"] == pytest.approx(0.25, rel=0.3)
    assert float(table["median error, mass alone"].iloc[1]) > 2 * float(table["median error"].iloc[1])


def test_too_few_policies_are_not_judged(measured: pd.DataFrame, fits: judging.Fits) -> None:
    few = measured[measured["policy"].isin(["e0", "e1"])]
    assert judging.decisions([judging.judge(few, fits, experiment.EVICTION, 300)])[experiment.EVICTION][:2] == ("not judged", "not judged")


def test_two_documents_of_one_name_stay_two(measured: pd.DataFrame, fits: judging.Fits) -> None:
    first, second = measured[measured["half"] == judging.FITTED]["document"].unique()[:2]
    again = judging.fit_models(measured.replace({"document": {second: first}}), SHAPE, 60)
    np.testing.assert_array_equal(again.chosen.fitted.weights, fits.chosen.fitted.weights)
    np.testing.assert_array_equal(again.chosen.misfits, fits.chosen.misfits)


def test_joined_rows_have_the_simulators_view_and_the_emulators_loss(measured: pd.DataFrame) -> None:
    rows = measured[measured["novelty"] == experiment.CAPACITY].drop(columns="seconds").reset_index(drop=True)
    seen = rows[["policy", "num_slots", "substituted_mass", *(str(c) for c in rows if str(c).startswith(("squared_", "log_age_")))]].copy()
    seen = seen.assign(document=0, num_tokens=0, seconds=2.0, squared_l0_r0=seen["squared_l0_r0"] * 3)
    both = judging.joined(rows, seen.sample(frac=1, random_state=0).sort_index())
    np.testing.assert_allclose(both["squared_l0_r0"], 3 * rows["squared_l0_r0"])
    np.testing.assert_array_equal(both["mean_difference_nats"], rows["mean_difference_nats"])
    assert both["policy"].iloc[0] == "p0 @ 64"
    with pytest.raises(ValueError, match="was not simulated"):
        judging.joined(rows, seen[seen["policy"] != "p3"])


def test_the_best_are_the_front_and_then_the_front_behind_it() -> None:
    swept = pd.DataFrame({"policy": list("abcd"), "seconds": [1.0, 2.0, 2.0, 3.0], "estimated_increase": [3.0, 2.0, 2.5, 2.6]})
    assert judging.best(swept, 2) == ["a", "b"]
    assert judging.best(swept, 3) == ["a", "b", "c"]
    assert judging.best(swept, 9) == ["a", "b", "c", "d"]


def test_a_best_policy_is_confirmed_only_near_what_is_measured_at_its_seconds(measured: pd.DataFrame) -> None:
    rows = measured[measured["novelty"] == experiment.EVICTION]
    levels = {"e0": (1.0, 0.10), "e1": (2.0, 0.05), "e2": (3.0, 0.054), "e3": (4.0, 0.06), "e4": (0.5, 0.2)}
    part = rows[rows["policy"].isin(levels)]
    part = part.assign(
        seconds=[levels[p][0] for p in part["policy"]],
        mean_difference_nats=[levels[p][1] for p in part["policy"]],
        policy=part["policy"] + " @ 128",
    )
    found = judging.confirmed(part, ["e0", "e2", "e3"]).set_index("policy")
    assert found.loc[["e0 @ 128", "e2 @ 128", "e3 @ 128"], "is_confirmed"].tolist() == [True, True, False]
    assert found["is_best"].sum() == 3
    shown = report.best_table(found.reset_index(), pd.DataFrame({"policy": ["e0", "e2", "e3"], "estimated_increase": [0.1, 0.2, 0.3]}))
    assert shown["estimated, %"].tolist() == [10.0, 20.0, 30.0]
    drawn.front(
        pd.DataFrame({"model": ["m"], "seconds": [1.0], "estimated_increase": [0.1]}),
        report.stacked({"m": found.reset_index()}),
        is_quick=True,
    )


def test_everything_that_is_shown_can_be_shown(measured: pd.DataFrame, fits: judging.Fits, judged: list[judging.Judged]) -> None:
    of_model, all_judged = {"m": fits}, {"m": judged}
    for table in (
        report.form_table(of_model),
        report.weight_table(of_model),
        report.order_table(all_judged),
        report.error_table(all_judged),
    ):
        assert len(table.columns) <= 8
        assert len(table)
    weights = report.weight_table(of_model)[["rank 0", "rank 1", "ranks 2, 3", "ranks 4 and up"]].iloc[0]
    assert weights.is_monotonic_decreasing and len(weights) == len(RANK_GROUPS)  # noqa: PT018
    figure = drawn.estimated_and_measured(report.points(all_judged))
    assert len(figure.axes) == 2
    own = judging.named(measured)
    assert judging.seen_and_logged(measured, own, fits.chosen)["estimate"].to_numpy() == pytest.approx(1.0)
    assert "mass alone" in report.sentence(all_judged)
