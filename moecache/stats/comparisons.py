"""One comparison of two policies, as a row: do they lose the same, or nearly?

The tests, effect sizes and bounds are those of `planned`, which puts several comparisons into one table; here each
stands in the form of `rows`, with n and status, so that it can be joined with answers of other kinds and corrected with
them (`rows.holm_family`).
"""

from __future__ import annotations

import pandas as pd

from moecache.stats.planned import equivalence_tests, paired_tests
from moecache.stats.rows import tidy_row

NAMES = {"ttest": "paired t-test", "wilcoxon": "Wilcoxon signed-rank test"}


def compare(
    frame: pd.DataFrame,
    policy: str,
    against: str,
    test: str = "ttest",
    unit: str = "document",
    is_planned: bool = False,
    **bootstrap: float,
) -> pd.DataFrame:
    """Test whether two policies lose the same, in nats a token.

    Parameters
    ----------
    frame : DataFrame
        One setting, as for `pair_documents`.
    policy, against : str
        Labels; the difference is the first minus the second.
    test : {"ttest", "wilcoxon"}
    unit : {"document", "cluster"}
    is_planned : bool
    **bootstrap
        ``confidence``, ``num_draws``, ``seed``.

    Returns
    -------
    DataFrame
        One row in the form of `rows`: difference of mean losses with its bootstrap interval, dz, uncorrected p.
    """
    table = paired_tests(frame, [(policy, against)], test, unit, **bootstrap)  # type: ignore[arg-type]
    row = table.iloc[0]
    return tidy_row(
        row["comparison"],
        row["difference_nats"],
        (row["low"], row["high"]),
        table.attrs["num_units"],
        f"{unit}s",
        test=NAMES[test],
        p=row["p_holm"],
        effect=row["dz"],
        effect_kind="dz",
        smallest_detectable=row["smallest_detectable_nats"],
        is_planned=is_planned,
    )


def equivalent(
    frame: pd.DataFrame, policy: str, against: str, bound_nats: float, unit: str = "document", is_planned: bool = False
) -> pd.DataFrame:
    """Test whether two policies lose the same to within a bound (two one-sided t-tests).

    Parameters
    ----------
    frame, policy, against, unit, is_planned
        As for `compare`.
    bound_nats : float
        The largest difference that still counts as none, named beforehand.

    Returns
    -------
    DataFrame
        One row in the form of `rows`, with the 90 % t-interval that the test is equivalent to; p below 0.05 says
        "the same to within the bound".
    """
    table = equivalence_tests(frame, [(policy, against)], bound_nats, unit)
    row, difference = table.iloc[0], compare(frame, policy, against, unit=unit, num_draws=100).iloc[0]
    return tidy_row(
        f"{row['comparison']} within ±{bound_nats:g} nats (90 % interval)",
        row["difference_nats"],
        (row["low_90"], row["high_90"]),
        table.attrs["num_units"],
        f"{unit}s",
        test="TOST",
        p=row["p_holm"],
        effect=difference["effect"],
        effect_kind="dz",
        smallest_detectable=difference["smallest_detectable"],
        is_planned=is_planned,
    )
