"""`HostTier`: main memory between a disk and the slots, holding the blocks that were read most recently.

Slots are few and policies decide what is in them. Behind them there is often room for more experts than slots but not for all: then a
miss costs a copy if the tier has the block, and a read from the disk otherwise. The rule is exact LRU: each read of a block from its
first byte on is a use, and the block used least recently leaves when another needs its place. A tier of the size of all blocks ends up as
a store in memory.

Blocks may be read in parts, by several threads: a block fills from the front as far as it has been asked for, is read from below once, and
is not given up while somebody reads it. If every place is in use, a read goes past the tier. Policies are not known here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moecache.stores.blocks import ALIGNMENT, Store, StoreCounters, StoreError, aligned_bytes, checked_range


@dataclass
class _Entry:
    """A block in the tier: its place, how many bytes of it are there, how many reads are under way."""

    place: int
    num_filled: int = 0
    num_users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class HostTier:
    """The most recently read blocks of another store; see `Store`.

    Parameters
    ----------
    store : where the others are; it is closed with the tier.
    num_bytes : main memory for blocks; at least one, and no more than all are used.
    is_pinned : whether it is page-locked, for copies to a GPU.

    Attributes
    ----------
    num_places : blocks that fit.
    counters : `num_hits` and `num_misses` count reads from a block's first byte on; bytes count all reads.
    """

    def __init__(self, store: Store, num_bytes: int, is_pinned: bool = False) -> None:
        block_bytes = store.layout.block_bytes
        if num_bytes < block_bytes:
            raise ValueError(f"a host tier of {num_bytes} bytes holds no block of {block_bytes}; give at least that, or 0 for no tier")
        self.store, self.layout = store, store.layout
        self.num_layers, self.num_experts = store.num_layers, store.num_experts
        self.alignment = store.alignment
        self.num_places = min(num_bytes // block_bytes, store.num_layers * store.num_experts)
        self.counters = StoreCounters()
        self._blocks = aligned_bytes(self.num_places * block_bytes, is_pinned).reshape(self.num_places, block_bytes)
        self._free = list(range(self.num_places - 1, -1, -1))
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Copy from the tier, reading from below what is not there yet; see `Store.read`."""
        first, end = checked_range(self, layer, expert, out, first_byte, num_bytes)
        entry, is_hit = self._take(layer, expert, first, end)
        if entry is None:
            self.store.read(layer, expert, out, first, end - first)
        else:
            try:
                self._fill(layer, expert, entry, end)
                out[first:end] = self._blocks[entry.place, first:end]
            finally:
                with self._lock:
                    entry.num_users -= 1
        self.counters.add(end - first, is_hit if first == 0 else None)

    def _take(self, layer: int, expert: int, first: int, end: int) -> tuple[_Entry | None, bool]:
        """The block's entry, held for this read, or None where every place is in use; and whether all bytes are there."""
        key = (layer, expert)
        with self._lock:
            if self._blocks.size == 0:
                raise StoreError(f"layer {layer}, expert {expert} was asked for after the host tier was closed")
            entry = self._entries.get(key)
            if entry is None:
                place = self._place()
                if place is None:
                    return None, False
                entry = self._entries[key] = _Entry(place)
            elif first == 0:
                self._entries.move_to_end(key)
            entry.num_users += 1
            return entry, entry.num_filled >= end

    def _place(self) -> int | None:
        """A free place, made by giving up the least recently used block that nobody reads."""
        if self._free:
            return self._free.pop()
        victim = next((key for key, entry in self._entries.items() if not entry.num_users), None)
        return None if victim is None else self._entries.pop(victim).place

    def _fill(self, layer: int, expert: int, entry: _Entry, end: int) -> None:
        """Read from below up to `end`; a second thread that needs the same bytes waits for them here."""
        with entry.lock:
            if entry.num_filled < end:
                start = entry.num_filled - entry.num_filled % ALIGNMENT
                self.store.read(layer, expert, self._blocks[entry.place], start, end - start)
                entry.num_filled = end

    def close(self) -> None:
        """Let go of the memory and close the store below."""
        with self._lock:
            self._entries.clear()
            self._free.clear()
            self._blocks = np.empty((0, self.layout.block_bytes), np.uint8)
        self.store.close()
