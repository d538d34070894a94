"""Where a number came from: the versions, the commit and the machine that made it.

A measured number means little without the machine beside it, and a stored result can be trusted only when
the code that made it can be found again. This module gathers both as a plain dictionary of JSON types, so
that a run, a stored result and a page of the book show the same facts in the same words.

It does not know what was measured, and it loads nothing: it reports the versions of libraries that are
already loaded, and names a GPU only where torch is loaded and has one in use. Host and user names are left
out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_REPORTED_LIBRARIES = ("numpy", "numba", "pandas", "scipy", "pingouin", "torch", "transformers", "tokenizers")


def provenance(*, device: str | None = None, seconds: float | None = None) -> dict[str, Any]:
    """Describe the code, the libraries and the machine of this process.

    Parameters
    ----------
    device : str, optional
        What did the computing, in words. By default the GPU that torch has in use, otherwise ``"cpu"``.
    seconds : float, optional
        How long the work took on the wall clock.

    Returns
    -------
    dict
        Only JSON types: ``moecache`` (version), ``commit`` and ``is_dirty`` (None outside a clone),
        ``python``, ``versions`` (of loaded libraries), ``machine``, ``device``, ``date`` (UTC, ISO 8601),
        ``seconds``.
    """
    return {
        "moecache": _package_version(),
        **_commit(),
        "python": platform.python_version(),
        "versions": _loaded_versions(),
        "machine": dict(_machine()),
        "device": device or _device_in_use(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": None if seconds is None else round(float(seconds), 3),
    }


def _package_version() -> str:
    from moecache import __version__

    return __version__


@cache
def _commit() -> dict[str, Any]:
    """Return the commit of the clone that holds this package, or None where it is not in a clone."""
    root = Path(__file__).resolve().parent.parent
    unknown = {"commit": None, "is_dirty": None}
    if not (root / ".git").exists():
        return unknown
    head = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    if head is None or changes is None:
        return unknown
    return {"commit": head, "is_dirty": bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _loaded_versions() -> dict[str, str]:
    return {name: _version(name) for name in _REPORTED_LIBRARIES if name in sys.modules}


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


@cache
def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _device_in_use() -> str:
    torch = sys.modules.get("torch")
    # `torch` is half loaded while its own import runs; then nothing can be in use yet.
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return "cpu"
    return f"cuda: {cuda.get_device_name()}"
