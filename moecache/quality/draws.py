"""Fits of a quality model to draws of document clusters, and to all families of policies but one.

The first give the part of an interval that the sample of documents causes; the second tell how wrong the formula is about policies that
it has not seen. It knows sums over clusters; what a policy is, is unknown here.
"""

from __future__ import annotations

import numpy as np

from moecache.quality.fit import FORMS, MISFIT, Array, Fitted, Observed, fit_many, predict_nats
from moecache.quality.sums import PolicySums

CLEAR = 1.0  # standard errors above zero of a loss that can be fitted in logarithms; how uncertain it is weighs besides


def draw(num_clusters: int, num_draws: int, seed: int) -> Array:
    """How often each cluster was drawn, [B, U]."""
    shares = np.full(num_clusters, 1 / num_clusters)
    return np.random.default_rng(seed).multinomial(num_clusters, shares, num_draws).astype(np.float64)


def observed(sums: PolicySums, counts: Array, form: str, is_used: np.ndarray | None = None) -> Observed:
    """Draws of the sums as the fit wants them; `is_used` [B, P] leaves policies out."""
    losses = sums.mean_losses(counts)
    relative = sums.standard_errors() / sums.mean_losses(np.ones((1, sums.num_clusters)))[0]
    precisions = np.where(losses > 0, 1 / (MISFIT**2 + relative**2), 0.0)
    amounts, log_ages = sums.features(counts, FORMS[form].mass)
    logs = np.log(np.where(losses > 0, losses, 1.0))
    return Observed(logs, precisions if is_used is None else precisions * is_used, amounts, log_ages)


def _families(sums: PolicySums) -> np.ndarray:
    """[F, P] bool, which policies belong to each family; every policy its own where there is only one family."""
    labels = np.array(sums.families if len(set(sums.families)) > 1 else sums.policies)
    return labels == np.unique(labels)[:, None]


def error_of_families_left_out(sums: PolicySums, form: str, num_layers: int) -> float:
    """Root mean square of log (loss / estimate) of families that the fit has not seen."""
    is_left = _families(sums)
    seen = observed(sums, np.ones((len(is_left), sums.num_clusters)), form, ~is_left)
    estimates = predict_nats(fit_many(seen, FORMS[form], num_layers), seen.amounts, seen.log_ages)
    misses = (seen.log_losses - np.log(estimates))[is_left]
    weights = np.broadcast_to(1 / (MISFIT**2 + (sums.standard_errors() / np.exp(seen.log_losses[0])) ** 2), is_left.shape)[is_left]
    return float(np.sqrt((weights * misses**2).sum() / weights.sum()))


def misfits(sums: PolicySums, counts: Array, form: str, num_layers: int, seed: int) -> np.ndarray:
    """[B] log (loss / estimate), each of a family that was left out and of clusters that were not drawn."""
    families = _families(sums)
    is_left = families[np.arange(len(counts)) % len(families)]
    fitted = fit_many(observed(sums, counts, form, ~is_left), FORMS[form], num_layers)
    rest = (counts == 0).astype(np.float64)
    has_rest = rest.any(axis=1)
    amounts, log_ages = sums.features(rest[has_rest], FORMS[form].mass)
    estimates = predict_nats(Fitted(*(part[has_rest] for part in fitted)), amounts, log_ages)
    losses = sums.mean_losses(rest[has_rest])
    errors = sums.standard_errors() * np.sqrt(sums.num_clusters / rest[has_rest].sum(axis=1))[:, None]
    is_told = is_left[has_rest] & (losses > CLEAR * errors) & (estimates > 0)
    if not is_told.any():
        raise ValueError("no policy has a loss clear of zero on the documents that a draw leaves out; score more documents")
    pool = np.log(losses[is_told] / estimates[is_told])
    return np.random.default_rng(seed + 1).choice(pool, len(counts))
