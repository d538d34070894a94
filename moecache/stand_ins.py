"""Who could stand in for a call, and how long ago it was called: arrays about one layer, without a policy.

The kernel picks a stand-in while it decides. A planned intervention decides nothing; it names calls, and then asks
the same question of many tokens at once: who was resident when the token arrived, and who of these has the highest
selection score? The rules are the kernel's: never an expert of the token's own top-k, each stand-in once a token, the
i-th named call in rank order takes the i-th best, and of equals the lower expert id. `tests/test_intervene.py` holds
a plain twin of each function.

Models and policies are not known here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moecache.kernel import Outcome
from moecache.trace import DecisionLog

NEVER = -(2**40)  # the token of a last call that never was


def residents_before(log: DecisionLog, layer: int, resident: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which experts were resident when each token arrived.

    Parameters
    ----------
    log : DecisionLog
        Of T tokens; every miss was waited for, and nothing came in the background.
    layer : int
        Which of the log's layers.
    resident : ndarray [E] bool
        Who was resident before the first token.

    Returns
    -------
    ndarray [T, E] bool
    """
    is_fetch = np.isin(log.outcome[:, layer], (Outcome.FETCHED, Outcome.FORCED))
    token, rank = np.nonzero(is_fetch)
    fetched, evicted = log.computed_ids[token, layer, rank], log.evicted_ids[token, layer, rank]
    change = np.zeros((len(is_fetch) + 1, resident.size), np.int8)
    change[0] = resident
    change[token + 1, fetched] += 1
    leaves = evicted >= 0
    change[token[leaves] + 1, evicted[leaves]] -= 1
    return np.cumsum(change[:-1], axis=0, dtype=np.int8).astype(bool)


def best_stand_ins(scores: NDArray[np.floating], may_serve: NDArray[np.bool_], is_named: NDArray[np.bool_]) -> NDArray[np.int16]:
    """The best expert for each named call of n tokens, each expert at most once a token.

    Parameters
    ----------
    scores : ndarray [n, E] float
        Selection scores; the highest is taken first, of equals the lower id.
    may_serve : ndarray [n, E] bool
        Who may stand in.
    is_named : ndarray [n, K] bool
        The calls to serve, in rank order.

    Returns
    -------
    ndarray [n, K] int16
        -1 where no call is named, or nobody is left to serve it.
    """
    found = np.full(is_named.shape, -1, np.int16)
    value = np.where(may_serve, scores.astype(np.float64), -np.inf)
    place = np.cumsum(is_named, axis=1) - 1
    for i in range(int(is_named.sum(axis=1).max(initial=0))):
        rows, ranks = np.nonzero(is_named & (place == i))
        best = np.argmax(value[rows], axis=1)
        exists = value[rows, best] > -np.inf
        rows, ranks, best = rows[exists], ranks[exists], best[exists]
        found[rows, ranks] = best
        value[rows, best] = -np.inf
    return found


def outside_topk(topk_ids: NDArray[np.integer], num_experts: int) -> NDArray[np.bool_]:
    """Marks [n, E] of the experts that a token does not call, from its calls [n, K]."""
    outside = np.ones((len(topk_ids), num_experts), bool)
    np.put_along_axis(outside, topk_ids.astype(np.int64), False, axis=1)
    return outside


def ages(topk_ids: NDArray[np.integer], first_token: int, last_call: NDArray[np.int64]) -> NDArray[np.float32]:
    """Tokens since each called expert was last called in its layer, infinite at its first call.

    Parameters
    ----------
    topk_ids : ndarray [n, K] int
        The calls of consecutive tokens of one layer.
    first_token : int
        Number of the first of these tokens.
    last_call : ndarray [E] int64
        Token of each expert's last call before these, `NEVER` where there was none; brought up to date.

    Returns
    -------
    ndarray [n, K] float32
    """
    num_tokens, top_k = topk_ids.shape
    expert = topk_ids.reshape(-1).astype(np.int64)
    token = first_token + np.repeat(np.arange(num_tokens), top_k)
    order = np.argsort(expert, kind="stable")  # by expert, and within an expert by token
    by_expert, when = expert[order], token[order]
    before = np.concatenate([[NEVER], when[:-1]])
    is_first = np.concatenate([[True], by_expert[1:] != by_expert[:-1]])
    before = np.where(is_first, last_call[by_expert], before)
    age = np.empty(expert.size, np.float32)
    age[order] = np.where(before == NEVER, np.inf, when - before)
    np.maximum.at(last_call, expert, token)
    return age.reshape(num_tokens, top_k)
