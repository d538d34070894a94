"""Record what the routers of a model say about a text: a RouterTrace, which the simulator replays without the model.

One full forward a document with every expert in place. Recorded are the selection scores, rounded to float16, and
the model's own top-k with its own weights: decisions made on the trace are the decisions that would be made beside
the model. Nothing is replaced, so the model's outputs do not change. Policies and slots are not known here.

On request the trace also holds what each layer could have been told to expect before it was reached, in the forms of `foresight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from moecache import hf_internals
from moecache.calibrate import predict_previous_token
from moecache.families import Family, Routing, check_router, family_of, model_shape, ranked_ids, routing_of
from moecache.foresight import check_prediction
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.score import as_documents, check_evaluation, describe_model, document_starts, with_progress
from moecache.trace import RouterTrace


def record(
    model: Any, token_ids: Any, progress: bool = False, source: dict[str, Any] | None = None, predict: str | None = None
) -> RouterTrace:
    """Router trace of a model reading one document or several.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode, of an understood family, with every expert in memory.
    token_ids : array-like of int [T], or a list of such
        Each document is its own forward; the trace marks where each starts.
    progress : bool
        Show a bar over documents.
    source : dict, optional
        Plain JSON values to keep in the trace beside the model's name, such as the text's name and revision.
    predict : {"previous_token", "stale_gate"}, optional
        Also record what each step could expect to call, for policies that prefetch.

    Returns
    -------
    RouterTrace
        `selection_scores` [T, L, E] float16, `topk_ids` [T, L, K] int16 and `gate_weights` [T, L, K] float32 in rank
        order, `token_ids` [T] int32, `document_start` [T] bool; with `predict` also `predicted_ids` [T, L, K] int16, best first.

    Raises
    ------
    UnknownRouter
        If the family is not understood, or the model does not follow its rule.
    ValueError
        If the model is in training mode, token ids lie outside its vocabulary, or `predict` is unknown.
    """
    documents = as_documents(model, token_ids)
    check_evaluation(model)
    with torch.no_grad(), hf_internals.experts_implementation(model), recording(model, predict) as recorder:
        for document in with_progress(documents, progress, "record"):
            ids = torch.from_numpy(document).to(model.device, torch.int64)
            hf_internals.final_hidden_states(model, ids[None], use_cache=False)
    return recorder.trace(documents, source)


@contextmanager
def recording(model: Any, predict: str | None = None) -> Iterator[Recorder]:
    """Keep what the routers say in every forward inside the block, whatever runs the model.

    Around an emulation it keeps the routers' own words before anything is replaced, so the trace holds the logits
    that the emulated model had:

        with recording(model) as recorder:
            run = emulate(model, documents, policy, num_slots=128)
        trace = recorder.trace(documents)

    Yields
    ------
    Recorder
        Call its `trace` after the block.
    """
    check_prediction(predict)
    recorder = Recorder(model, predict)
    with ExitStack() as hooks:
        hooks.enter_context(hf_internals.watched(recorder.layers, recorder.listen))
        if predict == "stale_gate":
            hooks.enter_context(hf_internals.overheard(recorder.layers, recorder.foresee))
        yield recorder


class Recorder:
    """Keeps what each router said, layer by layer, document after document."""

    def __init__(self, model: Any, predict: str | None = None) -> None:
        self.model, self.predict = model, predict
        self.family: Family = family_of(model)
        self.layers: tuple[MoeLayer, ...] = hf_internals.moe_layers(model)
        self.blocks: list[list[Routing]] = [[] for _ in self.layers]
        self.foreseen: list[list[np.ndarray]] = [[] for _ in self.layers]

    def listen(self, layer: int, output: RouterOutput) -> None:
        """Keep one router's output, rounded and sorted; it is not replaced."""
        if not self.blocks[layer]:
            check_router(self.family, self.layers[layer].name, output)
        self.blocks[layer].append(routing_of(self.family, output))

    @torch.no_grad()
    def foresee(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep whom the next MoE layer's router would call for what this layer's router is given, best first."""
        if layer + 1 < len(self.layers):
            self.foreseen[layer + 1].append(ranked_ids(hf_internals.route(self.layers[layer + 1], hidden)))

    def trace(self, token_ids: Any, source: dict[str, Any] | None = None) -> RouterTrace:
        """The trace of the documents that were read, in the order in which they were.

        Raises
        ------
        ValueError
            If the routers spoke about another number of tokens.
        """
        documents = as_documents(self.model, token_ids)
        num_tokens = sum(document.size for document in documents)
        num_heard = sum(len(block.topk_ids) for block in self.blocks[0])
        if num_heard != num_tokens:
            raise ValueError(f"the routers spoke about {num_heard} tokens, but the documents have {num_tokens}")
        trace = RouterTrace.from_arrays(
            selection_scores=self._stack("selection_scores"),
            topk_ids=self._stack("topk_ids"),
            gate_weights=self._stack("gate_weights"),
            token_ids=np.concatenate(documents),
            document_start=document_starts(documents),
            shape=model_shape(self.model),
            source=describe_model(self.model, documents) | (source or {}),
            predicted_ids=self._predictions(num_tokens),
        )
        return predict_previous_token(trace) if self.predict == "previous_token" else trace

    def _predictions(self, num_tokens: int) -> np.ndarray | None:
        """What stale gates let each layer expect [T, L, K], -1 at layer 0; None where nobody asked."""
        if self.predict != "stale_gate":
            return None
        nothing = np.full((num_tokens, model_shape(self.model).top_k), -1, np.int16)
        return np.stack([np.concatenate(blocks) if blocks else nothing for blocks in self.foreseen], axis=1)

    def _stack(self, field: str) -> np.ndarray:
        """A field of all layers as one array [T, L, ...]."""
        return np.stack([np.concatenate([getattr(block, field) for block in blocks]) for blocks in self.blocks], axis=1)
