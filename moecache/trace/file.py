"""The file of a trace: safetensors, with shape, source and a checksum of everything in the header.

The layout is 8 bytes of header length N (little-endian), N bytes of JSON that name each tensor's dtype, shape and place, then the tensors
end to end. It is read here by hand, so that arrays can be views of the mapped file, and so that no length is believed before it is compared
with the length of the file: nothing is allocated for a header that lies.

What makes arrays a possible trace is not known here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from moecache.trace.shape import ModelShape, TraceError

FORMAT = "moecache router trace 1"
LARGEST_HEADER = 100_000_000  # bytes; the format's own bound
CHECKED_BYTES = 2**24  # hashed at a time, so that Ctrl-C is heard
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
NEEDED = {"topk_ids", "gate_weights", "token_ids", "document_start"}
OPTIONAL = {"selection_scores", "recorded_ids", "predicted_ids"}


class _Entry(NamedTuple):
    """One tensor of the file; start and stop are bytes after the header."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_trace_file(path: Path, tensors: dict[str, np.ndarray], shape: ModelShape, source: dict[str, Any]) -> None:
    """Write one file, under a temporary name first."""
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    header = {"format": FORMAT, "shape": json.dumps(asdict(shape)), "source": json.dumps(source)}
    header["sha256"] = checksum(tensors, header)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # made by the user's own permissions, unlike mkstemp's
    try:
        save_file(tensors, temporary, header)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_trace_file(path: Path, memory_map: bool) -> tuple[dict[str, np.ndarray], ModelShape, dict[str, Any]]:
    """The arrays, shape and source of a file whose checksum is right.

    Parameters
    ----------
    path : an existing file.
    memory_map : True gives read-only views of the file, which take no memory of their own.

    Raises
    ------
    TraceError : truncated, foreign, damaged, or a header that contradicts the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            described, data_start = _read_header(file, size)
            metadata = _metadata(described)
            entries = _entries(described, size - data_start)
            tensors = _mapped(file, data_start, entries) if memory_map else _in_memory(file, data_start, entries)
    except OSError as error:
        raise TraceError(f"the file cannot be read ({error})") from error
    if metadata.get("sha256") != checksum(tensors, metadata):
        raise TraceError("the contents do not match the file's own checksum: it was damaged; copy or record it again")
    try:
        shape, source = ModelShape(**json.loads(metadata["shape"])), json.loads(metadata["source"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"the header's shape or source cannot be read ({error})") from error
    if not isinstance(source, dict):
        raise TraceError(f"the header's source is {type(source).__name__}, expected an object")
    return tensors, shape, source


def checksum(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """SHA-256 of all that a file holds: a bit flipped in a weight may well leave a possible trace."""
    digest = hashlib.sha256(f"{metadata.get('shape')}\0{metadata.get('source')}".encode(errors="surrogatepass"))
    for name in sorted(tensors):
        digest.update(f"\0{name} {tensors[name].dtype} {tensors[name].shape}\0".encode(errors="surrogatepass"))
        values = tensors[name].reshape(-1).view(np.uint8)
        for start in range(0, values.size, CHECKED_BYTES):
            digest.update(memoryview(values[start : start + CHECKED_BYTES]))  # type: ignore[arg-type]
    return digest.hexdigest()


def _incomplete(why: str) -> TraceError:
    return TraceError(f"not a complete safetensors file ({why}); copy or record it again")


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and where the tensors start."""
    length = int.from_bytes(file.read(8), "little")
    if size < 10 or not 2 <= length <= min(size - 8, LARGEST_HEADER):
        raise _incomplete(f"it has {size} bytes and its first 8 announce a header of {length}")
    text = file.read(length)
    try:
        described = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _incomplete(f"its header is no JSON: {error}") from error
    if not isinstance(described, dict) or len(text) < length:
        raise _incomplete("its header is no JSON object")
    return described, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name stands twice among {[name for name, _ in pairs]}")
    return found


def _metadata(described: dict[str, Any]) -> dict[str, str]:
    """The header's own facts, taken out of `described`."""
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _incomplete("its metadata are not all text")
    if metadata.get("format") != FORMAT:
        raise TraceError(f"format {metadata.get('format')!r} instead of {FORMAT!r}: not a trace of this package")
    if missing := NEEDED - set(described):
        raise TraceError(f"tensors {sorted(missing)} are missing")
    if unknown := set(described) - NEEDED - OPTIONAL:
        raise TraceError(f"tensors {sorted(unknown)} are unknown: written by a newer version?")
    return metadata


def _entries(described: dict[str, Any], num_bytes: int) -> list[_Entry]:
    """The tensors in the order of the file; they must fill its `num_bytes` end to end."""
    entries = sorted((_entry(name, told) for name, told in described.items()), key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise _incomplete(f"{entry.name} starts at byte {entry.start}, but the tensors before it end at {end}")
        end = entry.stop
    if end != num_bytes:
        raise _incomplete(f"its tensors take {end} bytes, but there are {num_bytes}")
    return entries


def _entry(name: str, told: Any) -> _Entry:
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data_offsets"}:
        raise _incomplete(f"{name} is not described by dtype, shape and data_offsets")
    if not isinstance(told["dtype"], str) or told["dtype"] not in DTYPES:
        raise TraceError(f"{name} is of dtype {told['dtype']!r}; a trace holds {', '.join(DTYPES)}")
    shape, offsets = told["shape"], told["data_offsets"]
    if not _are_lengths(shape) or not _are_lengths(offsets) or len(offsets) != 2 or len(shape) > 3:
        raise _incomplete(f"{name} has shape {shape!r:.60} and data_offsets {offsets!r:.60}")
    dtype = np.dtype(DTYPES[told["dtype"]])
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise _incomplete(f"{name} takes bytes {offsets[0]}..{offsets[1]}, which are not {dtype} {shape}")
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_lengths(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _mapped(file: BinaryIO, data_start: int, entries: list[_Entry]) -> dict[str, np.ndarray]:
    whole = np.memmap(file, np.uint8, "r")
    tensors = {}
    for entry in entries:
        part = np.asarray(whole[data_start + entry.start : data_start + entry.stop])
        if part.ctypes.data % entry.dtype.itemsize:
            raise TraceError(f"{entry.name} starts at a byte that is no multiple of its {entry.dtype}: load it with memory_map=False")
        tensors[entry.name] = part.view(entry.dtype).reshape(entry.shape)
    return tensors


def _in_memory(file: BinaryIO, data_start: int, entries: list[_Entry]) -> dict[str, np.ndarray]:
    file.seek(data_start)
    tensors = {}
    for entry in entries:
        try:
            tensors[entry.name] = np.empty(entry.shape, entry.dtype)
        except MemoryError as error:
            raise TraceError(f"{entry.name} of {entry.stop - entry.start} bytes exceeds the memory: load with memory_map=True") from error
        values, num_read = memoryview(tensors[entry.name].reshape(-1).view(np.uint8)), 0
        while num_read < len(values):
            count = file.readinto(values[num_read:])  # type: ignore[attr-defined]
            if not count:
                raise _incomplete(f"it ends inside {entry.name}")
            num_read += count
    return tensors
