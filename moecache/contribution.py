"""What each called expert contributes to its layer, relative to the residual stream: w x ||f|| / h, known before anyone decides.

For a call of rank r with routing weight w, f is the called expert's own output and h the length of the residual stream after the layer,
with the layer's exact output. The relative layer error of losing the call is at most about this, so a threshold on it is a bound for every
rule that guesses how much a call matters from its rank or weight. No machine can have it in time: it needs the very experts that are
missing. It is an oracle, for comparison only.

It is computed at the layer's actual input, with all that a policy did to earlier layers and tokens: the layer runs once more, exactly and
unheard, before it runs for the policy. That cannot be done token by token, where running a layer fills its decoding cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moecache import hf_internals
from moecache.families import Routing
from moecache.hf_internals import MoeLayer


class ContributionOracle:
    """Values for `wait_values`; made by `contribution_oracle`, one for each emulation."""

    def __init__(self) -> None:
        self._values: dict[int, NDArray[np.float32]] = {}

    def __call__(self, layer: int, routing: Routing, first_token: int) -> NDArray[np.float32]:
        """The calls' values [n, K] in rank order, for the tokens that the layer is computing."""
        values = self._values.pop(layer)
        return np.take_along_axis(values, routing.column, axis=1)

    @contextmanager
    def listening(self, layers: Sequence[MoeLayer]) -> Iterator[None]:
        """Run every MoE layer once more, unheard, before it runs for the policy."""
        handles = []
        try:
            for index, layer in enumerate(layers):
                handles.append(layer.decoder.register_forward_pre_hook(self._look_ahead(index, layer), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look_ahead(self, index: int, layer: MoeLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            seen: list[tuple[torch.Tensor, ...]] = []
            handle = layer.experts.register_forward_pre_hook(lambda experts, inputs: seen.append(inputs))
            try:
                with hf_internals.unheard():
                    output = module.forward(*args, **keywords)
            finally:
                handle.remove()
            stream = output[0] if isinstance(output, tuple) else output
            hidden, ids, weights = seen[0]
            self._values[index] = _contributions(layer.experts, hidden, ids, weights, stream.reshape(-1, stream.shape[-1]))

        return hook


def _contributions(
    experts: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stream: torch.Tensor
) -> NDArray[np.float32]:
    """w x ||f|| / h [T, K] float32 in the router's own order of calls, call by call to keep memory small; 0 in an all-zero token."""
    length = stream.to(torch.float32).norm(dim=-1)
    columns = []
    for call in range(ids.shape[1]):
        weight = weights[:, call : call + 1]
        alone = hf_internals.compute_experts(experts, hidden, ids[:, call : call + 1], torch.ones_like(weight))
        size = weight[:, 0].to(torch.float32).abs() * alone.to(torch.float32).norm(dim=-1)
        columns.append(torch.where(length > 0, size / length, torch.zeros_like(size)))
    return torch.stack(columns, dim=1).cpu().numpy()


def contribution_oracle() -> ContributionOracle:
    """`wait_values` that are each call's true contribution w x ||f|| / h; the policy's `gate_threshold` is then compared with it.

        mc.emulate(model, texts, mc.threshold(0.02), num_slots=128, wait_values=contribution_oracle())

    Returns
    -------
    ContributionOracle : for `emulate`; it computes each expert of a step by itself, and may be used for one run after another.
    """
    return ContributionOracle()
