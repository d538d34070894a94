"""Chapters 06 and 07 on a tiny model: rows, equal mass, and reports that find what was put into the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from tiny_models import documents, qwen3_next

from moecache import claims
from moecache.claims import State
from moecache.experiments import composition, composition_report, planned_sites, rank_or_weight, rank_or_weight_report
from moecache.experiments.planned_sites import block_of
from moecache.experiments.rank_or_weight_fit_report import explained, left_over
from moecache.experiments.rank_or_weight_words_report import values
from moecache.figures.composition import heavy_and_light
from moecache.figures.rank_or_weight import crossed_cells, kinds_of_calls


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray
    domain: str
    cluster: str
    name: str


@pytest.fixture(scope="module")
def block():
    texts = [Document(tokens, "any", f"cluster {i}", f"text {i}") for i, tokens in enumerate(documents(lengths=(30,) * 5))]
    return block_of("tiny", qwen3_next(top_k=8, num_layers=2), texts[:1], texts[1:], resident_fraction=0.6)


def test_composition_rows_have_equal_mass_at_equal_steps(block):
    frame = composition.measure_block(block, tolerance=0.1, stand_ins=("best",))
    assert len(frame) == 3 * 2 * 4
    for rank in composition.HEAVY_RANKS:
        heavy, light = (frame[(frame["rank"] == rank) & (frame["side"] == side)] for side in composition.SIDES)
        assert heavy["num_sites"].tolist() == light["num_sites"].tolist()
        assert heavy["substituted"].sum() <= heavy["num_sites"].sum() <= 0.25 * heavy["num_steps"].sum() + 4
        if heavy["num_sites"].sum():
            assert light["substituted"].sum() >= 2 * heavy["substituted"].sum() > 0
            assert light["substituted_mass"].sum() == pytest.approx(heavy["substituted_mass"].sum(), rel=0.2)
            assert (heavy["mean_difference_nats"] != 0).any()


def test_crossed_rows(block):
    frame = rank_or_weight.measure_crossed(block, seed=0, site_fraction=0.3)
    ranks = rank_or_weight.crossed_ranks(8)
    assert len(frame) == 4 * len(ranks) * len(rank_or_weight.WEIGHTS)
    assert frame["num_sites"].nunique() == 1
    sums = frame.groupby(["rank", "multiple"])["error2_layer0"].sum()
    for rank in ranks:
        assert sums[rank, 2.0] == pytest.approx(16 * sums[rank, 0.5], rel=1e-2)
    assert set(values(frame)) >= {"words", "both_matter", "num_left_overs"}


def test_ranks_scale_with_the_top_k():
    assert rank_or_weight.crossed_ranks(10) == [0, 1, 2, 4, 6, 9]
    assert rank_or_weight.crossed_ranks(8) == [0, 1, 2, 3, 5, 7]
    assert rank_or_weight.crossed_ranks(2) == [0, 1]
    assert rank_or_weight.ranks_of_bands(10) == {"heaviest": [0, 1], "heavy": [0, 1, 2], "medium": [1, 2, 4], "light": [4, 6, 9]}


def test_missed_calls_and_hits_are_paired(block):
    frame = rank_or_weight.measure_missed(block, seed=0, most_sites=5)
    wide = frame.pivot(index=["rank", "document"], columns="family", values=["num_sites", "gate_weight_sum"])
    assert (wide["num_sites"]["hit"] == wide["num_sites"]["missed"]).all()
    assert wide["num_sites"]["hit"].sum() > 10
    assert wide["gate_weight_sum"]["hit"].sum() == pytest.approx(wide["gate_weight_sum"]["missed"].sum(), rel=0.1)
    assert len(rank_or_weight_report.missed_tests(frame)) == 3


def test_single_calls_have_whole_windows(block):
    sites = rank_or_weight.measure_single(block, seed=0, spacing=8, num_passes=3)
    assert len(sites) >= 3 * 4 * 2
    assert (sites["relative_error"] > 0).mean() > 0.5
    assert np.isfinite(sites["loss_nats"]).all()
    assert sites["loss_nats"].abs().sum() > 0
    assert (sites["is_miss"] | (sites["age"] >= 1)).all()  # what is resident was called, but for the first experts
    assert len(explained(sites, num_draws=100)) == 7


def crossed_world(rank_costs: float) -> pd.DataFrame:
    """Documents whose losses are 3 (e/h)^2 a site, and this much more a site of rank 0."""
    generator, rows = np.random.default_rng(0), []
    for document in range(40):
        for rank, length in ((0, 0.2), (1, 0.15), (9, 0.08)):
            for multiple in rank_or_weight.WEIGHTS:
                errors = length * multiple * generator.uniform(0.5, 1.5, 50)
                sums = {f"error{power}_layer0": (errors**power).sum() for power in rank_or_weight.POWERS}
                loss = 3 * sums["error2_layer0"] + 50 * rank_costs * (rank == 0) + generator.normal(0, 0.3)
                rows.append(
                    {"rank": rank, "multiple": multiple, "policy": f"rank {rank}, {multiple:g}/K", "num_sites": 50, "num_tokens": 399}
                    | {"mean_difference_nats": loss / 399, "document": f"d{document}", "cluster": f"c{document // 2}", "model": "tiny"}
                    | sums
                )
    return pd.DataFrame(rows)


def test_what_is_left_of_rank_is_found_where_it_was_put_in():
    none, some = (left_over(crossed_world(cost), "rank", 0, 9, num_draws=500) for cost in (0.0, 0.05))
    assert none["decision"].startswith("nothing left")
    assert none["raw"] > 0.1
    assert none["left"] == pytest.approx(0.0, abs=0.25 * none["bound"])
    assert some["decision"] == "something is left"
    assert some["left"] == pytest.approx(0.05, rel=0.1)
    assert some["left_low"] < some["left"] < some["left_high"]


def test_planned_contrasts_by_hand():
    frame = crossed_world(0.0)
    found = rank_or_weight_report.planned(frame).set_index("comparison")["difference_nats"]
    loss = rank_or_weight_report.cells(frame).set_index(["rank", "multiple"])["loss"]
    assert loss[0, 2.0] == pytest.approx((frame.query("rank == 0 and multiple == 2")["mean_difference_nats"] * 399 / 50).mean())
    assert found["weight at equal identity"] == pytest.approx(np.mean([loss[r, 2.0] - loss[r, 0.5] for r in (0, 1, 9)]))
    assert found["identity at equal weight"] == pytest.approx(np.mean([loss[0, q] - loss[9, q] for q in (0.5, 1.0, 2.0)]))
    assert found["interaction"] == pytest.approx(loss[0, 2.0] - loss[0, 0.5] - loss[9, 2.0] + loss[9, 0.5])


def composition_world(heavy: float, light: float, mass: float = 0.03) -> pd.DataFrame:
    """40 documents in 30 clusters whose heavy and light sides lose this much."""
    generator, rows = np.random.default_rng(1), []
    for rank in composition.HEAVY_RANKS:
        for stand_in in composition.STAND_INS:
            for side, loss in (("heavy", heavy), ("light", light)):
                rows += [
                    {"policy": composition.label_of(rank, side, stand_in), "family": f"rank {rank}", "rank": rank, "side": side}
                    | {"stand_in": stand_in, "document": f"d{i}", "cluster": f"c{i % 30}", "num_tokens": 100, "substituted_mass": mass}
                    | {"model": "tiny", "regime": "planned", "num_slots": 16, "num_sites": 90, "num_steps": 400, "substituted": 90}
                    | {"dropped": 0, "first_choices_substituted": 0, "mean_difference_nats": loss + generator.normal(0, 0.001)}
                    for i in range(40)
                ]
    return pd.DataFrame(rows)


def test_figures_say_what_kind_of_numbers_they_show(block):
    sides = composition_report.tables(composition_world(0.03, 0.003))
    cells = rank_or_weight_report.by_model(crossed_world(0.0), rank_or_weight_report.cells)
    bands = rank_or_weight_report.complete(rank_or_weight.measure_bands(block, seed=0, most_sites=5))
    kinds = rank_or_weight_report.by_model(bands, rank_or_weight_report.kinds)
    missed = rank_or_weight.measure_missed(block, seed=0, most_sites=5)
    pairs = rank_or_weight_report.by_model(missed, rank_or_weight_report.kinds)
    for figure in (heavy_and_light(sides), crossed_cells(cells), kinds_of_calls(kinds, pairs)):
        assert any("MEASURED" in axes.get_title(loc="right") for axes in figure.axes)
    with pytest.raises(ValueError, match="lacks"):
        crossed_cells(sides)


def test_models_share_one_legend_and_a_rank_looks_the_same_in_both():
    one = rank_or_weight_report.by_model(crossed_world(0.0), rank_or_weight_report.cells)
    cells = pd.concat([one.assign(model="one"), one[one["rank"] > 0].assign(model="other")])
    figure = crossed_cells(cells)
    (legend,) = figure.legends
    named = [f"rank {rank}" for rank in sorted(one["rank"].unique())]
    assert [text.get_text() for text in legend.get_texts()] == named
    first, other = ([bar.lines[0].get_color() for bar in axes.containers] for axes in (figure.axes[0], figure.axes[2]))
    assert first[1:] == other
    assert [text.get_text() for text in figure.findobj(Text)].count("Loss a site, mnat") == 1
    with pytest.raises(ValueError, match="11 ranks: at most 10 can be told apart"):
        crossed_cells(pd.concat([one[one["rank"] == 1].assign(rank=rank) for rank in range(11)]))


@pytest.mark.parametrize(
    ("world", "state", "decision"),
    [
        (composition_world(0.03, 0.003), State.SUPPORTED, "heavy costs more"),
        (composition_world(0.011, 0.010), State.NOT_SUPPORTED, "heavy does not cost more"),
        (composition_world(0.015, 0.010), State.INCONCLUSIVE, "inconclusive"),
        (composition_world(0.03, 0.003, mass=0.01), State.INCONCLUSIVE, "inconclusive: too little mass"),
    ],
)
def test_the_claim_and_the_chapter_decide_by_one_rule(world, state, decision):
    verdict = claims.verdict_on("e", world)
    assert verdict.state == state
    table = composition_report.tables(world)
    assert set(table["decision"]) == {decision}
    assert len(composition_report.shown(table, "tiny")) == 9
    drawing, all_claims = claims.load_claims()
    (claim,) = [claim for claim in all_claims if claim.id == "e"]
    (one,) = claims.judge_settings(replace(claim), drawing, world).values()
    assert "mnat a token with mass" in one.evidence


def test_blocks_tell_documents_of_one_name_apart(monkeypatch):
    def measure(model_name, first_document, num_documents, num_warmup_documents):
        names = ["a.module", f"d{first_document}"][:num_documents]
        return pd.DataFrame([{"model": model_name, "policy": p, "document": d, "cluster": d} for p in ("x", "y") for d in names])

    monkeypatch.setattr(planned_sites.results, "load_or_run", lambda name, asked, run, inputs: SimpleNamespace(frame=run()))
    monkeypatch.setattr(planned_sites.inputs, "reference_inputs", lambda name: {})
    rows = planned_sites.stored_blocks("06_test", measure, ["m"], 6, 2, 2, {})
    assert rows["document"].to_list() == ["a.module", "d2"] * 2 + ["a.module #2", "d4"] * 2
    assert not rows.duplicated(["policy", "document"]).any()
