"""A folder of finished results: one small file each, named by the hash of its key.

A file is there as a whole or not at all, and holds its key beside its rows, so that a damaged or foreign file counts as not finished. What
the rows mean is unknown here. Digests of arrays and traces go into keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moecache.trace import RouterTrace


def _path(store: Path, key: dict[str, Any]) -> Path:
    return store / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def stored_results(store: str | Path | None, keys: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Finished combinations by number; a file that is damaged counts as not finished."""
    results = {}
    for i, key in enumerate(keys):
        try:
            content = json.loads(_path(Path(store or ""), key).read_text(encoding="utf-8"))
            if content["key"] == key:
                results[i] = content["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return results


def write_result(store: Path, key: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Keep the rows of one combination, under a temporary name first."""
    path = _path(store, key)
    store.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=store, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, "rows": rows}, file)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def trace_digest(trace: RouterTrace) -> str:
    """SHA-256 of everything that a replay reads."""
    arrays = {f.name: getattr(trace, f.name) for f in fields(trace) if f.name != "token_ids"}
    parts = {name: digest(array) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    return hashlib.sha256(json.dumps([asdict(trace.shape), parts], sort_keys=True).encode()).hexdigest()


def digest(array: npt.ArrayLike) -> str:
    """SHA-256 of an array's type, shape and values."""
    array = np.ascontiguousarray(array)
    made = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    made.update(array.data)
    return made.hexdigest()
