"""The experts of a checkpoint as downloaded: which ranges of bytes of which files make up each of them, and reading them.

Tensors are sorted by name, so the matrices of one expert usually lie in different shards, at any offset. Two layouts are common: one matrix
for each expert and projection, or all experts of a layer in one tensor. In both, an expert is a few contiguous *pieces*, and its block is
those pieces one after the other: nothing is computed, so no bit changes. Packing (`pack`) makes one piece of them, which reads faster.

Files are never mapped, because mapped pages count as memory. Slots and policies are not known here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.stores.aligned_read import AlignedFile
from moecache.stores.blocks import BlockLayout, StoreCounters, StoreError, TensorSpec, checked_range
from moecache.stores.checkpoint import Checkpoint, read_checkpoint


@dataclass(frozen=True)
class ExpertPieces:
    """Where every expert's pieces are: piece p of an expert fills block bytes ``at[p] : at[p] + num_bytes[p]``.

    `file` [L, E, P] int32 counts into `paths`, `offset` [L, E, P] int64 is in bytes from that file's start.
    """

    layout: BlockLayout
    paths: tuple[Path, ...]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    at: tuple[int, ...]
    num_bytes: tuple[int, ...]


def expert_pieces(checkpoint: Checkpoint) -> ExpertPieces:
    """Find every expert's pieces.

    Raises
    ------
    StoreError : an expert's tensor that is missing, or has another shape or dtype than its model says.
    """
    layers = [
        _layer_pieces(checkpoint, names, keys) for names, keys in zip(checkpoint.expert_names, _keys_by_layer(checkpoint), strict=True)
    ]
    layouts = [layout for layout, _ in layers]
    if any(layout != layouts[0] for layout in layouts) or len({tuple(p[0] for p in pieces) for _, pieces in layers}) != 1:
        raise StoreError(f"{checkpoint.folder}: MoE layers of one kind are needed, got {[layout.to_dict() for layout in layouts]}")
    paths = tuple(sorted({path for _, pieces in layers for piece in pieces for path in piece[2]}))
    number = {path: index for index, path in enumerate(paths)}
    file = np.array([[[number[path] for path in piece[2]] for piece in pieces] for _, pieces in layers], np.int32)
    offset = np.array([[piece[3] for piece in pieces] for _, pieces in layers], np.int64)
    at, num_bytes = zip(*[piece[0] for piece in layers[0][1]], strict=True)
    return ExpertPieces(layouts[0], paths, file.transpose(0, 2, 1), offset.transpose(0, 2, 1), at, num_bytes)


_Piece = tuple[tuple[int, int], str, list[Path], list[int]]  # (at, num_bytes), key, then each expert's file and offset


def _keys_by_layer(checkpoint: Checkpoint) -> list[dict[str, list[list[str]]]]:
    """For every layer and tensor, for every part of it the keys in the order of their numbers: that of the experts."""
    parts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(checkpoint.expert_keys, key=_by_numbers):
        target = checkpoint.targets[key]
        parts[target.name][target.part or 0].append(key)
    return [{name: [parts[name][part] for part in sorted(parts[name])] for name in layer} for layer in checkpoint.expert_names]


def _by_numbers(key: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


def _layer_pieces(
    checkpoint: Checkpoint, names: Mapping[str, Any], keys: Mapping[str, list[list[str]]]
) -> tuple[BlockLayout, list[_Piece]]:
    """The layout of a layer's blocks, and its pieces."""
    shapes = {}
    for name, meant in names.items():
        if not keys[name] or not keys[name][0]:
            raise StoreError(
                f"{checkpoint.folder} has no tensor for {name}; it is not a whole checkpoint of {checkpoint.config.model_type}"
            )
        shapes[name.rpartition(".")[2]] = (tuple(meant.shape[1:]), checkpoint.tensors[keys[name][0][0]].dtype)
    layout = BlockLayout.of(shapes)
    pieces: list[_Piece] = []
    for spec, (name, meant) in zip(layout.tensors, names.items(), strict=True):
        pieces += _tensor_pieces(checkpoint, name, tuple(meant.shape), spec, keys[name])
    return layout, pieces


def _tensor_pieces(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], spec: TensorSpec, parts: list[list[str]]) -> list[_Piece]:
    """The pieces of one tensor of the block, checked against the shape [E, ...] that the model has."""
    first = checkpoint.targets[parts[0][0]]
    if first.part is None:
        stored = checkpoint.tensors[parts[0][0]]
        _check(checkpoint, name, parts[0][0], stored.shape == shape and stored.dtype == spec.dtype, (shape, spec.dtype))
        return [
            ((spec.offset, spec.num_bytes), name, [stored.path] * shape[0], [stored.offset + e * spec.num_bytes for e in range(shape[0])])
        ]
    pieces, at = [], spec.offset
    for keys in parts:
        stored = [checkpoint.tensors[key] for key in keys]
        for key, tensor in zip(keys, stored, strict=True):
            is_right = tensor.shape == stored[0].shape and tensor.shape[1:] == shape[2:] and tensor.dtype == spec.dtype
            _check(checkpoint, name, key, is_right, (shape[1:], spec.dtype))
        pieces.append(((at, stored[0].num_bytes), name, [tensor.path for tensor in stored], [tensor.offset for tensor in stored]))
        at += stored[0].num_bytes
    is_whole = at == spec.offset + prod(shape[1:]) * (spec.num_bytes // prod(spec.shape)) and len(parts) == first.num_parts
    if not is_whole or any(len(keys) != shape[0] for keys in parts):
        told = ", ".join(f"{len(keys)} of {shape[0]} experts" for keys in parts)
        raise StoreError(f"{checkpoint.folder}: {name} is not whole: its {first.num_parts} parts have {told}, {at - spec.offset} bytes")
    return pieces


def _check(checkpoint: Checkpoint, name: str, key: str, is_right: bool, expected: Any) -> None:
    if not is_right:
        found = checkpoint.tensors[key]
        raise StoreError(
            f"{found.path}: tensor {key} is {found.shape} {found.dtype}, which does not fit {name} {expected[0]} {expected[1]}"
        )


class CheckpointStore:
    """The experts of a checkpoint, read from where they are; see `Store`. Gaps between the tensors of a block are not written.

    Parameters
    ----------
    source : a folder, or its `Checkpoint`.
    is_direct : whether to read past the system's cache; by default where the file system allows it.
    """

    def __init__(self, source: str | Path | Checkpoint, is_direct: bool | None = None) -> None:
        self.checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
        self._pieces = expert_pieces(self.checkpoint)
        self.layout = self._pieces.layout
        self.num_layers, self.num_experts = self._pieces.file.shape[:2]
        self.alignment = 1
        self.counters = StoreCounters()
        self._files = [AlignedFile(path, is_direct) for path in self._pieces.paths]

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the system's cache."""
        return all(file.is_direct for file in self._files)

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Read the parts of a block that its pieces cover; see `Store.read`."""
        first, end = checked_range(self, layer, expert, out, first_byte, num_bytes)
        for piece, (at, length) in enumerate(zip(self._pieces.at, self._pieces.num_bytes, strict=True)):
            start, stop = max(first, at), min(end, at + length)
            if start < stop:
                file = self._files[self._pieces.file[layer, expert, piece]]
                file.read(int(self._pieces.offset[layer, expert, piece]) + start - at, out[start:stop])
        self.counters.add(end - first)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
