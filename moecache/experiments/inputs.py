"""Content hashes of what an experiment reads, for the keys of stored results."""

from __future__ import annotations

import hashlib
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data"


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits.

    Raises
    ------
    FileNotFoundError : no such file, with its path.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; it is part of the key of a stored result")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reference_inputs(model_name: str) -> dict[str, str]:
    """Hashes of a reference model's weights and of the manifest of its texts."""
    return {
        "model": file_hash(DATA / "models" / model_name / "model.safetensors"),
        "texts": file_hash(DATA / "texts" / "manifest.json"),
    }
