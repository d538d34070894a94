"""Who computes a layer's experts, from which parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_IMPLEMENTATION = "grouped_mm"


@contextmanager
def experts_implementation(model: Any, name: str = EXPERTS_IMPLEMENTATION) -> Iterator[None]:
    """Compute experts by the named implementation inside the block, and by the model's own again after it.

    Implementations sum in different orders, so two runs are comparable to the last bit only under the same one.
    """
    before = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def register_experts(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Make a function (module, hidden, ids, weights) an experts implementation of this process, for any model to be set to.

    It is kept out of graphs that torch captures: what it looks up differs from call to call.
    """
    ALL_EXPERTS_FUNCTIONS.register(name, torch.compiler.disable(function))


def apply_gate(experts: Any, products: torch.Tensor) -> torch.Tensor:
    """The family's own combination of gate and up products [n, 2 F] into [n, F]; it needs no weights."""
    return experts._apply_gate(products)


def compute_experts(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of experts for tokens [n, H] with ids and weights [n, K], past any hook on the module."""
    return experts.forward(hidden, ids, weights)


def take_experts(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Take the parameters out of an experts module; `give_experts` puts them back."""
    return {name: experts._parameters.pop(name) for name in list(experts._parameters)}  # type: ignore[misc]


def give_experts(experts: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Undo `take_experts`."""
    experts._parameters.update(parameters)


def replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Let a module compute by another function; hooks on it see what that returns. `restore_forward` undoes it."""
    vars(module).setdefault("_moecache_forward", vars(module).get("forward"))
    module.forward = forward


def restore_forward(module: Any) -> None:
    """Let a module compute by its own forward again; nothing where it does already."""
    if "_moecache_forward" in vars(module):
        del module.forward
        before = vars(module).pop("_moecache_forward")
        if before is not None:
            module.forward = before


def argument_names(module: nn.Module) -> list[str]:
    """Names of the arguments of a module's forward, in order."""
    return [name for name in inspect.signature(inspect.unwrap(module.forward)).parameters if name != "self"]
