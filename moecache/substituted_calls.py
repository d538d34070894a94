"""What was substituted, in the terms that loss follows: squared gate weights and ages, by layer and rank group.

Substituted gate mass adds the gate weights of the calls that their own expert did not compute. Two calls of equal weight
need not cost the same, so three further descriptions are kept for each layer and each group of ranks: the sum of
*squared* gate weights (a heavy call counts more than several light ones of the same mass), how old the calls were, and
the two together. The *age* of a call is the number of tokens since the router last called that expert in that layer,
resident or not; an expert that was not called before has the largest age that is told apart.

All of it can be read off a router's choices and a decision log: no model is needed. This module knows neither losses nor
policies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.kernel import Outcome

RANK_GROUPS = ("r0", "r1", "r2_3", "r4_up")
LARGEST_AGE = 4096  # tokens
SUBSTITUTED = (int(Outcome.SUBSTITUTED), int(Outcome.DROPPED))


def rank_groups(top_k: int) -> NDArray[np.int64]:
    """Group of each rank [K], as a place in `RANK_GROUPS`: {0}, {1}, {2, 3}, {4 and up}."""
    return np.searchsorted([1, 2, 4], np.arange(top_k), side="right")


def call_ages(topk_ids: NDArray[np.int16], largest_age: int = LARGEST_AGE) -> NDArray[np.int64]:
    """Tokens since each call's expert was last called in its layer.

    Parameters
    ----------
    topk_ids : ndarray [T, L, K] int
        The router's calls; tokens in the order in which they were read, across documents.
    largest_age : int
        Ages are cut here, and a first call has this age.

    Returns
    -------
    ndarray [T, L, K] int64
        1 (called by the token before) to `largest_age`.
    """
    num_tokens, num_layers, top_k = topk_ids.shape
    ages = np.full((num_layers, num_tokens * top_k), largest_age, np.int64)
    token = np.repeat(np.arange(num_tokens), top_k)
    for layer in range(num_layers):
        experts = topk_ids[:, layer].ravel()
        order = np.argsort(experts, kind="stable")  # calls of one expert side by side, in the order of their tokens
        is_same = experts[order[1:]] == experts[order[:-1]]
        waited = token[order[1:]] - token[order[:-1]]
        ages[layer, order[1:][is_same]] = np.minimum(waited[is_same], largest_age)
    return ages.reshape(num_layers, num_tokens, top_k).transpose(1, 0, 2)


def describe_substituted(
    topk_ids: NDArray[np.int16],
    gate_weights: NDArray[np.float32],
    outcome: NDArray[np.uint8],
    document: NDArray[np.int64],
    largest_age: int = LARGEST_AGE,
) -> dict[str, NDArray[np.float64]]:
    """Describe the substituted and dropped calls of each document, by layer and rank group.

    Parameters
    ----------
    topk_ids, gate_weights, outcome : ndarray [T, L, K]
        The router's calls in rank order, their gate weights, and what became of them.
    document : ndarray [T] int
        Which document each token belongs to: 0 to D - 1.
    largest_age : int
        As for `call_ages`.

    Returns
    -------
    dict of ndarray [D, L, G] float64
        ``squared``: sum of squared gate weights, mean a token. ``age``: mean age of the calls, in tokens.
        ``log_age``: mean of log2(age), each call counted by its squared gate weight. Both ages are 0 where nothing was
        substituted.
    """
    is_substituted = np.isin(outcome, SUBSTITUTED)
    tokens, layers, ranks = np.nonzero(is_substituted)
    num_documents, num_layers, groups = int(document[-1]) + 1, outcome.shape[1], rank_groups(outcome.shape[2])
    cells = (document[tokens] * num_layers + layers) * len(RANK_GROUPS) + groups[ranks]
    ages = call_ages(topk_ids, largest_age)[tokens, layers, ranks]
    squared = gate_weights[tokens, layers, ranks].astype(np.float64) ** 2

    def total(weights: NDArray[Any] | None = None) -> NDArray[np.float64]:
        size = num_documents * num_layers * len(RANK_GROUPS)
        return np.bincount(cells, weights, minlength=size).reshape(num_documents, num_layers, -1).astype(np.float64)

    calls, squares = total(), total(squared)
    return {
        "squared": squares / np.bincount(document)[:, None, None],
        "age": np.divide(total(ages), calls, out=np.zeros_like(calls), where=calls > 0),
        "log_age": np.divide(total(squared * np.log2(ages)), squares, out=np.zeros_like(calls), where=squares > 0),
    }
