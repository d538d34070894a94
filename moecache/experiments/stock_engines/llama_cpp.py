"""llama.cpp on a GGUF file, through the C functions that llama-cpp-python exposes.

It maps the file and lets the system bring and drop pages. Nothing is patched: the flags are those of its own programs (mapped or read
into memory, threads, the type of its keys and values). Rearranging low-bit weights is off unless asked for, although it is their default:
it copies them into memory that the system cannot drop, and they no longer fit.

On a GPU (UNVERIFIED) all layers are there but the experts of the first ones, which stay mapped and are computed by the processor: what
its programs call `--n-gpu-layers` and `--n-cpu-moe`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.experiments.stock_engines import protocol

CONTEXT_STEP = 256  # llama.cpp rounds its context up to a multiple of this


def declare(parser: argparse.ArgumentParser) -> None:
    """The engine's own options."""
    parser.add_argument("--no-mmap", action="store_true", help="read the whole file into memory")
    parser.add_argument("--repack", action="store_true", help="rearrange low-bit weights for this processor, in memory of their own")
    parser.add_argument("--float32-cache", action="store_true", help="keys and values in float32 instead of float16")
    parser.add_argument("--context-tokens", type=int, default=1024, help="longest document")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU, the last ones and the output's first; -1: all")
    parser.add_argument("--cpu-expert-layers", type=int, default=0, help="first layers whose experts stay in main memory all the same")


class KeptTensors(ctypes.Structure):
    """The library's `llama_model_tensor_buft_override`: tensors whose names match are kept in a kind of memory."""

    _fields_ = (("pattern", ctypes.c_char_p), ("memory", ctypes.c_void_p))


def kept_on_cpu(num_layers: int) -> ctypes.Array[KeptTensors]:
    """The experts of the first layers, in the processor's memory; ends with an empty entry."""
    memory = import_module("llama_cpp._ggml").libggml.ggml_backend_cpu_buffer_type
    memory.restype = ctypes.c_void_p
    layers = "|".join(map(str, range(num_layers)))
    return (KeptTensors * 2)(KeptTensors(rf"^blk\.({layers})\.ffn_\w+_exps".encode(), memory()))


class LlamaCpp:
    """A loaded model; see `protocol.Engine`."""

    def __init__(self, asked: argparse.Namespace) -> None:
        try:
            library: Any = import_module("llama_cpp")
        except ImportError as fault:
            raise protocol.missing_extra("llama-cpp-python") from fault
        self._library = library
        library.llama_log_set(_SILENT, None)
        library.llama_backend_init()
        self._model = self._load_model(asked)
        self._context = self._new_context(asked)
        self._num_logits = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self.versions = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
        self.settings = {
            "mmap": not asked.no_mmap,
            "repack": asked.repack,
            "kv_cache": "float32" if asked.float32_cache else "float16",
            "system": library.llama_print_system_info().decode(),
        }
        if asked.gpu_layers:
            self.settings |= {"n_gpu_layers": asked.gpu_layers, "cpu_expert_layers": asked.cpu_expert_layers}

    def _load_model(self, asked: argparse.Namespace) -> Any:
        library = self._library
        if asked.gpu_layers and not library.llama_supports_gpu_offload():
            raise protocol.missing_gpu_build()
        parameters = library.llama_model_default_params()
        parameters.load_mode = library.LLAMA_LOAD_MODE_NONE if asked.no_mmap else library.LLAMA_LOAD_MODE_MMAP
        parameters.n_gpu_layers, parameters.use_extra_bufts = asked.gpu_layers, asked.repack
        if asked.cpu_expert_layers:
            kept = kept_on_cpu(asked.cpu_expert_layers)  # read while the model is loaded
            parameters.tensor_buft_overrides = ctypes.addressof(kept)
        model = library.llama_model_load_from_file(os.fsencode(asked.model), parameters)
        if not model:
            raise ValueError(f"llama.cpp cannot load {asked.model}; see what it says with `llama-cli -m {asked.model}`")
        return model

    def _new_context(self, asked: argparse.Namespace) -> Any:
        parameters = self._library.llama_context_default_params()
        parameters.n_ctx = -(-asked.context_tokens // CONTEXT_STEP) * CONTEXT_STEP
        parameters.n_batch = parameters.n_ubatch = 32  # one token at a time; larger ones only take memory
        parameters.n_threads = parameters.n_threads_batch = asked.threads
        if asked.float32_cache:
            parameters.type_k = parameters.type_v = self._library.GGML_TYPE_F32
        context = self._library.llama_init_from_model(self._model, parameters)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context of {parameters.n_ctx} tokens for {asked.model}; ask for fewer")
        return context

    def begin(self) -> None:
        """Forget the document so far."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Logits [V] of the token after this one; overwritten by the next step."""
        library = self._library
        token = (library.llama_token * 1)(token_id)
        if status := library.llama_decode(self._context, library.llama_batch_get_one(token, 1)):
            raise RuntimeError(f"llama_decode returned {status}: 1 = the document is longer than --context-tokens")
        return np.ctypeslib.as_array(library.llama_get_logits_ith(self._context, -1), (self._num_logits,))

    def stats(self) -> dict[str, float]:
        """Nothing: it does not count experts."""
        return {}

    def gpu_peak_bytes(self) -> int | None:
        """None: it does not say."""
        return None


def _silent_log() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


_SILENT = _silent_log()


def load(asked: argparse.Namespace) -> LlamaCpp:
    """Decode with llama.cpp."""
    return LlamaCpp(asked)


if __name__ == "__main__":
    raise SystemExit(protocol.main("llama_cpp", declare, load))
