"""`measure_hardware`: a `Hardware` of the machine at hand, measured in a few seconds with NumPy alone.

Three things are timed, each for about the same time: the link (reads of whole experts from a scratch file that bypass the system's cache
where it can be bypassed, or copies in main memory), its latency (reads of 4 KiB), and the computation of one expert, as the product of a
float32 matrix of that many bytes with a vector. Each constant is a median; where other work disturbs even that (several BLAS threads on
busy cores are the usual case: set OMP_NUM_THREADS=1), the median product is far above the fastest, and `derivation` shows both.

A disk is not one number: the same disk gives other rates within the hour, and a virtual one has a cache of its host's that nobody here can
bypass. So the constants are dated, and good for orders of magnitude; a comparison of seconds measures again. The time of a layer outside
its experts belongs to the model and is not measured here.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from moecache.hardware import Hardware
from moecache.provenance import provenance

LINKS = ("disk", "memory")
ALIGNMENT = 4096  # what O_DIRECT asks of offset, length and address
WORKING_SET_BYTES = 384 * 2**20  # matrices and blocks are taken in turn, so that none stays in the processor's cache


def measure_hardware(
    expert_bytes: int = 6 * 2**20,
    *,
    link: str = "disk",
    directory: str | Path | None = None,
    file_bytes: int = 256 * 2**20,
    layer_seconds: float = 0.0,
    seconds_each: float = 1.5,
    progress: bool = True,
) -> Hardware:
    """Measure this machine: about three times `seconds_each`, and writing the scratch file.

    Parameters
    ----------
    expert_bytes : size of one expert, at least 4096.
    link : "disk" (experts in a file, slots in main memory) or "memory" (experts and slots in main memory).
    directory : where the scratch file goes, by default the system's temporary folder; it should be on the disk in question.
    file_bytes : size of the scratch file; it holds at least two experts.
    layer_seconds : fixed time of a layer outside its experts, which only the model knows.
    seconds_each : how long each thing is timed.
    progress : show a progress bar.

    Returns
    -------
    Hardware : kind "measured"; `derivation` names date, processor, and how the file was read.

    Raises
    ------
    ValueError : an unknown link, or an expert below 4096 bytes.
    """
    if link not in LINKS:
        raise ValueError(f"link={link!r} is unknown; choose one of {', '.join(LINKS)}")
    if expert_bytes < ALIGNMENT:
        raise ValueError(f"expert_bytes={expert_bytes} must be at least {ALIGNMENT}")
    with tqdm(total=3, desc="measuring this machine", disable=not progress) as bar:
        expert_seconds, fastest = _matrix_seconds(expert_bytes, seconds_each)
        bar.update()
        measure = _disk if link == "disk" else _memory
        rate, latency, how = measure(expert_bytes, Path(directory or tempfile.gettempdir()), file_bytes, seconds_each)
        bar.update(2)
    facts = provenance()
    return Hardware(
        f"this machine ({link})",
        rate,
        latency,
        layer_seconds=layer_seconds,
        expert_seconds=expert_seconds,
        kind="measured",
        derivation=f"{facts['date']}, {facts['machine']['cpu']}: {how}; medians for experts of {expert_bytes} bytes; expert = "
        f"float32 matrix times vector in NumPy, the fastest {fastest:.2e} s; layer_seconds was given, not measured.",
    )


def _matrix_seconds(expert_bytes: int, seconds: float) -> tuple[float, float]:
    """Median and fastest product of a float32 matrix of `expert_bytes` with a vector."""
    columns = 2048 if expert_bytes >= 4 * 2048 else expert_bytes // 4
    rows = max(expert_bytes // (4 * columns), 1)
    matrices = np.ones((_num_in_turn(expert_bytes), rows, columns), np.float32)
    vector, result = np.full(columns, 0.5, np.float32), np.empty(rows, np.float32)
    times = _times(lambda i: np.dot(matrices[i % len(matrices)], vector, out=result), seconds)
    return float(np.median(times)), min(times)


def _num_in_turn(expert_bytes: int) -> int:
    return max(-(-WORKING_SET_BYTES // expert_bytes), 2)


def _memory(expert_bytes: int, directory: Path, file_bytes: int, seconds: float) -> tuple[float, float, str]:
    """Rate of copying whole experts in main memory, no latency, and how it was done."""
    del directory, file_bytes
    blocks, slot = np.ones((_num_in_turn(expert_bytes), expert_bytes), np.uint8), np.zeros(expert_bytes, np.uint8)
    elapsed = float(np.median(_times(lambda i: np.copyto(slot, blocks[i % len(blocks)]), seconds)))
    return expert_bytes / elapsed, 0.0, "copy in main memory"


def _disk(expert_bytes: int, directory: Path, file_bytes: int, seconds: float) -> tuple[float, float, str]:
    """Rate and latency of reads at random places of a scratch file, and how it was read."""
    block = -(-expert_bytes // ALIGNMENT) * ALIGNMENT
    num_blocks = max(file_bytes // block, 2)
    with scratch_file(directory, block, num_blocks) as path, _opened(path) as (descriptor, how):
        small = _read_seconds(descriptor, ALIGNMENT, num_blocks * (block // ALIGNMENT), seconds)
        whole = _read_seconds(descriptor, block, num_blocks, seconds)
    latency = min(small, whole / 2)  # of a read that is nothing but latency
    return expert_bytes / (whole - latency), latency, how


def _read_seconds(descriptor: int, num_bytes: int, num_blocks: int, seconds: float) -> float:
    """Median seconds of reading `num_bytes` at places in a random order without repetition (then again from the first)."""
    order = np.random.default_rng(1).permutation(num_blocks)
    with mmap.mmap(-1, num_bytes) as buffer:  # page aligned, as O_DIRECT asks

        def read(i: int) -> None:
            place = int(order[i % num_blocks]) * num_bytes
            if os.preadv(descriptor, [buffer], place) != num_bytes:
                raise OSError(f"the scratch file gave fewer than {num_bytes} bytes at {place}")

        return float(np.median(_times(read, seconds)))


@contextmanager
def scratch_file(directory: Path, block: int, num_blocks: int) -> Iterator[Path]:
    """A file of `num_blocks` blocks of random bytes, on the disk itself, deleted afterwards."""
    handle, name = tempfile.mkstemp(dir=directory, prefix="moecache-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            content = np.random.default_rng(2).bytes(block)
            for _ in range(num_blocks):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, str]]:
    """The file open for reading past the system's cache, or with the cache dropped once where that is refused."""
    descriptor, how = -1, "reads with O_DIRECT from a scratch file"
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        with mmap.mmap(-1, ALIGNMENT) as buffer:
            os.preadv(descriptor, [buffer], 0)
        if not hasattr(os, "O_DIRECT"):
            raise OSError("no O_DIRECT on this system")
    except OSError:  # some file systems refuse it when opening, some when reading
        if descriptor >= 0:
            os.close(descriptor)
        descriptor, how = os.open(path, os.O_RDONLY), "buffered reads from a scratch file (the system's cache may have helped)"
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        yield descriptor, how
    finally:
        os.close(descriptor)


def _times(work: Callable[[int], object], seconds: float) -> list[float]:
    """The times of work(1), work(2), ... over about `seconds`, after a first run that is thrown away."""
    work(0)
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work(len(times) + 1)
        times.append(time.perf_counter() - start)
    return times
