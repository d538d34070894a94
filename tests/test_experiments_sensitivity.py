"""Chapter 92's measurement on a tiny model: one choice at a time, each against its own base, inert ones found and said."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models
import torch

from moecache.experiments import memory_choices_cells, paired_runs, sensitivity, sensitivity_report
from moecache.figures import sensitivity as drawn
from moecache.record import record

NUM_SLOTS = 14
RULE = "0.15 rule"


def texts(num_documents=7, num_tokens=90):
    generator = np.random.default_rng(1)
    return [
        SimpleNamespace(tokens=generator.integers(0, 60, num_tokens), domain="ab"[i % 2], cluster=f"c{i}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def reading():
    return paired_runs.read(tiny_models.qwen3_next(num_layers=2, num_experts=32, top_k=10), texts(), 2)


@pytest.fixture(scope="module")
def frame(reading):
    parts = [sensitivity.measure(reading, RULE, choice, NUM_SLOTS) for choice in sensitivity.asked(RULE, [])]
    return pd.concat(parts, ignore_index=True).assign(model="tiny")


@pytest.fixture(scope="module")
def table(frame):
    return sensitivity_report.changes(frame)


def test_every_switch_differs_from_its_base_in_one_choice():
    base = sensitivity.bases(RULE, 8)
    for choice, settings in sensitivity.switches(RULE, 8).items():
        for switch in settings:
            is_policy = switch.policy != base[switch.against]
            arguments = set(switch.arguments) - {"predict"}  # how a prefetch is carried out
            assert is_policy + bool(arguments) + switch.reorder + bool(switch.rounding) == 1, (choice, switch.setting)


def test_every_eviction_that_has_counts_is_switched():
    settings = sensitivity.switches(RULE, 8)["eviction"]
    assert {switch.policy.eviction.name for switch in settings} == {"DECAYED_COUNT", "PLAIN_COUNT", "PLAIN_COUNT_FORGET"}


def test_each_setting_is_compared_on_every_scored_document(frame, table):
    assert frame.groupby("policy")["document"].nunique().eq(5).all()
    assert len(table) == sum(map(len, sensitivity.switches(RULE, 10, lambda: np.zeros((2, 32)), False).values()))
    assert (table["num_units"] == 5).all()


def test_a_setting_without_any_changed_decision_is_inert(table):
    """At top-10 the absolute threshold is the default, and LRU asks who was called, not who was served, only of residents that hit."""
    inert = set(table.loc[table["is_inert"], "setting"])
    assert "0.15 whatever K" in inert
    assert "only served calls count (LRU)" in inert
    assert "its own, rescaled to the old sum" in inert  # this family renormalises
    assert "a random resident" not in inert
    assert (table.loc[table["is_inert"], "changed_fraction"] == 0).all()


def test_weights_change_losses_and_no_decision_of_the_first_layer(table):
    """A weight rule decides nothing itself; later layers see other inputs, so only some calls change."""
    weights = table[table["choice"] == "weight of the stand-in"]
    assert (weights["effect"] != 0).any()
    assert (weights["changed_fraction"] < 0.6).all()


def test_bases_are_compared_with_themselves(frame):
    base = frame[frame["choice"] == sensitivity.DEFAULT]
    assert base["policy"].unique().tolist() == [sensitivity.DEFAULT, sensitivity.DECAYED, sensitivity.ADMITTED]
    delay = frame[frame["choice"] == "delay of an admission"]
    assert delay["against"].unique().tolist() == [sensitivity.ADMITTED]


def test_copies_take_their_bytes_from_the_slots(reading, frame):
    """Where they leave fewer slots than a router calls they have no row; elsewhere slots and copies take at most the slots' bytes."""
    assert not frame["setting"].str.contains("copies").any()
    sizes, num_slots = memory_choices_cells.sizes_of(reading.model), 28
    rows = sensitivity.measure(reading, RULE, "low-bit copies, prefetch", num_slots)
    copied = rows[rows["setting"] == "2-bit copies of all, fewer slots"]
    left = int(copied["num_slots"].iloc[0])
    full, few = sizes.expert_bytes[16], sizes.expert_bytes[2]
    assert left * full + sizes.num_experts * few <= num_slots * full < (left + 1) * full + sizes.num_experts * few
    assert (copied["substituted"] == 0).all()
    assert (copied["changed_fraction"] > 0).all()


def test_prefetches_are_copies_that_nobody_waits_for(frame):
    ahead, plain = (frame[frame["policy"] == name] for name in ("low-bit copies, prefetch: up to 4 prefetches a step", sensitivity.DEFAULT))
    assert plain["copies"].sum() == 0
    assert ahead["copies"].sum() > 0


def test_a_prompt_is_exact_and_judged_on_what_follows(frame, table):
    prompt = frame[frame["choice"] == "prompt"]
    assert (prompt["nats_0_64"] == 0).all()
    plain = frame[frame["policy"] == sensitivity.DEFAULT].set_index("document")["nats_64_end"]
    expected = (prompt.set_index("document")["nats_64_end"] - plain).mean()
    assert table.loc[table["choice"] == "prompt", "effect"].iloc[0] == pytest.approx(expected)


def test_rounding_reaches_the_router_and_ends_with_the_block(reading):
    tokens = np.asarray(reading.documents[0].tokens)
    plain = record(reading.model, tokens)
    with sensitivity.rounded_router(reading.model, torch.float32):
        unrounded = record(reading.model, tokens)
    with sensitivity.rounded_router(reading.model, torch.bfloat16):
        rounded = record(reading.model, tokens)
    after = record(reading.model, tokens)
    assert np.array_equal(plain.topk_ids, unrounded.topk_ids)
    assert np.allclose(plain.gate_weights, unrounded.gate_weights, atol=1e-6)
    in_bfloat16 = torch.from_numpy(rounded.selection_scores.astype(np.float32)).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(in_bfloat16, rounded.selection_scores.astype(np.float32))
    assert not np.array_equal(plain.selection_scores, rounded.selection_scores)
    assert np.array_equal(plain.selection_scores, after.selection_scores)


def test_another_order_compares_the_same_documents(frame):
    order = frame[frame["setting"] == "another order"]
    plain = frame[frame["policy"] == sensitivity.DEFAULT]
    assert set(order["document"]) == set(plain["document"])
    assert order["document"].tolist() != plain["document"].tolist()
    losses = [rows.set_index("document")["exact_loss_nats"].sort_index() for rows in (order, plain)]
    assert losses[0].equals(losses[1])


def test_unknown_choices_are_answered_with_the_known(reading):
    with pytest.raises(ValueError, match="choose among substituted expert, stand-in"):
        sensitivity.asked(RULE, ["colour"])
    with pytest.raises(ValueError, match="choice='colour' is unknown"):
        sensitivity.measure(reading, RULE, "colour", NUM_SLOTS)
    assert "threshold" not in sensitivity.asked("first choice", [])
    assert sensitivity.asked("first choice", ["stand-in"]) == [sensitivity.DEFAULT, "stand-in"]


def test_the_page_names_every_setting(frame, table):
    shown = sensitivity_report.shown(table, "tiny")
    assert len(shown) == len(table)
    assert (shown.iloc[:, 3] == "inert").sum() == table["is_inert"].sum()
    values = sensitivity_report.values(frame, table)
    assert values["num_units"] == 5
    assert "0.15 whatever K" in values["inert_words"]
    figure = drawn.change_forest(table.assign(series="tiny, 0.15 rule"))
    assert len(figure.axes[0].get_yticklabels()) == len(table)
    assert "a random resident (0.15 rule)" in sensitivity_report.alternative(table)
