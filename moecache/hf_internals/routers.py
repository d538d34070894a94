"""What routers say, heard while they run, and what is put in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moecache.hf_internals.layers import MoeLayer


@dataclass(frozen=True)
class RouterOutput:
    """What a router returned for T tokens, in its own order of the K calls.

    `logits` [T, E], `weights` [T, K] and `ids` [T, K] int64 are the model's own tensors: read, never written to. `correction` [E] is
    what the router adds to its scores when it selects experts, None where it adds nothing.
    """

    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    correction: torch.Tensor | None = None


RouterListener = Callable[[int, RouterOutput], RouterOutput | None]
_IS_UNHEARD: ContextVar[bool] = ContextVar("_IS_UNHEARD", default=False)


@contextmanager
def watched(layers: Sequence[MoeLayer], listener: RouterListener) -> Iterator[None]:
    """Call the listener with (layer, output) whenever a router has run; what it returns replaces the output.

    A listener that returns None leaves the router's own tensors in place, bit for bit. The hooks are gone after the
    block, also when it ends by an error or by Ctrl-C.
    """
    handles = []
    try:
        for index, layer in enumerate(layers):
            handles.append(layer.router.register_forward_hook(_router_hook(index, listener)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _router_hook(layer: int, listener: RouterListener) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if _IS_UNHEARD.get():
            return None
        replaced = listener(layer, router_output(module, output))
        return None if replaced is None else (replaced.logits, replaced.weights, replaced.ids, *output[3:])

    return torch.compiler.disable(hook)  # a decision is made anew in every call, and is no part of a captured graph


@contextmanager
def overheard(layers: Sequence[MoeLayer], listener: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Call the listener with (layer, hidden states) whenever a router is about to run; they are read, never written to."""
    handles = []
    try:
        for index, layer in enumerate(layers):
            handles.append(layer.router.register_forward_pre_hook(_input_hook(index, listener)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_hook(layer: int, listener: Callable[[int, torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not _IS_UNHEARD.get():
            listener(layer, args[0])

    return hook


@contextmanager
def unheard() -> Iterator[None]:
    """Inside the block routers run without any listener: for looking at what a layer would do, beside what it does."""
    token = _IS_UNHEARD.set(True)
    try:
        yield
    finally:
        _IS_UNHEARD.reset(token)


def route(layer: MoeLayer, hidden: torch.Tensor) -> RouterOutput:
    """What the layer's router says about hidden states that are not its own, past any hook on it."""
    return router_output(layer.router, layer.router.forward(hidden))


def router_output(module: nn.Module, output: Any) -> RouterOutput:
    """The (logits, weights, ids) that a router module returned.

    Raises
    ------
    ValueError
        If it returned anything else.
    """
    tensors = output if isinstance(output, tuple) else (output,)
    if len(tensors) >= 3:
        logits, weights, ids = tensors[:3]
        if _is_matrix(logits) and _is_matrix(weights) and _is_matrix(ids):
            return RouterOutput(logits, weights, ids, _own_tensor(module, "e_score_correction_bias"))
    raise ValueError(f"{type(module).__name__} must return (logits, weights, ids) as matrices, got {len(tensors)} values")


def _is_matrix(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.ndim == 2


def _own_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or buffer of a module, None without it; `getattr` would raise and catch an error for every router that has none."""
    buffer = module._buffers.get(name)
    return module._parameters.get(name) if buffer is None else buffer
