"""One expert is one block of bytes: what lies where in it, and what every place that holds blocks can do.

An expert has a few tensors (two matrices, in some families two biases, with low precision the scales as well). They are laid one after the
other into a *block* whose length is a multiple of 4096 bytes, because that is what reading past the system's cache asks for. All experts of
a model share one layout, so a slot is one block and an expert is moved by one read.

A *store* is any object with the members of `Store`: it says how blocks look and copies the bytes of one into an array that the caller owns.
Disk, packed file, main memory, a tier in front of another store and an emulated link all are stores, so they can be stacked.

Nothing here knows policies, slots or devices, and nothing decides which expert is read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

ALIGNMENT = 4096  # bytes; what O_DIRECT asks of address, offset and length on every common disk
TENSOR_ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element's size
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int8": 1, "uint8": 1}


class StoreError(ValueError):
    """A block could not be had whole: the message names the file, the place in it, and what was expected and found."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a block: `name` as in the experts module, `shape` without the expert dimension, `offset` and `num_bytes` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class BlockLayout:
    """The tensors of a block and its length, a multiple of 4096 bytes."""

    tensors: tuple[TensorSpec, ...]
    block_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[Sequence[int], str]]) -> BlockLayout:
        """Lay tensors one after the other, each at a multiple of 64 bytes.

        Parameters
        ----------
        tensors : for each name its shape and the name of its dtype, such as ``((1024, 2048), "bfloat16")``.

        Raises
        ------
        ValueError : no tensors, or a dtype that is not understood.
        """
        if not tensors:
            raise ValueError("a block needs at least one tensor, got none")
        specs, end = [], 0
        for name, (shape, dtype) in tensors.items():
            if dtype not in ITEM_BYTES:
                raise ValueError(f"tensor {name!r} has dtype {dtype!r}; understood are {', '.join(ITEM_BYTES)}")
            offset = round_up(end, TENSOR_ALIGNMENT)
            specs.append(TensorSpec(name, tuple(int(n) for n in shape), dtype, offset, prod(shape) * ITEM_BYTES[dtype]))
            end = offset + specs[-1].num_bytes
        return cls(tuple(specs), round_up(end, ALIGNMENT))

    @property
    def expert_bytes(self) -> int:
        """Bytes of the tensors alone, without the gaps."""
        return sum(spec.num_bytes for spec in self.tensors)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors inside a block, as views: other bytes in the block are another expert under the same views.

        Parameters
        ----------
        block : tensor [block_bytes or more] uint8, contiguous, its address a multiple of 64.

        Raises
        ------
        ValueError : another dtype, or a block that is too short.
        """
        import torch

        if block.dtype != torch.uint8 or block.ndim != 1 or block.numel() < self.block_bytes:
            raise ValueError(f"a block is uint8 [{self.block_bytes} or more], got {block.dtype} {list(block.shape)}")
        parts = {spec.name: block[spec.offset : spec.offset + spec.num_bytes] for spec in self.tensors}
        return {spec.name: parts[spec.name].view(getattr(torch, spec.dtype)).view(spec.shape) for spec in self.tensors}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "block_bytes": self.block_bytes,
            "tensors": [{**vars(spec), "shape": list(spec.shape)} for spec in self.tensors],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockLayout:
        """The inverse of `to_dict`.

        Raises
        ------
        ValueError : tensors that overlap, leave the block or do not have the bytes of their shape.
        """
        specs = tuple(TensorSpec(**{**row, "shape": tuple(row["shape"])}) for row in values["tensors"])
        layout = cls(specs, int(values["block_bytes"]))
        end = 0
        for spec in specs:
            if spec.offset < end or spec.dtype not in ITEM_BYTES or prod(spec.shape) * ITEM_BYTES[spec.dtype] != spec.num_bytes:
                raise ValueError(f"tensor {spec} does not fit behind byte {end} of its block")
            end = spec.offset + spec.num_bytes
        if end > layout.block_bytes or layout.block_bytes % ALIGNMENT:
            raise ValueError(f"blocks of {layout.block_bytes} bytes must be a multiple of {ALIGNMENT} and hold {end}")
        return layout


@dataclass
class StoreCounters:
    """What a store has been asked for since it was opened; safe to add to from several threads.

    `num_reads` counts reads (whole blocks or parts of one), `num_bytes` the bytes they delivered; `num_hits` those that a tier held, and
    `num_misses` those that it had to ask for.
    """

    num_reads: int = 0
    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, num_bytes: int, is_hit: bool | None = None) -> None:
        """Count one read."""
        with self._lock:
            self.num_reads += 1
            self.num_bytes += num_bytes
            self.num_hits += is_hit is True
            self.num_misses += is_hit is False

    def to_dict(self) -> dict[str, int]:
        """Plain numbers by name."""
        with self._lock:
            return {name: getattr(self, name) for name in ("num_reads", "num_bytes", "num_hits", "num_misses")}


class Store(Protocol):
    """What everything that holds blocks can do.

    Attributes
    ----------
    layout : how a block looks.
    num_layers, num_experts : L and E; every pair (layer, expert) has a block.
    alignment : `out`'s address, `first_byte` and `num_bytes` must be multiples of this many bytes.
    counters : what has been read.
    """

    layout: BlockLayout
    num_layers: int
    num_experts: int
    alignment: int
    counters: StoreCounters

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Copy an expert's bytes into ``out[first_byte : first_byte + num_bytes]``; blocks until they are there. Safe from any thread.

        Parameters
        ----------
        out : ndarray [block_bytes or more] uint8, contiguous: the whole block, also where a part of it is read.
        first_byte, num_bytes : the part; by default everything from `first_byte` on.

        Raises
        ------
        StoreError : the bytes are not there, or not those that were stored.
        """
        ...

    def close(self) -> None:
        """Give files and memory back; reading afterwards is a StoreError."""
        ...


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is at least `number`."""
    return -(-number // multiple) * multiple


def checked_range(store: Store, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int, num_bytes: int | None) -> tuple[int, int]:
    """The part [first, end) of a block that a read asks for.

    Raises
    ------
    ValueError : a layer, expert, array or part that does not exist or is not aligned.
    """
    if not (0 <= layer < store.num_layers and 0 <= expert < store.num_experts):
        raise ValueError(f"layer {layer}, expert {expert} is outside {store.num_layers} layers of {store.num_experts} experts")
    end = store.layout.block_bytes if num_bytes is None else first_byte + num_bytes
    if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous or out.size < store.layout.block_bytes:
        raise ValueError(f"out must be a contiguous uint8 array of {store.layout.block_bytes} bytes or more, got {out.dtype} {out.shape}")
    if not 0 <= first_byte <= end <= store.layout.block_bytes:
        raise ValueError(f"bytes {first_byte}..{end} are outside a block of {store.layout.block_bytes}")
    address = out.__array_interface__["data"][0]
    if any(value % store.alignment for value in (first_byte, end, address)):
        raise ValueError(f"address {address}, first byte {first_byte} and end {end} must be multiples of {store.alignment}")
    return first_byte, end


def aligned_bytes(num_bytes: int, is_pinned: bool = False) -> NDArray[np.uint8]:
    """A uint8 array [num_bytes] at an address that is a multiple of 4096; `is_pinned` = page-locked, for copies to a GPU."""
    if is_pinned:
        import torch

        raw = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True).numpy()
    else:
        raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + num_bytes]
