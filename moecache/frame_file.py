"""A table on disk that reads back exactly as it was written, or not at all.

A table is two files: plain CSV, which any tool can read and a diff can show, and a JSON file beside it that
names each column's dtype, the number of rows and the hash of the CSV, with whatever else is worth knowing.
Floats are written with the fewest digits that identify them, so reading gives the same bits. Both files are
written under another name and renamed, the JSON last: it is the mark of a complete table.

It does not know what the table holds, nor where tables are kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd

_NUMERIC_KINDS = "iufb"


class DamagedFile(ValueError):
    """A stored table is incomplete or was changed after it was written."""


def write_frame(path: Path, frame: pd.DataFrame, header: dict[str, Any]) -> None:
    """Write a table as ``path`` (CSV) and its header beside it (JSON).

    Parameters
    ----------
    path : Path
        Name of the CSV file; the header takes the same name with ``.json``.
    frame : pandas.DataFrame
        Columns of integers, floats, booleans or strings, with the default index.
    header : dict
        JSON types; kept under its own names.

    Raises
    ------
    ValueError
        If the table would not read back as it is: another dtype, another index, missing strings.
    """
    dtypes = _checked_dtypes(frame)
    text = frame.to_csv(index=False, na_rep="nan", lineterminator="\n")
    if not _parse(text, dtypes).equals(frame.astype(dtypes)):
        raise ValueError(f"{path.name}: a column does not survive the way to CSV and back, got dtypes {dtypes}")
    about = {"columns": dtypes, "num_rows": len(frame), "sha256": _digest(text)} | header
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    replace_file(path.with_suffix(".json"), json.dumps(about, indent=1) + "\n")


def read_frame(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read what `write_frame` wrote.

    Returns
    -------
    frame : pandas.DataFrame
    header : dict

    Raises
    ------
    FileNotFoundError
        If neither file is there.
    DamagedFile
        If one is missing, or the content is not what was written.
    """
    if not path.exists() and not path.with_suffix(".json").exists():
        raise FileNotFoundError(path)
    try:
        header = json.loads(path.with_suffix(".json").read_text())
        text = path.read_bytes().decode()
        if _digest(text) != header["sha256"]:
            raise ValueError("the content is not what its header describes")
        return _parse(text, header["columns"]), header
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise DamagedFile(
            f"{path} is damaged or incomplete ({fault}): delete {path.name} and {path.stem}.json "
            "and measure again, or restore both with `git checkout`"
        ) from fault


def replace_file(path: Path, text: str) -> None:
    """Write a text file under another name, then rename it: it is there as a whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(text.encode())
    part.replace(path)


def _checked_dtypes(frame: pd.DataFrame) -> dict[str, str]:
    if not frame.index.equals(pd.RangeIndex(len(frame))):
        raise ValueError("the table has an index of its own, which CSV would lose: call reset_index() first")
    if not frame.columns.is_unique or not all(isinstance(name, str) for name in frame.columns):
        raise ValueError(f"column names must be different strings, got {list(frame.columns)}")
    return {str(name): _dtype_name(str(name), column) for name, column in frame.items()}


def _dtype_name(name: str, column: pd.Series) -> str:
    dtype = column.dtype
    if getattr(dtype, "kind", "") in _NUMERIC_KINDS and type(dtype).__module__.startswith("numpy"):
        return str(dtype)
    if all(isinstance(value, str) for value in column):
        return "str"
    raise ValueError(f"column {name!r} has dtype {dtype}: use integers, floats, booleans or strings (none missing)")


def _parse(text: str, dtypes: dict[str, str]) -> pd.DataFrame:
    raw = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, na_filter=False)
    if list(raw.columns) != list(dtypes):
        raise ValueError(f"columns {list(raw.columns)} in place of {list(dtypes)}")
    for name, dtype in dtypes.items():
        if dtype == "bool":
            # Booleans are spelled out, and every word but the empty one is true.
            raw[name] = raw[name] == "True"
    return raw.astype(dtypes)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
