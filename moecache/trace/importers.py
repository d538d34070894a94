"""`load_trace`, which finds out what a file is, and the reader for `route_trace v1`.

| format | told by | holds |
|---|---|---|
| this package's own safetensors file | its header | everything |
| `.npz` with `ids` [T,L,K], `weights` [T,L,K], perhaps `offsets` | zip archive | the top-k |
| torch's `.pt` with logits [T,L,E] | zip archive with a pickle | all scores |
| `# route_trace v1` CSV (BigMoeOnEdge) | its first line | the top-k: one line a call with phase, step, layer, slot, expert, weight |

A format that holds the top-k only replays hits, misses, mass and admission, but no stand-in by score. Any other table becomes a trace
through `RouterTrace.from_frame`. Safetensors and zip archives have checksums, so that damage is found; plain text has none, and a changed
digit may leave another possible trace.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from moecache.trace import ModelShape, RouterTrace, TraceError
from moecache.trace.archives import is_torch_file, load_npz, load_torch_logits, reading
from moecache.trace.long_form import Cells, Columns, integer_column, read_cells

CSV_MAGIC = b"# route_trace v1"
CSV_COLUMNS = Columns("step", "layer", "slot", "expert", "weight", "turn")


def load_trace(
    path: str | Path,
    num_experts: int | None = None,
    *,
    memory_map: bool = False,
    top_k: int | None = None,
    norm_topk_prob: bool | None = None,
) -> RouterTrace:
    """Read a trace of any known format.

    Parameters
    ----------
    path : the file; its first bytes tell the format.
    num_experts, top_k, norm_topk_prob : the model's geometry, for formats that do not say: npz needs `num_experts` where the expert with
        the highest id is never called, a tensor of logits needs the other two. A file that says otherwise is refused.
    memory_map : for this package's own files: arrays are views of the file, see `RouterTrace.load`. Other formats are read into memory.

    Returns
    -------
    RouterTrace : checked; without scores where the format has none.

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
        trace = load_torch_logits(path, top_k, norm_topk_prob) if is_torch_file(path) else load_npz(path, num_experts)
    elif head.startswith(CSV_MAGIC):
        trace = _load_route_csv(path)
    elif len(head) >= 9 and head[8:9] == b"{":  # safetensors: 8 bytes of header length, then JSON
        trace = RouterTrace.load(path, memory_map)
    else:
        raise TraceError(
            f"{path} starts with {head[:16]!r}: not a safetensors trace, an .npz with ids and weights, a .pt with logits, or a route_trace "
            "v1 CSV; build one with RouterTrace.from_arrays or RouterTrace.from_frame"
        )
    for name, given in {"num_experts": num_experts, "top_k": top_k, "norm_topk_prob": norm_topk_prob}.items():
        if given is not None and given != getattr(trace.shape, name):
            raise TraceError(f"{path}: {name}={given} was given, but the file holds {name}={getattr(trace.shape, name)}")
    return trace


def _load_route_csv(path: Path) -> RouterTrace:
    with reading(path, "route_trace v1 file"):
        comments = " ".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        facts = dict(re.findall(r"(\w+)=(\S+)", comments))
        sizes = [int(size) for size in re.findall(r"expert_bytes=(\d+)", comments)]
        frame = pd.read_csv(path, comment="#", low_memory=False, compression=None, encoding="utf-8")
        layers, experts, top_k = (int(facts[name]) for name in ("n_layer", "n_expert", "n_expert_used"))
        shape = ModelShape(layers, experts, top_k, expert_bytes=max(sizes) if sizes else None)
        cells, num_dropped = _whole_tokens(frame, shape)
        source = {"file": path.name, "format": "route_trace v1", "model": facts.get("model", ""), "dropped_tokens": num_dropped}
        return RouterTrace.from_cells(cells, shape=shape, source=source)


def _whole_tokens(frame: pd.DataFrame, shape: ModelShape) -> tuple[Cells, int]:
    """The calls of the tokens that every layer reports, and how many are left out: of a prompt (phase 0) the last layer routes only the
    last token."""
    if not isinstance(frame.index, pd.RangeIndex):
        raise TraceError("its lines have more fields than its header")
    if missing := {"phase", "turn"} - set(frame.columns):
        raise TraceError(f"columns {sorted(missing)} are missing; the table has {list(frame.columns)}")
    read_cells(frame, CSV_COLUMNS, shape, None)  # every line is looked at, also those that are left out
    frame = frame.iloc[np.argsort(integer_column(frame, CSV_COLUMNS, "turn"), kind="stable")]
    phase, key = integer_column(frame, CSV_COLUMNS, "phase"), ["turn", "step"]
    if (is_twice := frame.duplicated([*key, "layer", "slot"])).any():
        first = frame[is_twice].iloc[0]
        raise TraceError(f"turn {first['turn']:g}, step {first['step']:g}, layer {first['layer']:g}: slot {first['slot']:g} stands twice")
    num_calls = frame.groupby(key)["slot"].transform("size").to_numpy()
    is_left_out = (phase == 0) & (num_calls < shape.num_layers * shape.top_k)
    if is_left_out.all():
        raise TraceError(f"no token has its {shape.num_layers} layers x {shape.top_k} calls")
    num_dropped = len(frame[is_left_out].drop_duplicates(key))
    return read_cells(frame[~is_left_out], CSV_COLUMNS, shape, None), num_dropped
