"""Open a model bigger than its memory: a checkpoint or a loaded model, a place for its experts, and a runtime under a policy.

    model = moecache.offload("path/to/checkpoint", moecache.QUALITY_FIRST, num_slots=128)
    model.generate(**inputs)
    model.moecache.stats()
    model.moecache.close()

Reading experts while others are computed wants threads that rest while they wait: set ``OMP_WAIT_POLICY=PASSIVE`` before torch is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecache import hf_checkpoints, hf_internals
from moecache.cache import ExpertCache, slots_per_layer
from moecache.expert_sum import set_source
from moecache.families import model_shape
from moecache.foresight import check_prediction
from moecache.kernel import Fallback
from moecache.packed_products import CODES
from moecache.policy import Policy, check_policy
from moecache.runtime.budget import CONTEXT_TOKENS, parse_bytes, reserve_bytes, slots_within
from moecache.runtime.engine import Runtime
from moecache.runtime.loading import checkpoint_of, load_dense
from moecache.runtime.low_bit_experts import LowBitExperts
from moecache.runtime.transfer import NUM_READERS, Transfer
from moecache.score import check_evaluation
from moecache.stores.blocks import Store
from moecache.stores.store import RamStore, open_store
from moecache.trace import ModelShape

GPU_RESULT = Path(__file__).with_name("gpu_result.json")


class UnverifiedWarning(UserWarning):
    """A part of the package that has not run on the hardware it is for."""


def offload(
    path_or_model: Any,
    policy: Policy,
    num_slots: int | Sequence[int] | None = None,
    *,
    memory: int | float | str | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    reserve: int | float | str | None = None,
    device: str | torch.device = "cpu",
    store: Store | None = None,
    host_memory: int | float | str | None = None,
    low_bits: int | LowBitExperts | None = None,
    cold_start: str | npt.ArrayLike = "first",
    seed: int = 0,
    buddies: np.ndarray | None = None,
    num_readers: int = NUM_READERS,
    chunk_tokens: int = 1024,
    predict: str = "stale_gate",
) -> Any:
    """A transformers model whose experts visit slots.

    Parameters
    ----------
    path_or_model : path of a checkpoint, or a loaded model
        A loaded model's experts are copied into main memory and taken out of it until `close`.
    policy : Policy
        What waits, what is substituted, who is evicted and admitted.
    num_slots : int or sequence of int
        Slots a layer, at least the router's top-k. Give it or `memory`.
    memory : int or str
        Bytes on the device, such as ``"20 GiB"``: dense weights, decoding cache, reserve, slots and copies under way, as `plan` counts.
    context_tokens : int
        Length of prompt and answer that `memory` has to have room for.
    reserve : int or str
        Bytes of `memory` for activations and libraries; by default 256 MiB on the CPU and 1 GiB on a GPU.
    device : where the model computes.
    store : Store, optional
        Where experts are read from; by default the checkpoint, or main memory for a loaded model. It stays open after `close`.
    host_memory : int or str, optional
        Bytes of main memory that keep the experts read last, in front of a checkpoint on disk.
    low_bits : {8, 4} or LowBitExperts, for ``fallback="low_precision"``
        Bits of the copies that compute such calls (made now, from every expert), or copies made before. They stay on the device.
    cold_start, seed, buddies : see `ExpertCache`.
    num_readers : threads that read.
    chunk_tokens : of a prompt that are computed together; each expert they call is read once.
    predict : what a policy that prefetches expects: "stale_gate" or "previous_token".

    Returns
    -------
    transformers.PreTrainedModel
        With a `Runtime` as ``model.moecache``.

    Raises
    ------
    ValueError
        A policy that cannot be carried out, a budget too small, a store of another model, or a model that is offloaded already.

    Warns
    -----
    UnverifiedWarning : on a GPU, until the package's own check of it has been run and kept.
    """
    check_carried_out(check_policy(policy), low_bits)
    check_prediction(predict)
    if (num_slots is None) == (memory is None):
        raise ValueError("give num_slots (slots a layer) or memory (bytes on the device), one of the two")
    device = torch.device(device)
    _warn_of_unverified(device)
    with ExitStack() as undo:
        model, place = _opened(path_or_model, store, host_memory, device, undo)
        shape = replace(model_shape(model), expert_bytes=place.layout.expert_bytes)
        _check_store(place, shape, device)
        copies = _copies(model, place, low_bits, device)
        slots: Any = num_slots
        if memory is not None:
            taken = _dense_bytes(model) + (0 if copies is None else copies.num_bytes)
            cache = hf_checkpoints.cache_bytes(hf_checkpoints.skeleton(model.config), context_tokens)
            other = cache + reserve_bytes(reserve, device.type)
            slots = slots_within(memory, taken, place.layout.block_bytes, policy, shape, other)
        new_cache = partial(ExpertCache, shape, policy, slots_per_layer(shape, slots), cold_start, seed, buddies)
        on_close = undo.pop_all().close
    model.moecache = Runtime(model, new_cache, _transfer(place, device, num_readers), copies, chunk_tokens, predict, on_close)
    return model


def check_carried_out(policy: Policy, low_bits: int | LowBitExperts | None) -> None:
    """Refuse, by name, what a runtime cannot do.

    Raises
    ------
    ValueError
        Experts computed where they lie, a policy that knows the future or couples layers, or low precision without copies.
    """
    if policy.fallback == Fallback.CPU:
        raise ValueError("the runtime cannot carry out fallback='cpu': it computes on one device; the simulator can estimate it")
    if policy.needs_future:
        name = policy.eviction.name.lower()  # type: ignore[union-attr]
        raise ValueError(f"the runtime cannot carry out eviction={name!r}, which knows the future; simulate a recorded trace instead")
    if policy.couples_layers:
        raise ValueError(f"the runtime cannot carry out policy {policy.label!r}: its layers decide together, here each decides alone")
    if policy.fallback == Fallback.LOW_PRECISION and low_bits is None:
        raise ValueError("fallback='low_precision' computes misses from low-bit copies; give them as low_bits=")
    if policy.fallback != Fallback.LOW_PRECISION and low_bits is not None:
        raise ValueError(f"low_bits= is for fallback='low_precision'; policy {policy.label!r} would never use the copies")


def _copies(model: Any, store: Store, low_bits: int | LowBitExperts | None, device: torch.device) -> LowBitExperts | None:
    if not isinstance(low_bits, int):
        return low_bits
    return LowBitExperts.rounded(store, low_bits, hf_internals.is_transposed(hf_internals.moe_layers(model)[0].experts), device)


def _opened(
    path_or_model: Any, store: Store | None, host_memory: int | float | str | None, device: torch.device, undo: ExitStack
) -> tuple[Any, Store]:
    """The model without its experts, on the device, and where its experts are."""
    is_path = isinstance(path_or_model, str | Path)
    if host_memory is not None and (store is not None or not is_path):
        raise ValueError("host_memory= is a tier in front of a checkpoint on disk; put a HostTier around a store of your own")
    if is_path:
        return _from_path(Path(path_or_model), store, host_memory, device, undo)
    model = path_or_model
    if not getattr(getattr(model, "moecache", None), "is_closed", True):
        raise ValueError("this model is offloaded already; close it first: model.moecache.close()")
    check_evaluation(model)
    if store is None:
        store = RamStore.from_model(model, is_pinned=device.type == "cuda")
        undo.callback(store.close)
    undo.callback(model.set_experts_implementation, model.get_experts_implementation())
    for layer in hf_internals.moe_layers(model):
        undo.callback(_give_back, layer.experts, hf_internals.take_experts(layer.experts))
    return model.to(device), store


def _give_back(experts: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    set_source(experts, None)
    hf_internals.give_experts(experts, parameters)


def _from_path(
    path: Path, store: Store | None, host_memory: int | float | str | None, device: torch.device, undo: ExitStack
) -> tuple[Any, Store]:
    model = load_dense(path, device)
    if store is None:
        host_bytes = 0 if host_memory is None else parse_bytes(host_memory)
        store = open_store(checkpoint_of(model), host_bytes, is_pinned=device.type == "cuda" and host_bytes > 0)
        undo.callback(store.close)
    return model, store


def _check_store(store: Store, shape: ModelShape, device: torch.device) -> None:
    if device.type != "cpu" and any(spec.name.endswith(CODES) for spec in store.layout.tensors):
        raise ValueError(f"these experts were packed for products on a processor, not on {device}; pack the checkpoint in the plain order")
    if (store.num_layers, store.num_experts) != (shape.num_layers, shape.num_experts):
        raise ValueError(
            f"the store holds {store.num_layers} layers of {store.num_experts} experts, but the model has "
            f"{shape.num_layers} of {shape.num_experts}; open the store of this model"
        )


def _dense_bytes(model: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in (*model.parameters(), *model.buffers()))


def _transfer(store: Store, device: torch.device, num_readers: int) -> Transfer:
    if device.type != "cuda":
        return Transfer(store, num_readers)
    from moecache.runtime.transfer_cuda import CudaTransfer

    return CudaTransfer(store, device, num_readers)


def _warn_of_unverified(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} is not supported; choose 'cpu' or 'cuda'")
    if device.type == "cuda" and not GPU_RESULT.exists():
        warnings.warn(
            "UNVERIFIED: experts have not been moved to a GPU by this version; check yours with `pytest -m gpu tests/gpu`",
            UnverifiedWarning, stacklevel=3,
        )  # fmt: skip
