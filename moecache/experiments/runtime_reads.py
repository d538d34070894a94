"""How fast blocks come: a plain parallel reader to compare the runtime's demand reads with.

A disk is not one number, and a host may keep what was read a moment ago. So the plain reader reads the *same* blocks in the same groups as
the runtime while decoding, in the same run, half of the time before it and half of the time after it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

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
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(num_readers, initializer=self._take_memory)

    def read(self, groups: Sequence[Group]) -> tuple[int, float]:
        """Read group after group, the blocks of one group together; returns (bytes, seconds)."""
        start = perf_counter()
        num_bytes = sum(sum(self._threads.map(self._read, group)) for group in groups)
        return num_bytes, perf_counter() - start

    def close(self) -> None:
        """Stop the threads and close the file."""
        self._threads.shutdown()
        os.close(self._descriptor)

    def _take_memory(self) -> None:
        self._own.block = aligned_bytes(self.header.layout.block_bytes)
        self._own.block[:] = 0  # touched, so that it is there

    def _read(self, which: tuple[int, int]) -> int:
        block, offset, done = self._own.block, self.header.offset(*which), 0
        while done < block.size:
            got = os.preadv(self._descriptor, [block[done:]], offset + done)
            if got == 0:
                raise OSError(f"expected {block.size} bytes at {offset}, got {done}; pack the checkpoint again")
            done += got
        return done


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
