"""Which modules of a loaded model are its MoE layers.

Each family declares the class whose output is recorded as router logits and the class whose output is recorded as hidden states, and a
decorator marks every experts module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

TRANSFORMERS_SERIES = "5.24."

if not transformers.__version__.startswith(TRANSFORMERS_SERIES):
    raise ImportError(
        f"moecache reads private names of transformers {TRANSFORMERS_SERIES}*, but {transformers.__version__} is "
        f"installed; install it with `pip install 'transformers=={TRANSFORMERS_SERIES}*'`"
    )


@dataclass(frozen=True)
class MoeLayer:
    """One layer with routed experts: `name` is the decoder layer's path in the model; the rest are its modules."""

    name: str
    decoder: nn.Module
    router: nn.Module
    experts: nn.Module


def model_type(model: nn.Module) -> str:
    """Name of the family as its configuration gives it, e.g. ``"qwen3_next"``."""
    return str(text_config(model).model_type)


def text_config(model: Any) -> Any:
    """Configuration of the language model, also where it is one part of several."""
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"a transformers model is needed, got {type(model).__name__}, which has no `config`")
    return config.get_text_config()


def moe_layers(model: nn.Module) -> tuple[MoeLayer, ...]:
    """The model's MoE layers in the order in which a token meets them.

    Raises
    ------
    ValueError
        If the model declares no router, or a layer has not exactly one router and one experts module.
    """
    routers = _recorded_classes(model, "router_logits")
    decoders = _recorded_classes(model, "hidden_states")
    if not routers:
        raise ValueError(f"{type(model).__name__} declares no router: it is not a mixture-of-experts model")
    found = [_moe_layer(name, module, routers) for name, module in model.named_modules() if isinstance(module, decoders)]
    layers = tuple(layer for layer in found if layer is not None)
    num_routers = sum(isinstance(module, routers) for module in model.modules())
    if len(layers) != num_routers:
        raise ValueError(f"{type(model).__name__} has {num_routers} routers, of which {len(layers)} lie in a decoder layer")
    return layers


def _moe_layer(name: str, decoder: nn.Module, routers: tuple[type, ...]) -> MoeLayer | None:
    """The MoE layer inside a decoder layer, or None where it is dense."""
    inside = [module for module in decoder.modules() if isinstance(module, routers)]
    experts = [module for module in decoder.modules() if is_experts(module)]
    if not inside and not experts:
        return None
    if len(inside) != 1 or len(experts) != 1:
        raise ValueError(f"layer {name} has {len(inside)} routers and {len(experts)} experts modules; one of each is understood")
    return MoeLayer(name, decoder, inside[0], experts[0])


def before_first_experts(model: nn.Module) -> tuple[nn.Module, ...]:
    """The largest modules that a token passes before the experts of the first MoE layer, and beside them in that layer."""
    first = moe_layers(model)[0]
    decoders = [module for module in model.modules() if isinstance(module, _recorded_classes(model, "hidden_states"))]
    below = decoders[: next(index for index, decoder in enumerate(decoders) if decoder is first.decoder)]
    return (*below, *_parts_without(first.decoder, first.experts))


def _parts_without(module: nn.Module, excluded: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if child is excluded:
            continue
        if any(inside is excluded for inside in child.modules()):
            yield from _parts_without(child, excluded)
        else:
            yield child


def _recorded_classes(model: nn.Module, output: str) -> tuple[type, ...]:
    """Module classes whose outputs the model, or a model inside it, declares as `output`."""
    classes: list[type] = []
    for module in model.modules():
        declared = (getattr(module, "_can_record_outputs", None) or {}).get(output, ())
        for entry in declared if isinstance(declared, (list, tuple)) else (declared,):
            target = entry if isinstance(entry, type) else getattr(entry, "target_class", None)
            if target is not None and target not in classes:
                classes.append(target)
    return tuple(classes)


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds a layer's routed experts (the attribute is set by transformers' decorator)."""
    return hasattr(module, "_is_expert_parallel")


def is_transposed(experts: nn.Module) -> bool:
    """Whether the experts' matrices are stored as [E, inputs, outputs] instead of [E, outputs, inputs]."""
    return bool(getattr(experts, "is_transposed", False))


def is_split_over_devices(experts: nn.Module) -> bool:
    """Whether the layer's experts are spread over processes, so that this one does not hold them all."""
    return bool(experts._is_expert_parallel)
