"""Chapter 05: its fixed list of policies, and what its report makes of rows whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from paired_frames import SyntheticPolicy, paired_frame

from moecache import figures, stats
from moecache.experiments import mass_hypothesis
from moecache.experiments import mass_hypothesis_report as report
from moecache.record import record
from moecache.reference import load_model
from moecache.substituted_calls import RANK_GROUPS

PLAIN = ["weight 1.5/K and first choice", "weight 1.0/K"]


@pytest.mark.parametrize("top_k", [8, 10])
def test_the_list_has_enough_policies_and_families_and_every_one_compiles(top_k: int) -> None:
    listed = mass_hypothesis.listed_policies(top_k)
    assert len({policy.label for _, policy in listed}) == len(listed) == 25
    assert len({family for family, _ in listed}) == 8
    assert len({policy.compile(top_k) for _, policy in listed}) == 25
    groups = mass_hypothesis.list_in_groups(top_k)
    assert [pair for group in groups.values() for pair in group] == sorted(listed, key=lambda pair: list(groups).index(pair[0]))
    with pytest.raises(ValueError, match="at least 8"):
        mass_hypothesis.listed_policies(4)


def test_the_plan_page_names_every_policy_of_the_list(root) -> None:
    page = (root / "book" / "decisions" / "plan_05.md").read_text()
    for family in dict.fromkeys(family for family, _ in mass_hypothesis.listed_policies(10)):
        assert f"| {family} |" in page
    numbers = "1.5, 1.2, 1.0, 0.9, 0.8", "1, 2, 3, 4, 6 ranks", "0.1, 0.2, 0.3", "0.1/K, 0.3/K", "rank 0, 1, 2, K-1"
    assert all(text in page for text in numbers)


def test_residencies_change_only_residency() -> None:
    rules = {policy.label: policy for _, policy in mass_hypothesis.listed_policies(10)}
    for residency, policies in mass_hypothesis.varied_policies().items():
        for rule, policy in policies:
            assert policy.label == mass_hypothesis.varied_label(rule, residency)
            back = policy.replace(eviction="lru", half_life=None, admission="none", mass_threshold=None, admission_delay=None)
            assert back == rules[rule] != policy


def _rows() -> pd.DataFrame:
    """A world in which the layer error sets the loss, and mass only where first choices are fetched."""
    rng = np.random.default_rng(0)
    policies = {label: SyntheticPolicy("threshold", 0.02 * (i + 1), 0.1 * (i + 1), 0.1) for i, label in enumerate(PLAIN)}
    policies |= {f"p{i}": SyntheticPolicy("mass budget", 0.01 * (i + 1), 0.05 * (i + 1), 0.1) for i in range(6)}
    policies |= {f"equal {i}": SyntheticPolicy("first J", 0.015 * (i + 1), 0.2, 0.1) for i in range(6)}
    policies["only rank 0 substituted"] = SyntheticPolicy("one rank", 0.5, 0.05, 0.03, first_choice_fraction=0.03)
    listed = paired_frame(policies, 24, setting=("reference-512", "stays_out", 128)).assign(part=mass_hypothesis.LISTED)
    varied = {
        mass_hypothesis.varied_label(rule, residency): SyntheticPolicy(rule, 0.03, 0.08, 0.1)
        for residency in mass_hypothesis.RESIDENCIES[1:]
        for rule in PLAIN
    }
    both = [listed, paired_frame(varied, 24, seed=1, setting=("reference-512", "varied", 128)).assign(part=mass_hypothesis.VARIED)]
    frame = pd.concat(both, ignore_index=True)
    cells = {f"{name}_l{layer}_{g}": 2.0 for name in ("squared", "log_age") for layer in (0, 1) for g in RANK_GROUPS}
    loss = frame["mean_difference_nats"].to_numpy()
    noise = np.exp(rng.normal(0, 0.01, len(frame)))
    return frame.assign(**cells, relative_error2=np.abs(loss) * noise, squared_weights=frame["substituted_mass"] ** 2)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return report.prepare(_rows())


def test_aged_squares_by_hand(frame: pd.DataFrame) -> None:
    assert frame["aged_squares"].unique().tolist() == [4 * 2.0 * 2.0]  # four rank groups a step, each 2 times 2


def test_the_better_predictor_is_called_better(frame: pd.DataFrame) -> None:
    rows = report.one_model(frame, "reference-512")
    table = report.predictors(rows.assign(aged_squares=rows["squared_weights"])).set_index("predictor")
    assert float(str(table.loc["layer error e²", "spearman, whole list"]).split()[0]) > 0.99
    assert float(str(table.loc["layer error e²", "minus that of mass"]).split()[0]) > 0.1
    assert table.loc["mass", "minus that of mass"] == ""


def test_equal_mass_and_unequal_loss_refutes_the_strong_form(frame: pd.DataFrame) -> None:
    rows = report.one_model(frame, "reference-512")
    ratios = report.ratio_rows(rows)
    assert report.strong_form(ratios) == "refuted"
    few = rows[rows["policy"].isin(PLAIN)]
    assert report.ratio_rows(few) is None
    assert report.strong_form(None).startswith("not judged")
    assert report.ratio_table(few).shape == (1, 2)
    equal = rows.assign(mean_difference_nats=rows["substituted_mass"] * (1 + 0.001 * np.arange(len(rows)) % 3))
    assert report.strong_form(report.ratio_rows(equal)) == "supported"


def test_residencies_find_mass_and_loss_in_opposite_directions(frame: pd.DataFrame) -> None:
    rows, varied = (report.one_model(frame, "reference-512", part) for part in ("listed", "varied"))
    found = report.residencies(rows, varied)
    # The first rule loses 0.02 at mass 0.1, the second 0.04 at 0.2; varied, both lose 0.03 at mass 0.08.
    assert found["is_opposite"].tolist() == [True] * 3 + [False] * 3
    assert (found["mass_change"] < 0).all()
    assert set(found["test"]) == {"paired t-test, Holm over 6"}
    assert report.residency_table(found).shape == (6, 7)


def test_every_table_fits_a_page_and_every_figure_is_drawn(frame: pd.DataFrame) -> None:
    some = frame[frame["policy"].isin([*PLAIN, "p1", "p2", "p3", "equal 1", "equal 2", "only rank 0 substituted"])]
    both = pd.concat([some, some.assign(model="reference-64")], ignore_index=True)
    listed = {model: report.one_model(both, model) for model in ("reference-512", "reference-64")}
    varying = [report.order_table, report.families_left_out, report.ratio_table, report.within_policies]
    for table in [report.every_model(make, listed) for make in varying]:
        assert 3 <= len(table.columns) <= 8
        assert table["model"].nunique() == 2
    assert report.widest_pairs(listed["reference-512"]).shape[1] == 3
    points = report.points(both, list(listed))
    assert len(figures.loss_by_predictor(points).axes) == 6
    fans = pd.concat([report.fans(rows).assign(model=model) for model, rows in listed.items()])
    assert len(figures.fan(fans).axes) == 6
    assert "20 documents" in report.fan_sentence(fans)


def test_levels_are_laid_out_one_column_each(frame: pd.DataFrame) -> None:
    rows = report.one_model(frame, "reference-512")
    some = rows[rows["policy"].isin([*PLAIN, "p1", "p3"]) & (rows["document"] < "document 008")]
    table = report.levels(some)
    assert list(table.columns) == ["explained by", "slope on", "between policies", "between documents", "interaction"]
    assert table["slope on"].tolist() == ["mass", "layer error e²", "mass", "layer error e²"]


def test_values_name_what_the_prose_asks_for(frame: pd.DataFrame, root) -> None:
    values = report.values(frame.assign(aged_squares=frame["squared_weights"]), ["reference-512"])
    source = (root / "notebooks" / "05_the_mass_hypothesis.py").read_text()
    asked = set(pd.Series(source).str.findall(r"\{\{(\w+)").iloc[0])
    assert asked - {"num_warmup", "ages", *(f"verdict_{letter}" for letter in "bcdl")} <= set(values)
    assert values["strong_form"] == "refuted"
    assert values["num_opposite"] == 3
    assert isinstance(stats.shown(report.order_rows(report.one_model(frame, "reference-512"))), pd.DataFrame)


@pytest.mark.parametrize("name", ["reference-512", "reference-64"])
def test_the_shape_of_a_reference_model_is_that_of_its_trace(name):
    trace = record(load_model(name), [np.arange(3)])
    assert mass_hypothesis.shape_of(name, trace.shape.num_layers) == replace(trace.shape, expert_bytes=None)
