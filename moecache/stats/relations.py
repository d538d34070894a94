"""How two quantities go together: across policies, and across documents within one policy.

*Across policies* the policies are fixed (a designed list, not a sample), and the units are drawn: in every
draw each policy's two means are taken over the same units and the correlation is computed anew. The interval
therefore says how much the correlation depends on which texts were read; it says nothing about policies that
are not in the list, and no p-value is given. Leaving out one family of policies at a time shows how much the
list itself matters.

*Across documents* one policy is fixed and each document is a point; whole units are drawn, so that documents
of one cluster stay together.

Spearman's coefficient is the main one, since losses span orders of magnitude; Pearson's stands beside it
only. This module does not know what the quantities are.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from moecache.stats.paired import DIFFERENCE, PairedUnits, pair_documents
from moecache.stats.resample import (
    NUM_DRAWS,
    correlation_under_counts,
    draw_counts,
    midranks_under_counts,
    percentile_interval,
    weighted_mean_draws,
)

FEWEST_POINTS = 4
METHODS = ("spearman", "pearson")


def correlation_across_policies(
    frame: pd.DataFrame,
    x: str = "substituted_mass",
    y: str = DIFFERENCE,
    unit: str = "document",
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Correlate two token-weighted means across the policies of the frame, drawing units.

    Parameters
    ----------
    frame : DataFrame
        One setting, one row per (policy, document); leave out fetching every miss, which is zero by
        definition.
    x, y : str
        Columns that hold a mean per document.
    unit, confidence, num_draws, seed
        Of the percentile bootstrap.

    Returns
    -------
    DataFrame
        Two rows: ``method`` (spearman, pearson), ``r``, ``low``, ``high``, ``num_policies``, ``num_units``.

    Raises
    ------
    ValueError
        For fewer than four policies, or if x or y is the same for all of them.
    """
    paired = pair_documents(frame, unit, (x, y))
    _check_points(len(paired.policies), "policies")
    counts = draw_counts(paired.num_units, num_draws, seed)
    drawn = [weighted_mean_draws(paired.sums[c], paired.num_tokens, counts) for c in (x, y)]
    means = [paired.means(c)[None] for c in (x, y)]
    rows = []
    for method in METHODS:
        r = float(rowwise_correlation(means[0], means[1], method)[0])
        if np.isnan(r):
            raise ValueError(f"{x} or {y} is the same for all {len(paired.policies)} policies: no correlation exists")
        low, high = map(float, percentile_interval(rowwise_correlation(drawn[0], drawn[1], method), confidence))
        rows.append((method, r, low, high, len(paired.policies), paired.num_units))
    return pd.DataFrame(rows, columns=["method", "r", "low", "high", "num_policies", "num_units"])


def leaving_families_out(frame: pd.DataFrame, x: str = "substituted_mass", y: str = DIFFERENCE) -> pd.DataFrame:
    """Return Spearman's coefficient across policies with each family left out in turn.

    Parameters
    ----------
    frame : DataFrame
        As for ``correlation_across_policies``, with ``family``.
    x, y : str
        Columns that hold a mean per document.

    Returns
    -------
    DataFrame
        ``left_out``, ``r``, ``num_policies``; families whose removal leaves fewer than four policies, or none
        that differ, are not listed.
    """
    paired = pair_documents(frame, columns=(x, y))
    family_of = frame.drop_duplicates("policy").set_index("policy")["family"].to_dict()
    families = np.array([family_of[label] for label in paired.policies])
    rows = []
    for family in dict.fromkeys(families):
        kept = families != family
        if kept.sum() < FEWEST_POINTS:
            continue
        r = float(rowwise_correlation(paired.means(x)[None, kept], paired.means(y)[None, kept], "spearman")[0])
        if not np.isnan(r):
            rows.append((str(family), r, int(kept.sum())))
    return pd.DataFrame(rows, columns=["left_out", "r", "num_policies"])


def correlation_across_documents(
    frame: pd.DataFrame,
    x: str = "substituted_mass",
    y: str = DIFFERENCE,
    unit: str = "document",
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Correlate two quantities across documents, within each policy.

    Parameters
    ----------
    frame : DataFrame
        One setting, one row per (policy, document).
    x, y : str
        Columns that hold a mean per document.
    unit, confidence, num_draws, seed
        Of the percentile bootstrap; with ``"cluster"`` the points stay documents, drawn by whole clusters.

    Returns
    -------
    DataFrame
        One row a policy and a last row ``mean of the policies`` over those that have a coefficient:
        ``policy``, ``spearman``, ``low``, ``high``, ``pearson``, ``num_documents``, ``note`` (says which side
        is constant where no coefficient exists).

    Raises
    ------
    ValueError
        For fewer than four documents, or if no policy has a coefficient.
    """
    documents = pair_documents(frame, "document", (x, y))
    _check_points(documents.num_units, "documents")
    counts = _document_counts(frame, documents, unit, num_draws, seed)
    rows, drawn, found = [], [], []
    for row, policy in enumerate(documents.policies):
        points = [documents.sums[c][row] / documents.num_tokens for c in (x, y)]
        constant = [c for c, values in zip((x, y), points, strict=True) if np.ptp(values) == 0.0]
        if constant:
            rows.append((policy, *[np.nan] * 4, documents.num_units, f"{constant[0]} is the same for all documents"))
            continue
        r, pearson, draws = _across_documents(points[0], points[1], counts)
        low, high = map(float, percentile_interval(draws, confidence))
        rows.append((policy, r, low, high, pearson, documents.num_units, ""))
        drawn.append(draws)
        found.append((r, pearson))
    if not found:
        raise ValueError(f"{x} or {y} is constant across documents for every policy: nothing to correlate")
    low, high = map(float, percentile_interval(_mean_of_defined(np.array(drawn)), confidence))
    r, pearson = map(float, np.mean(found, axis=0))
    note = f"{len(found)} policies"
    rows.append(("mean of the policies", r, low, high, pearson, documents.num_units, note))
    columns = ["policy", "spearman", "low", "high", "pearson", "num_documents", "note"]
    return pd.DataFrame(rows, columns=columns)


def _mean_of_defined(drawn: np.ndarray) -> np.ndarray:
    """Mean of every column, over the rows that are defined in it; NaN where none is."""
    is_defined = ~np.isnan(drawn)
    number = is_defined.sum(axis=0)
    return np.where(number > 0, np.where(is_defined, drawn, 0.0).sum(axis=0) / np.maximum(number, 1), np.nan)


def _across_documents(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Return Spearman's and Pearson's coefficient, and Spearman's in every draw."""
    ranks = [midranks_under_counts(values, counts) for values in (x, y)]
    draws = correlation_under_counts(ranks[0], ranks[1], counts)
    spearman, pearson = (float(rowwise_correlation(x[None], y[None], method)[0]) for method in METHODS)
    return spearman, pearson, draws


def _document_counts(frame: pd.DataFrame, documents: PairedUnits, unit: str, num_draws: int, seed: int) -> np.ndarray:
    """Return how often each document occurs in each draw of whole units, [num_draws, D]."""
    if unit == "document":
        return draw_counts(documents.num_units, num_draws, seed)
    units = pair_documents(frame, unit, ()).units
    of_document = frame.drop_duplicates("document").assign(document=lambda f: f["document"].astype(str))
    names = of_document.set_index("document")["cluster"].astype(str).loc[list(documents.units)]
    index = {name: i for i, name in enumerate(units)}
    return draw_counts(len(units), num_draws, seed)[:, [index[name] for name in names]]


def rowwise_correlation(x: np.ndarray, y: np.ndarray, method: str) -> np.ndarray:
    """Return the correlation of each row of x with that of y, NaN where one is constant."""
    if method == "spearman":
        x, y = scipy_stats.rankdata(x, axis=1), scipy_stats.rankdata(y, axis=1)
    return correlation_under_counts(x, y, np.ones_like(x))


def _check_points(number: int, what: str) -> None:
    if number < FEWEST_POINTS:
        raise ValueError(f"{number} {what}: a correlation needs at least {FEWEST_POINTS}")
