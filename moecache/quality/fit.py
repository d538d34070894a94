"""The arithmetic of a quality model: what many policies lost, explained by what they substituted, fitted in logarithms.

A policy's loss is taken to be

    loss = (sum over cells c of  a_c * x_c * age_c ^ g) ^ s

where a *cell* is a layer and a group of ranks, x_c what was substituted there (squared gate weights, mean a token) and age_c the mean age
of those calls, a geometric mean weighted like x_c. The weights a_c are never negative: they are exponentials of a common level plus the
effects that a *form* allows (of the rank group, the layer, the cell). Residuals are differences of logarithms, because losses span
orders of magnitude.

There are about as many cells as policies, so effects are drawn towards zero: each has a normal prior (`PRIOR_DEVIATIONS`). With no
information a cell weighs what the others do. The fit is the mode of that posterior, found by the method of Levenberg and Marquardt
(D. Marquardt, SIAM J. Appl. Math. 11:431, 1963), for many bootstrap draws at once.

This module knows arrays only: neither policies nor where the numbers come from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moecache.substituted_calls import LARGEST_AGE, RANK_GROUPS

Array = NDArray[np.float64]
MISFIT = 0.15  # standard deviation of log loss that no form explains; beside it stands the sampling of documents
PRIOR_DEVIATIONS = {"level": 100.0, "rank": 1.5, "layer": 0.7, "cell": 0.3, "age": 1.0, "power": 0.5}
SMALLEST_LOG = -60.0
NUM_STEPS, SMALLEST_GAIN = 80, 1e-10


class Form(NamedTuple):
    """What the weights of cells may depend on."""

    ranks: bool = False
    layers: bool = False
    age: bool = False
    mass: bool = False  # one cell only: the substituted gate mass


FORMS = {
    "mass": Form(mass=True),
    "squares": Form(),
    "ranks": Form(ranks=True),
    "ranks and age": Form(ranks=True, age=True),
    "layers and ranks": Form(ranks=True, layers=True),
    "layers, ranks and age": Form(ranks=True, layers=True, age=True),
}


class Fitted(NamedTuple):
    """Parameters of B fits: weights a [B, C], power of the age g [B], power of the sum s [B]."""

    weights: Array
    age_powers: Array
    powers: Array


class Observed(NamedTuple):
    """What is fitted, B times P policies and C cells: log loss [B, P], precision [B, P] (0 = left out), amounts and log ages [B, P, C]."""

    log_losses: Array
    precisions: Array
    amounts: Array
    log_ages: Array


def basis(form: Form, num_layers: int) -> tuple[Array, Array]:
    """Which effects make the log weight of each cell [C, N], and the prior deviation of each [N]; cells by layer, then rank group."""
    if form.mass:
        return np.ones((1, 1)), np.array([PRIOR_DEVIATIONS["level"]])
    num_groups = len(RANK_GROUPS)
    cells = num_layers * num_groups
    parts = [("level", np.ones((cells, 1)))]
    if form.ranks:
        parts.append(("rank", np.tile(np.eye(num_groups), (num_layers, 1))))
    if form.layers:
        parts += [("layer", np.repeat(np.eye(num_layers), num_groups, axis=0)), ("cell", np.eye(cells))]
    deviations = [np.full(columns.shape[1], PRIOR_DEVIATIONS[name]) for name, columns in parts]
    return np.concatenate([columns for _, columns in parts], axis=1), np.concatenate(deviations)


def predict_nats(fitted: Fitted, amounts: Array, log_ages: Array) -> Array:
    """Loss [..., P] of amounts and log ages [..., P, C] by fits whose leading axes broadcast with theirs."""
    aged = amounts * np.exp(fitted.age_powers[..., None, None] * scaled(log_ages))
    return ((aged * fitted.weights[..., None, :]).sum(axis=-1)) ** fitted.powers[..., None]


def scaled(log_ages: Array) -> Array:
    """log2 of ages as a share of the largest, so that the age's power is a number near one."""
    return log_ages / np.log2(LARGEST_AGE)


def fit_many(observed: Observed, form: Form, num_layers: int) -> Fitted:
    """Fit B sets of observations at once; each row of the result is what it would be alone.

    Parameters
    ----------
    observed : Observed
        In logarithms of nats; log2 of tokens.
    form : Form
    num_layers : int
        L; C is L times the number of rank groups, or 1 for mass.

    Returns
    -------
    Fitted
    """
    effects, deviations = basis(form, num_layers)
    prior = 1.0 / np.concatenate([deviations, [PRIOR_DEVIATIONS["age"] if form.age else 1e-6, PRIOR_DEVIATIONS["power"]]]) ** 2
    parameters = _start(observed, effects.shape[1])
    damping = np.full(len(parameters), 1e-2)
    cost = _cost(observed, effects, prior, parameters)
    for _ in range(NUM_STEPS):
        moved = parameters + _steps(observed, effects, prior, parameters, damping)
        moved[:, -2:] = np.clip(moved[:, -2:], -4.0, 4.0)  # far beyond any use; keeps a wild trial step finite
        new_cost = _cost(observed, effects, prior, moved)
        is_better = new_cost < cost
        gain = np.where(is_better, (cost - new_cost) / np.maximum(cost, 1e-300), 0.0)
        parameters[is_better], cost = moved[is_better], np.minimum(cost, new_cost)
        damping = np.clip(np.where(is_better, damping / 4, damping * 5), 1e-9, 1e9)
        if is_better.all() and gain.max() < SMALLEST_GAIN:
            break
    return Fitted(np.exp(parameters[:, :-2] @ effects.T), parameters[:, -2], np.exp(parameters[:, -1]))


def _start(observed: Observed, num_effects: int) -> Array:
    """Power 1, no effects, and the level at which the losses are right on average."""
    parameters = np.zeros((len(observed.log_losses), num_effects + 2))
    total = np.maximum(np.log(np.maximum(observed.amounts.sum(axis=2), 1e-300)), SMALLEST_LOG)
    weight = observed.precisions
    parameters[:, 0] = (weight * (observed.log_losses - total)).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-300)
    return parameters


def _predict_log(observed: Observed, effects: Array, parameters: Array) -> tuple[Array, Array, Array]:
    """Log of the sum [B, P], each cell's share of it [B, P, C], and the power [B]."""
    logs = np.maximum(np.log(np.maximum(observed.amounts, 1e-300)), SMALLEST_LOG)
    logs = logs + (parameters[:, :-2] @ effects.T)[:, None] + parameters[:, -2, None, None] * scaled(observed.log_ages)
    largest = logs.max(axis=2, keepdims=True)
    terms = np.exp(logs - largest)
    total = terms.sum(axis=2, keepdims=True)
    return (largest + np.log(total))[..., 0], terms / total, np.exp(parameters[:, -1])


def _cost(observed: Observed, effects: Array, prior: Array, parameters: Array) -> Array:
    """Weighted squares and prior, [B]."""
    log_sum, _, power = _predict_log(observed, effects, parameters)
    residual = observed.log_losses - power[:, None] * log_sum
    return (observed.precisions * residual**2).sum(axis=1) + (prior * parameters**2).sum(axis=1)


def _steps(observed: Observed, effects: Array, prior: Array, parameters: Array, damping: Array) -> Array:
    """One damped Gauss-Newton step of every fit, [B, N + 2]."""
    log_sum, shares, power = _predict_log(observed, effects, parameters)
    slope = np.concatenate([shares @ effects, (shares * scaled(observed.log_ages)).sum(axis=2, keepdims=True), log_sum[..., None]], axis=2)
    slope = slope * power[:, None, None]
    weighted = observed.precisions[..., None] * slope
    residual = observed.log_losses - power[:, None] * log_sum
    gradient = (weighted * residual[..., None]).sum(axis=1) - prior * parameters
    curvature = slope.transpose(0, 2, 1) @ weighted + np.diag(prior)
    diagonal = np.einsum("bnn->bn", curvature)
    diagonal += damping[:, None] * diagonal
    return np.linalg.solve(curvature, gradient[..., None])[..., 0]
