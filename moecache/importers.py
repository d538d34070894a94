"""Readers for public trace formats, and `load_trace`, which finds out what a file is.

- this package's own safetensors files,
- `.npz` with `ids` [T,L,K], `weights` [T,L,K] and optionally `offsets` [documents + 1],
- `# route_trace v1` CSV (BigMoeOnEdge): one line per call with phase, step, layer, slot, expert, weight.

The public formats hold the top-k only: they replay hits, misses, mass and admission, but no stand-in by score.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd

from moecache.trace import ModelShape, RouterTrace, TraceError

CSV_MAGIC = b"# route_trace v1"
CSV_COLUMNS = ["turn", "phase", "step", "layer", "slot", "expert", "weight"]


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
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise TraceError(f"{path} is not a complete .npz file ({error})") from error
    if missing := {"ids", "weights"} - set(arrays):
        raise TraceError(f"{path} has arrays {sorted(arrays)}; {sorted(missing)} are missing")
    ids, weights = arrays["ids"], arrays["weights"].astype(np.float32)
    starts = np.zeros(ids.shape[0], bool)
    starts[arrays.get("offsets", np.zeros(1, np.int64))[:-1] if "offsets" in arrays else 0] = True
    experts = num_experts if num_experts is not None else int(ids.max()) + 1
    return RouterTrace.from_arrays(ids, weights, document_start=starts, num_experts=experts, source={"file": path.name, "format": "npz"})


def _load_route_csv(path: Path) -> RouterTrace:
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    facts = dict(re.findall(r"(\w+)=(\S+)", " ".join(comments)))
    sizes = [int(size) for size in re.findall(r"expert_bytes=(\d+)", " ".join(comments))]
    try:
        frame = pd.read_csv(path, comment="#")
        layers, experts, top_k = (int(facts[name]) for name in ("n_layer", "n_expert", "n_expert_used"))
    except (KeyError, ValueError, pd.errors.ParserError) as error:
        raise TraceError(f"{path} is not a readable route_trace v1 file ({error})") from error
    if missing := set(CSV_COLUMNS) - set(frame.columns):
        raise TraceError(f"{path}: columns {sorted(missing)} are missing")
    ids, weights, starts, num_dropped = _fill_cells(path, frame, layers, top_k)
    source = {"file": path.name, "format": "route_trace v1", "model": facts.get("model", ""), "dropped_tokens": num_dropped}
    shape = ModelShape(layers, experts, top_k, expert_bytes=max(sizes) if sizes else None)
    return RouterTrace.from_arrays(ids, weights, document_start=starts, shape=shape, source=source)


def _fill_cells(path: Path, frame: pd.DataFrame, layers: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """[T,L,K] arrays of the tokens that every layer reports; the others (a prompt's last layer) are counted and left out."""
    if not frame["layer"].between(0, layers - 1).all() or not frame["slot"].between(0, top_k - 1).all():
        raise TraceError(f"{path}: a layer outside 0..{layers - 1} or a slot outside 0..{top_k - 1}")
    if frame.duplicated(["turn", "step", "layer", "slot"]).any():
        raise TraceError(f"{path}: the same turn, step, layer and slot stands twice")
    token, tokens = pd.factorize(pd.MultiIndex.from_frame(frame[["turn", "step"]]))
    ids = np.full((len(tokens), layers, top_k), -1, np.int64)
    weights = np.zeros(ids.shape, np.float32)
    cell = (token, frame["layer"].to_numpy(), frame["slot"].to_numpy())
    ids[cell], weights[cell] = frame["expert"].to_numpy(), frame["weight"].to_numpy()
    is_complete = (ids >= 0).all(axis=(1, 2))
    if not is_complete.any():
        raise TraceError(f"{path}: no token has all {layers} layers x {top_k} calls")
    turns = np.array([turn for turn, _ in tokens])[is_complete]
    starts = np.concatenate([[True], turns[1:] != turns[:-1]])
    return ids[is_complete], weights[is_complete], starts, int((~is_complete).sum())
