"""accelerate's disk offload: every experts module is "on disk" and visits memory for its forward, by the library's own hooks.

The checkpoint has all experts of a layer in one tensor (`--layout fused`): the library then maps it in place. From one matrix for each
expert it would first write a second copy of all experts into the offload folder, which takes twice their bytes in memory.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import tempfile
from typing import Any

from moecache.experiments.stock_engines import protocol


def declare(parser: argparse.ArgumentParser) -> None:
    """The engine's own options."""
    protocol.declare_products(parser)
    protocol.declare_device(parser)
    parser.add_argument("--gpu-expert-layers", type=int, default=0, help="first layers whose experts are not on disk but on the GPU")


def load(asked: argparse.Namespace) -> Any:
    """Decode with transformers and accelerate, experts offloaded to disk."""
    from transformers import AutoModelForCausalLM

    from moecache import hf_internals
    from moecache.experiments.stock_engines.stepping import Stepped
    from moecache.reference.loading import quiet_library

    try:
        version = importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError as fault:
        raise protocol.missing_extra("accelerate") from fault
    folder = tempfile.TemporaryDirectory(prefix="moecache-offload-")
    atexit.register(folder.cleanup)
    with quiet_library():
        model = AutoModelForCausalLM.from_pretrained(
            asked.model, dtype="auto", device_map=_device_map(asked), offload_folder=folder.name, local_files_only=True
        )  # fmt: skip
    model.set_experts_implementation(hf_internals.EXPERTS_IMPLEMENTATION)
    settings: dict[str, Any] = {"experts": hf_internals.EXPERTS_IMPLEMENTATION}
    if asked.device != "cpu":
        settings["gpu_expert_layers"] = asked.gpu_expert_layers
    return Stepped(model.eval(), asked, settings=settings, versions={"accelerate": version})


def _device_map(asked: argparse.Namespace) -> dict[str, str]:
    """Everything on the device but the experts modules, which are on disk, save those of the first layers that a GPU holds."""
    from moecache import hf_internals
    from moecache.hf_checkpoints import skeleton
    from moecache.stores.checkpoint import read_config

    model = skeleton(read_config(asked.model))
    experts = [name for name, module in model.named_modules() if hf_internals.is_experts(module)]
    device = "cpu" if asked.device == "cpu" else f"{asked.device}:0"
    places = {name: device if layer < asked.gpu_expert_layers else "disk" for layer, name in enumerate(experts)}
    for name, module in model.named_modules():
        is_inside = any(name == path or name.startswith(f"{path}.") for path in places)
        has_experts_below = any(path.startswith(f"{name}.") or not name for path in experts)
        if not is_inside and not has_experts_below and (list(module.parameters()) or list(module.buffers())):
            places[name] = device
    return places


if __name__ == "__main__":
    raise SystemExit(protocol.main("accelerate_offload", declare, load, protocol.TORCH_ENVIRONMENT))
