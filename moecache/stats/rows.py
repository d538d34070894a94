"""One answer, one row: what was asked, the estimate and its interval, n and what it counts, and what was not seen.

Every function of this package that answers a single question gives rows of one form, so that a reader finds the same
facts in the same place whichever method was used:

================== ==============================================================================================
question            in words
estimate, low, high the effect and its interval, in the unit that the question names
n, counted          how many, and what they are (documents, clusters, pairs of policies ...)
test, p             the test and its p-value, corrected where the test says so; empty and NaN where none was made
effect, effect_kind a size without a unit: dz, r, a ratio
smallest_detectable the smallest effect that the sample would have shown in 80 % of cases, in the unit of the estimate
status              "planned" or "exploratory"
================== ==============================================================================================

For an estimate that is judged by its interval alone, the smallest detectable deviation (from whatever bound it is held
against) is 2.80 standard errors: the normal quantiles of 97.5 % and 80 % together.

This module does not know how a row was computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pingouin

COLUMNS = (
    "question",
    "estimate",
    "low",
    "high",
    "n",
    "counted",
    "test",
    "p",
    "effect",
    "effect_kind",
    "smallest_detectable",
    "status",
)
STANDARD_ERRORS = 2.8016  # normal quantiles: 1.9600 + 0.8416


def tidy_row(
    question: str,
    estimate: float,
    interval: tuple[float, float],
    n: int,
    counted: str,
    *,
    test: str = "",
    p: float = np.nan,
    effect: float = np.nan,
    effect_kind: str = "",
    smallest_detectable: float = np.nan,
    is_planned: bool = False,
) -> pd.DataFrame:
    """Return one row in the form of this package.

    Parameters
    ----------
    question : str
    estimate : float
        In the unit that the question names.
    interval : (float, float)
        Its low and high end.
    n, counted : int, str
        How many, and what they are.
    test, p : str, float
        Empty and NaN where no test was made.
    effect, effect_kind : float, str
        A size without a unit, and which one.
    smallest_detectable : float
        In the unit of the estimate.
    is_planned : bool

    Returns
    -------
    DataFrame
        One row with the columns of `COLUMNS`.
    """
    status = "planned" if is_planned else "exploratory"
    bounds = (float(interval[0]), float(interval[1]))
    values = (question, float(estimate), *bounds, int(n), counted, test, p, effect, effect_kind, smallest_detectable, status)
    return pd.DataFrame([values], columns=list(COLUMNS))


def detectable_from_draws(draws: np.ndarray) -> float:
    """Return 2.80 standard errors, from bootstrap draws of an estimate (undefined draws left out)."""
    return STANDARD_ERRORS * float(np.nanstd(draws))


def holm_family(rows: pd.DataFrame | Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Correct the p-values of rows together, as one family of tests (Holm 1979).

    Parameters
    ----------
    rows : DataFrame, or a sequence of them
        In the form of `tidy_row`; rows without a p-value belong to no test and stay as they are.

    Returns
    -------
    DataFrame
        All rows; ``test`` names the number of tests that were corrected for.

    Raises
    ------
    ValueError
        If no row has a p-value.
    """
    table = rows.copy() if isinstance(rows, pd.DataFrame) else pd.concat(rows, ignore_index=True)
    has_test = table["p"].notna()
    if not has_test.any():
        raise ValueError("none of the rows has a p-value: there is no family to correct")
    table.loc[has_test, "p"] = pingouin.multicomp(table.loc[has_test, "p"].to_list(), method="holm")[1]
    table.loc[has_test, "test"] += f", Holm over {int(has_test.sum())}"
    return table


def shown(rows: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """Return rows as a page shows them: eight columns at most, estimate and interval together.

    Parameters
    ----------
    rows : DataFrame
        In the form of `tidy_row`.
    digits : int
        Significant digits.

    Returns
    -------
    DataFrame
        Of words: question, estimate with interval, n, test, effect size, smallest detectable, status.
    """
    number = f"{{:.{digits}g}}".format
    bounds = zip(rows["estimate"], rows["low"], rows["high"], strict=True)
    table = {
        "question": rows["question"].to_list(),
        "estimate [interval]": [f"{number(e)} [{number(low)}, {number(high)}]" for e, low, high in bounds],
        "n": [f"{n} {what}" for n, what in zip(rows["n"], rows["counted"], strict=True)],
        "test": [_test(*pair) for pair in zip(rows["test"], rows["p"], strict=True)],
        "effect size": [f"{kind} {number(e)}" if kind else "" for e, kind in zip(rows["effect"], rows["effect_kind"], strict=True)],
        "smallest detectable": ["" if np.isnan(value) else number(value) for value in rows["smallest_detectable"]],
        "status": rows["status"].to_list(),
    }
    return pd.DataFrame(table)


def _test(test: str, p: float) -> str:
    if np.isnan(p):
        return test
    return f"{test}: p < 0.0001" if p < 1e-4 else f"{test}: p = {p:.2g}"
