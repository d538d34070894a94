"""How well one quantity orders another, as rows: across policies, across documents, and which of two orders better.

Across policies the list is fixed and units are drawn; across documents one policy is fixed. Both are told in
`relations`, whose arithmetic this module uses. Here are the single questions:

- one coefficient across policies, and the difference of two coefficients with the same loss (which predicts better);
- the coefficient of one policy across its documents (what smaller samples would have said of it is told by `fans`).

No p-value is given over policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pingouin
from scipy import stats as scipy_stats

from moecache.stats.paired import DIFFERENCE, pair_documents
from moecache.stats.relations import FEWEST_POINTS, correlation_across_documents, rowwise_correlation
from moecache.stats.resample import NUM_DRAWS, draw_counts, percentile_interval, weighted_mean_draws
from moecache.stats.rows import detectable_from_draws, tidy_row


def association(
    frame: pd.DataFrame,
    x: str = "substituted_mass",
    y: str = DIFFERENCE,
    method: str = "spearman",
    unit: str = "document",
    is_planned: bool = False,
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Correlate two means across the policies of the frame, drawing units.

    Parameters
    ----------
    frame : DataFrame
        One setting, as for `correlation_across_policies`.
    x, y : str
        Columns that hold a mean per document.
    method : {"spearman", "pearson"}
    unit : {"document", "cluster"}
    is_planned : bool
    confidence, num_draws, seed
        Of the percentile bootstrap.

    Returns
    -------
    DataFrame
        One row in the form of `rows`; n counts the units, the question names the number of policies.
    """
    found, draws, num_policies, num_units = _across_policies(frame, (x,), y, method, unit, num_draws, seed)
    return tidy_row(
        f"{method} of {x} and {y} over {num_policies} policies",
        found[0],
        _interval(draws[0], confidence),
        num_units,
        f"{unit}s",
        effect=found[0],
        effect_kind="r",
        smallest_detectable=detectable_from_draws(draws[0]),
        is_planned=is_planned,
    )


def better_association(
    frame: pd.DataFrame,
    x: str,
    against: str = "substituted_mass",
    y: str = DIFFERENCE,
    method: str = "spearman",
    unit: str = "document",
    is_planned: bool = False,
    confidence: float = 0.95,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
) -> pd.DataFrame:
    """Ask which of two quantities orders the loss of the policies better: coefficient of x minus that of `against`.

    Parameters
    ----------
    frame, y, method, unit, is_planned, confidence, num_draws, seed
        As for `association`.
    x, against : str
        Columns; both meet the same draws.

    Returns
    -------
    DataFrame
        One row in the form of `rows`: above zero, x orders better.
    """
    found, draws, num_policies, num_units = _across_policies(frame, (x, against), y, method, unit, num_draws, seed)
    difference = draws[0] - draws[1]
    return tidy_row(
        f"{method} with {y} over {num_policies} policies: {x} minus {against}",
        found[0] - found[1],
        _interval(difference, confidence),
        num_units,
        f"{unit}s",
        smallest_detectable=detectable_from_draws(difference),
        is_planned=is_planned,
    )


def association_within(
    frame: pd.DataFrame,
    policy: str,
    x: str = "substituted_mass",
    y: str = DIFFERENCE,
    unit: str = "document",
    is_planned: bool = False,
    **bootstrap: float,
) -> pd.DataFrame:
    """Correlate two quantities across the documents of one policy (Spearman).

    Parameters
    ----------
    frame, x, y, unit, is_planned
        As for `association`; with "cluster" the points stay documents, drawn by whole clusters.
    policy : str
        Label.
    **bootstrap
        ``confidence``, ``num_draws``, ``seed``.

    Returns
    -------
    DataFrame
        One row in the form of `rows`. The p-value is that of Spearman's coefficient over documents; the smallest
        detectable coefficient is that of a two-sided test at 5 % with 80 % power.

    Raises
    ------
    ValueError
        For an unknown label, or if x or y is the same for all documents.
    """
    points = document_points(frame, policy, x, y)
    # Clusters are looked up in the whole frame; one policy's rows hold them all.
    table = correlation_across_documents(pd.DataFrame(frame[frame["policy"] == policy]), x, y, unit, **bootstrap)  # type: ignore[arg-type]
    row, num_documents = table.iloc[0], len(points[0])
    return tidy_row(
        f"spearman of {x} and {y} across documents, {policy}",
        row["spearman"],
        (row["low"], row["high"]),
        num_documents,
        "documents",
        test="Spearman",
        p=float(scipy_stats.spearmanr(*points).pvalue),  # type: ignore[attr-defined]
        effect=row["spearman"],
        effect_kind="r",
        smallest_detectable=detectable_correlation(num_documents),
        is_planned=is_planned,
    )


def detectable_correlation(num_points: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest correlation that a two-sided test over n points would detect with this power.

    Parameters
    ----------
    num_points : int
        n, at least 4.
    power, alpha : float
        Share of samples that would detect it, and the level of the test.

    Returns
    -------
    float
        |r|; 1 where no correlation would be detected.

    Raises
    ------
    ValueError
        For fewer than four points, which detect no correlation.
    """
    if num_points < 4:
        raise ValueError(f"num_points is {num_points}: a correlation needs at least 4")
    found: Any = pingouin.power_corr(n=num_points, power=power, alpha=alpha)
    return float(found) if np.isfinite(found) else 1.0


def document_points(frame: pd.DataFrame, policy: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return both quantities of each document of a policy."""
    paired = pair_documents(frame, "document", (x, y))
    row = paired.index(policy)
    points = tuple(paired.sums[c][row] / paired.num_tokens for c in (x, y))
    for column, values in zip((x, y), points, strict=True):
        if np.ptp(values) == 0.0:
            raise ValueError(f"{column} is the same for all documents of {policy!r}: no correlation exists")
    return points[0], points[1]


def _across_policies(
    frame: pd.DataFrame, xs: Sequence[str], y: str, method: str, unit: str, num_draws: int, seed: int
) -> tuple[list[float], list[np.ndarray], int, int]:
    """Return each x's coefficient with y across policies, its draws, and the numbers of policies and units."""
    paired = pair_documents(frame, unit, (*xs, y))
    if len(paired.policies) < FEWEST_POINTS:
        raise ValueError(f"{len(paired.policies)} policies: a correlation needs at least {FEWEST_POINTS}")
    counts = draw_counts(paired.num_units, num_draws, seed)
    drawn = {c: weighted_mean_draws(paired.sums[c], paired.num_tokens, counts) for c in (*xs, y)}
    found = [float(rowwise_correlation(paired.means(x)[None], paired.means(y)[None], method)[0]) for x in xs]
    if np.isnan(found).any():
        raise ValueError(f"{', '.join(xs)} or {y} is the same for all policies: no correlation exists")
    return found, [rowwise_correlation(drawn[x], drawn[y], method) for x in xs], len(paired.policies), paired.num_units


def _interval(draws: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = percentile_interval(draws, confidence)
    return float(low), float(high)
