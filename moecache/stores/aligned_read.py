"""Byte ranges of a file, read past the system's cache.

A file of experts is much larger than main memory, and which of them stay there is a policy's decision, not the system's. O_DIRECT reads
around the system's cache, at the price that address, offset and length are multiples of 4096 bytes. A range that is not aligned is
read as the aligned range around it, into a scratch buffer of the thread, and copied. Where a file system refuses O_DIRECT, ordinary
positioned reads take its place and the system is told after each that the pages are not wanted.

A read that ends early is no error to the operating system; here it is one, with the file, the place and both numbers. So is a file that has
changed since it was opened. What the bytes mean is not known here.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moecache.stores.blocks import ALIGNMENT, StoreError, aligned_bytes, round_up

SCRATCH_BYTES = 4 * 2**20
_scratch = threading.local()


class AlignedFile:
    """One open file; every method may be called from any thread.

    Parameters
    ----------
    path : the file.
    is_direct : whether to read past the system's cache; by default where the file system allows it.

    Attributes
    ----------
    is_direct : whether it does.
    num_bytes : length of the file when it was opened.
    """

    def __init__(self, path: Path, is_direct: bool | None = None) -> None:
        self.path = Path(path)
        self.is_direct, self._descriptor = _opened(self.path, is_direct)
        self._seen = _look(self._descriptor)
        self.num_bytes = self._seen[0]

    def read(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises
        ------
        StoreError : the file is closed, shorter than that, has changed since it was opened, or the disk reports an error.
        """
        self._check_unchanged(offset, out.size)
        address = out.__array_interface__["data"][0]
        if not self.is_direct or not (offset | address | out.size) % ALIGNMENT:
            self._fill(offset, out, out.size)
            return
        for start in range(0, out.size, SCRATCH_BYTES):
            self._read_around(offset + start, out[start : start + SCRATCH_BYTES])

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_around(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Copy a range of at most SCRATCH_BYTES out of the aligned range around it."""
        shift = offset % ALIGNMENT
        needed = shift + out.size
        scratch = _scratch_buffer()[: round_up(needed, ALIGNMENT)]
        self._fill(offset - shift, scratch, needed)
        out[:] = scratch[shift:needed]

    def _fill(self, offset: int, buffer: NDArray[np.uint8], needed: int) -> None:
        """Read until `needed` bytes are there; the buffer may be longer, because an aligned range may end behind the file."""
        done = 0
        while done < needed:
            try:
                got = os.preadv(self._descriptor, [buffer[done:]], offset + done)  # type: ignore[list-item]
            except OSError as fault:
                raise StoreError(f"{self.path}: reading {needed - done} bytes at {offset + done} failed: {fault}") from fault
            if got == 0:
                raise StoreError(
                    f"{self.path}: expected {needed} bytes at {offset}, got {done}; the file is truncated: download or pack it again"
                )
            done += got
            if done < needed and self.is_direct:
                done -= done % ALIGNMENT  # the next read has to be aligned again
                if not got >= ALIGNMENT:
                    raise StoreError(f"{self.path}: expected {needed} bytes at {offset}, got {done + got}; the file is truncated")
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, needed, os.POSIX_FADV_DONTNEED)

    def _check_unchanged(self, offset: int, num_bytes: int) -> None:
        if self._descriptor < 0:
            raise StoreError(f"{self.path} was closed before {num_bytes} bytes at {offset} were read")
        now = _look(self._descriptor)
        if now != self._seen:
            raise StoreError(
                f"{self.path} changed while it was open (bytes, then nanoseconds of the last change: {self._seen} when opened, {now} now); "
                f"open it again once nobody writes to it"
            )


def _look(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _scratch_buffer() -> NDArray[np.uint8]:
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = aligned_bytes(SCRATCH_BYTES + 2 * ALIGNMENT)
    return _scratch.buffer


def _opened(path: Path, is_direct: bool | None) -> tuple[bool, int]:
    """(whether reads bypass the system's cache, file descriptor)."""
    if is_direct is not False:
        try:
            return True, _direct(path)
        except FileNotFoundError as fault:
            raise StoreError(f"there is no file {path}") from fault
        except OSError as fault:
            if is_direct:
                raise StoreError(f"{path} cannot be read past the system's cache ({fault}); leave is_direct=None") from fault
    try:
        return False, os.open(path, os.O_RDONLY)
    except OSError as fault:
        raise StoreError(f"{path} cannot be opened: {fault}") from fault


def _direct(path: Path) -> int:
    """A descriptor for which a read past the system's cache has worked; some file systems refuse when opening, some when reading."""
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this system has no O_DIRECT")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(descriptor, [_scratch_buffer()[:ALIGNMENT]], 0)  # type: ignore[list-item]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
