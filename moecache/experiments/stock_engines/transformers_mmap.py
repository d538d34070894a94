"""Plain transformers over mapped experts: the library's own modules and products, its experts' weights pages of the checkpoint's file.

`from_pretrained` copies all weights into memory; a model whose weights stay mapped is the most that one can have without another library.
The checkpoint has all experts of a layer in one tensor (`--layout fused`), so that nothing has to be joined. Dense weights are read.
"""

from __future__ import annotations

import argparse
from typing import Any

from moecache.experiments.stock_engines import protocol


def load(asked: argparse.Namespace) -> Any:
    """Decode with transformers, its experts mapped."""
    from torch import nn

    from moecache import hf_internals
    from moecache.experiments.stock_engines.stepping import Stepped
    from moecache.runtime.loading import load_dense

    model = load_dense(asked.model)
    mapped = _mapped_experts(model)
    for layer, names in zip(hf_internals.moe_layers(model), model.moecache_checkpoint.expert_names, strict=True):
        weights = {name.rpartition(".")[2]: mapped[name] for name in names}
        hf_internals.give_experts(layer.experts, {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()})
    model.set_experts_implementation(hf_internals.EXPERTS_IMPLEMENTATION)
    return Stepped(model, asked, settings={"experts": hf_internals.EXPERTS_IMPLEMENTATION})


def _mapped_experts(model: Any) -> dict[str, Any]:
    """The experts' tensors by their names in the model, as views of mapped files."""
    from safetensors import safe_open

    checkpoint = model.moecache_checkpoint
    found = {}
    for key in checkpoint.expert_keys:
        target = checkpoint.targets[key]
        if target.part is not None:
            raise ValueError(f"{checkpoint.folder} keeps {key!r} apart; a checkpoint with all experts of a layer in one tensor is needed")
        with safe_open(checkpoint.tensors[key].path, framework="pt") as file:
            found[target.name] = file.get_tensor(key)
    return found


if __name__ == "__main__":
    raise SystemExit(protocol.main("transformers_mmap", protocol.declare_products, load, protocol.TORCH_ENVIRONMENT))
