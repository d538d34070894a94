"""What is left of rank and of weight once the relative layer error is known.

In a pass of the crossed injection a document's loss is a sum over its sites. Suppose a site costs g(e/h), a polynomial
without constant for each layer, plus a constant for its rank. The sums of powers of e/h over a document's sites are
stored, so both are found by least squares over all documents and cells, and the constants say what rank costs at equal
e/h. Everything is a sum over clusters, so a draw of clusters is a weighted sum of small matrices and every draw is
fitted anew.

Single calls are fitted one by one, on other clusters than they are judged on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moecache import stats
from moecache.experiments.rank_or_weight import POWERS
from moecache.stats.resample import NUM_DRAWS

BOUND_FRACTION = 0.1  # of the raw gap
NUM_FOLDS = 5
_RIDGE = 1e-9  # of columns of unit length: keeps a draw of few clusters solvable


def left_over(frame: pd.DataFrame, factor: str, high: float, low: float, num_draws: int = NUM_DRAWS) -> dict[str, Any]:
    """The difference between two levels of a factor, raw and at equal relative layer error.

    Parameters
    ----------
    frame : DataFrame
        Of the crossed injection, one model.
    factor : {"rank", "multiple"}
    high, low : float
        The levels compared, high minus low.
    num_draws : int
        Bootstrap draws of clusters.

    Returns
    -------
    dict : `raw`, `left` (nats a site) with `_low` and `_high` of 95 %, `left_low_90`, `left_high_90`, `bound` (a tenth of the raw gap),
        `decision`, `num_units`.
    """
    levels = sorted(frame[factor].unique())
    sites = frame["num_sites"].to_numpy(np.float64)
    loss = (frame["mean_difference_nats"] * frame["num_tokens"]).to_numpy(np.float64)
    constants = np.stack([sites * (frame[factor] == level).to_numpy() for level in levels], axis=1)
    powers = frame[[name for name in frame.columns if name.startswith(tuple(f"error{power}_" for power in POWERS))]].to_numpy(np.float64)
    codes, names = pd.factorize(frame["cluster"])
    counts = stats.draw_counts(len(names), num_draws)
    chosen = np.array([(level == high) * 1.0 - (level == low) * 1.0 for level in levels])
    raw, raw_draws = _contrast(constants, loss, codes, counts, chosen)
    left, left_draws = _contrast(np.hstack([constants, powers]), loss, codes, counts, np.concatenate([chosen, np.zeros(powers.shape[1])]))
    row: dict[str, Any] = {"raw": raw, "left": left, "bound": BOUND_FRACTION * abs(raw), "num_units": len(names)}
    for name, drawn in (("raw", raw_draws), ("left", left_draws)):
        row[f"{name}_low"], row[f"{name}_high"] = map(float, stats.percentile_interval(drawn))
    row["left_low_90"], row["left_high_90"] = map(float, stats.percentile_interval(left_draws, 0.9))
    return row | {"decision": _decide(row)}


def _contrast(columns: np.ndarray, loss: np.ndarray, codes: np.ndarray, counts: np.ndarray, chosen: np.ndarray) -> tuple[float, np.ndarray]:
    """A contrast of least-squares coefficients, over all clusters and in every draw of them."""
    size = np.sqrt((columns**2).sum(axis=0))
    scaled = columns / np.where(size > 0, size, 1.0)
    num_units, width = counts.shape[1], columns.shape[1]
    products = np.zeros((num_units, width, width + 1))
    np.add.at(products, codes, scaled[:, :, None] * np.concatenate([scaled, loss[:, None]], axis=1)[:, None, :])
    everything = np.concatenate([np.ones((1, num_units)), counts])
    summed = np.tensordot(everything, products, axes=1)
    found = np.linalg.solve(summed[:, :, :width] + _RIDGE * np.eye(width), summed[:, :, width:])[:, :, 0]
    contrast = (found / np.where(size > 0, size, 1.0)) @ chosen
    return float(contrast[0]), contrast[1:]


def _decide(row: dict[str, Any]) -> str:
    """The decision rule that was fixed beforehand."""
    if -row["bound"] < row["left_low_90"] and row["left_high_90"] < row["bound"]:
        return "nothing left, within a tenth of the raw gap"
    is_beyond = (row["left_low"] > 0.0 or row["left_high"] < 0.0) and abs(row["left"]) > row["bound"]
    return "something is left" if is_beyond else "inconclusive"


def predictors(sites: pd.DataFrame) -> dict[str, np.ndarray]:
    """Columns by which the loss of a single call is predicted, by the name of the predictor."""
    layers = np.stack([(sites["layer"] == layer).to_numpy(np.float64) for layer in sorted(sites["layer"].unique())], axis=1)
    ranks = np.stack([(sites["rank"] == rank).to_numpy(np.float64) for rank in sorted(sites["rank"].unique())[1:]], axis=1)
    weight = _powers(sites["gate_weight"], (1, 2, 3))
    error = _powers(sites["relative_error"], POWERS)
    return {
        "rank": ranks,
        "weight": weight,
        "rank and weight": np.hstack([ranks, weight]),
        "weight by layer": _by_layer(weight, layers),
        "e/h": error,
        "e/h by layer": _by_layer(error, layers),
        "e/h, rank and weight": np.hstack([error, ranks, weight]),
    }


def _powers(values: pd.Series, powers: tuple[int, ...]) -> np.ndarray:
    scaled = values.to_numpy(np.float64) / max(float(values.max()), 1e-12)
    return np.stack([scaled**power for power in powers], axis=1)


def _by_layer(columns: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """The columns of each layer apart, with a constant for each."""
    return np.hstack([layers, (columns[:, :, None] * layers[:, None, :]).reshape(len(columns), -1)])


def explained(sites: pd.DataFrame, num_draws: int = NUM_DRAWS) -> pd.DataFrame:
    """How much of the variance of single losses each predictor explains on clusters that its fit has not seen.

    Returns
    -------
    DataFrame : `predictor`, `r2`, `low`, `high` (clusters drawn, not refitted), `num_sites`.
    """
    codes, names = pd.factorize(sites["cluster"])
    folds = codes % min(NUM_FOLDS, len(names))
    loss = sites["loss_nats"].to_numpy(np.float64)
    counts = stats.draw_counts(len(names), num_draws)
    baseline = _by_cluster((loss - _predicted(np.zeros((len(loss), 0)), loss, folds)) ** 2, codes)
    rows = []
    for name, columns in predictors(sites).items():
        errors = _by_cluster((loss - _predicted(columns, loss, folds)) ** 2, codes)
        low, high = map(float, stats.percentile_interval(1.0 - (counts @ errors) / (counts @ baseline)))
        rows.append((name, 1.0 - errors.sum() / baseline.sum(), low, high, len(loss)))
    return pd.DataFrame(rows, columns=["predictor", "r2", "low", "high", "num_sites"])


def _predicted(columns: np.ndarray, loss: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Predictions of each fold by a fit on the others."""
    design = np.hstack([np.ones((len(loss), 1)), columns])
    predicted = np.empty_like(loss)
    for fold in np.unique(folds):
        is_judged = folds == fold
        coefficients = np.linalg.lstsq(design[~is_judged], loss[~is_judged], rcond=None)[0]
        predicted[is_judged] = design[is_judged] @ coefficients
    return predicted


def _by_cluster(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return np.bincount(codes, weights=values)
