"""Chapter 14's measurement on a tiny model: bytes add up, copies come from the base precision, and curves are what their formulas say."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch

from moecache import hf_internals
from moecache.experiments import memory_choices, memory_choices_report
from moecache.experiments.memory_choices_cells import ALL_FEW, COPIES, FEW_BITS, Sizes, Sweep, contenders, size_rows, sizes_of
from moecache.experiments.memory_choices_curves import bands, curve_at, intervals, levels_of, line_at, points, winners
from moecache.figures import memory_choices as drawn
from moecache.low_bit import round_trip
from moecache.score import score

SWEEP = Sweep((0.3, 0.2), (), (2, 3), 4)
CELLS = ((16, 0.25), (4, 0.75))
WIDE = Sizes(4, 512, 10, {16: 12288, 8: 6464, 4: 3840, 3: 3072, 2: 2304})


def texts(num_documents=6, num_tokens=30):
    generator = np.random.default_rng(1)
    domains = ["code", "prose"]
    return [
        SimpleNamespace(tokens=generator.integers(0, 60, num_tokens), domain=domains[i % 2], cluster=f"c{i}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_models.qwen3_next(num_layers=2, num_experts=32, top_k=4, layer_types=["linear_attention", "full_attention"])


@pytest.fixture(scope="module")
def bases(model):
    return {bits: memory_choices.based(model, bits, texts(), 1, 5) for bits, _ in CELLS}


@pytest.fixture(scope="module")
def frame(bases):
    parts = [memory_choices.measure(bases[bits], budget, SWEEP).assign(model="tiny") for bits, budget in CELLS]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("budget", [0.1, 0.25, 0.5, 0.75])
def test_nobody_spends_more_than_the_budget(bits, budget):
    total = budget * WIDE.num_experts * WIDE.expert_bytes[bits]
    found = contenders(WIDE, bits, budget, SWEEP)
    for who in found:
        spent = who.num_slots * WIDE.expert_bytes[bits] + who.num_copies * WIDE.expert_bytes.get(who.copy_bits, 0)
        assert spent <= total
        assert who.num_slots >= WIDE.top_k or who.family == ALL_FEW
    assert len({who.name for who in found}) == len(found)


def test_copies_fit_where_their_bytes_do():
    """2-bit copies take 3/16 of 16 bits and 3/5 of 4: beside them lie what is left in slots."""
    at = {budget: {who.name: who for who in contenders(WIDE, 16, budget, SWEEP)} for budget in (0.1, 0.25, 0.5)}
    assert at[0.25]["2-bit copies"].num_slots == 128 - 96
    assert at[0.5]["3-bit copies"].num_slots == 256 - 128
    assert "3-bit copies" not in at[0.25]
    assert at[0.1]["2-bit copies of some"].num_copies == int((51.2 - 25) * 12288 / 2304)
    assert "everything at 3 bits" in at[0.25]
    assert not any(who.family in (COPIES, ALL_FEW) for who in contenders(WIDE, 4, 0.5, SWEEP))


def test_impossible_cells_are_refused():
    with pytest.raises(ValueError, match="choose one of 16, 8, 4"):
        contenders(WIDE, 5, 0.25, SWEEP)
    with pytest.raises(ValueError, match=r"budget=1\.5"):
        contenders(WIDE, 16, 1.5, SWEEP)


def test_bytes_are_those_of_the_weights(model):
    sizes = sizes_of(model)
    weights = [p for p in hf_internals.moe_layers(model)[0].experts.parameters() if p.ndim == 3]
    assert sizes.expert_bytes[16] == 2 * sum(weight[0].numel() for weight in weights)
    assert list(sizes.expert_bytes) == [16, *FEW_BITS]


def test_everything_is_rounded_from_the_base_precision(model, bases):
    """The base model is rounded once, its copies twice; the model that was handed over stays as it is."""
    original, based = (next(hf_internals.moe_layers(m)[0].experts.parameters()) for m in (model, bases[4].reading.model))
    copied = next(bases[4].copies(2).layers[0].parameters())
    assert torch.equal(based, round_trip(original, 4))
    assert torch.equal(copied, round_trip(round_trip(original, 4), 2))
    assert not torch.equal(original, based)
    exact = score(bases[4].reading.model, [document.tokens for document in texts()])
    assert np.array_equal(np.concatenate(bases[4].reading.exact_losses), exact, equal_nan=True)


def test_every_contender_reads_every_document_of_the_map(frame):
    kept = frame[frame["in_map"]]
    assert kept.groupby(["base_bits", "policy"])["document"].nunique().eq(4).all()
    exact = frame["rule"] == "fetch every miss"
    assert (frame.loc[exact, "mean_difference_nats"] == 0).all()
    few = frame[frame["family"] == ALL_FEW]
    assert (few["hits"] == few["calls"]).all()
    assert (few["mean_difference_nats"] != 0).all()


def test_a_miss_is_computed_from_its_copy_or_waited_for(frame):
    rows = frame[(frame["copy_bits"] > 0) & (frame["family"] != ALL_FEW)]
    assert set(rows["contender"]) == {"2-bit copies", "2-bit copies of some"}
    assert (rows["substituted"] == 0).all()
    assert (rows["hits"] + rows["fetched"] < rows["calls"]).any()
    fetched = frame.groupby(["contender", "rule"])["fetched"].sum()
    assert fetched["2-bit copies of some", "0.15 rule"] > fetched["substitution", "0.15 rule"]
    assert fetched["prefetch", "fetch every miss"] < fetched["waiting", "fetch every miss"]


def test_experts_without_a_copy_are_waited_for(bases):
    base = bases[16]
    wait = memory_choices.WaitWithoutCopy(base.trace(), base.map_reading, 5)
    assert wait.has_copy.sum(axis=1).tolist() == [5, 5]
    ids = np.arange(8).reshape(2, 4)
    values = wait(1, SimpleNamespace(topk_ids=ids, gate_weights=np.full((2, 4), 0.25, np.float32)), 0)  # type: ignore[arg-type]
    assert np.array_equal(np.isinf(values), ~wait.has_copy[1][ids])


def test_planned_comparison_needs_copies_of_all(frame):
    """At 16 bits and a quarter the tiny model has no room for them; at 4 bits and three quarters it has, and reads all documents."""
    found = memory_choices_report.planned_tests(frame, "tiny")
    assert found["comparison"].tolist() == ["4 bits, 75%"]
    assert found.attrs["num_units"] == 5
    assert "16 bits, 25%" in memory_choices_report.untested_words(frame, "tiny", CELLS)
    rows = memory_choices_report.planned_rows(frame, "tiny", 4, 0.75)
    contrast, _ = memory_choices_report.planned_contrast(rows)
    means = rows.groupby("policy")["mean_difference_nats"].mean()  # documents are equally long
    assert found["difference_nats"].iloc[0] == pytest.approx(sum(weight * means[name] for name, weight in contrast.items()))


def test_a_curve_is_straight_in_logarithms():
    curve = pd.DataFrame({"policy": ["a", "b", "c"], "waited_kb": [0.0, 1.0, 100.0], "loss": [0.5, 0.1, 0.001]})
    loss, weights = curve_at(curve, 10.0)  # type: ignore[misc]
    assert loss == pytest.approx(0.01)
    assert weights == pytest.approx({"b": 0.05, "c": 5.0})
    assert sum(weights[name] * value for name, value in zip("bc", (0.1, 0.001), strict=True)) == pytest.approx(loss)
    assert curve_at(curve, 0.5) == (0.5, {"a": 1.0})
    assert curve_at(curve, 1000.0) == (0.001, {"c": 1.0})
    assert curve_at(curve[1:], 0.5) is None
    assert [line_at(curve[1:], level)[1] for level in (0.5, 1000.0)] == [{"b": 1.0}, {"c": 1.0}]
    rising = curve.assign(loss=[0.5, 0.001, 0.1])
    assert curve_at(rising, 10.0) == (0.001, {"b": 1.0})
    assert line_at(rising, 10.0)[0] == pytest.approx(0.01)
    ends = curve.assign(loss=[0.5, 0.1, 0.0])
    assert curve_at(ends, 10.0) == (pytest.approx(0.05), pytest.approx({"b": 0.5, "c": 0.5}))


def test_winner_is_the_lowest_curve(frame):
    rows = memory_choices_report.cell(frame, "tiny", 16, 0.25)
    table = points(rows)
    levels = levels_of(table, 7)
    found = winners(rows, table, levels)
    for level, row in zip(levels, found.to_dict("records"), strict=True):
        at = {name: curve_at(curve, level) for name, curve in table.groupby("contender")}
        assert row["loss"] == min(value[0] for value in at.values() if value)
    laid = bands(found)
    assert laid["from_kb"].iloc[0] == 0
    assert np.array_equal(laid["to_kb"].to_numpy()[:-1], laid["from_kb"].to_numpy()[1:])


def test_intervals_of_a_policy_are_those_of_its_table(frame):
    rows = memory_choices_report.cell(frame, "tiny", 16, 0.25)
    table = points(rows).set_index("policy")
    name = "substitution: 0.15 rule"
    found = intervals(rows, {name: {name: 1.0}})
    assert list(found.loc[name]) == pytest.approx(list(table.loc[name, ["low", "high"]]))


def test_page_shows_every_cell(frame, model, monkeypatch):
    table = memory_choices_report.all_points(frame, "tiny")
    found = memory_choices_report.all_bands(frame, "tiny", table)
    assert len(drawn.loss_by_waited(table).axes) == 4
    assert len(drawn.winner_map(found).axes) == 2
    values = memory_choices_report.values(frame, table, found, "tiny")
    assert (values["num_scored"], values["num_planned_scored"]) == (4, 5)
    assert "4 bits, 75%" in values["map_words"]
    assert values["main_cell"] == "16 bits, 25%"
    monkeypatch.setattr("moecache.experiments.memory_choices_cells.load_model", lambda name: model)
    sweep = {"gate_thresholds": [0.3], "copy_gate_thresholds": [], "copy_bits": [2, 3], "num_prefetches": 4}
    sizes = size_rows("tiny", [16, 4], [0.25, 0.75], sweep)
    shown = memory_choices_report.shown_sizes(sizes)
    assert len(shown) == 4
    assert shown.columns.size <= 8
    assert memory_choices_report.copy_words(sizes).endswith("at 4 bits")


def test_a_map_without_scored_documents_is_refused(model):
    with pytest.raises(ValueError, match="num_map_documents=1 must be more than the 1 warm-up"):
        memory_choices.based(model, 16, texts(), 1, 1)
