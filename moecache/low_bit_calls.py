"""Calls computed from low-bit copies: the router's choice stands, and another set of weights answers.

A call whose outcome is low precision keeps its expert and its routing weight. Its weight in the router's output is set to zero, so the
layer's experts compute the token's other calls; the copies compute these calls, and the two sums are added in float32. Which calls they
are is the decision's business; how a copy was rounded is `low_bit.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moecache import hf_internals
from moecache.families import Routing
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.kernel import Outcome
from moecache.low_bit import LowBitCopies


@dataclass
class _Calls:
    """Low-precision calls of one layer: where they stand [n] in (token, call), who computes them and with which weight."""

    token: torch.Tensor
    call: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    top_k: int


class LowBitCalls:
    """Adds what the copies give for the calls that were announced, whenever a layer's experts have run."""

    def __init__(self, layers: Sequence[MoeLayer], copies: LowBitCopies) -> None:
        if len(copies.layers) != len(layers):
            raise ValueError(f"the low-bit copies are of {len(copies.layers)} MoE layers, but this model has {len(layers)}; make its own")
        self.layers, self.copies = layers, copies
        self._announced: dict[int, _Calls] = {}

    def announce(self, layer: int, output: RouterOutput, routing: Routing, outcome: NDArray[np.uint8]) -> RouterOutput | None:
        """What the layer's own experts are to compute when calls [T, K] (rank order) have these outcomes; None = all as it is."""
        is_low = outcome == Outcome.LOW_PRECISION
        if not is_low.any():
            return None
        token, rank = np.nonzero(is_low)
        device = output.ids.device
        at = torch.from_numpy(token).to(device)
        call = torch.from_numpy(routing.column[token, rank]).to(device)
        self._announced[layer] = _Calls(at, call, output.ids[at, call], output.weights[at, call], output.ids.shape[1])
        weights = output.weights.clone()
        weights[at, call] = 0
        return RouterOutput(output.logits, weights, output.ids, output.correction)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute announced calls inside the block; the experts are as they were after it."""
        try:
            for index, layer in enumerate(self.layers):
                hf_internals.replace_forward(layer.experts, self._forward(index, layer.experts.forward))
            yield
        finally:
            for layer in self.layers:
                hf_internals.restore_forward(layer.experts)

    def _forward(self, layer: int, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            calls = self._announced.pop(layer, None)
            output = own(hidden, ids, weights)
            return output if calls is None else output + self._low_bit_sum(layer, hidden, calls).to(output.dtype)

        return forward

    def _low_bit_sum(self, layer: int, hidden: torch.Tensor, calls: _Calls) -> torch.Tensor:
        """Sum [T, H] over the announced calls, each in its place, so that it does not depend on the order of adding."""
        copies = self.copies.layers[layer]
        terms = hf_internals.compute_experts(copies, hidden[calls.token], calls.ids[:, None], calls.weights[:, None])
        total = torch.zeros((len(hidden), calls.top_k, terms.shape[1]), dtype=torch.float32, device=terms.device)
        total[calls.token, calls.call] = terms.to(torch.float32)
        return total.sum(1)
