"""Contrasts: weighted sums of policies' losses, tested document by document.

A difference of two policies is the simplest contrast. The interaction of a 2 x 2 is another (+1 -1 -1 +1), a mixture of two points of a
curve a third. Each becomes one paired quantity a document and goes through the same test, interval and smallest detectable effect as a
plain difference.

This module reads tidy frames; what a contrast means is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from moecache import stats
from moecache.stats.paired import DIFFERENCE

Contrast = Mapping[str, float]
UNIT = "cluster"
_ZERO = "nothing"


def combined(frame: pd.DataFrame, contrasts: Mapping[str, Contrast], column: str = DIFFERENCE) -> pd.DataFrame:
    """The rows of each contrast, in the form in which policies have them.

    Parameters
    ----------
    frame : DataFrame
        One row per (policy, document) of one setting.
    contrasts : mapping of name to mapping of policy to coefficient
    column : str
        What is summed; any column of means.

    Returns
    -------
    DataFrame : `policy` (the contrast's name), `document`, `cluster`, `num_tokens`, `mean_difference_nats`.

    Raises
    ------
    ValueError : a policy is not in the frame; those that are, are listed.
    """
    wide = frame.pivot(index="document", columns="policy", values=column)
    facts = frame.drop_duplicates("document").set_index("document")[["cluster", "num_tokens"]].loc[wide.index]
    parts = []
    for name, contrast in contrasts.items():
        if absent := sorted(set(contrast) - set(wide.columns)):
            raise ValueError(f"no policy is labelled {', '.join(map(repr, absent))}; the frame has {', '.join(map(repr, wide.columns))}")
        values = sum(coefficient * wide[policy] for policy, coefficient in contrast.items())
        parts.append(facts.assign(policy=name, **{DIFFERENCE: values}).reset_index())
    return pd.concat(parts, ignore_index=True)


def table_of(frame: pd.DataFrame, contrasts: Mapping[str, Contrast], column: str = DIFFERENCE, unit: str = UNIT) -> pd.DataFrame:
    """Test each contrast against zero, with Holm's correction over all of them.

    Returns
    -------
    DataFrame : `comparison` (the contrast's name), `difference_nats`, `low`, `high`, `dz`, `smallest_detectable_nats`, `p_holm`;
        `.attrs["num_units"]` holds n. A contrast that is zero in every unit says so in its name.
    """
    return table_of_rows(combined(frame, contrasts, column), unit)


def table_of_rows(rows: pd.DataFrame, unit: str = UNIT) -> pd.DataFrame:
    """`table_of` for rows that are contrasts already (as `combined` makes them), possibly of several columns."""
    first = rows["policy"].iloc[0]
    zero = rows[rows["policy"] == first].assign(policy=_ZERO, **{DIFFERENCE: 0.0})
    names = [str(name) for name in rows["policy"].unique()]
    found = stats.paired_tests(pd.concat([rows, zero], ignore_index=True), [(name, _ZERO) for name in names], unit=unit)
    renamed = found["comparison"].str.replace(f" − {_ZERO}", "", regex=False)
    return found.assign(comparison=renamed)


def in_mnat(found: pd.DataFrame) -> pd.DataFrame:
    """The table of `table_of` as a page shows it: thousandths of a nat, the interval in one column."""
    bounds = zip(found["low"], found["high"], strict=True)
    return pd.DataFrame(
        {
            "comparison": found["comparison"],
            "mnat": 1000 * found["difference_nats"],
            "95 % interval": [f"[{1000 * low:+.1f}, {1000 * high:+.1f}]" for low, high in bounds],
            "dz": found["dz"],
            "smallest detectable": 1000 * found["smallest_detectable_nats"],
            "p (Holm)": found["p_holm"],
        }
    )
