"""One checkpoint in the forms that the engines read, made once in the user's cache folder, and the texts that they decode.

A trained reference model is widened exactly to experts of real size (`moecache.widen`): the same routes and text, large bytes, which are
noise where their value changes nothing, so that no disk can save itself the reading of zeros. Engines of the library read it fused, this
project's runtime as packed blocks, llama.cpp as GGUF. Nothing is timed here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from moecache.experiments.inputs import reference_inputs
from moecache.reference import held_out_documents
from moecache.reference.loading import model_folder
from moecache.trace import ModelShape

PYTHON_VARIABLE = "MOECACHE_STOCK_PYTHON"
PACKED, GGUF = "ours", "llama_cpp"  # programs of `stock_engines` that read another form than the fused checkpoint
BITS = (16, 4)
TOKENS_A_DOCUMENT = 1000


class StockError(RuntimeError):
    """An engine is not installed, or failed for another reason than its memory."""


def python() -> str:
    """The interpreter that runs stock engines: this one, or the one that MOECACHE_STOCK_PYTHON names."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


@dataclass(frozen=True)
class Files:
    """What one engine reads, and the sizes that a cap is made of.

    Attributes
    ----------
    model : folder or file.
    fused : the checkpoint that all forms were made from.
    shape : of the model's routers.
    dense_bytes : weights outside the experts.
    block_bytes : one expert as a packed block, by bits.
    """

    model: Path
    fused: Path
    shape: ModelShape
    dense_bytes: int
    block_bytes: Mapping[int, int]

    def expert_bytes(self, bits: int) -> int:
        """All experts."""
        return self.shape.num_layers * self.shape.num_experts * self.block_bytes[bits]


@cache
def files_of(model_name: str, hidden_size: int, expert_width: int, bits: int, module: str) -> Files:
    """The form that an engine reads, made where it is missing.

    Parameters
    ----------
    model_name, hidden_size, expert_width : of the widened checkpoint.
    bits : 16, or 4 for engines that read rounded experts.
    module : the engine's program.

    Raises
    ------
    ValueError : other bits, or sizes that cannot be widened exactly.
    """
    if bits not in BITS:
        raise ValueError(f"bits={bits}: engines are compared in {' and '.join(map(str, BITS))} bits")
    fused = _widened(model_name, hidden_size, expert_width)
    packed = {number: _packed(fused, number) for number in sorted({16, bits})}
    forms = {PACKED: lambda: packed[bits], GGUF: lambda: _gguf(fused, bits)}
    model = forms[module]() if module in forms else fused
    return Files(model, fused, _shape(fused), _dense_bytes(fused), {number: _block_bytes(folder) for number, folder in packed.items()})


def tokens_of(num_tokens: int, document: int) -> NDArray[np.int32]:
    """[num_tokens] token ids: the beginning of one held-out document.

    Raises
    ------
    ValueError : more tokens than a document has, or no such document.
    """
    if not 0 < num_tokens <= TOKENS_A_DOCUMENT:
        raise ValueError(f"{num_tokens} tokens are asked for; documents of 1 to {TOKENS_A_DOCUMENT} are read")
    return held_out_documents(document + 1, TOKENS_A_DOCUMENT, say=lambda _: None)[document].tokens[:num_tokens]


def _widened(model_name: str, hidden_size: int, expert_width: int) -> Path:
    from moecache.widen import widen

    weights = reference_inputs(model_name)["model"][:8]
    target = user_cache_path("moecache") / "stock" / f"{model_name}-{hidden_size}-{expert_width}-{weights}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        widen(model_folder(model_name), target, hidden_size=hidden_size, expert_width=expert_width, padding="noise", progress=False)
    return target


def _packed(fused: Path, bits: int) -> Path:
    from moecache.stores.pack import pack

    if bits == 16:
        return pack(fused, fused.with_name(f"{fused.name}-packed-16"), progress=False)
    return pack(fused, fused.with_name(f"{fused.name}-packed-{bits}-products"), bits, progress=False, order="products")


def _gguf(fused: Path, bits: int) -> Path:
    """Written by the interpreter of the stock engines, which has the format's package."""
    target = fused.with_name(f"{fused.name}-{bits}.gguf")
    if not target.exists():
        command = [python(), "-m", "moecache.cli", "export-gguf", str(fused), str(target), "--bits", str(bits)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise StockError(f"{' '.join(command[2:])} failed: {done.stderr.strip()[-500:]}")
    return target


def _shape(fused: Path) -> ModelShape:
    from moecache.families import model_shape
    from moecache.hf_checkpoints import skeleton
    from moecache.stores.checkpoint import read_config

    return model_shape(skeleton(read_config(fused)))


def _dense_bytes(fused: Path) -> int:
    from moecache.stores.checkpoint import read_checkpoint

    found = read_checkpoint(fused)
    return sum(tensor.num_bytes for key, tensor in found.tensors.items() if key not in found.expert_keys)


def _block_bytes(packed: Path) -> int:
    from moecache.stores.packed_file import PackedStore

    store = PackedStore(packed)
    try:
        return store.layout.block_bytes
    finally:
        store.close()
