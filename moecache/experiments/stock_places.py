"""Where engines compute, and what *equal memory* means there.

| place | dense weights + a share of the experts fit into | main memory |
|---|---|---|
| `cpu` | main memory, beside an allowance for the process | that sum is the cap |
| `cuda` | memory of a GPU | a cap of its own, the same for every share |

Beside a GPU an engine is told what fits there, in the unit in which it places experts: this project's runtime single experts, in slots;
the others the experts of whole layers. What does not fit stays in main memory and on disk, as the engine does it: llama.cpp computes these
layers' experts on the processor, accelerate copies whole layers, the runtime the experts it needs. All dense weights are on the GPU. The
budget is one of weights: nobody enforces it, and decoding cache and activations come on top for everybody.

UNVERIFIED: nothing of the second row has run on a GPU. Engines and caps are started elsewhere (`stock_runs`).
"""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from moecache.experiments.stock_engines import protocol
from moecache.experiments.stock_files import PYTHON_VARIABLE, StockError, python

CPU, GPU = "cpu", "cuda"
HOST_MEBIBYTES = 16 * 1024  # main memory of the machine on which the claim was made
ALL_LAYERS = -1  # llama.cpp's word for every layer and the output's
SEE_TORCH = "import torch; print(torch.version.cuda, torch.cuda.is_available())"
SEE_LLAMA = "import llama_cpp; print(llama_cpp.llama_supports_gpu_offload())"


@dataclass(frozen=True)
class Place:
    """Where engines compute.

    Attributes
    ----------
    device : "cpu" or "cuda".
    host_mebibytes : cap of main memory beside a GPU, pages of files included; means nothing on a processor.

    Raises
    ------
    ValueError : another device.
    """

    device: str = CPU
    host_mebibytes: int = HOST_MEBIBYTES

    def __post_init__(self) -> None:
        if self.device not in (CPU, GPU):
            raise ValueError(f"device={self.device!r}: engines are compared on {CPU!r} and {GPU!r}; choose a GPU by CUDA_VISIBLE_DEVICES")

    @property
    def is_gpu(self) -> bool:
        """Whether engines compute on a GPU."""
        return self.device == GPU

    def asked(self) -> dict[str, Any]:
        """What a result's key says of it: nothing on a processor, so keys are those of results from before there were places."""
        return asdict(self) if self.is_gpu else {}


PROCESSOR = Place()


def why_no_gpu() -> str | None:
    """One sentence that says why the engines' interpreter cannot compute on a GPU; None where it can."""
    seen = _said(SEE_TORCH)
    if seen is None:
        return f"torch cannot be imported by {python()}: install it there, or name another interpreter in {PYTHON_VARIABLE}"
    built_for, is_there = seen.split()
    if built_for == "None":
        return f"the torch of {python()} was built for processors only: install a build of torch for CUDA"
    if is_there != "True":
        return f"the torch of {python()} (CUDA {built_for}) sees no GPU: see what `nvidia-smi` says, and CUDA_VISIBLE_DEVICES"
    return None


def why_no_llama_offload() -> str | None:
    """One sentence that says why llama.cpp cannot use a GPU; None where it can."""
    return None if _said(SEE_LLAMA) == "True" else str(protocol.missing_gpu_build())


def _said(program: str) -> str | None:
    """The last line that a program of the engines' interpreter prints; None where it fails."""
    run = subprocess.run([python(), "-c", program], capture_output=True, text=True)
    return None if run.returncode else run.stdout.strip().rpartition("\n")[2]


def check_gpu(place: Place) -> None:
    """See that a place's GPU is there.

    Raises
    ------
    StockError : it is not; says what is missing.
    """
    if place.is_gpu and (reason := why_no_gpu()):
        raise StockError(f"device={place.device!r}: {reason}")


def check_llama_offload(place: Place) -> None:
    """See that llama.cpp can use a place's GPU.

    Raises
    ------
    StockError : it was built without; says how to build it.
    """
    if place.is_gpu and (reason := why_no_llama_offload()):
        raise StockError(f"device={place.device!r}: {reason}")


def place_options(module: str, place: Place, num_layers: int, gpu_expert_layers: int, tier_mebibytes: int) -> list[str]:
    """What tells an engine's program to compute on a GPU; nothing on a processor.

    Parameters
    ----------
    module : program of `stock_engines`.
    num_layers : with experts.
    gpu_expert_layers : of them, whose experts an engine that places whole layers keeps on the GPU.
    tier_mebibytes : of main memory in which this project's runtime keeps experts behind its slots; 0 = none.

    Raises
    ------
    ValueError : a program that has no form for a GPU.
    """
    if not place.is_gpu:
        return []
    if module == "ours":
        return ["--device", place.device, "--host-mebibytes", str(tier_mebibytes)]
    if module == "accelerate_offload":
        return ["--device", place.device, "--gpu-expert-layers", str(gpu_expert_layers)]
    if module == "llama_cpp":
        return ["--gpu-layers", str(ALL_LAYERS), "--cpu-expert-layers", str(num_layers - gpu_expert_layers)]
    raise ValueError(f"{module} has no form for a GPU; leave it out on {place.device!r}")
