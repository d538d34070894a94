"""`expert_sum`: the weighted sum of a token's experts, wherever their weights lie. One function for emulator and runtime.

Two ways of adding the same numbers differ in the last bits, and then two instruments cannot be compared bit for bit. So there is one way:
the products of each call in a row of their own, in the order in which the router named them, stacked and summed as transformers does it. In
which order the rows are *computed* does not matter, so experts that are in place can be computed while others are on their way.

The function is an *experts implementation* of transformers under the name "moecache": `model.set_experts_implementation("moecache")`. The
registry is one for the whole process, so the function knows no model. It asks the experts module for its *source* (`set_source`) and, where
there is none, takes the module's own parameters.

Families differ in how gate and up are combined, in biases and in transposed matrices; the module says so. Policies are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecache import hf_internals
from moecache.packed_products import PackedMatrix

IMPLEMENTATION = "moecache"
_SOURCE = "_moecache_source"

Weights = Mapping[str, Any]  # tensors, or matrices in few bits


class ExpertSource(Protocol):
    """Who hands out the weights of one layer's experts, by the names of the module's parameters and without the expert dimension."""

    def calls(self, ids: Tensor) -> Iterator[tuple[int, Weights | None]]:
        """(position of the call, weights) of each of one token's calls [1, K], in any order; None where nobody computes it."""
        ...

    def chunks(self, num_tokens: int) -> list[slice]:
        """The parts in which several tokens are to be computed, one after the other."""
        ...

    def experts(self, chunk: int, ids: Tensor) -> Iterator[tuple[int, Weights]]:
        """(expert, weights) of every expert in a chunk's ids [t, K], each once, in any order."""
        ...


class OwnParameters:
    """The module's own parameters: every expert is in place."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters(recurse=False))

    def calls(self, ids: Tensor) -> Iterator[tuple[int, Weights | None]]:
        """See `ExpertSource`."""
        for call, expert in enumerate(ids[0].tolist()):
            yield call, self._weights(expert)

    def chunks(self, num_tokens: int) -> list[slice]:
        """See `ExpertSource`."""
        return [slice(0, num_tokens)]

    def experts(self, chunk: int, ids: Tensor) -> Iterator[tuple[int, Weights]]:
        """See `ExpertSource`."""
        for expert in ids.unique().tolist():
            yield expert, self._weights(expert)

    def _weights(self, expert: int) -> Weights:
        return {name: weight[expert] for name, weight in self.parameters.items()}


class ClosedError(ValueError):
    """The runtime that held a model's experts was closed."""


class ClosedSource:
    """What is left of a model's experts once their runtime is closed: an error that says so."""

    def calls(self, ids: Tensor) -> Iterator[tuple[int, Weights | None]]:
        """See `ExpertSource`."""
        raise ClosedError("the runtime that held this model's experts is closed; open the model again with moecache.offload")

    def chunks(self, num_tokens: int) -> list[slice]:
        """See `ExpertSource`."""
        return [slice(0, num_tokens)]

    def experts(self, chunk: int, ids: Tensor) -> Iterator[tuple[int, Weights]]:
        """See `ExpertSource`."""
        return self.calls(ids)  # type: ignore[return-value]


def set_source(module: nn.Module, source: ExpertSource | None) -> None:
    """Let a module's experts be computed from a source, or from its own parameters again (None)."""
    if source is None:
        module.__dict__.pop(_SOURCE, None)
    else:
        module.__dict__[_SOURCE] = source


def source_of(module: nn.Module) -> ExpertSource:
    """The module's source, its own parameters where none was set."""
    return module.__dict__.get(_SOURCE) or OwnParameters(module)


def expert_sum(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's experts.

    Parameters
    ----------
    module : experts module of transformers
    hidden : tensor [T, H]
    ids : tensor [T, K] int64
        In the router's own order.
    weights : tensor [T, K]
        Routing weights, in the model's type or in float32.

    Returns
    -------
    tensor [T, H]
        In the type of `hidden`.
    """
    source = source_of(module)
    if len(hidden) == 1:
        return _one_token(module, source, hidden, ids, weights)
    chunks = enumerate(source.chunks(len(hidden)))
    return torch.cat([_chunk(module, source, index, hidden[rows], ids[rows], weights[rows]) for index, rows in chunks])


def _one_token(module: Any, source: ExpertSource, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows: list[Any] = [None] * ids.shape[1]
    for call, tensors in source.calls(ids):
        rows[call] = torch.zeros_like(hidden) if tensors is None else expert_output(module, hidden, tensors)
    weighted = torch.stack(rows, dim=1) * weights[:, :, None]  # each number as if its row were weighted alone
    return weighted.sum(dim=1).to(hidden.dtype)


def _chunk(module: Any, source: ExpertSource, index: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows = torch.zeros(*ids.shape, hidden.shape[1], dtype=torch.promote_types(hidden.dtype, weights.dtype), device=hidden.device)
    for expert, tensors in source.experts(index, ids):
        token, call = torch.where(ids == expert)
        output = expert_output(module, hidden[token], tensors)
        rows[token, call] = (output * weights[token, call, None]).to(rows.dtype)
    return rows.sum(dim=1).to(hidden.dtype)


def expert_output(module: Any, hidden: Tensor, weights: Weights) -> Tensor:
    """One expert's output [n, H] for inputs [n, H], before it is weighted."""
    is_transposed = hf_internals.is_transposed(module)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _product(hidden, weights, name, is_transposed)
    inner = hf_internals.apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
    output = _product(inner, weights, "down_proj", is_transposed)
    return module.post_expert_norm(output) if module.has_post_expert_norm else output


def _product(inputs: Tensor, weights: Weights, name: str, is_transposed: bool) -> Tensor:
    matrix, bias = weights[name], weights.get(f"{name}_bias")
    inputs = inputs if inputs.dtype is matrix.dtype else inputs.to(matrix.dtype)
    if isinstance(matrix, PackedMatrix):
        output = matrix.product(inputs)
    elif is_transposed:
        output = inputs @ matrix
    else:
        output = F.linear(inputs, matrix)
    return output if bias is None else output + bias


hf_internals.register_experts(IMPLEMENTATION, expert_sum)
