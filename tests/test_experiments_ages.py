"""Percentages of an earlier age, quoted from the rows of another chapter."""

import numpy as np
import pandas as pd

from moecache.experiments.ages_report import words_of

RULES = ["0.15 rule", "first choice"]


def _rows(model, losses):
    """Six documents under each rule, each losing the same."""
    return pd.DataFrame(
        [
            {"model": model, "policy": policy, "document": f"d{i}", "cluster": f"d{i}", "num_tokens": 100, "num_slots": 128,
             "mean_difference_nats": loss}
            for policy, loss in losses.items()
            for i in range(6)
        ]
    )  # fmt: skip


def test_only_the_earlier_age_is_told_and_in_the_order_asked():
    frame = pd.concat([_rows("m-early", {"first choice": np.log(1.05), "0.15 rule": np.log(1.02)}), _rows("m", {"0.15 rule": np.log(2.0)})])
    found = words_of(frame, RULES)
    assert "in m-early" in found
    assert "2.00 % [2.00, 2.00] for *0.15 rule*, 5.00 % [5.00, 5.00] for *first choice*" in found
    assert "n = 6 clusters" in found
    assert "*first choice*" not in words_of(frame, RULES[:1])


def test_where_nothing_is_stored_it_says_so():
    for frame in (pd.DataFrame(), _rows("m", {"0.15 rule": 0.1}), _rows("m-early", {"another": 0.1})):
        assert words_of(frame, RULES) == "An earlier age of the model was not read."
