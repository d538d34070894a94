"""Places that hold experts, and how to open one.

| store | where the blocks are | read by |
|---|---|---|
| `CheckpointStore` | a checkpoint as downloaded: tensors of one expert in several shards, at any offset | enclosing aligned ranges |
| `PackedStore` | one file made by `moecache pack`: an aligned block per expert, with checksums | one read |
| `DequantisedStore` | such a file with experts in few bits in the plain order, given as full blocks | one read, and arithmetic |
| `RamStore` | main memory, optionally page-locked | a copy |
| `HostTier` | main memory, the most recently read blocks of another store | a copy, or the other store |
| `PacedStore` | another store, its reads completed no earlier than a given link would | the other store |

`open_store` finds out what a path is. Slots, policies and devices are not known here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from moecache import hf_internals
from moecache.stores.blocks import (
    ALIGNMENT,
    BlockLayout,
    Store,
    StoreCounters,
    StoreError,
    TensorSpec,
    aligned_bytes,
    checked_range,
)
from moecache.stores.checkpoint import Checkpoint
from moecache.stores.checkpoint_store import CheckpointStore
from moecache.stores.host_tier import HostTier
from moecache.stores.low_bit_blocks import DequantisedStore
from moecache.stores.paced import PacedStore
from moecache.stores.packed_file import FILE_NAME, PackedStore
from moecache.stores.product_blocks import check_order

__all__ = [
    "ALIGNMENT",
    "BlockLayout",
    "CheckpointStore",
    "DequantisedStore",
    "HostTier",
    "PacedStore",
    "PackedStore",
    "RamStore",
    "Store",
    "StoreCounters",
    "StoreError",
    "TensorSpec",
    "aligned_bytes",
    "open_store",
]


def open_store(source: str | Path | Checkpoint, host_bytes: int = 0, check: str = "first", is_pinned: bool = False) -> Store:
    """Open the experts of a folder: packed ones if it has them, else those of its checkpoint.

    Rounded experts come as full blocks where they lie in the plain order, and as they are where products compute with them so.

    Parameters
    ----------
    source : a checkpoint's folder, one made by `moecache pack`, a packed file, or a checkpoint's headers.
    host_bytes : main memory for the most recently read blocks; 0 = no such tier.
    check : when checksums of a packed file are compared: "first", "always" or "never".
    is_pinned : whether that memory is page-locked, for copies to a GPU.

    Returns
    -------
    Store

    Raises
    ------
    StoreError : it is not there, not whole, not understood, or packed for another kind of processor.
    """
    folder = source.folder if isinstance(source, Checkpoint) else Path(source)
    if folder.is_file() or (folder / FILE_NAME).is_file():
        packed = PackedStore(folder, check)
        if packed.header.order is not None and packed.header.bits is not None:
            check_order(packed.header.order, packed.header.bits, folder)
        tier = HostTier(packed, host_bytes, is_pinned) if host_bytes else packed
        is_plain = packed.header.bits is not None and packed.header.order is None
        return DequantisedStore(tier, packed.header) if is_plain else tier
    store = CheckpointStore(source)
    return HostTier(store, host_bytes, is_pinned) if host_bytes else store


class RamStore:
    """Every block in main memory.

    Parameters
    ----------
    layout : how a block looks.
    blocks : ndarray [L, E, block_bytes] uint8, contiguous; kept, not copied.
    """

    def __init__(self, layout: BlockLayout, blocks: NDArray[np.uint8]) -> None:
        if blocks.ndim != 3 or blocks.dtype != np.uint8 or blocks.shape[2] != layout.block_bytes:
            raise ValueError(f"blocks must be uint8 [L, E, {layout.block_bytes}], got {blocks.dtype} {blocks.shape}")
        self.layout = layout
        self.num_layers, self.num_experts = blocks.shape[:2]
        self.alignment = 1
        self.counters = StoreCounters()
        self._blocks: NDArray[np.uint8] | None = blocks

    @classmethod
    def from_model(cls, model: Any, is_pinned: bool = False) -> RamStore:
        """Copy the experts of a loaded transformers model into blocks.

        Raises
        ------
        ValueError : layers whose experts differ in number, shapes or dtypes.
        """
        import torch

        layers = [dict(layer.experts.named_parameters()) for layer in hf_internals.moe_layers(model)]
        looks = [{name: (weight.shape[1:], str(weight.dtype).removeprefix("torch.")) for name, weight in layer.items()} for layer in layers]
        num_experts = {len(weight) for layer in layers for weight in layer.values()}
        if any(look != looks[0] for look in looks) or len(num_experts) != 1:
            raise ValueError(f"MoE layers of one kind are needed, got {looks}")
        layout = BlockLayout.of(looks[0])
        blocks = _empty_blocks(layout, len(layers), num_experts.pop(), is_pinned)
        with torch.no_grad():
            for layer, weights in enumerate(layers):
                for expert, block in enumerate(torch.from_numpy(blocks[layer])):
                    for name, view in layout.views(block).items():
                        view.copy_(weights[name][expert])
        return cls(layout, blocks)

    @classmethod
    def from_store(cls, store: Store, is_pinned: bool = False, progress: bool = True) -> RamStore:
        """Read every block of another store into main memory."""
        blocks = _empty_blocks(store.layout, store.num_layers, store.num_experts, is_pinned)
        total = store.num_layers * store.num_experts
        for index in tqdm(range(total), desc="reading experts", disable=not progress):
            layer, expert = divmod(index, store.num_experts)
            store.read(layer, expert, blocks[layer, expert])
        return cls(store.layout, blocks)

    def block(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The block itself, [block_bytes] uint8, without a copy; read, never written to."""
        if self._blocks is None:
            raise StoreError(f"layer {layer}, expert {expert} was asked for after the store in main memory was closed")
        return self._blocks[layer, expert]

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Copy a block or a part of it; see `Store.read`."""
        first, end = checked_range(self, layer, expert, out, first_byte, num_bytes)
        out[first:end] = self.block(layer, expert)[first:end]
        self.counters.add(end - first)

    def close(self) -> None:
        """Let go of the memory."""
        self._blocks = None


def _empty_blocks(layout: BlockLayout, num_layers: int, num_experts: int, is_pinned: bool) -> NDArray[np.uint8]:
    raw = aligned_bytes(num_layers * num_experts * layout.block_bytes, is_pinned)
    return raw.reshape(num_layers, num_experts, layout.block_bytes)
