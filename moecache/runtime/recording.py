"""`Recording`: what an offloaded model's routers said and what was decided, kept while it runs.

The trace holds the routers' own words, before anything was replaced, so the simulator that replays it meets the same steps and must make
the same decisions. A recording knows no devices and no weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moecache.families import Routing
from moecache.trace import DecisionLog, ModelShape, RouterTrace, concatenate_layers, concatenate_tokens


class Recording:
    """Everything heard between the start and the end of the recording, over all forwards.

    Parameters
    ----------
    shape : of the model.
    source : plain JSON values about the model, kept in the trace.
    """

    def __init__(self, shape: ModelShape, source: dict[str, Any]) -> None:
        self.shape, self.source = shape, source
        self._routings: list[list[Routing]] = [[] for _ in range(shape.num_layers)]
        self._logs: list[list[DecisionLog]] = [[] for _ in range(shape.num_layers)]
        self._predicted: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]
        self._ids: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._exact: list[np.ndarray] = []
        self._cancelled: list[np.ndarray] = []

    def began(self, ids: np.ndarray, is_start: bool, is_exact: bool) -> None:
        """A forward of `ids` [t] begins, perhaps a sequence with it."""
        self._ids.append(ids.astype(np.int32))
        self._starts.append((np.arange(ids.size) == 0) & is_start)
        self._exact.append(np.full(ids.size, is_exact))

    def heard(self, layer: int, routing: Routing, log: DecisionLog, predicted_ids: np.ndarray | None) -> None:
        """What a layer's router said about some tokens, and what was decided."""
        self._routings[layer].append(routing)
        self._logs[layer].append(log)
        if predicted_ids is not None:
            self._predicted[layer].append(predicted_ids)

    def was_reset(self, cancelled: np.ndarray) -> None:
        """Note copies that a cold start cancelled, as rows of arrivals."""
        self._cancelled.append(cancelled)

    @property
    def is_exact(self) -> np.ndarray:
        """[T] bool: tokens whose misses were all waited for."""
        return np.concatenate(self._exact)

    def decisions(self) -> DecisionLog:
        """The log of all tokens."""
        self._check()
        log = concatenate_layers([concatenate_tokens(blocks) for blocks in self._logs])
        arrivals = np.concatenate([log.arrivals, *self._cancelled])
        return DecisionLog(log.outcome, log.computed_ids, log.evicted_ids, arrivals, log.substituted_mass)

    def trace(self) -> RouterTrace:
        """The trace of all tokens; it starts a document where a forward had no decoding cache."""
        self._check()
        starts = np.concatenate(self._starts)
        starts[:1] = True
        return RouterTrace.from_arrays(
            selection_scores=self._stack("selection_scores"),
            topk_ids=self._stack("topk_ids"),
            gate_weights=self._stack("gate_weights"),
            token_ids=np.concatenate(self._ids),
            document_start=starts,
            shape=self.shape,
            source=self.source,
            predicted_ids=np.stack([np.concatenate(blocks) for blocks in self._predicted], axis=1) if self._predicted[0] else None,
        )

    def _check(self) -> None:
        heard = {sum(len(routing.topk_ids) for routing in blocks) for blocks in self._routings}
        begun = sum(ids.size for ids in self._ids)
        if heard != {begun} or begun == 0:
            raise ValueError(
                f"layers heard of {sorted(heard)} tokens where {begun} were begun: nothing ran, or a forward was interrupted; record again"
            )

    def _stack(self, field: str) -> np.ndarray:
        return np.stack([np.concatenate([getattr(routing, field) for routing in blocks]) for blocks in self._routings], axis=1)
