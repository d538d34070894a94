"""How the kernel is compiled, and how its compiled form is kept honest.

`jit` is numba's `njit` with two settings. `nogil` lets other Python threads run. `_nrt=False` switches reference counting off: passing a
named tuple of arrays otherwise costs an atomic increment and decrement per array and call, which makes the whole kernel 16 to 25
times slower. It also turns any allocation inside the kernel into a compile error, which enforces that the kernel touches
nothing but the arrays it is given.

numba's disk cache looks only at the file that holds the cached function: an edit to `eviction.py` would leave the compiled
`replay` of `step.py` in use, with the old policy inside. `drop_stale_cache` compares a digest of all kernel sources with the one
stored beside the cache, and deletes the compiled files when they differ.

`entry` is for the one function that Python calls: its machine code, helpers included, is kept on disk. `inline` is for the helpers on
the path of every step: a call that passes the kernel's tuples passes some two hundred machine words, and doubles the time of a step
that hits.

This module knows nothing of policies.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
from numba import njit

KERNEL_DIRECTORY = Path(__file__).parent

# numba's type stubs lack _nrt.
entry = njit(nogil=True, cache=True, _nrt=False)  # pyright: ignore[reportCallIssue]
jit = njit(nogil=True, _nrt=False)  # pyright: ignore[reportCallIssue]
inline = njit(nogil=True, forceinline=True, _nrt=False)  # pyright: ignore[reportCallIssue]
PLACE_MASK = 2**48 - 1


@inline
def place(index):
    """An index of which the compiler knows that it is not negative, so that it leaves out the code for counting from the end."""
    return np.int64(index) & PLACE_MASK


def source_digest(directory: Path = KERNEL_DIRECTORY) -> str:
    """SHA-256 over the names and contents of every Python file in `directory`."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def drop_stale_cache(cache_directory: Path, sources: Path = KERNEL_DIRECTORY) -> bool:
    """Delete compiled kernel files that were made from other sources.

    Parameters
    ----------
    cache_directory : where numba keeps the compiled files (`replay.stats.cache_path`).
    sources : the folder whose Python files the compiled files must come from.

    Returns
    -------
    bool : True when the stored digest differed, so that everything will be compiled anew.
    """
    stamp, digest = cache_directory / "kernel.digest", source_digest(sources)
    if stamp.is_file() and stamp.read_text() == digest:
        return False
    if not cache_directory.is_dir():
        return False
    for stem in (path.stem for path in sources.glob("*.py")):
        for index in cache_directory.glob(f"{stem}.*.nbi"):
            index.unlink(missing_ok=True)
    _write_atomically(stamp, digest)
    return True


def _write_atomically(path: Path, text: str) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:  # a read-only cache folder: numba cannot have written stale files there either
        return
