"""Traces and decision logs: what a router said, and what a policy made of it.

A `RouterTrace` holds, for T tokens at L MoE layers, the router's own top-k ids and gate weights in rank order, and (where they were
recorded) the selection scores of all E experts as float16. Everything that a policy decides on is in it, so that a replay is exact.

Stored as one safetensors file: the tensors, and a JSON header with shape, source and a checksum of everything. Every dtype, range, order
and length is checked on load; an error names the token and the layer.

This module knows no policies and no models.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moecache.kernel import Outcome

FORMAT = "moecache router trace 1"
WEIGHT_SUM_TOLERANCE = 0.003


class TraceError(ValueError):
    """A trace that is damaged, foreign or impossible; the message names the value, the place and the way out."""


@dataclass(frozen=True)
class ModelShape:
    """The routing geometry of a model.

    Parameters
    ----------
    num_layers, num_experts, top_k : MoE layers L, experts a layer E, experts called a token K.
    expert_bytes : size of one expert, or None where it is unknown.
    scoring : "softmax" or "sigmoid".
    norm_topk_prob : whether the family rescales the routing weights of the top-k to sum to 1.
    """

    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int | None = None
    scoring: str = "softmax"
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        if not (self.num_layers >= 1 and 1 <= self.top_k <= self.num_experts <= 32767):
            raise ValueError(f"impossible model shape {self}: need layers >= 1 and 1 <= top_k <= experts <= 32767")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring={self.scoring!r} is unknown; choose softmax or sigmoid")


@dataclass(frozen=True)
class DecisionLog:
    """What became of every call, in rank order.

    Attributes
    ----------
    outcome : [T,L,K] uint8, see `Outcome`.
    computed_ids : [T,L,K] int16, the expert that computed the call, -1 = dropped.
    evicted_ids : [T,L,K] int16, whom a fetch evicted, -1 = nobody.
    arrivals : [n,7] int64: asked, landed (clocks), layer, expert, victim (-1 a free slot, -2 dropped), kind, reason.
    substituted_mass : [T,L] float32, gate weight of the step's substituted and dropped calls.
    """

    outcome: np.ndarray
    computed_ids: np.ndarray
    evicted_ids: np.ndarray
    arrivals: np.ndarray
    substituted_mass: np.ndarray

    def is_equal(self, other: DecisionLog) -> bool:
        """True when every decision and every arrival is the same, bit for bit (arrivals in any order of layers)."""
        mine, theirs = (log.arrivals[np.lexsort(log.arrivals.T[::-1])] for log in (self, other))
        names = ("outcome", "computed_ids", "evicted_ids", "substituted_mass")
        return np.array_equal(mine, theirs) and all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    def count(self, outcome: Outcome | int) -> int:
        """Number of calls with this outcome."""
        return int((self.outcome == int(outcome)).sum())


def concatenate_tokens(logs: list[DecisionLog]) -> DecisionLog:
    """One log from logs of consecutive tokens of the same layers (the order of `arrivals` is theirs)."""
    names = ("outcome", "computed_ids", "evicted_ids", "arrivals", "substituted_mass")
    return DecisionLog(**{name: np.concatenate([getattr(log, name) for log in logs]) for name in names})


def concatenate_layers(logs: list[DecisionLog]) -> DecisionLog:
    """One log from logs of consecutive layers of the same tokens."""
    names = ("outcome", "computed_ids", "evicted_ids", "substituted_mass")
    arrays = {name: np.concatenate([getattr(log, name) for log in logs], axis=1) for name in names}
    return DecisionLog(arrivals=np.concatenate([log.arrivals for log in logs]), **arrays)


@dataclass(frozen=True, eq=False)
class RouterTrace:
    """What the routers said about T tokens; make one with `from_arrays`, `load` or `moecache.record`.

    Attributes
    ----------
    topk_ids : [T,L,K] int16, rank order (gate weight falling, lower id first among equals).
    gate_weights : [T,L,K] float32, rank order, a step sums to 1 within 0.003.
    selection_scores : [T,L,E] float16, or None: router logits (softmax families) or corrected sigmoids.
    token_ids : [T] int32, -1 where unknown.
    document_start : [T] bool, True at the first token of each document.
    shape : ModelShape.
    source : JSON-able facts: model, revision, text, hashes, versions.
    predicted_ids : [T,L,P] int16 or None: what a predictor expects each step to call, best first, -1 = nothing (prefetch).
    """

    topk_ids: np.ndarray
    gate_weights: np.ndarray
    selection_scores: np.ndarray | None
    token_ids: np.ndarray
    document_start: np.ndarray
    shape: ModelShape
    source: dict[str, Any] = field(default_factory=dict)
    predicted_ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.topk_ids.shape[0]

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
    ) -> RouterTrace:
        """A trace from arrays in any order of ranks.

        Parameters
        ----------
        topk_ids, gate_weights : [T,L,K]; sorted into rank order here.
        router_logits or selection_scores : [T,L,E] real, at most one of them; rounded to float16.
        token_ids : [T], document_start : [T]; by default unknown, and one document.
        shape : ModelShape; made from the arrays when absent (then `num_experts` is needed without scores).

        Raises
        ------
        TraceError : arrays that contradict each other, with token and layer.
        """
        ids, weights = np.asarray(topk_ids), np.asarray(gate_weights, dtype=np.float32)
        if ids.ndim != 3 or ids.shape != weights.shape:
            raise TraceError(f"topk_ids {ids.shape} and gate_weights {weights.shape} must both be [tokens, layers, top-k]")
        if ids.dtype.kind not in "iu":
            raise TraceError(f"topk_ids are {ids.dtype}; expert ids are integers")
        if router_logits is not None and selection_scores is not None:
            raise TraceError("give router_logits or selection_scores, not both")
        scores = router_logits if selection_scores is None else selection_scores
        scores = None if scores is None else to_recorded(np.asarray(scores))
        if shape is None:
            if scores is None and num_experts is None:
                raise TraceError("without scores the number of experts is unknown: give num_experts or shape")
            experts = int(scores.shape[-1]) if scores is not None else int(num_experts or 0)
            shape = ModelShape(ids.shape[1], experts, ids.shape[2])
        if ids.size and (ids.min() < 0 or ids.max() >= shape.num_experts):
            _fail_at(ids < 0 if ids.min() < 0 else ids >= shape.num_experts, ids, f"an expert id outside 0..{shape.num_experts - 1}")
        by_id = np.argsort(ids, axis=-1, kind="stable")
        ids, weights = np.take_along_axis(ids, by_id, -1), np.take_along_axis(weights, by_id, -1)
        order = np.argsort(-weights, axis=-1, kind="stable")
        starts = _default_starts(ids.shape[0]) if document_start is None else np.asarray(document_start, bool)
        tokens = np.full(ids.shape[0], -1, np.int32) if token_ids is None else np.asarray(token_ids, np.int32)
        return cls(
            np.take_along_axis(ids, order, -1).astype(np.int16), np.take_along_axis(weights, order, -1),
            scores, tokens, starts, shape, dict(source or {}),
        )

    def document_slices(self) -> list[slice]:
        """One slice of tokens per document, in order."""
        starts = np.flatnonzero(self.document_start)
        return [slice(int(a), int(b)) for a, b in zip(starts, [*starts[1:], self.num_tokens], strict=True)]

    def tokens(self, start: int, stop: int) -> RouterTrace:
        """The trace of tokens start..stop-1; its first token starts a document."""
        starts = self.document_start[start:stop].copy()
        starts[:1] = True
        scores = None if self.selection_scores is None else self.selection_scores[start:stop]
        return replace(
            self, topk_ids=self.topk_ids[start:stop], gate_weights=self.gate_weights[start:stop], selection_scores=scores,
            token_ids=self.token_ids[start:stop], document_start=starts,
            predicted_ids=None if self.predicted_ids is None else self.predicted_ids[start:stop],
        )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, under a temporary name first."""
        tensors = {"topk_ids": self.topk_ids, "gate_weights": self.gate_weights, "token_ids": self.token_ids,
                   "document_start": self.document_start.astype(np.uint8)}
        for name in ("selection_scores", "predicted_ids"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name)
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        header = {"format": FORMAT, "shape": json.dumps(asdict(self.shape)), "source": json.dumps(self.source)}
        header["sha256"] = _checksum(tensors, header)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        os.close(handle)
        try:
            save_file(tensors, temporary, header)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> RouterTrace:
        """Read and check a trace written by `save`.

        Raises
        ------
        FileNotFoundError : no such file.
        TraceError : truncated, foreign or impossible, with what is wrong and where.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no trace at {path}: record one with moecache.record(model, token_ids).save(path)")
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, TypeError) as error:
            raise TraceError(f"{path} is not a complete safetensors file ({error}); record it again") from error
        try:
            return cls._from_file(tensors, header)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error

    @classmethod
    def _from_file(cls, tensors: dict[str, np.ndarray], header: dict[str, str]) -> RouterTrace:
        if header.get("format") != FORMAT:
            raise TraceError(f"format {header.get('format')!r} instead of {FORMAT!r}: not a trace of this package")
        missing = {"topk_ids", "gate_weights", "token_ids", "document_start"} - set(tensors)
        if missing:
            raise TraceError(f"tensors {sorted(missing)} are missing")
        if header.get("sha256") != _checksum(tensors, header):
            raise TraceError("the contents do not match the file's own checksum: it was damaged; copy or record it again")
        try:
            shape, source = ModelShape(**json.loads(header["shape"])), json.loads(header["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"the header's shape or source cannot be read ({error})") from error
        scores = tensors.get("selection_scores")
        if scores is not None and scores.dtype == np.float16:
            bits = scores.view(np.int16)
            bits[bits == -0x8000] = 0  # -0.0 would sort below +0.0
        return cls(
            tensors["topk_ids"], tensors["gate_weights"], scores, tensors["token_ids"],
            tensors["document_start"].astype(bool), shape, source, tensors.get("predicted_ids"),
        )


def _checksum(tensors: dict[str, np.ndarray], header: dict[str, str]) -> str:
    """SHA-256 of all that a file holds: a bit flipped in a weight may well leave a possible trace."""
    digest = hashlib.sha256(f"{header.get('shape')}\0{header.get('source')}".encode())
    for name in sorted(tensors):
        digest.update(f"\0{name} {tensors[name].dtype} {tensors[name].shape}\0".encode())
        digest.update(memoryview(tensors[name]))  # type: ignore[arg-type]
    return digest.hexdigest()


def to_recorded(scores: np.ndarray) -> np.ndarray:
    """Scores as the kernel sees them: float16, with -0.0 turned into 0.0."""
    with np.errstate(over="ignore"):
        return np.asarray(scores, np.float16) + np.float16(0.0)


def _default_starts(num_tokens: int) -> np.ndarray:
    starts = np.zeros(num_tokens, bool)
    starts[:1] = True
    return starts


def _validate(trace: RouterTrace) -> None:
    shape, ids, weights, scores = trace.shape, trace.topk_ids, trace.gate_weights, trace.selection_scores
    num_tokens = ids.shape[0] if ids.ndim else 0
    expected = {
        "topk_ids": (ids, np.int16, (num_tokens, shape.num_layers, shape.top_k)),
        "gate_weights": (weights, np.float32, (num_tokens, shape.num_layers, shape.top_k)),
        "token_ids": (trace.token_ids, np.int32, (num_tokens,)),
        "document_start": (trace.document_start, np.bool_, (num_tokens,)),
    }
    if scores is not None:
        expected["selection_scores"] = (scores, np.float16, (num_tokens, shape.num_layers, shape.num_experts))
    for name, (array, dtype, size) in expected.items():
        if array.dtype != dtype or array.shape != size:
            raise TraceError(f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(size)}")
    if num_tokens == 0:
        raise TraceError("the trace has no tokens")
    if not trace.document_start[0]:
        raise TraceError("document_start is False at token 0, which must start a document")
    if trace.predicted_ids is not None:
        _validate_predictions(trace.predicted_ids, ids.shape[:2], shape.num_experts)
    _validate_steps(ids, weights, shape.num_experts)
    if scores is not None:
        bits = scores.view(np.int16)  # ten times faster than float16 arithmetic, which NumPy does one by one
        _fail_at((bits >= 0x7C00) | ((bits > -0x400) & (bits < 0)), scores, "a selection score that is NaN or +infinity in float16")


def _validate_predictions(predicted: np.ndarray, size: tuple[int, ...], num_experts: int) -> None:
    if predicted.dtype != np.int16 or predicted.ndim != 3 or predicted.shape[:2] != size:
        raise TraceError(f"predicted_ids is {predicted.dtype} {list(predicted.shape)}, expected int16 [{size[0]}, {size[1]}, any]")
    _fail_at((predicted < -1) | (predicted >= num_experts), predicted, f"a predicted id outside -1..{num_experts - 1}")


def _validate_steps(ids: np.ndarray, weights: np.ndarray, num_experts: int) -> None:
    _fail_at((ids < 0) | (ids >= num_experts), ids, f"an expert id outside 0..{num_experts - 1}")
    ordered = np.sort(ids, axis=-1)
    _fail_at(ordered[..., 1:] == ordered[..., :-1], ordered[..., 1:], "the same expert called twice")
    _fail_at(~np.isfinite(weights) | (weights < 0), weights, "a gate weight that is negative or not finite")
    sums = weights.sum(axis=-1, dtype=np.float64)
    _fail_at(np.abs(sums - 1) > WEIGHT_SUM_TOLERANCE, sums, "gate weights that do not sum to 1 (divide them by their sum)")
    falls = weights[..., 1:] > weights[..., :-1]
    ties = (weights[..., 1:] == weights[..., :-1]) & (ids[..., 1:] < ids[..., :-1])
    _fail_at(falls | ties, weights[..., 1:], "calls out of rank order (weight falling, lower id first among equals)")


def _fail_at(is_wrong: np.ndarray, values: np.ndarray, what: str) -> None:
    if is_wrong.any():
        place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
        raise TraceError(f"token {place[0]}, layer {place[1]}: {what}: {values[place]}")
