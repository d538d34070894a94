"""The rules about chosen policies and admission: each verdict follows the data and flips when the data flip."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from paired_frames import SyntheticPolicy, paired_frame

from moecache import claims
from moecache.claims import State

SETTING = ("reference-512", "each policy's own admission", 128)
NUM_DOCUMENTS = 72  # 24 clusters


def _world(quality: float, speed: float, noise: float = 0.004) -> dict[str, SyntheticPolicy]:
    """Both bare rules lose 0.02 nats; the chosen policies as given."""
    losses = {"0.15 rule": 0.02, "quality-first": quality, "first choice": 0.02, "speed-first": speed}
    families = {label: "first J" if label in ("first choice", "speed-first") else "threshold" for label in losses}
    return {label: SyntheticPolicy(families[label], loss, 0.2, 0.2, noise_nats=noise) for label, loss in losses.items()}


def _verdict(claim_id: str, frame: pd.DataFrame) -> claims.Verdict:
    drawing, listed = claims.load_claims()
    claim = next(c for c in listed if c.id == claim_id)
    (verdict,) = claims.judge_settings(claim, replace(drawing, num_draws=1000), frame).values()
    return verdict


@pytest.mark.parametrize(
    ("claim", "quality", "speed", "noise", "expected"),
    [
        ("g", 0.01, 0.01, 0.004, State.INCONCLUSIVE),  # the half about perplexity holds; seconds are open
        ("g", 0.05, 0.01, 0.004, State.NOT_SUPPORTED),
        ("g", 0.03, 0.01, 0.05, State.INCONCLUSIVE),
        ("h", 0.01, 0.02, 0.004, State.SUPPORTED),
        ("h", 0.03, 0.02, 0.004, State.NOT_SUPPORTED),
        ("h", 0.02, 0.02, 0.05, State.INCONCLUSIVE),
        ("i", 0.02, 0.02, 0.004, State.INCONCLUSIVE),
        ("i", 0.02, 0.03, 0.004, State.NOT_SUPPORTED),
        ("i", 0.02, 0.02, 0.05, State.INCONCLUSIVE),
    ],
)
def test_a_verdict_flips_with_the_data(claim: str, quality: float, speed: float, noise: float, expected: State) -> None:
    frame = paired_frame(_world(quality, speed, noise), NUM_DOCUMENTS, 0, SETTING)
    assert _verdict(claim, frame).state is expected


def test_a_half_that_holds_says_what_is_still_open() -> None:
    clear, wide = (paired_frame(_world(0.01, 0.02, noise), NUM_DOCUMENTS, 0, SETTING) for noise in (0.004, 0.1))
    for claim in ("g", "i"):
        assert "the half about perplexity holds" in _verdict(claim, clear).evidence
        assert "the half about seconds is not decided here" in _verdict(claim, clear).evidence
    assert "the half about perplexity holds" not in _verdict("i", wide).evidence


def test_evidence_names_effect_interval_and_n() -> None:
    evidence = _verdict("h", paired_frame(_world(0.01, 0.02), NUM_DOCUMENTS, 0, SETTING)).evidence
    assert evidence.startswith("*quality-first* minus *0.15 rule*: -")
    assert "n = 24 clusters" in evidence


def test_an_absent_policy_is_named() -> None:
    world = {label: policy for label, policy in _world(0.01, 0.01).items() if label != "quality-first"}
    for claim in ("g", "h"):
        verdict = _verdict(claim, paired_frame(world, NUM_DOCUMENTS, 0, SETTING))
        assert verdict.state is State.NOT_YET_MEASURED
        assert "*quality-first*" in verdict.evidence


@pytest.mark.parametrize(
    ("near", "far", "noise", "expected"),
    [
        (0.010, 0.002, 0.004, State.SUPPORTED),
        (0.002, 0.010, 0.004, State.NOT_SUPPORTED),  # it helps, but not most near the change
        (-0.010, -0.020, 0.004, State.NOT_SUPPORTED),  # nearer is better, but it does not help
        (0.010, 0.010, 0.004, State.INCONCLUSIVE),
        (0.010, 0.002, 0.2, State.INCONCLUSIVE),
    ],
)
def test_admission_must_help_and_most_near_a_change(near: float, far: float, noise: float, expected: State) -> None:
    gain = (240 * near + 760 * far) / 1000
    world = {
        "0.15 rule": SyntheticPolicy("threshold", 0.05, 0.2, 0.2, noise_nats=noise),
        "0.15 rule, admit at 0.5": SyntheticPolicy("threshold", 0.05 - gain, 0.15, 0.15, noise_nats=noise),
    }
    frame = paired_frame(world, NUM_DOCUMENTS, 0, SETTING)
    is_admitting = frame["policy"] == "0.15 rule, admit at 0.5"
    for column, part in (("nats_0_240", near), ("nats_240_end", far)):
        frame[column] = frame["mean_difference_nats"] + is_admitting * (gain - part)
    # Noise is shared by the spans of a document; a little of its own keeps equal gains from being equal to the last bit.
    frame["nats_0_240"] += 0.002 * (-1.0) ** pd.RangeIndex(len(frame)) * is_admitting
    verdict = _verdict("f", frame)
    assert verdict.state is expected
    assert "n = 24 clusters" in verdict.evidence
