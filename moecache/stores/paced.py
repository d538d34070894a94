"""`PacedStore`: an EMULATED link. Its reads end no earlier than they would over a link of given latency and bandwidth.

One machine can so play another's disk or bus, as far as waiting for bytes goes. The link serves one read after the other: a read that is
asked for at time t ends no earlier than

    max(t, when the link is free) + latency + bytes / bandwidth,

where latency is charged once a block (to the part that has its first byte). A machine whose own store is slower than that stays slower:
what is emulated is a bound from below. Two of these, one behind the other with a `HostTier` between them, stand for a disk and a bus.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moecache.stores.blocks import Store, StoreCounters, checked_range


class PacedStore:
    """Another store, behind an emulated link; see `Store`.

    Parameters
    ----------
    store : where the blocks are; it is closed with this one.
    latency_seconds : from asking to the first byte, 0 or more.
    bytes_per_second : above 0.
    clock, sleep : for tests; seconds now, and waiting for seconds.

    Attributes
    ----------
    label : what is emulated, in words.
    num_late : reads that the store below finished later than the link would have.
    """

    def __init__(
        self,
        store: Store,
        latency_seconds: float,
        bytes_per_second: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (latency_seconds >= 0 and bytes_per_second > 0):
            raise ValueError(f"latency_seconds={latency_seconds} must be 0 or more, bytes_per_second={bytes_per_second} above 0")
        self.store, self.layout = store, store.layout
        self.num_layers, self.num_experts, self.alignment = store.num_layers, store.num_experts, store.alignment
        self.latency_seconds, self.bytes_per_second = latency_seconds, bytes_per_second
        self.label = f"emulated link: {bytes_per_second / 1e9:g} GB/s, {latency_seconds * 1e6:g} us"
        self.counters = StoreCounters()
        self.num_late = 0
        self._clock, self._sleep = clock, sleep
        self._free_at = -np.inf
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Read from the store below and wait until the link would be done; see `Store.read`."""
        first, end = checked_range(self, layer, expert, out, first_byte, num_bytes)
        latency = self.latency_seconds if first == 0 else 0.0
        with self._lock:
            due = max(self._clock(), self._free_at) + latency + (end - first) / self.bytes_per_second
            self._free_at = due
        self.store.read(layer, expert, out, first, end - first)
        self._wait_until(due)
        self.counters.add(end - first)

    def _wait_until(self, due: float) -> None:
        left = due - self._clock()
        if left < 0:
            with self._lock:
                self.num_late += 1
        while left > 0:
            self._sleep(left)
            left = due - self._clock()

    def close(self) -> None:
        """Close the store below."""
        self.store.close()
