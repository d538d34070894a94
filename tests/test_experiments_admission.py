"""Chapter 08's measurement on a tiny model: two orders of the same documents, the groups of policies, and equal bytes."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny_models

from moecache.experiments import admission, admission_report, paired_runs, topic_changes
from moecache.figures import admission as drawn

DOMAINS = ["code", "prose", "law"]
SWEEP = {
    "order_thresholds": [0.5],
    "mass_thresholds": [0.0, 2.0],
    "gate_thresholds": [0.3, 0.1, 0.02],
    "delays_tokens": [16],
    "account_half_lives_tokens": [64],
    "half_lives_tokens": [128],
}


def texts(num_documents=12, num_tokens=250):
    generator = np.random.default_rng(1)
    return [
        SimpleNamespace(tokens=generator.integers(0, 60, num_tokens), domain=DOMAINS[i % 3], cluster=f"c{i}", name=f"document {i}")
        for i in range(num_documents)
    ]


@pytest.fixture(scope="module")
def reading():
    return paired_runs.read(tiny_models.qwen3_next(num_layers=2, num_experts=32, top_k=10), texts(), 3)


@pytest.fixture(scope="module")
def frame(reading):
    orders = [admission.measure_group(reading, "orders", SWEEP, 0.4, order) for order in topic_changes.ORDERS]
    others = [admission.measure_group(reading, name, SWEEP, 0.4) for name in ("curve", "thresholds")]
    return pd.concat([*orders, *others], ignore_index=True).assign(model="tiny")


def test_documents_of_a_domain_follow_one_another(reading):
    turned = topic_changes.in_runs(reading)
    domains = [document.domain for document in turned.documents]
    assert domains[:3] == DOMAINS
    assert domains[3:] == ["code"] * 3 + ["prose"] * 3 + ["law"] * 3
    assert [document.name for document in turned.documents[3:6]] == ["document 3", "document 6", "document 9"]
    with pytest.raises(ValueError, match="choose one of interleaved, in_runs"):
        topic_changes.in_order(reading, "backwards")


def test_only_documents_inside_a_run_tell_of_a_change(frame):
    """The first of each run sees a change in both orders: here also the first code document, which follows a warm-up document of law."""
    names = topic_changes.changed_documents(frame[frame["policy"] == "0.15 rule"])
    assert names == [f"{DOMAINS[i % 3]}: document {i}" for i in (6, 9, 7, 10, 8, 11)]


def test_the_order_changes_substitution_and_not_the_exact_losses(frame):
    bare = frame[(frame["policy"] == "0.15 rule")].pivot(
        index="document", columns="order", values=["exact_loss_nats", "mean_difference_nats"]
    )
    assert np.array_equal(bare["exact_loss_nats"][topic_changes.INTERLEAVED], bare["exact_loss_nats"][topic_changes.IN_RUNS])
    assert not np.allclose(bare["mean_difference_nats"][topic_changes.INTERLEAVED], bare["mean_difference_nats"][topic_changes.IN_RUNS])
    fetching = frame[frame["policy"] == "fetch every miss"]
    assert (fetching["mean_difference_nats"] == 0).all()


def test_spans_add_up_to_the_document(frame):
    """249 scored tokens: 15 in the first span, as the first token has no loss."""
    widths = dict(zip(topic_changes.BINS, (15, 32, 64, 128, 10), strict=True))
    total = sum(width * frame[f"nats_{paired_runs.span_name(span)}"] for span, width in widths.items())
    assert total.to_numpy() == pytest.approx(249 * frame["mean_difference_nats"].to_numpy(), abs=1e-5)
    assert frame["nats_0_48"].to_numpy() == pytest.approx((15 * frame["nats_0_16"] + 32 * frame["nats_16_48"]).to_numpy() / 47, abs=1e-7)


def test_a_higher_mass_threshold_copies_less(frame):
    copies = frame[frame["order"] == topic_changes.INTERLEAVED].groupby("policy")["copies"].sum()
    for rule in ("0.15 rule", "first choice"):
        assert copies[rule] == 0
        assert copies[f"{rule}, admit at 0"] > copies[f"{rule}, admit at 0.5"] > copies[f"{rule}, admit at 2"] > 0


def test_every_group_differs_from_its_bare_rule_and_the_labels_differ():
    labels = [
        policy.label
        for name in ("orders", "thresholds", "curve", "delays", "accounts", "caps", "evictions")
        for policy in admission.group(name, 10, SWEEP)
    ]
    assert len(set(labels)) == len(labels)
    capped = next(p for p in admission.group("caps", 10, SWEEP) if p.max_bookings)
    assert (capped.mass_threshold, capped.max_bookings) == (0.0, 1)
    assert [p.gate_threshold for p in admission.group("curve", 8, SWEEP)] == pytest.approx([0.375, 0.125, 0.025])
    with pytest.raises(ValueError, match="choose one of orders, thresholds"):
        admission.group("colours", 10, SWEEP)


def test_equal_bytes_mixes_two_neighbours_of_the_curve(frame):
    rows = admission_report.one(frame, "tiny")
    weights, note = admission_report.at_equal_bytes(rows, "0.15 rule, admit at 0.5")
    what = paired_runs.moved(rows)["moved"]
    assert sum(weights.values()) == pytest.approx(1)
    assert note == ""
    mixed = sum(weight * np.log(what[label]) for label, weight in weights.items())
    assert mixed == pytest.approx(np.log(what["0.15 rule, admit at 0.5"]))


def test_beyond_the_curve_its_end_is_taken_and_said(frame):
    rows = admission_report.one(frame, "tiny")
    short = rows[~rows["policy"].isin(["gate weight 0.02", "gate weight 0.1"])]
    weights, note = admission_report.at_equal_bytes(short, "0.15 rule, admit at 0")
    assert weights == {"gate weight 0.3": 1.0}
    assert "beyond the curve" in note


def test_the_report_finds_every_number(frame):
    values = admission_report.values(frame, "tiny")
    assert values["num_changed"] == 6
    assert values["admitted_moved"] > values["bare_moved"]
    assert len(admission_report.planned_tests(frame, "tiny")) == 4
    shown = admission_report.shown(frame, "tiny").set_index("policy")
    assert shown.loc["0.15 rule", "against not admitting"] == ""
    assert shown.loc["0.15 rule, admit at 0.5", "against not admitting"] == values["whole_gate"]
    assert "(One model was read.)" in admission_report.other_models(frame, [])
    assert "tiny" in admission_report.other_models(frame, ["tiny"])


def test_figures_show_every_span_and_policy(frame):
    change = admission_report.change_by_distance(frame, "tiny").assign(panel="change")
    effect = admission_report.admission_by_distance(frame, "tiny").assign(panel="effect")
    figure = drawn.by_distance(pd.concat([change, effect]))
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0-16", "16-48", "48-112", "112-240", "240+"]
    assert len(figure.axes[1].get_legend().get_texts()) == 4
    moved = drawn.loss_by_moved(admission_report.frontier(frame, "tiny"))
    assert {text.get_text() for text in moved.axes[0].texts} >= {"0.15 rule", "gate weight 0.1"}
    with pytest.raises(ValueError, match="at most 4"):
        drawn.by_distance(pd.concat([change.assign(line=change["line"] + str(i)) for i in range(2)]))
