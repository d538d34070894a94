"""This machine: what it is, and how fast its parts are.

Chapters that show seconds stand on a few rates: of the memory, of the disk, of the products of one expert. No rate of a machine is one
number: clocks change, neighbours share memory and disk, and a virtual disk has a cache of its host's behind it. So every part is measured
in *rounds*, all parts one after the other in each round, and the rounds are kept apart: what they disagree by is part of the answer.

Each row of `measure_rounds` is one part in one round: units of work as large as one expert, one after the other on one thread, taken in
turn from more memory than a processor's cache holds, or from places of a file in a random order. The time of a unit is the median of the
round, because other processes may take the core away for a moment; only for reads in flight together it is elapsed time over units.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from moecache.hardware_probe import WORKING_SET_BYTES, measure_hardware, scratch_file
from moecache.provenance import provenance
from moecache.runtime.call import without_onednn
from moecache.stores.aligned_read import AlignedFile
from moecache.stores.blocks import ALIGNMENT, aligned_bytes, round_up

NUM_READERS = 4
COPY, READ = "memory, copying", "memory, reading"
DISK, AGAIN, TOGETHER = "disk, one read at a time", "disk, the same blocks again", f"disk, {NUM_READERS} reads in flight"
ONEDNN, PLAIN, FLOAT32 = "products, bfloat16, oneDNN", "products, bfloat16, without oneDNN", "products, float32"
PARTS = (READ, COPY, DISK, AGAIN, TOGETHER, ONEDNN, PLAIN, FLOAT32)


@dataclass(frozen=True)
class ExpertSize:
    """The size of an expert: two matrices in, one out, of `hidden_size` x `expert_width` weights each."""

    hidden_size: int
    expert_width: int

    @property
    def num_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden_size * self.expert_width


def facts() -> pd.DataFrame:
    """What this machine is, one row a fact: `fact`, `value`, both words. Neither host nor user is named."""
    about = provenance()
    machine, versions = about["machine"], about["versions"]
    memory = f"{machine['memory_bytes'] / 2**30:.1f} GiB" if machine["memory_bytes"] else "unknown"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine["num_cores"]
    rows = {
        "processor": machine["cpu"],
        "cores": f"{machine['num_cores']}, of which {usable} may be used",
        "instruction set that torch uses": torch.backends.cpu.get_cpu_capability(),
        "main memory": memory,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": machine["system"],
        "Python": platform.python_version(),
        **{name: versions[name] for name in ("torch", "transformers", "numpy", "numba") if name in versions},
        "threads of torch": str(torch.get_num_threads()),
    }
    return pd.DataFrame({"fact": list(rows), "value": [str(value) for value in rows.values()]})


def constants(expert_bytes: int, directory: str | Path | None, file_bytes: int, seconds_each: float) -> pd.DataFrame:
    """What `measure_hardware` says of both links, as the cost model uses it.

    Returns
    -------
    DataFrame : `link`, `gigabytes_per_second`, `latency_seconds`, `expert_seconds` (a float32 product in NumPy), `derivation`.
    """
    rows = []
    for link in ("disk", "memory"):
        found = measure_hardware(
            expert_bytes, link=link, directory=directory, file_bytes=file_bytes, seconds_each=seconds_each, progress=False
        )
        rate = found.link_bytes_per_second / 1e9
        rows.append((link, rate, found.fetch_latency_seconds, found.seconds_per_expert(expert_bytes), found.derivation))
    return pd.DataFrame(rows, columns=["link", "gigabytes_per_second", "latency_seconds", "expert_seconds", "derivation"])


Probe = Callable[[int], tuple[int, int, float]]  # round -> units, bytes of a unit, seconds of a unit


def measure_rounds(
    size: ExpertSize,
    num_rounds: int,
    seconds_each: float,
    pause_seconds: float,
    num_blocks: int,
    directory: str | Path | None,
    file_bytes: int,
) -> pd.DataFrame:
    """Every part of the machine in every round.

    Parameters
    ----------
    size : of one expert; a block is one expert in bfloat16.
    num_rounds, pause_seconds : rounds, and the rest between two.
    seconds_each, num_blocks : of each part in memory, and blocks read for each part of the disk, in a round.
    directory, file_bytes : where the scratch file goes (None: the system's temporary folder), and how large it is.

    Returns
    -------
    DataFrame : `round`, `at_seconds` (since the first round), `part`, `num_units`, `unit_bytes`, `unit_seconds`.

    Raises
    ------
    ValueError : a file that holds fewer than 2 x `num_blocks` blocks.
    """
    block_bytes = round_up(2 * size.num_weights, ALIGNMENT)
    if file_bytes < (least := 2 * num_blocks * block_bytes):
        raise ValueError(f"file_bytes={file_bytes} must hold {2 * num_blocks} blocks of {block_bytes} bytes: give at least {least}")
    rows: list[tuple[int, float, str, int, int, float]] = []
    with ExitStack() as stack:
        probes = _memory_probes(seconds_each) | stack.enter_context(_disk_probes(block_bytes, num_blocks, directory, file_bytes))
        probes |= _product_probes(size, seconds_each)
        start = perf_counter()
        for number in range(num_rounds):
            sleep(pause_seconds if number else 0.0)
            for part in PARTS:
                at = perf_counter() - start
                rows.append((number, at, part, *probes[part](number)))
    return pd.DataFrame(rows, columns=["round", "at_seconds", "part", "num_units", "unit_bytes", "unit_seconds"])


def _timed(work: Callable[[int], Any], unit_bytes: int, seconds: float, number: int) -> tuple[int, int, float]:
    """Do work(number), work(number + 1), ... for about so long; the first is not counted."""
    work(number)
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        start = perf_counter()
        work(number + 1 + len(times))
        times.append(perf_counter() - start)
    return len(times), unit_bytes, float(np.median(times))


def _memory_probes(seconds: float) -> dict[str, Probe]:
    unit = 6 * 2**20 // 8
    blocks, slot = np.ones((WORKING_SET_BYTES // (8 * unit), unit)), np.zeros(unit)

    def copied(i: int) -> None:
        np.copyto(slot, blocks[i % len(blocks)])

    def read(i: int) -> None:
        np.dot(blocks[i % len(blocks)], blocks[i % len(blocks)])

    return {COPY: partial(_timed, copied, 8 * unit, seconds), READ: partial(_timed, read, 8 * unit, seconds)}


@contextmanager
def _disk_probes(block_bytes: int, num_blocks: int, directory: str | Path | None, file_bytes: int) -> Iterator[dict[str, Probe]]:
    """Reads of blocks in a random order: every block is read once before any is read anew, except where that is what is asked."""
    total = file_bytes // block_bytes
    order = np.random.default_rng(1).permutation(total)
    buffers = [aligned_bytes(block_bytes) for _ in range(NUM_READERS)]
    with scratch_file(Path(directory or gettempdir()), block_bytes, total) as path, ThreadPoolExecutor(NUM_READERS) as pool:
        file = AlignedFile(path)

        def chosen(number: int, half: int) -> list[int]:
            first = (2 * number + half) * num_blocks
            return [int(order[place % total]) for place in range(first, first + num_blocks)]

        def in_turn(number: int) -> tuple[int, int, float]:
            times = []
            for block in chosen(number, 0):
                start = perf_counter()
                file.read(block * block_bytes, buffers[0])
                times.append(perf_counter() - start)
            return num_blocks, block_bytes, float(np.median(times))

        def together(number: int) -> tuple[int, int, float]:
            blocks = chosen(number, 1)

            def every_fourth(reader: int) -> None:
                for block in blocks[reader::NUM_READERS]:
                    file.read(block * block_bytes, buffers[reader])

            start = perf_counter()
            list(pool.map(every_fourth, range(NUM_READERS)))
            return num_blocks, block_bytes, (perf_counter() - start) / num_blocks

        try:
            yield {DISK: in_turn, AGAIN: in_turn, TOGETHER: together}
        finally:
            file.close()


def _product_probes(size: ExpertSize, seconds: float) -> dict[str, Probe]:
    """One expert's products for one token: gate and up together, the activation, down."""
    generator = torch.Generator().manual_seed(1)
    num_bytes = 2 * size.num_weights
    weights = torch.randn(max(WORKING_SET_BYTES // num_bytes, 2), size.num_weights, generator=generator, dtype=torch.bfloat16)
    return {
        ONEDNN: _products(size, weights, seconds, is_plain=False),
        PLAIN: _products(size, weights, seconds, is_plain=True),
        FLOAT32: _products(size, weights[: len(weights) // 2].to(torch.float32), seconds, is_plain=False),
    }


def _products(size: ExpertSize, weights: torch.Tensor, seconds: float, is_plain: bool) -> Probe:
    hidden_size, width = size.hidden_size, size.expert_width
    token = torch.full((1, hidden_size), 0.01, dtype=weights.dtype)

    def product(i: int) -> None:
        expert = weights[i % len(weights)]
        first, last = expert[: 2 * width * hidden_size], expert[2 * width * hidden_size :]
        gate, up = F.linear(token, first.view(2 * width, hidden_size)).chunk(2, dim=-1)
        F.linear(F.silu(gate) * up, last.view(hidden_size, width))

    def probe(number: int) -> tuple[int, int, float]:
        with torch.no_grad(), without_onednn() if is_plain else nullcontext():
            return _timed(product, weights[0].nbytes, seconds, number)

    return probe
