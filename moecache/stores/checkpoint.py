"""What a checkpoint holds, from its headers alone: no weight is read here.

A checkpoint is a folder with `config.json` and *shards* (safetensors files: a JSON header that gives each tensor's dtype, shape and
range of bytes, then the bytes). Its keys are the names its authors chose; where each of them goes in the model is the library's knowledge
(`hf_checkpoints`). Keys without a place in the model are counted and never read.

A shard whose length is not what its header says is refused, and so are files that would have to be unpickled and checkpoints that are
already quantized, whose experts are no plain matrices. What makes up one expert is the business of `checkpoint_store`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moecache import hf_checkpoints
from moecache.hf_checkpoints import KeyTarget
from moecache.stores.blocks import StoreError
from moecache.stores.packed_file import part_of

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I32": "int32", "I8": "int8", "U8": "uint8"}
_LARGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `offset` counts from the file's start, both numbers in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a checkpoint say.

    Attributes
    ----------
    folder : where it is.
    config : the library's configuration object.
    tensors : every key with its place.
    targets : where each key goes in the model.
    unknown_keys : keys with no place in the model (layers for other purposes, for instance); they are never read.
    """

    folder: Path
    config: Any
    tensors: Mapping[str, StoredTensor]
    targets: Mapping[str, KeyTarget]
    unknown_keys: tuple[str, ...]
    expert_names: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def expert_keys(self) -> frozenset[str]:
        """Keys that belong to routed experts."""
        names = {name for layer in self.expert_names for name in layer}
        return frozenset(key for key, target in self.targets.items() if target.name in names)


def read_checkpoint(folder: str | Path, model: Any = None) -> Checkpoint:
    """Read the headers of a checkpoint.

    Parameters
    ----------
    folder : with `config.json` and safetensors files.
    model : the model of that configuration, with or without its experts; by default a skeleton is made.

    Raises
    ------
    StoreError : files that are missing, truncated, or not safetensors.
    ValueError : a checkpoint that is already quantized.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = {key: tensor for path in shard_paths(folder) for key, tensor in read_header(path).items()}
    model = hf_checkpoints.skeleton(config) if model is None else model
    targets = hf_checkpoints.key_targets(model, sorted(tensors))
    known = {key: target for key, target in targets.items() if target is not None}
    unknown = tuple(key for key in targets if key not in known)
    return Checkpoint(folder, config, tensors, known, unknown, hf_checkpoints.expert_names(model))


def read_config(folder: Path) -> Any:
    """The configuration of a checkpoint that is not quantized."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        part = part_of(folder)
        begun = f"; {part} is there: it is being packed, or that was interrupted, and the same command goes on" if part.is_dir() else ""
        raise StoreError(f"{folder} is not a checkpoint: it has no config.json{begun}")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    method = getattr(config, "quantization_config", None)
    if method is not None:
        name = method.get("quant_method") if isinstance(method, Mapping) else getattr(method, "quant_method", None)
        raise ValueError(
            f"{folder} is already quantized ({name}), so its experts are not plain matrices. Load it with transformers, dequantised to "
            f"bfloat16, and save it with save_pretrained; then use that folder (`moecache pack --bits 4` makes it small again)"
        )
    return config


def shard_paths(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, by its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "no weights"
        raise StoreError(f"{folder} has no model.safetensors and no index of shards (found: {others}); only safetensors are loaded")
    if bad := [name for name in names if Path(name).name != name]:
        raise StoreError(f"{index} names shards outside its folder: {bad}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise StoreError(f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:3])}; download them again")
    return tuple(folder / name for name in names)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises
    ------
    StoreError : no such header, or a file shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise StoreError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
        try:
            rows = json.loads(file.read(length))
        except ValueError as fault:
            raise StoreError(f"{path} is no safetensors file: its header is not JSON ({fault})") from fault
    rows.pop("__metadata__", None)
    start = 8 + length
    tensors = {key: _stored(path, start, row) for key, row in rows.items()}
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=start)
    if end != size:
        raise StoreError(f"{path}: expected {end} bytes, got {size}; the shard is truncated or damaged: download it again")
    return tensors


def _stored(path: Path, start: int, row: Mapping[str, Any]) -> StoredTensor:
    first, end = row["data_offsets"]
    dtype = str(row["dtype"])
    return StoredTensor(path, _DTYPES.get(dtype, dtype), tuple(row["shape"]), start + first, end - first)
