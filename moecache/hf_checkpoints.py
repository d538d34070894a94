"""The private names of transformers that have to do with checkpoints: the second of two such places, beside `hf_internals`.

Two things are needed. First, a model without its experts: their parameters are taken out before weights are loaded, so that the library
neither allocates nor reads them. Second, where each key of a checkpoint goes: checkpoints name and cut tensors as their authors did, the
library has rules that rename keys and join tensors, and the same rules tell which ranges of bytes make up an expert. No family has code of
its own here. Files and bytes are not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import modeling_utils

from moecache.hf_internals import (
    decoding_cache,
    experts_implementation,
    is_experts,
    is_transposed,
    moe_layers,
    register_experts,
    text_config,
)


@dataclass(frozen=True)
class KeyTarget:
    """Where a key of a checkpoint goes.

    `name` is the model's parameter or buffer. Where the library makes it out of one tensor for each expert, `part` tells which of the
    `num_parts` matrices of an expert this one is, in the order in which they are joined along their rows; otherwise `part` is None.
    """

    name: str
    part: int | None = None
    num_parts: int = 1


_JOINS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The causal language model of a configuration without any memory for its weights (on the device "meta")."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or getattr(config, "dtype", None), trust_remote_code=False)


@contextmanager
def reading_instead_of_mapping() -> Iterator[None]:
    """Let the library read weights into memory of their own inside the block.

    It maps files otherwise: weights are then pages of the file, and the process is killed when the file becomes shorter.
    """
    library: Any = modeling_utils
    before = library.safe_open

    def open_for_reading(*args: Any, **settings: Any) -> Any:
        return before(*args, **settings | {"backend": "pread"})

    library.safe_open = open_for_reading
    try:
        yield
    finally:
        library.safe_open = before


def strip_experts(model: nn.Module) -> None:
    """Take the parameters of all experts out of a model; `expert_tensors` still tells their shapes."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    model._keys_to_ignore_on_load_unexpected = patterns | {r"\.experts\."}  # type: ignore[assignment]
    for module in model.modules():
        if is_experts(module) and module._parameters:
            module._moecache_tensors = {name: torch.empty_like(weight, device="meta") for name, weight in module.named_parameters()}  # type: ignore
            module._parameters.clear()
            module._is_hf_initialized = True  # type: ignore[assignment]


def expert_tensors(experts: nn.Module) -> dict[str, torch.Tensor]:
    """The layer's expert parameters by name, for their shapes and dtypes; they are on "meta" where they were stripped."""
    return dict(experts.named_parameters()) or dict(getattr(experts, "_moecache_tensors", {}))


def routing_counts(model: Any) -> tuple[int, int, int]:
    """MoE layers, experts a layer and calls a token of a model of any family."""
    layers = moe_layers(model)
    config = text_config(model)
    top_k = getattr(layers[0].router, "top_k", None) or config.num_experts_per_tok
    num_experts = next(iter(expert_tensors(layers[0].experts).values())).shape[0]
    return len(layers), int(num_experts), int(top_k)


def expert_names(model: nn.Module) -> tuple[dict[str, torch.Tensor], ...]:
    """For every MoE layer the full names of its experts' parameters in the model, with tensors of their shapes."""
    path = {id(module): name for name, module in model.named_modules()}
    found = [(path[id(layer.experts)], expert_tensors(layer.experts)) for layer in moe_layers(model)]
    return tuple({f"{name}.{tensor}": weight for tensor, weight in tensors.items()} for name, tensors in found)


def key_targets(model: Any, keys: Sequence[str]) -> dict[str, KeyTarget | None]:
    """Where each key of a checkpoint goes by the library's own rules of conversion; None where the model has no such place.

    Raises
    ------
    ValueError
        If an expert's tensor is made by more than stacking experts and joining rows.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    experts = {name: tensor for layer in expert_names(model) for name, tensor in layer.items()}
    known = {**model.state_dict(), **experts}
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings: list[Any] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    found: dict[str, KeyTarget | None] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known:
            found[key] = None
        elif pattern is None or name not in experts:
            found[key] = KeyTarget(name)
        else:
            found[key] = _part_of(key, name, pattern, converters)
    return found


def _part_of(key: str, name: str, pattern: str, converters: Sequence[Any]) -> KeyTarget:
    rules = [rule for rule in converters if pattern in rule.source_patterns and len(rule.target_patterns) == 1]
    steps = [[(type(step).__name__, step.dim) for step in rule.operations] for rule in rules]
    if len(rules) != 1 or steps[0] not in _JOINS:
        raise ValueError(
            f"checkpoint key {key!r} becomes {name!r} by {steps}; understood is stacking experts and joining rows. Load the model with "
            f"transformers and save it by save_pretrained(..., save_original_format=False), then use that folder"
        )
    return KeyTarget(name, rules[0].source_patterns.index(pattern), len(rules[0].source_patterns))


def are_experts_transposed(config: Any) -> bool:
    """Whether the matrices of the model's experts are stored as [E, inputs, outputs]."""
    return is_transposed(moe_layers(skeleton(config))[0].experts)


@torch.no_grad()
def cache_bytes(model: Any, num_tokens: int) -> int:
    """Bytes of the decoding cache after `num_tokens` tokens, from a skeleton that is run on a few tokens without computing anything.

    Keys and values grow with the tokens, up to the window of a layer that has one; the states of linear attention do not grow.
    """
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)  # advice about kernels for what is not run
    register_experts(_SHAPES_ONLY, lambda module, hidden, ids, weights: torch.empty_like(hidden))
    with experts_implementation(model, _SHAPES_ONLY):
        output = model(input_ids=torch.zeros(1, _TRIED_TOKENS, dtype=torch.long, device="meta"), use_cache=True)
    total = 0
    for layer in decoding_cache(output).layers:
        kept = min(num_tokens, getattr(layer, "sliding_window", None) or num_tokens)
        for tensor in _tensors(vars(layer)):
            grows = tensor.ndim == 4 and tensor.shape[-2] == _TRIED_TOKENS
            num_bytes = tensor.numel() * tensor.element_size()
            total += num_bytes // _TRIED_TOKENS * kept if grows else num_bytes
    return total


_SHAPES_ONLY = "moecache_shapes_only"
_TRIED_TOKENS = 11  # unlike any other dimension of a cache


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inside for tensor in _tensors(part)]
