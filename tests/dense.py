"""A second, plain way to compute what an emulated model computes, sharing no code with the package.

It is handed the experts that the log says computed each call, works out their weights from the router's logits, and
adds one expert after the other in float64. Slow, and short enough to be checked by eye.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def call_weights(probabilities: Any, called: Any, computed: Any, rule: str, is_normalised: bool) -> list[float]:
    """Weights of one token's calls; `computed` holds -1 where nobody computes the call."""
    before = [float(probabilities[e]) / (sum(float(probabilities[c]) for c in called) if is_normalised else 1.0) for e in called]
    own = [float(probabilities[e]) if e >= 0 else 0.0 for e in computed]
    if list(called) == list(computed):
        return before
    if rule == "inherit":
        return [b if e >= 0 else 0.0 for b, e in zip(before, computed, strict=True)]
    if rule == "own_raw":
        return [o / (sum(float(probabilities[c]) for c in called) if is_normalised else 1.0) for o in own]
    total = 1.0 if is_normalised else sum(before) if rule == "rescale" else sum(own)
    return [o * total / sum(own) if sum(own) else 0.0 for o in own]


@torch.no_grad()
def moe_output(experts: Any, hidden: torch.Tensor, computed: Any, weights: Any) -> torch.Tensor:
    """Sum [T, H] float64 over the calls of each token, for gate_up [E, 2F, H] and down [E, H, F] matrices."""
    output = torch.zeros_like(hidden, dtype=torch.float64)
    for token, row in enumerate(hidden.double()):
        for expert, weight in zip(computed[token], weights[token], strict=True):
            if expert >= 0:
                gate, up = (experts.gate_up_proj[expert].double() @ row).chunk(2)
                output[token] += weight * (experts.down_proj[expert].double() @ (F.silu(gate) * up))
    return output


@torch.no_grad()
def logged_output(layer: Any, hidden: torch.Tensor, computed: np.ndarray, rule: str, is_normalised: bool) -> torch.Tensor:
    """What a layer's experts give [T, H] for inputs [T, H], when `computed` [T, K] (rank order) serve the router's calls."""
    probabilities = torch.softmax(hidden.double() @ layer.router.weight.double().T, dim=-1)
    called = probabilities.topk(computed.shape[1]).indices.tolist()
    rows = zip(probabilities.tolist(), called, computed.tolist(), strict=True)
    return moe_output(layer.experts, hidden, computed, [call_weights(*row, rule, is_normalised) for row in rows])
