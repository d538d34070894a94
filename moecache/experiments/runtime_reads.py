"""How fast blocks come: a plain parallel reader to compare the runtime's demand reads with.

A disk is not one number, and a host may keep what was read a moment ago. So the plain reader reads the *same* blocks in the same groups as
the runtime while decoding, in the same run, half of the time before it and half of the time after it. A disk may also be slower when it
never rests, as many virtual ones are: between two groups the plain reader rests as long as the runtime computed, and rests do not count.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep

import numpy as np
import pandas as pd

from moecache.kernel import Outcome
from moecache.runtime.transfer import NUM_READERS
from moecache.stores.blocks import aligned_bytes
from moecache.stores.packed_file import FILE_NAME, read_packed_header
from moecache.trace import DecisionLog

Group = list[tuple[int, int]]  # (layer, expert) of one step's demand reads


def demand_groups(log: DecisionLog, first_token: int = 0, end_token: int | None = None) -> list[Group]:
    """What each step waited for: the fetched and forced experts of every layer and token that had any, in order."""
    is_read = np.isin(log.outcome, (int(Outcome.FETCHED), int(Outcome.FORCED)))
    groups = []
    for token in range(first_token, len(is_read) if end_token is None else end_token):
        for layer in range(is_read.shape[1]):
            experts = log.computed_ids[token, layer][is_read[token, layer]]
            if experts.size:
                groups.append([(layer, int(expert)) for expert in experts])
    return groups


class PlainReader:
    """Threads that read blocks of a packed file into aligned memory of their own, and do nothing else.

    Parameters
    ----------
    folder : of the packed checkpoint; its file is opened by a descriptor of this reader's own.
    is_direct : past the system's cache, as the store does (`PackedStore.is_direct`).
    num_readers : threads.
    """

    def __init__(self, folder: Path, is_direct: bool, num_readers: int = NUM_READERS) -> None:
        path = Path(folder) / FILE_NAME
        self.header, _ = read_packed_header(path)
        self._descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
        self._asked: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._done: SimpleQueue[int | OSError] = SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True, name=f"plain read {i}") for i in range(num_readers)]
        for thread in self._threads:
            thread.start()

    def read(self, groups: Sequence[Group], rest_seconds: float = 0.0) -> tuple[int, float]:
        """Read group after group, the blocks of one group together, with rests between them; returns (bytes, seconds without the rests)."""
        num_bytes, seconds = 0, 0.0
        for group in groups:
            sleep(rest_seconds)
            start = perf_counter()
            for which in group:
                self._asked.put(which)
            done = [self._done.get() for _ in group]
            seconds += perf_counter() - start
            num_bytes += sum(_checked(number) for number in done)
        return num_bytes, seconds

    def close(self) -> None:
        """Stop the threads and close the file."""
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._descriptor)

    def _serve(self) -> None:
        block = aligned_bytes(self.header.layout.block_bytes)
        block[:] = 0  # touched, so that it is there
        while (which := self._asked.get()) is not None:
            try:
                self._done.put(self._read(block, self.header.offset(*which)))
            except OSError as fault:
                self._done.put(fault)

    def _read(self, block: np.ndarray, offset: int) -> int:
        done = 0
        while done < block.size:
            got = os.preadv(self._descriptor, [block[done:]], offset + done)  # type: ignore[list-item]
            if got == 0:
                raise OSError(f"expected {block.size} bytes at {offset}, got {done}; pack the checkpoint again")
            done += got
        return done


def _checked(number: int | OSError) -> int:
    if isinstance(number, OSError):
        raise number
    return number


def compared_reads(reads: pd.DataFrame, num_draws: int = 2000, seed: int = 0) -> dict[str, float]:
    """The runtime's demand reads against the plain reader's, over all blocks of tokens.

    Parameters
    ----------
    reads : one row a block of tokens: num_bytes, fetch_seconds (runtime), plain_seconds, is_plain_first.

    Returns
    -------
    dict
        num_groups, num_bytes; fetch_bytes_per_second, plain_bytes_per_second; ratio with ratio_low, ratio_high (95 %, blocks drawn
        again); ratio_plain_first and ratio_plain_second, by who read first.
    """
    picks = np.random.default_rng(seed).integers(len(reads), size=(num_draws, len(reads)))
    mine, plain = reads["fetch_seconds"].to_numpy(), reads["plain_seconds"].to_numpy()
    low, high = np.quantile(plain[picks].sum(axis=1) / mine[picks].sum(axis=1), (0.025, 0.975))
    first = reads["is_plain_first"].to_numpy()
    num_bytes = float(reads["num_bytes"].sum())
    return {
        "num_groups": int(reads["num_groups"].sum()),
        "num_bytes": int(num_bytes),
        "fetch_bytes_per_second": num_bytes / mine.sum(),
        "plain_bytes_per_second": num_bytes / plain.sum(),
        "ratio": plain.sum() / mine.sum(),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "ratio_plain_first": plain[first].sum() / mine[first].sum(),
        "ratio_plain_second": plain[~first].sum() / mine[~first].sum(),
    }
