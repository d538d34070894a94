"""Record what the routers of a model say about a text: a RouterTrace, which the simulator replays without the model.

One full forward a document with every expert in place. Recorded are the selection scores, rounded to float16, and
the model's own top-k with its own weights: decisions made on the trace are the decisions that would be made beside
the model. Nothing is replaced, so the model's outputs do not change. Policies and slots are not known here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moecache import hf_internals
from moecache.families import Family, Routing, check_router, family_of, model_shape, routing_of
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.score import as_documents, check_evaluation, describe_model, document_starts, with_progress
from moecache.trace import RouterTrace


def record(model: Any, token_ids: Any, progress: bool = False, source: dict[str, Any] | None = None) -> RouterTrace:
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

    Returns
    -------
    RouterTrace
        `selection_scores` [T, L, E] float16, `topk_ids` [T, L, K] int16 and `gate_weights` [T, L, K] float32 in rank
        order, `token_ids` [T] int32, `document_start` [T] bool.

    Raises
    ------
    UnknownRouter
        If the family is not understood, or the model does not follow its rule.
    ValueError
        If the model is in training mode or token ids lie outside its vocabulary.
    """
    documents = as_documents(model, token_ids)
    check_evaluation(model)
    shape, recorder = model_shape(model), _Recorder(model)
    with torch.no_grad(), hf_internals.experts_implementation(model):
        with hf_internals.watched(recorder.layers, recorder.listen):
            for document in with_progress(documents, progress, "record"):
                ids = torch.from_numpy(document).to(model.device, torch.int64)
                hf_internals.final_hidden_states(model, ids[None], use_cache=False)
    return RouterTrace.from_arrays(
        selection_scores=recorder.stack("selection_scores"),
        topk_ids=recorder.stack("topk_ids"),
        gate_weights=recorder.stack("gate_weights"),
        token_ids=np.concatenate(documents),
        document_start=document_starts(documents),
        shape=shape,
        source=describe_model(model, documents) | (source or {}),
    )


class _Recorder:
    """Keeps what each router said, layer by layer, document after document."""

    def __init__(self, model: Any) -> None:
        self.family: Family = family_of(model)
        self.layers: tuple[MoeLayer, ...] = hf_internals.moe_layers(model)
        self.blocks: list[list[Routing]] = [[] for _ in self.layers]

    def listen(self, layer: int, output: RouterOutput) -> None:
        if not self.blocks[layer]:
            check_router(self.family, self.layers[layer].name, output)
        self.blocks[layer].append(routing_of(self.family, output))

    def stack(self, field: str) -> np.ndarray:
        """A field of all layers as one array [T, L, ...]."""
        return np.stack([np.concatenate([getattr(block, field) for block in blocks]) for blocks in self.blocks], axis=1)
