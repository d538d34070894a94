"""Readers for public trace formats, and `load_trace`, which finds out what a file is.

- this package's own safetensors files,
- `.npz` with `ids` [T,L,K], `weights` [T,L,K] and optionally `offsets` [documents + 1],
- `# route_trace v1` CSV (BigMoeOnEdge): one line per call with phase, step, layer, slot, expert, weight.

The public formats hold the top-k only: they replay hits, misses, mass and admission, but no stand-in by score.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moecache.trace import ModelShape, RouterTrace, TraceError

CSV_MAGIC = b"# route_trace v1"
CSV_COLUMNS: Any = dict.fromkeys(("turn", "phase", "step", "layer", "slot", "expert"), "int64") | {"weight": "float64"}


def load_trace(path: str | Path, num_experts: int | None = None) -> RouterTrace:
    """Read a trace of any known format.

    Parameters
    ----------
    path : the file; its first bytes tell the format.
    num_experts : experts a layer, for formats that do not say (npz).

    Raises
    ------
    FileNotFoundError : no such file.
    TraceError : a format that is not known, or a file that is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no trace at {path}")
    with path.open("rb") as file:
        head = file.read(32)
    if head.startswith(b"PK"):
        return _load_npz(path, num_experts)
    if head.startswith(CSV_MAGIC):
        return _load_route_csv(path)
    if len(head) >= 9 and head[8:9] == b"{":  # safetensors: 8 bytes of header length, then JSON
        return RouterTrace.load(path)
    raise TraceError(
        f"{path} starts with {head[:16]!r}: not a safetensors trace, an .npz with ids and weights, or a route_trace v1 CSV; "
        "build one with RouterTrace.from_arrays"
    )


def _load_npz(path: Path, num_experts: int | None) -> RouterTrace:
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, NotImplementedError, SyntaxError) as error:
        raise TraceError(f"{path} is not a complete .npz file ({error})") from error
    if missing := {"ids", "weights"} - set(arrays):
        raise TraceError(f"{path} has arrays {sorted(arrays)}; {sorted(missing)} are missing")
    ids, weights = arrays["ids"], arrays["weights"]
    if ids.ndim != 3 or ids.size == 0 or ids.dtype.kind not in "iu" or weights.dtype.kind != "f":
        raise TraceError(
            f"{path}: ids are {ids.dtype} {list(ids.shape)} and weights {weights.dtype} {list(weights.shape)}, "
            "expected integers and reals [tokens, layers, top-k]"
        )
    starts = _document_starts(path, arrays.get("offsets"), ids.shape[0])
    experts = num_experts if num_experts is not None else int(ids.max()) + 1
    source = {"file": path.name, "format": "npz", "num_experts": "given" if num_experts is not None else "largest id + 1"}
    with _named(path):
        shape = ModelShape(ids.shape[1], experts, ids.shape[2])
        return RouterTrace.from_arrays(ids, weights, document_start=starts, shape=shape, source=source)


def _document_starts(path: Path, offsets: np.ndarray | None, num_tokens: int) -> np.ndarray:
    """[T] bool from the documents' first tokens and the end."""
    starts = np.arange(num_tokens) == 0
    if offsets is None:
        return starts
    is_right = offsets.ndim == 1 and offsets.dtype.kind in "iu" and offsets.size >= 2 and bool((offsets[1:] > offsets[:-1]).all())
    if not is_right or offsets[0] != 0 or offsets[-1] != num_tokens:
        raise TraceError(f"{path}: offsets must rise from 0 to {num_tokens}, the number of tokens, got {offsets}")
    starts[offsets[:-1].astype(np.int64)] = True
    return starts


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in whatever is wrong with its contents."""
    try:
        yield
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from error


def _load_route_csv(path: Path) -> RouterTrace:
    try:
        comments = " ".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        facts = dict(re.findall(r"(\w+)=(\S+)", comments))
        sizes = [int(size) for size in re.findall(r"expert_bytes=(\d+)", comments)]
        frame = pd.read_csv(path, comment="#", dtype=CSV_COLUMNS)
        layers, experts, top_k = (int(facts[name]) for name in ("n_layer", "n_expert", "n_expert_used"))
        shape = ModelShape(layers, experts, top_k, expert_bytes=max(sizes) if sizes else None)
    except (KeyError, ValueError, pd.errors.ParserError) as error:
        raise TraceError(f"{path} is not a readable route_trace v1 file ({error})") from error
    if missing := set(CSV_COLUMNS) - set(frame.columns):
        raise TraceError(f"{path}: columns {sorted(missing)} are missing")
    ids, weights, starts, num_dropped = _fill_cells(path, frame, shape)
    source = {"file": path.name, "format": "route_trace v1", "model": facts.get("model", ""), "dropped_tokens": num_dropped}
    with _named(path):
        return RouterTrace.from_arrays(ids, weights, document_start=starts, shape=shape, source=source)


def _fill_cells(path: Path, frame: pd.DataFrame, shape: ModelShape) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """[T,L,K] arrays of the tokens that every layer reports; the others (a prompt's last layer) are counted and left out."""
    bounds = {"layer": shape.num_layers, "slot": shape.top_k, "expert": shape.num_experts}
    columns = {name: frame[name].to_numpy() for name in CSV_COLUMNS}
    for name, bound in bounds.items():
        if ((columns[name] < 0) | (columns[name] >= bound)).any():
            raise TraceError(f"{path}: column {name} holds {columns[name].min()}..{columns[name].max()}, outside 0..{bound - 1}")
    if frame.empty:
        raise TraceError(f"{path} holds no calls")
    keys = np.stack([columns[name] for name in ("turn", "step", "layer", "slot")], axis=1)
    if np.unique(keys, axis=0).shape[0] < keys.shape[0]:
        raise TraceError(f"{path}: the same turn, step, layer and slot stands twice")
    tokens, first_row, token = np.unique(keys[:, :2], axis=0, return_index=True, return_inverse=True)
    ids = np.full((tokens.shape[0], shape.num_layers, shape.top_k), -1, np.int64)
    weights = np.zeros(ids.shape, np.float32)
    cell = (token.reshape(-1), columns["layer"], columns["slot"])
    ids[cell], weights[cell] = columns["expert"], columns["weight"]
    is_complete = (ids >= 0).all(axis=(1, 2))
    is_cut = ~is_complete & (columns["phase"][first_row] != 0)
    if is_cut.any() or not is_complete.any():
        turn, step = tokens[is_cut][0] if is_cut.any() else tokens[0]
        raise TraceError(f"{path}: turn {turn}, step {step} lacks some of its {shape.num_layers} layers x {shape.top_k} calls; is it cut?")
    turns = tokens[is_complete, 0]
    starts = np.concatenate([[True], turns[1:] != turns[:-1]])
    return ids[is_complete], weights[is_complete], starts, int((~is_complete).sum())
