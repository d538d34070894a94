"""A checkpoint as one GGUF file, the format of llama.cpp: the same weights under other names, for the same model in another engine.

| in the checkpoint | in the file |
|---|---|
| gate, up and down of the experts of layer 0 | ``blk.0.ffn_gate_exps.weight``, ``..._up_...``, ``..._down_...`` [E, outputs, inputs] |
| norms and routers | in float32, as the format asks |
| all other matrices | as they are |
| `config.json` | keys such as ``olmoe.embedding_length`` |

With fewer bits the experts are rounded by the format's own rule (Q8_0, Q4_0: blocks of 32 weights with one float16 scale) and nothing else
is, as `moecache pack` does by its rule. A vocabulary head that is tied to the embeddings is written out.

A family is listed here once llama.cpp was seen to compute the same from such a file. What its loader there does not understand is
refused rather than left out.

Tokens are meant to be fed as ids. The tokenizer's vocabulary goes along, because llama.cpp will not open a file without one, but how text
is split before it is not part of what is written: let the checkpoint's own tokenizer turn text into ids.

Tensors are written one after the other; memory holds the largest of them. The file has a temporary name until it is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from moecache import __version__
from moecache.stores.aligned_read import AlignedFile
from moecache.stores.blocks import TensorSpec, aligned_bytes
from moecache.stores.checkpoint import Checkpoint, read_checkpoint
from moecache.stores.checkpoint_store import CheckpointStore

BITS = {16: None, 8: "Q8_0", 4: "Q4_0"}
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FAMILIES = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}  # model type: llama.cpp's name


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file: its type there, its shape, and how its bytes are had."""

    name: str
    code: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.uint8]]


def export_gguf(source: str | Path, target: str | Path, bits: int = 16, progress: bool = True) -> Path:
    """Write a checkpoint as a GGUF file.

    Parameters
    ----------
    source : a checkpoint's folder, of family olmoe or qwen3_moe.
    target : the file to make.
    bits : 16 = experts as they are; 8 or 4 = experts in Q8_0 or Q4_0.
    progress : show a progress bar.

    Returns
    -------
    Path : the new file.

    Raises
    ------
    ValueError : another family or number of bits, a model that llama.cpp would compute otherwise, a target that exists, or a missing
        `gguf` package.
    StoreError : a source that is not whole.
    """
    source, target = Path(source), Path(target)
    library = _library()
    if bits not in BITS:
        raise ValueError(f"bits={bits!r} cannot be exported; choose one of {', '.join(map(str, BITS))}")
    if target.exists():
        raise ValueError(f"{target} is there already; remove it or name another file")
    checkpoint = read_checkpoint(source)
    _check_understood(checkpoint)
    _export(checkpoint, target, bits, library, progress)
    return target


def _export(checkpoint: Checkpoint, target: Path, bits: int, library: Any, progress: bool) -> None:
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    with closing(CheckpointStore(checkpoint)) as store:
        tensors = [*_dense_tensors(checkpoint, library), *_expert_tensors(store, bits, library)]
        writer = library.GGUFWriter(None, _FAMILIES[checkpoint.config.model_type])
        try:
            _add_configuration(writer, checkpoint, bits, library)
            _add_vocabulary(writer, checkpoint, library)
            _write(writer, tensors, temporary, library, progress)
            os.replace(temporary, target)
        finally:
            writer.close()
            temporary.unlink(missing_ok=True)


def _library() -> Any:
    try:
        import gguf
    except ImportError as fault:
        raise ValueError("the package gguf is not installed; exporting needs `pip install moecache[stock]`") from fault
    return gguf


def _check_understood(checkpoint: Checkpoint) -> None:
    """Refuse what llama.cpp would compute otherwise, by name."""
    config = checkpoint.config
    if config.model_type not in _FAMILIES:
        raise ValueError(f"family {config.model_type!r} cannot be exported; understood are {', '.join(_FAMILIES)}")
    is_olmoe = config.model_type == "olmoe"
    meant = {
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": not is_olmoe,
        **({"clip_qkv": None, "num_key_value_heads": config.num_attention_heads} if is_olmoe else {"use_sliding_window": False}),
    }
    for name, value in meant.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{name}={found!r} cannot be exported: llama.cpp computes {config.model_type} with {name}={value!r}")
    if (rope := config.rope_parameters)["rope_type"] != "default":
        raise ValueError(f"rope_type={rope['rope_type']!r} cannot be exported; only 'default' is")
    if len(checkpoint.expert_names) != config.num_hidden_layers:
        dense = config.num_hidden_layers - len(checkpoint.expert_names)
        raise ValueError(f"{dense} of {config.num_hidden_layers} layers have no experts; llama.cpp's {config.model_type} has them in all")


# Metadata


def _add_configuration(writer: Any, checkpoint: Checkpoint, bits: int, library: Any) -> None:
    config = checkpoint.config
    stored = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}[_experts_dtype(checkpoint)]
    writer.add_name(checkpoint.folder.name)
    writer.add_description(
        f"Written by moecache {__version__}. Feed token ids: text is split by the checkpoint's tokenizer, not by this file."
    )
    writer.add_file_type(getattr(library.LlamaFileType, f"MOSTLY_{BITS[bits]}" if BITS[bits] else stored))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _add_vocabulary(writer: Any, checkpoint: Checkpoint, library: Any) -> None:
    """The tokens and merges of a byte-pair tokenizer, or no vocabulary where the checkpoint has none."""
    path = checkpoint.folder / "tokenizer.json"
    found = json.loads(path.read_text()) if path.is_file() else {"model": {}}
    if found["model"].get("type") != "BPE":
        writer.add_tokenizer_model("none")
        return
    kinds = library.TokenType
    entries = {id_: (token, kinds.NORMAL) for token, id_ in found["model"]["vocab"].items()}
    entries |= {row["id"]: (row["content"], kinds.CONTROL if row["special"] else kinds.USER_DEFINED) for row in found["added_tokens"]}
    rows = [entries.get(id_, (f"[unused {id_}]", kinds.UNUSED)) for id_ in range(checkpoint.config.vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([int(kind) for _, kind in rows])
    writer.add_token_merges(merges)
    for name in ("bos", "eos"):
        if isinstance(id_ := getattr(checkpoint.config, f"{name}_token_id", None), int):
            getattr(writer, f"add_{name}_token_id")(id_)
    writer.add_add_bos_token(False)


def _experts_dtype(checkpoint: Checkpoint) -> str:
    return checkpoint.tensors[min(checkpoint.expert_keys)].dtype


# Tensors


def _dense_tensors(checkpoint: Checkpoint, library: Any) -> Iterator[_Tensor]:
    """Everything outside the experts; see the module's table."""
    architecture = {name: number for number, name in library.MODEL_ARCH_NAMES.items()}[_FAMILIES[checkpoint.config.model_type]]
    names = library.get_tensor_name_map(architecture, checkpoint.config.num_hidden_layers)
    keys = {checkpoint.targets[key].name: key for key in sorted(checkpoint.targets) if key not in checkpoint.expert_keys}
    if "lm_head.weight" not in keys:
        keys["lm_head.weight"] = keys["model.embed_tokens.weight"]
    for place, key in keys.items():
        name, stored = names.get_name(place, try_suffixes=(".weight",)), checkpoint.tensors[key]
        if name is None or stored.dtype not in _CODES:
            raise ValueError(f"{checkpoint.folder}: {key!r} ({stored.dtype}) has no place in llama.cpp's {checkpoint.config.model_type}")
        is_float32 = len(stored.shape) == 1 or name.endswith("ffn_gate_inp.weight")
        yield _Tensor(name, "F32" if is_float32 else _CODES[stored.dtype], stored.shape, _reading(stored, is_float32))


def _reading(stored: Any, is_float32: bool) -> Callable[[], NDArray[np.uint8]]:
    def read() -> NDArray[np.uint8]:
        data = aligned_bytes(stored.num_bytes)
        with closing(AlignedFile(stored.path)) as file:
            file.read(stored.offset, data)
        return _as_float32(data, stored.dtype).view(np.uint8) if is_float32 else data

    return read


def _as_float32(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    return torch.from_numpy(data).view(getattr(torch, dtype)).to(torch.float32).numpy()


def _expert_tensors(store: CheckpointStore, bits: int, library: Any) -> Iterator[_Tensor]:
    """Gate, up and down of all experts of every layer, each as one stack."""
    joined, down = store.layout.tensors
    if (joined.name, down.name) != ("gate_up_proj", "down_proj") or joined.dtype not in _CODES:
        raise ValueError(f"{store.checkpoint.folder}: experts are {store.layout.to_dict()}; gate, up and down matrices are understood")
    width, half = joined.shape[0] // 2, joined.num_bytes // 2
    gate = TensorSpec("gate", (width, joined.shape[1]), joined.dtype, joined.offset, half)
    up = TensorSpec("up", gate.shape, joined.dtype, joined.offset + half, half)
    parts = (gate, up, TensorSpec("down", down.shape, down.dtype, down.offset, down.num_bytes))
    code = BITS[bits] or _CODES[joined.dtype]
    block, _ = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[code]]
    if odd := [part.shape for part in parts if part.shape[1] % block]:
        raise ValueError(f"{code} rounds blocks of {block} weights; matrices of {odd[0]} cannot be cut into them: export with bits=16")
    for layer in range(store.num_layers):
        for part in parts:
            name, shape = f"blk.{layer}.ffn_{part.name}_exps.weight", (store.num_experts, *part.shape)
            yield _Tensor(name, code, shape, _stacking(store, layer, part, code, library))


def _stacking(store: CheckpointStore, layer: int, part: TensorSpec, code: str, library: Any) -> Callable[[], NDArray[np.uint8]]:
    def read() -> NDArray[np.uint8]:
        stack = np.empty((store.num_experts, _num_bytes(code, part.shape, library)), np.uint8)
        block = aligned_bytes(store.layout.block_bytes)
        for expert in range(store.num_experts):
            store.read(layer, expert, block, part.offset, part.num_bytes)
            data = block[part.offset : part.offset + part.num_bytes]
            if code not in _CODES.values():
                matrix = _as_float32(data, part.dtype).reshape(part.shape)
                data = library.quants.quantize(matrix, library.GGMLQuantizationType[code]).reshape(-1)
            stack[expert] = data
        return stack

    return read


def _num_bytes(code: str, shape: tuple[int, ...], library: Any) -> int:
    block, block_bytes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[code]]
    return int(np.prod(shape)) // block * block_bytes


def _write(writer: Any, tensors: list[_Tensor], path: Path, library: Any, progress: bool) -> None:
    sizes = [_num_bytes(tensor.code, tensor.shape, library) for tensor in tensors]
    for tensor, size in zip(tensors, sizes, strict=True):
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, library.GGMLQuantizationType[tensor.code])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="writing GGUF", disable=not progress) as bar:
        for tensor, size in zip(tensors, sizes, strict=True):
            writer.write_tensor_data(tensor.read())
            bar.update(size)
    writer.flush()
    with path.open("rb") as file:
        os.fsync(file.fileno())
