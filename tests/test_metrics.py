"""Rates and sums from a log written by hand, and the perplexity increase."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import moecache as mc
from moecache.metrics import count_calls, count_transfers, summarise, token_frame

H, F, X, S, D = mc.Outcome.HIT, mc.Outcome.FETCHED, mc.Outcome.FORCED, mc.Outcome.SUBSTITUTED, mc.Outcome.DROPPED
LANDED, ALREADY, NO_VICTIM, CANCELLED = mc.Landing


def hand_log():
    """Three tokens, two layers, top-2. Arrivals: two landed (one into a free slot), one useless, one without victim, one cancelled."""
    outcome = np.array([[[H, F], [S, H]], [[H, H], [X, D]], [[F, S], [S, S]]], np.uint8)
    evicted = np.full((3, 2, 2), -1, np.int16)
    evicted[0, 0, 1], evicted[2, 0, 0] = 7, 5  # the forced fetch took a free slot
    arrivals = [
        (0, 1, 0, 4, 6, 0, LANDED),
        (0, 1, 1, 4, -1, 0, LANDED),
        (0, 2, 1, 5, -2, 0, ALREADY),
        (1, 2, 0, 2, -2, 0, NO_VICTIM),
        (2, 2, 1, 3, -2, 0, CANCELLED),
    ]
    mass = np.array([[0, 0.5], [0, 0.25], [0.25, 1]], np.float32)
    return mc.DecisionLog(outcome, evicted.copy(), evicted, np.array(arrivals, np.int64), mass)


# calls: hit fetched forced substituted dropped low_precision cpu | evictions booked admitted arrivals_dropped first_substituted
ALL_TOKENS = [[3, 2, 0, 1, 0, 0, 0, 3, 0, 1, 1, 0], [1, 0, 1, 3, 1, 0, 0, 0, 0, 1, 1, 2]]
FROM_ONE = [[2, 1, 0, 1, 0, 0, 0, 2, 0, 1, 1, 0], [0, 0, 1, 2, 1, 0, 0, 0, 0, 1, 1, 1]]
FROM_TWO = [[0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0], [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1, 1]]


def test_counts_of_a_log():
    log = hand_log()
    assert count_calls(log)[:, :12].tolist() == ALL_TOKENS
    assert count_calls(log, 1)[:, :12].tolist() == FROM_ONE
    assert count_calls(log, 2)[:, :12].tolist() == FROM_TWO
    assert (count_calls(log, 0, 1) + count_calls(log, 1))[:, :12].tolist() == ALL_TOKENS
    assert not count_calls(log)[:, 12:].any()


def test_a_log_must_start_at_clock_0():
    log = hand_log()
    log.arrivals[:, :2] += 2
    for count in (count_calls, count_transfers):
        with pytest.raises(
            ValueError, match=r"arrivals at clocks 2\.\.4 do not belong to a log of 3 tokens that starts at clock 0; subtract"
        ):
            count(log)


def test_transfers_of_a_log():
    """Three fetches, four copies that arrived, and none of them shared."""
    log = hand_log()
    assert count_transfers(log) == 3 + 4
    log.computed_ids[2, 0, 0] = 2  # fetched in the step in which its copy was dropped: once more
    assert count_transfers(log) == 3 + 4
    log.arrivals[3, :2] = 0, 2
    log.outcome[1, 0, 0], log.computed_ids[1, 0, 0] = F, 2  # fetched while its copy is under way: no transfer of its own
    assert count_transfers(log) == 3 + 4


def test_summary():
    totals = summarise(np.pad(np.array(ALL_TOKENS), ((0, 0), (0, 5))), 2.0, 3)
    expected = {
        "tokens": 3, "calls": 12, "hits": 4, "fetched": 2, "forced": 1, "substituted": 4, "dropped": 1, "low_precision": 0, "cpu": 0,
        "evictions": 3, "admitted": 2, "arrivals_dropped": 2, "first_choices_substituted": 2, "fewest_evictions_a_layer": 0,
    }  # fmt: skip
    assert {name: totals[name] for name in expected} == expected
    assert totals["hit_rate"] == pytest.approx(4 / 12)
    assert totals["substitution_rate"] == pytest.approx(5 / 12)
    assert totals["substituted_mass"] == pytest.approx(2 / 6)
    assert totals["fetches_per_token"] == pytest.approx(3 / 3)
    assert totals["fetches_per_step"] == pytest.approx(3 / 6)
    assert totals["copies_per_step"] == pytest.approx(4 / 6)


def test_summary_of_nothing_divides_by_nothing():
    totals = summarise(np.zeros((2, 17), np.int64), 0.0, 0)
    assert totals["calls"] == 0
    assert totals["hit_rate"] == 0


def test_frame_per_token():
    losses = np.array([np.nan, 1.5, 2.5])
    frame = token_frame(hand_log(), np.array([True, False, True]), losses)
    expected = pd.DataFrame(
        {
            "token": [0, 1, 2], "document": [0, 0, 1], "loss_nats": losses, "hits": [2, 2, 0], "fetched": [1, 0, 1], "forced": [0, 1, 0],
            "substituted": [1, 0, 3], "dropped": [0, 1, 0], "low_precision": [0, 0, 0], "cpu": [0, 0, 0],
            "first_choices_substituted": [1, 0, 1], "substituted_mass": [0.25, 0.125, 0.625], "copies": [0, 2, 2], "evictions": [1, 1, 1],
        }
    )  # fmt: skip
    pd.testing.assert_frame_equal(frame, expected, check_dtype=False)
    assert "loss_nats" not in token_frame(hand_log(), np.array([True, False, False]), None)


def test_perplexity_increase():
    exact = np.array([np.nan, 1.0, 2.0, 3.0])
    assert mc.perplexity_increase(exact, exact) == 0
    assert mc.perplexity_increase(exact + math.log(1.05), exact) == pytest.approx(0.05)
    assert mc.perplexity_increase(exact - math.log(2), exact) == pytest.approx(-0.5)
    uneven = exact + np.array([0, 0.3, -0.1, 0.1])
    assert mc.perplexity_increase(uneven, exact) == pytest.approx(math.exp(0.1) - 1)
    one_missing = np.array([5.0, np.nan, 2.5, 3.5])
    assert mc.perplexity_increase(one_missing, exact) == pytest.approx(math.exp(0.5) - 1)


def test_perplexity_increase_needs_pairs():
    with pytest.raises(ValueError, match=r"losses of \(3,\) and \(4,\) tokens cannot be paired"):
        mc.perplexity_increase(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="no token has both losses"):
        mc.perplexity_increase([np.nan, 1.0], [1.0, np.nan])


def test_perplexity_increase_takes_runs_and_says_when_they_have_no_losses():
    with_losses = SimpleNamespace(loss_nats=np.array([np.nan, 1.0, 2.0]))
    exact = SimpleNamespace(loss_nats=np.array([np.nan, 0.5, 1.5]))
    assert mc.perplexity_increase(with_losses, exact) == pytest.approx(np.expm1(0.5))
    with pytest.raises(ValueError, match="the simulator runs no model"):
        mc.perplexity_increase(SimpleNamespace(loss_nats=None), exact)
