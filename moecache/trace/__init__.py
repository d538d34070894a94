"""Traces: what a router said. (`log` holds the other half: what a policy made of it.)

A `RouterTrace` holds, for T tokens at L MoE layers, the router's own top-k ids and gate weights in rank order, and (where they were
recorded) the selection scores as float16: of all E experts, or of the best M with their ids (a *compact* trace). Everything that a policy
decides on is in it, so that a replay is exact.

Stored as one safetensors file: the tensors, and a JSON header with shape, source and a checksum of everything. Every dtype, range, order
and length is checked on load; an error names the token and the layer. With `memory_map=True` the arrays are views of the file, so that a
trace larger than memory can be replayed.

This package knows no policies and no models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moecache.trace.best import best_scores, full_scores, in_falling_order
from moecache.trace.blocks import token_blocks
from moecache.trace.check import WEIGHT_SUM_TOLERANCE, check_ids, check_trace
from moecache.trace.file import FORMAT, read_trace_file, write_trace_file
from moecache.trace.log import DecisionLog, concatenate_layers, concatenate_tokens
from moecache.trace.long_form import Cells, Columns, arrays_of, read_cells
from moecache.trace.shape import ModelShape, TraceError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FORMAT",
    "WEIGHT_SUM_TOLERANCE",
    "DecisionLog",
    "ModelShape",
    "RouterTrace",
    "TraceError",
    "concatenate_layers",
    "concatenate_tokens",
    "to_recorded",
    "token_blocks",
]


@dataclass(frozen=True, eq=False)
class RouterTrace:
    """What the routers said about T tokens; make one with `from_arrays`, `from_frame`, `load` or `moecache.record`.

    Attributes
    ----------
    topk_ids : [T,L,K] int16, rank order (gate weight falling, lower id first among equals).
    gate_weights : [T,L,K] float32, rank order, a step sums to 1 within 0.003.
    selection_scores : [T,L,E] float16, or None: router logits (softmax families) or corrected sigmoids. [T,L,M] in a compact trace.
    token_ids : [T] int32, -1 where unknown.
    document_start : [T] bool, True at the first token of each document.
    shape : ModelShape.
    source : JSON-able facts: model, revision, text, hashes, versions.
    predicted_ids : [T,L,P] int16 or None: what a predictor expects each step to call, best first, -1 = nothing (prefetch).
    recorded_ids : [T,L,M] int16 or None: in a compact trace, whose the selection scores are: the step's top-k and the best M - K others,
        scores falling, lower id first among equals.
    """

    topk_ids: np.ndarray
    gate_weights: np.ndarray
    selection_scores: np.ndarray | None
    token_ids: np.ndarray
    document_start: np.ndarray
    shape: ModelShape
    source: dict[str, Any] = field(default_factory=dict)
    predicted_ids: np.ndarray | None = None
    recorded_ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_trace(self)

    def __repr__(self) -> str:
        shape, num_documents = self.shape, int(self.document_start.sum())
        size = (
            f"{self.num_tokens:,} tokens, {num_documents:,} documents, {shape.num_layers} layers, top-{shape.top_k} of {shape.num_experts}"
        )
        return f"RouterTrace({size} experts, {self.num_recorded} scores a step)"

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.topk_ids.shape[0]

    @property
    def num_recorded(self) -> int:
        """Scores recorded a step: E, M in a compact trace, 0 in a trace without scores."""
        if self.selection_scores is None:
            return 0
        return self.shape.num_experts if self.recorded_ids is None else self.recorded_ids.shape[-1]

    @classmethod
    def from_arrays(
        cls,
        topk_ids: npt.ArrayLike,
        gate_weights: npt.ArrayLike,
        router_logits: npt.ArrayLike | None = None,
        selection_scores: npt.ArrayLike | None = None,
        token_ids: npt.ArrayLike | None = None,
        document_start: npt.ArrayLike | None = None,
        shape: ModelShape | None = None,
        source: dict[str, Any] | None = None,
        num_experts: int | None = None,
        predicted_ids: npt.ArrayLike | None = None,
        recorded_ids: npt.ArrayLike | None = None,
    ) -> RouterTrace:
        """A trace from arrays in any order of ranks.

        Parameters
        ----------
        topk_ids, gate_weights : [T,L,K]; sorted into rank order here.
        router_logits or selection_scores : [T,L,E] real, at most one of them; rounded to float16.
        token_ids : [T], document_start : [T]; by default unknown, and one document.
        shape : ModelShape; made from the arrays when absent (then `num_experts` is needed without all scores).
        predicted_ids : [T,L,P], best first, -1 = nothing.
        recorded_ids : [T,L,M], whose the scores are where only the best M were kept; then the scores are [T,L,M] as well.

        Raises
        ------
        TraceError : arrays that contradict each other, with token and layer.
        """
        ids, weights = np.asarray(topk_ids), np.asarray(gate_weights, dtype=np.float32)
        if ids.ndim != 3 or ids.shape != weights.shape:
            raise TraceError(f"topk_ids {ids.shape} and gate_weights {weights.shape} must both be [tokens, layers, top-k]")
        if router_logits is not None and selection_scores is not None:
            raise TraceError("give router_logits or selection_scores, not both")
        scores = router_logits if selection_scores is None else selection_scores
        scores = None if scores is None else to_recorded(np.asarray(scores))
        if shape is None:
            shape = _shape_of(ids, scores if recorded_ids is None else None, num_experts)
        ids = _as_ids("topk_ids", ids, shape)
        recorded = None if recorded_ids is None else _as_ids("recorded_ids", np.asarray(recorded_ids), shape)
        if recorded is not None and scores is not None and recorded.shape == scores.shape:
            recorded, scores = in_falling_order(scores, recorded)
        ids, weights = _in_rank_order(ids, weights)
        starts = np.arange(ids.shape[0]) == 0 if document_start is None else np.asarray(document_start, bool)
        tokens = np.full(ids.shape[0], -1, np.int32) if token_ids is None else np.asarray(token_ids, np.int32)
        predicted = None if predicted_ids is None else _as_ids("predicted_ids", np.asarray(predicted_ids), shape, lowest=-1)
        return cls(ids, weights, scores, tokens, starts, shape, dict(source or {}), predicted, recorded)

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        token: str = "token",
        layer: str = "layer",
        rank: str | None = "rank",
        expert: str = "expert",
        weight: str = "weight",
        document: str | None = None,
        num_experts: int | None = None,
        shape: ModelShape | None = None,
        source: dict[str, Any] | None = None,
    ) -> RouterTrace:
        """A trace from a table in long form: one row a call.

        Parameters
        ----------
        frame : DataFrame, rows in any order; every token has the same layers, every layer the same number of calls.
        token, layer, rank, expert, weight : names of the columns. Tokens are taken in rising order. Without `shape` the layers that occur
            are numbered from 0 (`source["layers"]` says which they were), and ranks may start anywhere. `rank=None`: no such column; the
            calls of a token and layer are told apart by their order.
        document : name of a column whose values tell documents apart, in the order of their first rows; tokens then count within one.
        num_experts or shape : experts a layer, or the whole geometry; with `shape` layers and ranks must be 0..L-1 and 0..K-1.
        source : facts to keep in the trace.

        Raises
        ------
        TraceError : missing columns, and whatever is missing, twice, NaN, no integer or impossible, with its token and layer.
        """
        if shape is None and num_experts is None:
            raise TraceError("a table of calls does not tell the number of experts: give num_experts or shape")
        cells = read_cells(frame, Columns(token, layer, rank, expert, weight, document), shape, num_experts)
        return cls.from_cells(cells, shape, num_experts, source)

    @classmethod
    def from_cells(
        cls, cells: Cells, shape: ModelShape | None = None, num_experts: int | None = None, source: dict[str, Any] | None = None
    ) -> RouterTrace:
        """A trace from the calls of a table that were checked one by one; `from_frame` does both."""
        table = arrays_of(cells, shape)
        if shape is None:
            shape = _shape_of(table.ids, None, num_experts)
        facts = dict(source or {})
        if table.layers.tolist() != list(range(table.layers.size)):
            facts["layers"] = table.layers.tolist()
        try:
            return cls.from_arrays(table.ids, table.weights, document_start=table.document_start, shape=shape, source=facts)
        except TraceError as error:
            raise table.renamed(error) from error

    def document_slices(self) -> list[slice]:
        """One slice of tokens per document, in order."""
        starts = np.flatnonzero(self.document_start)
        return [slice(int(a), int(b)) for a, b in zip(starts, [*starts[1:], self.num_tokens], strict=True)]

    def tokens(self, start: int, stop: int) -> RouterTrace:
        """The trace of tokens start..stop-1; its first token starts a document."""
        starts = self.document_start[start:stop].copy()
        starts[:1] = True
        names = ("topk_ids", "gate_weights", "selection_scores", "token_ids", "predicted_ids", "recorded_ids")
        cut = {name: None if (array := getattr(self, name)) is None else array[start:stop] for name in names}
        return replace(self, document_start=starts, **cut)

    def compact(self, num_best: int = 64) -> RouterTrace:
        """The trace with only the best scores of each step: its top-k and the best of the others, `num_best` in all.

        With 512 experts and 64 best it takes a quarter of the bytes. A stand-in outside them is fetched instead and counted
        (`outside_recorded`): look at that count before you trust a small `num_best`.

        Parameters
        ----------
        num_best : M, from top-k to the scores that are recorded.

        Raises
        ------
        TraceError : a trace without scores, or another M.
        """
        ids, scores = best_scores(self, num_best)
        return replace(self, selection_scores=scores, recorded_ids=ids)

    def scores(self, block: slice) -> np.ndarray | None:
        """Scores [t,L,E] float16 of a block of tokens, None without scores; unrecorded ones are a NaN that the kernel knows."""
        return None if self.selection_scores is None else full_scores(self, block)

    def report(self, num_slots: int | None = None) -> Any:
        """What is in the trace and what it can tell, as a `TraceReport`: see `moecache.trace_report.report_trace` (on a higher floor)."""
        return import_module("moecache.trace_report").report_trace(self, num_slots)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, under a temporary name first."""
        tensors = {name: getattr(self, name) for name in ("topk_ids", "gate_weights", "token_ids")}
        tensors["document_start"] = self.document_start.astype(np.uint8)
        for name in ("selection_scores", "recorded_ids", "predicted_ids"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        write_trace_file(Path(path), tensors, self.shape, self.source)

    @classmethod
    def load(cls, path: str | Path, memory_map: bool = False) -> RouterTrace:
        """Read and check a trace written by `save`.

        Parameters
        ----------
        path : the file.
        memory_map : True makes the arrays read-only views of the file: they take no memory of their own, and are read from disk as they
            are used. The file is still read once here, to be checked. It must not be changed meanwhile (`save` replaces, never changes).

        Raises
        ------
        FileNotFoundError : no such file.
        TraceError : truncated, foreign, damaged or impossible, with what is wrong and where.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no trace at {path}: record one with moecache.record(model, token_ids).save(path)")
        try:
            tensors, shape, source = read_trace_file(path, memory_map)
            starts = tensors["document_start"]
            if starts.dtype != np.uint8 or (starts.size and starts.max() > 1):
                raise TraceError(f"document_start is {starts.dtype} up to {starts.max(initial=0)}, expected uint8 0 or 1")
            known = {**tensors, "selection_scores": tensors.get("selection_scores"), "document_start": starts.astype(bool)}
            return cls(**known, shape=shape, source=source)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error


def to_recorded(scores: np.ndarray) -> np.ndarray:
    """Scores as the kernel sees them: float16, with -0.0 turned into 0.0."""
    with np.errstate(over="ignore"):
        return np.asarray(scores, np.float16) + np.float16(0.0)


def _shape_of(ids: np.ndarray, scores: np.ndarray | None, num_experts: int | None) -> ModelShape:
    if scores is None and num_experts is None:
        raise TraceError("without the scores of all experts their number is unknown: give num_experts or shape")
    return ModelShape(ids.shape[1], int(scores.shape[-1]) if scores is not None else int(num_experts or 0), ids.shape[2])


def _as_ids(name: str, ids: np.ndarray, shape: ModelShape, lowest: int = 0) -> np.ndarray:
    """Ids [T,L,..] as int16, checked before they are cut."""
    if ids.dtype.kind not in "iu" or ids.ndim != 3:
        raise TraceError(f"{name} are {ids.dtype} {list(ids.shape)}; expert ids are integers [tokens, layers, any]")
    check_ids(ids, shape.num_experts, lowest=lowest)
    return ids.astype(np.int16)


def _in_rank_order(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and gate weights [T,L,K]: weight falling, the lower id first among equals."""
    by_id = np.argsort(ids, axis=-1, kind="stable")
    ids, weights = np.take_along_axis(ids, by_id, -1), np.take_along_axis(weights, by_id, -1)
    order = np.argsort(-weights, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)
