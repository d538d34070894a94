"""Every private or undocumented name of transformers that moecache relies on, in one file.

Three things are needed of a loaded model: its routers, its experts, and how a decoding cache is passed. transformers
names them without promising to keep the names: each family declares the class whose output is recorded as router
logits and the class whose output is recorded as hidden states, and a decorator marks every experts module. Here they
are turned into a plain list of MoE layers. What a family's router *means* (softmax or sigmoid, renormalised or not)
is not known here, and neither are policies or caches of experts.

A new version of transformers is a change to this file and to the version it demands, nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

TRANSFORMERS_SERIES = "5.24."
EXPERTS_IMPLEMENTATION = "grouped_mm"

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


def cache_keyword(model: nn.Module) -> str:
    """Name of the forward argument that takes the decoding cache: it is being renamed across families."""
    names = inspect.signature(inspect.unwrap(model.forward)).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ValueError(f"the forward of {type(model).__name__} takes no decoding cache: it cannot be stepped")


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


def take_experts(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Take the parameters out of an experts module; `give_experts` puts them back."""
    return {name: experts._parameters.pop(name) for name in list(experts._parameters)}  # type: ignore[misc]


def give_experts(experts: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Undo `take_experts`."""
    experts._parameters.update(parameters)


def compute_experts(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of experts for tokens [n, H] with ids and weights [n, K], past any hook on the module."""
    return experts.forward(hidden, ids, weights)


def decoding_cache(output: Any) -> Any:
    """The decoding cache that a forward with ``use_cache=True`` returned, under whichever name."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def repeated_cache(cache: Any, num_rows: int) -> Any:
    """The decoding cache of a batch whose rows all start from the one row of this cache, which is used up."""
    if num_rows > 1:
        cache.reorder_cache(torch.zeros(num_rows, dtype=torch.long))
    return cache


def final_hidden_states(model: Any, input_ids: torch.Tensor, **keywords: Any) -> Any:
    """Output of the model without its vocabulary head; `last_hidden_state` is [1, T, H] after the last norm."""
    return model.base_model(input_ids=input_ids, **keywords)


def vocabulary_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits over the vocabulary [n, V] of hidden states [n, H] after the last norm, scaled as the family scales them."""
    scaling = getattr(text_config(model), "logits_scaling", None)
    logits = vocabulary_head(model)(hidden)
    return logits if scaling is None else logits / scaling


def vocabulary_head(model: Any) -> nn.Module:
    """The layer that turns hidden states into logits over the vocabulary.

    Raises
    ------
    ValueError
        If the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no vocabulary head; load it as a causal language model")
    return head
