"""The faster training step, put together: which of the library's parts are exchanged, and when.

On a processor core the library spends most of a step outside its arithmetic. The parts exchanged are the experts product
(`fast_experts`), the delta rule (`fast_delta`), the causal convolution (`fast_convolution`), the choice of the top-k
(`fast_router`) and the linear layers' products (`fast_linear`, bfloat16). All but the last give the library's numbers up
to rounding. Evaluation and the study's instruments use none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next

from moecache.reference import fast_experts
from moecache.reference.fast_convolution import causal_convolution
from moecache.reference.fast_delta import delta_rule
from moecache.reference.fast_linear import use_bfloat16_products
from moecache.reference.fast_router import use_fast_routers

REPLACEMENTS = {"torch_chunk_gated_delta_rule": delta_rule, "causal_conv1d_fn": causal_convolution}


def use_fast_parts(model: PreTrainedModel, routers: list[nn.Module], is_bfloat16: bool = True) -> None:
    """Exchange a model's experts product, routers and linear products, in place."""
    model.set_experts_implementation(fast_experts.register())
    use_fast_routers(routers)
    if is_bfloat16:
        use_bfloat16_products(model)


@contextmanager
def fast_layers() -> Iterator[None]:
    """While inside, Qwen3-Next layers use the compiled delta rule and convolution."""
    before = {name: getattr(modeling_qwen3_next, name) for name in REPLACEMENTS}
    for name, function in REPLACEMENTS.items():
        setattr(modeling_qwen3_next, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(modeling_qwen3_next, name, function)
