"""A second, plain way to compute what an emulated model computes, sharing no code with the package.

It is handed the experts that the log says computed each call, works out their weights from the router's logits, and
adds one expert after the other in float64. Slow, and short enough to be checked by eye.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def call_weights(scores: Any, called: Any, computed: Any, rule: str, is_normalised: bool, scaling: float = 1.0) -> list[float]:
    """Weights of one token's calls; `computed` holds -1 where nobody computes the call."""
    whole = sum(float(scores[c]) for c in called) if is_normalised else 1.0
    before = [scaling * float(scores[e]) / whole for e in called]
    own = [scaling * float(scores[e]) if e >= 0 else 0.0 for e in computed]
    if list(called) == list(computed):
        return before
    if rule == "inherit":
        return [b if e >= 0 else 0.0 for b, e in zip(before, computed, strict=True)]
    if rule == "own_raw":
        return [o / whole for o in own]
    total = scaling if is_normalised else sum(before) if rule == "rescale" else sum(own)
    return [o * total / sum(own) if sum(own) else 0.0 for o in own]


def one_expert(experts: Any, expert: int, row: torch.Tensor) -> torch.Tensor:
    """What one expert gives for one token's hidden state."""
    up_matrix, down_matrix = experts.gate_up_proj[expert].double(), experts.down_proj[expert].double()
    if not hasattr(experts, "gate_up_proj_bias"):
        gate, up = (up_matrix @ row).chunk(2)
        return down_matrix @ (F.silu(gate) * up)
    both = row @ up_matrix + experts.gate_up_proj_bias[expert].double()  # gpt_oss: transposed, interleaved, clamped, biased
    gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down_matrix + experts.down_proj_bias[expert].double()


@torch.no_grad()
def moe_output(experts: Any, hidden: torch.Tensor, computed: Any, weights: Any) -> torch.Tensor:
    """Sum [T, H] float64 over the calls of each token."""
    output = torch.zeros_like(hidden, dtype=torch.float64)
    for token, row in enumerate(hidden.double()):
        for expert, weight in zip(computed[token], weights[token], strict=True):
            if expert >= 0 and weight != 0:
                output[token] += weight * one_expert(experts, int(expert), row)
    return output


def selection(router: Any, logits: torch.Tensor, family: str) -> tuple[torch.Tensor, torch.Tensor, bool, float]:
    """Scores that weights are made of, scores that select, whether weights are divided by their sum, and their multiple."""
    if not hasattr(router, "num_group"):
        is_normalised = family in ("mixtral", "granitemoe", "gpt_oss") or router.norm_topk_prob
        scores = torch.softmax(logits, -1)
        return scores, scores, is_normalised, 1.0
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    scores = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits, -1)
    choice = scores + router.e_score_correction_bias if is_sigmoid else scores.clone()
    size = choice.shape[1] // router.num_group
    for token in range(len(choice)):
        groups = choice[token].reshape(-1, size).sort(-1, descending=True).values[:, : 2 if is_sigmoid else 1].sum(-1)
        for group in groups.argsort()[: router.num_group - router.topk_group].tolist():
            choice[token, group * size : (group + 1) * size] = -torch.inf
    return scores, choice, is_sigmoid and router.norm_topk_prob, router.routed_scaling_factor


@torch.no_grad()
def logged_output(layer: Any, hidden: torch.Tensor, computed: np.ndarray, rule: str, family: str) -> torch.Tensor:
    """What a layer's experts give [T, H] for inputs [T, H], when `computed` [T, K] (rank order) serve the router's calls."""
    router = layer.router
    logits = hidden.double() @ router.weight.double().T + (router.bias.double() if family == "gpt_oss" else 0.0)
    scores, choice, is_normalised, scaling = selection(router, logits, family)
    chosen = choice.topk(computed.shape[1]).indices
    by_weight = scores.gather(1, chosen).argsort(-1, descending=True)
    called = chosen.gather(1, by_weight).tolist()
    rows = zip(scores.tolist(), called, computed.tolist(), strict=True)
    return moe_output(layer.experts, hidden, computed, [call_weights(*row, rule, is_normalised, scaling) for row in rows])
