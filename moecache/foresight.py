"""What each step could be expected to call before its router has spoken: the two predictions that prefetching knows.

- `previous_token`: what the same layer's router called for the token before (nothing at a document's start);
- `stale_gate`: what the router of layer l says about the hidden states that the router of layer l - 1 was given. One layer of computing
  too old, but early enough to fetch what it names; the first MoE layer has nothing before it and expects nothing.

Both are had while the model runs, and look at the model as it is, with all that a policy did to its earlier layers and tokens.
Whether anything is brought because of them is the policy's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from moecache import hf_internals
from moecache.families import ranked_ids
from moecache.hf_internals import MoeLayer

PREDICTIONS = ("previous_token", "stale_gate")


def check_prediction(predict: str | None) -> None:
    """ValueError for a prediction that is unknown; None predicts nothing."""
    if predict is not None and predict not in PREDICTIONS:
        raise ValueError(f"predict={predict!r} is unknown; choose one of {', '.join(PREDICTIONS)}, or None")


class Foresight:
    """Predictions of one document, layer by layer; `begin` starts the next."""

    def __init__(self, layers: Sequence[MoeLayer], predict: str) -> None:
        check_prediction(predict)
        self.layers, self.predict = layers, predict
        self.begin()

    def begin(self) -> None:
        """Start a document: nothing is known of the one before."""
        self._last: dict[int, NDArray[np.int16]] = {}
        self._named: dict[int, NDArray[np.int16]] = {}

    def expect(self, layer: int, topk_ids: NDArray[np.int16]) -> NDArray[np.int16]:
        """What could be expected [n, K] of the layer's next n tokens, best first, -1 = nothing; `topk_ids` is what they call."""
        if self.predict == "stale_gate":
            return self._named.pop(layer, np.full_like(topk_ids, -1))
        before = self._last.get(layer, np.full_like(topk_ids[:1], -1))
        self._last[layer] = topk_ids[-1:]
        return np.concatenate([before, topk_ids[:-1]])

    def named(self, layer: int) -> NDArray[np.int16] | None:
        """Whom the layer before has just named for this one [n, K], best first, until `expect` is asked; None = nobody."""
        return self._named.get(layer)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Overhear what routers are given, where the prediction needs it."""
        if self.predict == "stale_gate":
            with hf_internals.overheard(self.layers, self._name_next):
                yield
        else:
            yield

    @torch.no_grad()
    def _name_next(self, layer: int, hidden: torch.Tensor) -> None:
        if layer + 1 < len(self.layers):
            self._named[layer + 1] = ranked_ids(hf_internals.route(self.layers[layer + 1], hidden))
