"""A faster choice of the top-k experts for training; gate weights as the library computes them.

The library sorts with a general routine; choosing 10 of 512 needs one comparison for nearly every expert. Among equal
probabilities the lower id comes first.

Letters: T tokens, E experts, K top-k. This module knows tensors. It is used in training only.
"""

from __future__ import annotations

from functools import partial

import numba
import numpy as np
import torch
from torch import Tensor, nn


@numba.njit(cache=True)
def topk_of(probabilities, top_k):
    """Ids [T,K] int64 of the K largest of each row [T,E], largest first, ties by lower id."""
    num_tokens, num_experts = probabilities.shape
    ids = np.empty((num_tokens, top_k), np.int64)
    best = np.empty(top_k, np.float32)
    for token in range(num_tokens):
        best[:] = -1
        row = probabilities[token]
        for expert in range(num_experts):
            value = row[expert]
            if value > best[top_k - 1]:
                place = top_k - 1
                while place > 0 and value > best[place - 1]:
                    best[place] = best[place - 1]
                    ids[token, place] = ids[token, place - 1]
                    place -= 1
                best[place] = value
                ids[token, place] = expert
    return ids


def _forward(router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)  # type: ignore[arg-type]
    probabilities = logits.softmax(-1)
    ids = torch.from_numpy(topk_of(probabilities.detach().numpy(), router.top_k))
    weights = probabilities.gather(-1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids


def use_fast_routers(routers: list[nn.Module]) -> None:
    """Replace the forward of the given routers, in place."""
    for router in routers:
        router.forward = partial(_forward, router)
