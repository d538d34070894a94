"""Readers for traces in zip archives: `.npz` with ids and weights, and torch's `.pt` with router logits.

- `.npz`: `ids` [T,L,K], `weights` [T,L,K] and optionally `offsets` [documents + 1].
- `.pt`: one tensor [T,L,E] of router logits, as `torch.save` writes it. torch is loaded only to read such a file, and only plain tensors
  are unpickled (`weights_only`).

A zip archive has a checksum for each member, but torch does not look at them, and NumPy believes the length that an array announces. So
the archive is checked here first: every announced length against the bytes that are there, then every checksum.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from moecache.trace import ModelShape, RouterTrace, TraceError, token_blocks

LARGEST_RATIO = 1100  # deflate cannot do better than 1032 to 1
CHECKED_BYTES = 2**20
NPZ_ARRAYS = ("ids", "weights", "offsets")


def is_torch_file(path: Path) -> bool:
    """True when a zip archive was written by torch: its pickle is called data.pkl."""
    with reading(path, "zip archive"), zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a foreign parser raises about a damaged file into a TraceError that names the file.

    The parsers of zip, npy and pickle raise a dozen types between them, from KeyError to RuntimeError and RecursionError.
    """
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except Exception as error:
        raise TraceError(f"{path} is not a readable {kind} ({type(error).__name__}: {error})") from error


def load_npz(path: Path, num_experts: int | None) -> RouterTrace:
    """A trace from ids and weights; without `num_experts` the largest id tells the number of experts."""
    with reading(path, ".npz file"), zipfile.ZipFile(path) as archive:
        _check_members(archive)  # all of them: a damaged name would hide the offsets
        present = {name.removesuffix(".npy") for name in archive.namelist()}
        arrays = {name: _read_array(archive, f"{name}.npy") for name in NPZ_ARRAYS if name in present}
    if missing := {"ids", "weights"} - present:
        raise TraceError(f"{path} has arrays {sorted(present)}; {sorted(missing)} are missing")
    ids, weights = arrays["ids"], arrays["weights"]
    if ids.ndim != 3 or ids.size == 0 or ids.dtype.kind not in "iu" or weights.dtype.kind != "f":
        raise TraceError(
            f"{path}: ids are {ids.dtype} {list(ids.shape)} and weights {weights.dtype} {list(weights.shape)}, "
            "expected integers and reals [tokens, layers, top-k]"
        )
    starts = _document_starts(path, arrays.get("offsets"), ids.shape[0])
    experts = num_experts if num_experts is not None else int(ids.max()) + 1
    source = {"file": path.name, "format": "npz", "num_experts": "given" if num_experts is not None else "largest id + 1"}
    with reading(path, "trace"):
        return RouterTrace.from_arrays(ids, weights, document_start=starts, num_experts=experts, source=source)


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array, after a look at its own header: its announced length must be what the archive holds."""
    info = archive.getinfo(name)
    with archive.open(info) as member:
        shape, is_fortran, dtype = _array_header(member)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes != info.file_size - member.tell():
            raise ValueError(f"{name} announces {dtype} {list(shape)}, but holds {info.file_size - member.tell()} bytes")
        values = member.read()
    array = np.frombuffer(values, dtype, math.prod(shape))
    return array.reshape(shape, order="F" if is_fortran else "C")


def _array_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"npy version {version}")
    return read[version](member)


def _check_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Every member read to its end, where the archive compares name, length and checksum; returns the members."""
    for info in archive.infolist():
        if info.file_size > LARGEST_RATIO * max(info.compress_size, 1):
            raise ValueError(f"{info.filename} announces {info.file_size} bytes from {info.compress_size}")
        with archive.open(info) as member:
            while member.read(CHECKED_BYTES):
                pass
    return archive.infolist()


def _document_starts(path: Path, offsets: np.ndarray | None, num_tokens: int) -> np.ndarray:
    """[T] bool from the documents' first tokens and the end."""
    starts = np.arange(num_tokens) == 0
    if offsets is None:
        return starts
    is_right = offsets.ndim == 1 and offsets.dtype.kind in "iu" and offsets.size >= 2 and bool((offsets[1:] > offsets[:-1]).all())
    if not is_right or offsets[0] != 0 or offsets[-1] != num_tokens:
        raise TraceError(f"{path}: offsets must rise from 0 to {num_tokens}, the number of tokens, got {offsets!s:.200}")
    starts[offsets[:-1].astype(np.int64)] = True
    return starts


def load_torch_logits(path: Path, top_k: int | None, norm_topk_prob: bool | None) -> RouterTrace:
    """A trace from a tensor of router logits [T,L,E] of a softmax family.

    The top-k are the experts with the largest logits (the lower id among equals), their gate weights the softmax over them. The logits are
    taken as they are, before they are rounded to float16 for the scores.

    Parameters
    ----------
    path : zip archive written by `torch.save`.
    top_k, norm_topk_prob : what the file does not say: experts called a token, and whether the family rescales their weights.

    Raises
    ------
    TraceError : top_k or norm_topk_prob not given, a damaged file, or contents that are no such tensor.
    ImportError : torch is not installed.
    """
    if top_k is None or norm_topk_prob is None:
        raise TraceError(f"{path} holds router logits, which do not tell the routing: give top_k= and norm_topk_prob=")
    logits = _read_tensor(path)
    if logits.ndim != 3 or logits.size == 0 or logits.dtype.kind != "f":
        raise TraceError(f"{path} holds {logits.dtype} {list(logits.shape)}, expected reals [tokens, layers, experts]")
    with reading(path, "trace"):
        shape = ModelShape(logits.shape[1], logits.shape[2], top_k, norm_topk_prob=norm_topk_prob)
        ids = np.empty((*logits.shape[:2], top_k), np.int64)
        weights = np.empty(ids.shape, np.float32)
        for block in token_blocks(0, logits.shape[0], logits.shape[1] * logits.shape[2]):
            ids[block], weights[block] = _route(logits[block], top_k, block.start)
        source = {"file": path.name, "format": "torch logits"}
        return RouterTrace.from_arrays(ids, weights, router_logits=logits, shape=shape, source=source)


def _route(logits: np.ndarray, top_k: int, first_token: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and gate weights [t,L,K] of the largest logits [t,L,E]."""
    if (is_wrong := np.isnan(logits) | (logits == np.inf)).any():
        token, layer = (int(i) for i in np.argwhere(is_wrong)[0][:2])
        raise TraceError("a router logit that is NaN or infinite", (token + first_token, layer))
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]
    chosen = np.take_along_axis(logits, ids, -1).astype(np.float64)
    weights = np.exp(chosen - chosen[..., :1])
    return ids, (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def _read_tensor(path: Path) -> np.ndarray:
    """The file's only tensor, as float32 where NumPy lacks its dtype."""
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise ImportError(f"{path} was written by torch, which is not installed: pip install 'moecache[torch]'") from error
    with reading(path, ".pt file"):
        with zipfile.ZipFile(path) as archive:
            sizes = [info.file_size for info in _check_members(archive) if info.filename.split("/")[-2:-1] == ["data"]]
        tensor = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise TraceError(f"it holds {type(tensor).__name__}, expected one tensor: torch.save(torch.stack(router_logits, dim=1), path)")
        # Older versions of torch do not compare the length that the pickle announces with the one of the data.
        if sizes != [tensor.untyped_storage().nbytes()]:
            raise ValueError(f"its tensor announces {tensor.untyped_storage().nbytes()} bytes, but its data have {sizes}")
        tensor = tensor.detach()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
