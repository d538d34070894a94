"""Equal mass, equal loss? How much two policies differ in loss when they hardly differ in another quantity.

If a quantity set the loss, two policies of equal quantity would lose the same, whatever else they do. All pairs of
policies within a tolerance of each other are taken; a pair's *loss ratio* is the larger loss over the smaller, and the
answer is the median over pairs. It is 1 if the quantity decides alone, and it has no upper end.

Which policies are near each other is decided once, on all units; units are then drawn and every pair's ratio computed
anew. In each draw the loss that is larger *on all units* stays above the line, so that a pair that truly loses the same
gives ratios around 1 rather than above it. A policy whose loss is not clear of zero is in no pair: its ratio would have
no bounds.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from moecache.stats.paired import DIFFERENCE, PairedUnits, pair_documents
from moecache.stats.resample import NUM_DRAWS, draw_counts, percentile_interval, weighted_mean_draws
from moecache.stats.rows import STANDARD_ERRORS, tidy_row


def near_pairs(
    frame: pd.DataFrame, x: str = "substituted_mass", within: float = 0.10, unit: str = "document", **bootstrap: float
) -> pd.DataFrame:
    """List the pairs of policies that are near each other in x, with their loss ratio.

    Parameters
    ----------
    frame : DataFrame
        One setting, as for `pair_documents`.
    x : str
        Column that holds a mean per document.
    within : float
        Largest difference, as a fraction of the larger.
    unit, **bootstrap
        As for `loss_ratio_of_near_pairs`; they decide whose loss is clear of zero.

    Returns
    -------
    DataFrame
        ``dearer``, ``cheaper``, ``ratio``; the dearest pair first.
    """
    paired, counts, confidence = _paired(frame, x, unit, bootstrap)
    rows = [(paired.policies[a], paired.policies[b], ratio) for a, b, ratio in _pairs(paired, x, within, counts, confidence)]
    return pd.DataFrame(rows, columns=["dearer", "cheaper", "ratio"]).sort_values("ratio", ascending=False, ignore_index=True)


def loss_ratio_of_near_pairs(
    frame: pd.DataFrame,
    x: str = "substituted_mass",
    within: float = 0.10,
    unit: str = "document",
    is_planned: bool = False,
    **bootstrap: float,
) -> pd.DataFrame:
    """Return the median loss ratio of pairs of policies that are near each other in x.

    Parameters
    ----------
    frame, x, within
        As for `near_pairs`.
    unit : {"document", "cluster"}
    is_planned : bool
    **bootstrap
        ``confidence``, ``num_draws``, ``seed``.

    Returns
    -------
    DataFrame
        One row in the form of `rows`; n counts the pairs, the question names the number of units drawn.

    Raises
    ------
    ValueError
        If no two policies are near each other.
    """
    paired, counts, confidence = _paired(frame, x, unit, bootstrap)
    pairs = _pairs(paired, x, within, counts, confidence)
    if not pairs:
        raise ValueError(f"no two policies with a loss clear of zero lie within {within:.0%} of each other in {x}")
    losses = weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, counts)
    above, below = np.array([(a, b) for a, b, _ in pairs]).T
    drawn = np.median(losses[:, above] / np.maximum(losses[:, below], 1e-12), axis=1)
    low, high = percentile_interval(drawn, confidence)
    median = float(np.median([ratio for *_, ratio in pairs]))
    return tidy_row(
        f"median loss ratio of policies within {within:.0%} in {x} ({paired.num_units} {unit}s drawn)",
        median,
        (float(low), float(high)),
        len(pairs),
        "pairs of policies",
        effect=median,
        effect_kind="ratio",
        smallest_detectable=STANDARD_ERRORS * float(np.std(drawn)),
        is_planned=is_planned,
    )


def _paired(frame: pd.DataFrame, x: str, unit: str, bootstrap: dict[str, float]) -> tuple[PairedUnits, np.ndarray, float]:
    paired = pair_documents(frame, unit, (x, DIFFERENCE))
    counts = draw_counts(paired.num_units, int(bootstrap.get("num_draws", NUM_DRAWS)), int(bootstrap.get("seed", 0)))
    return paired, counts, float(bootstrap.get("confidence", 0.95))


def _pairs(paired: PairedUnits, x: str, within: float, counts: np.ndarray, confidence: float) -> list[tuple[int, int, float]]:
    """Return (dearer, cheaper, ratio of losses) of every near pair whose losses are clear of zero."""
    if not 0.0 < within < 1.0:
        raise ValueError(f"within is {within}: name a fraction between 0 and 1, such as 0.1")
    losses, amounts = paired.means(), paired.means(x)
    drawn = weighted_mean_draws(paired.sums[DIFFERENCE], paired.num_tokens, counts)
    is_clear = percentile_interval(drawn, confidence)[0] > 0.0
    found = []
    for a, b in combinations(np.flatnonzero(is_clear).tolist(), 2):
        if abs(amounts[a] - amounts[b]) <= within * max(amounts[a], amounts[b]):
            dearer, cheaper = (a, b) if losses[a] >= losses[b] else (b, a)
            found.append((dearer, cheaper, float(losses[dearer] / losses[cheaper])))
    return found
