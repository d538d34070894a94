"""`plan`: what fits into a given memory, before anything is loaded.

    memory = dense weights + decoding cache + reserve + block x (slots a layer x layers + blocks for copies under way)

Everything in this sum follows from the model's configuration: the model is built without memory for its weights, and run on a few tokens
without computing anything to see how its decoding cache grows. So a plan needs no weights, only `config.json`.

How long a token takes depends on how often experts are resident, which no configuration tells. The plan replays the policy over a synthetic
trace with the locality of a large router (`synthetic_trace`) and turns the decisions into seconds with the constants of the hardware
(`cost`). A layer's time outside its experts is its bytes at the rate at which the device reads weights. The result is ESTIMATED: good for
orders of magnitude and for comparing two plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moecache import hf_checkpoints, hf_internals
from moecache.cost import estimate_seconds
from moecache.hardware import Hardware, as_hardware
from moecache.hardware_probe import measure_hardware
from moecache.policy import QUALITY_FIRST, Policy
from moecache.runtime.budget import CONTEXT_TOKENS, GIB, num_copy_blocks, parse_bytes, reserve_bytes, slots_within
from moecache.simulate import simulate
from moecache.stores.blocks import ALIGNMENT, BlockLayout
from moecache.stores.low_bit_blocks import low_bit_layout
from moecache.stores.packed_file import FILE_NAME, read_packed_header
from moecache.stores.product_blocks import product_layout
from moecache.synthetic import synthetic_trace
from moecache.trace import ModelShape

ESTIMATED = "estimated"
TRIED_TOKENS = 512
TRIED_LAYERS = 2
_DTYPE_BITS = (16, 8, 4)


@dataclass(frozen=True)
class Plan:
    """What fits, and what it is worth.

    Attributes
    ----------
    model_type, shape : the model; `shape.expert_bytes` without the gaps of a block.
    dense_bytes, block_bytes : weights outside the experts; one expert in a slot or a file.
    packed_bytes : a packed file of all experts, by bits.
    cache_bytes, context_tokens : the decoding cache after that many tokens.
    reserve_bytes : for activations and the libraries.
    memory_bytes, num_slots, num_copy_blocks : the budget, slots a layer, blocks for copies under way.
    host_bytes : main memory for experts behind the slots (a GPU's pinned memory, or a tier in front of a disk).
    policy, hardware : what was assumed for the next three.
    hit_rate, seconds_per_token, all_hits_seconds : ESTIMATED; the last with every expert resident.
    seconds_kind : always "estimated".
    """

    model_type: str
    shape: ModelShape
    dense_bytes: int
    block_bytes: int
    packed_bytes: dict[int, int]
    cache_bytes: int
    context_tokens: int
    reserve_bytes: int
    memory_bytes: int
    num_slots: int
    num_copy_blocks: int
    host_bytes: int
    policy: Policy
    hardware: Hardware
    hit_rate: float
    seconds_per_token: float
    all_hits_seconds: float
    seconds_kind: str = ESTIMATED

    def report(self) -> str:
        """The plan in words, one line a fact."""
        shape, size = self.shape, self.num_slots * self.shape.num_layers * self.block_bytes
        packed = ", ".join(f"{num_bytes / GIB:.2f} GiB at {bits} bits" for bits, num_bytes in self.packed_bytes.items())
        return "\n".join(
            (
                f"{self.model_type}: {shape.num_layers} MoE layers of {shape.num_experts} experts, top-{shape.top_k}, "
                f"{self.block_bytes / 2**20:.2f} MiB an expert",
                f"  all experts       {packed}",
                f"  dense weights     {self.dense_bytes / GIB:.2f} GiB",
                f"  decoding cache    {self.cache_bytes / GIB:.2f} GiB after {self.context_tokens} tokens",
                f"  reserve           {self.reserve_bytes / GIB:.2f} GiB for activations and libraries",
                f"  copies under way  {self.num_copy_blocks * self.block_bytes / GIB:.2f} GiB in {self.num_copy_blocks} blocks",
                f"  slots             {size / GIB:.2f} GiB: {self.num_slots} of {shape.num_experts} experts a layer",
                f"  of a memory of    {self.memory_bytes / GIB:.2f} GiB; main memory behind it: {self.host_bytes / GIB:.2f} GiB",
                f"  ESTIMATED         {self.seconds_per_token:.4f} s a token ({1 / self.seconds_per_token:.1f} tokens/s) under "
                f"{self.policy.label}, {self.hit_rate:.0%} hits; {self.all_hits_seconds:.4f} s if every expert were resident",
                f"  on                {self.hardware.name} ({self.hardware.kind})",
            )
        )


@dataclass(frozen=True)
class Geometry:
    """What a configuration alone tells: routing, bytes, and the skeleton it was read from.

    `layout` is of a block of full experts. `head_bytes` are those of the vocabulary head, which every token reads; the word embedding is
    read a row at a time.
    """

    model_type: str
    shape: ModelShape
    layout: BlockLayout
    dense_bytes: int
    embedding_bytes: int
    head_bytes: int
    is_transposed: bool
    skeleton: Any


def read_geometry(source: str | Path | Any) -> Geometry:
    """The geometry of a configuration.

    Parameters
    ----------
    source : a folder with `config.json`, that file, or a configuration object of transformers.

    Raises
    ------
    ValueError : no such file, or a model without routed experts.
    """
    config = _config(source) if isinstance(source, str | Path) else source
    model = hf_checkpoints.skeleton(config)
    num_layers, num_experts, top_k = hf_checkpoints.routing_counts(model)
    experts = [weight for layer in hf_internals.moe_layers(model) for weight in layer.experts.parameters()]
    first = hf_internals.moe_layers(model)[0].experts
    tensors = {name: (weight.shape[1:], str(weight.dtype).removeprefix("torch.")) for name, weight in first.named_parameters()}
    layout = BlockLayout.of(tensors)
    head, embedding = hf_internals.vocabulary_head(model).weight, model.get_input_embeddings().weight
    return Geometry(
        hf_internals.model_type(model),
        ModelShape(num_layers, num_experts, top_k, layout.expert_bytes),
        layout,
        _num_bytes([*model.parameters(), *model.buffers()]) - _num_bytes(experts),
        0 if head is embedding else _num_bytes([embedding]),
        _num_bytes([head]),
        hf_internals.is_transposed(first),
        model,
    )


def _config(source: str | Path) -> Any:
    from transformers import AutoConfig

    path = Path(source)
    if not (path / "config.json").is_file() and not path.is_file():
        raise ValueError(f"{path} is no configuration: name a folder with config.json, that file, or give a configuration object")
    return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _num_bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def plan(
    source: str | Path | Any,
    memory: int | str,
    *,
    policy: Policy = QUALITY_FIRST,
    device: str = "cpu",
    bits: int | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    host_memory: int | str = 0,
    reserve: int | str | None = None,
    hardware: Hardware | str | None = None,
) -> Plan:
    """Say what fits into `memory` and how fast it would be.

    Parameters
    ----------
    source : a folder with `config.json`, that file, or a configuration object of transformers; no weights are read.
    memory : of the device that computes, such as ``"20 GiB"``.
    policy : what is waited for.
    device : "cpu" (experts on a disk) or "cuda" (experts in main memory, or on a disk behind `host_memory`).
    bits : of experts in slots: 16 = as they are, 8 or 4 = as packed for products. By default as a packed folder says, else 16.
    context_tokens : length of prompt and answer, for the decoding cache.
    host_memory : main memory for experts behind the slots; 0 on a GPU = all of them.
    reserve : for activations and libraries; by default 256 MiB on the CPU and 1 GiB on a GPU.
    hardware : constants, or the name of a profile; by default this machine is measured for a few seconds ("cpu"), or "pcie4" is assumed.

    Returns
    -------
    Plan

    Raises
    ------
    CapacityError : a memory too small for top-k slots a layer; the message names the smallest that works.
    ValueError : an unknown device, other bits, or no configuration.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown; choose 'cpu' or 'cuda'")
    if context_tokens < 1:
        raise ValueError(f"context_tokens={context_tokens} must be at least 1")
    geometry = read_geometry(source)
    slot = _slot_layout(geometry, _bits_in_slots(source) if bits is None else bits)
    shape = replace(geometry.shape, expert_bytes=slot.expert_bytes)
    cache = hf_checkpoints.cache_bytes(geometry.skeleton, context_tokens)
    kept = reserve_bytes(reserve, device)
    num_slots = int(slots_within(memory, geometry.dense_bytes, slot.block_bytes, policy, shape, cache + kept)[0])
    all_blocks = shape.num_layers * shape.num_experts * slot.block_bytes
    host = min(parse_bytes(host_memory), all_blocks)
    machine = _hardware(geometry, slot.expert_bytes, hardware, device, host)
    hit_rate, seconds = _estimate(shape, policy, num_slots, machine)
    return Plan(
        geometry.model_type,
        shape,
        geometry.dense_bytes,
        slot.block_bytes,
        _packed(geometry),
        cache,
        context_tokens,
        kept,
        parse_bytes(memory),
        num_slots,
        num_copy_blocks(policy, shape),
        host if host or device == "cpu" else all_blocks,
        policy,
        machine,
        hit_rate,
        seconds,
        _estimate(shape, policy, shape.num_experts, machine)[1],
    )


def _bits_in_slots(source: str | Path | Any) -> int:
    """As a packed folder says; full experts otherwise."""
    if not isinstance(source, str | Path) or not (Path(source) / FILE_NAME).is_file():
        return 16
    header, _ = read_packed_header(Path(source) / FILE_NAME)
    return 16 if header.order is None or header.bits is None else header.bits


def _slot_layout(geometry: Geometry, bits: int) -> BlockLayout:
    return geometry.layout if bits == 16 else product_layout(geometry.layout, bits, geometry.is_transposed)


def _packed(geometry: Geometry) -> dict[int, int]:
    num_experts = geometry.shape.num_layers * geometry.shape.num_experts
    layouts = {bits: low_bit_layout(geometry.layout, bits, geometry.is_transposed) for bits in _DTYPE_BITS[1:]}
    return {16: num_experts * geometry.layout.block_bytes, **{bits: num_experts * layout.block_bytes for bits, layout in layouts.items()}}


def _hardware(geometry: Geometry, expert_bytes: int, hardware: Hardware | str | None, device: str, host_bytes: int) -> Hardware:
    """The machine, with the time of a layer and of a token outside the experts from the model's own bytes."""
    if hardware is None:
        hardware = "pcie4" if device == "cuda" else measure_hardware(max(expert_bytes, ALIGNMENT), seconds_each=0.5)
    machine = as_hardware(hardware)
    if host_bytes and device == "cuda" and machine.host_ram_bytes is None:
        machine = machine.behind_disk("nvme", host_bytes)
    rate = machine.device_bytes_per_second or expert_bytes / max(machine.seconds_per_expert(expert_bytes), 1e-12)
    in_layers = geometry.dense_bytes - geometry.embedding_bytes - geometry.head_bytes
    layer_seconds = in_layers / geometry.shape.num_layers / rate
    return machine.replace(kind=machine.kind, layer_seconds=layer_seconds, token_seconds=geometry.head_bytes / rate)


def _estimate(shape: ModelShape, policy: Policy, num_slots: int, hardware: Hardware) -> tuple[float, float]:
    """Hit rate and seconds a token over the warm half of a synthetic trace; a few layers stand for all."""
    layers = min(TRIED_LAYERS, shape.num_layers)
    trace = synthetic_trace(TRIED_TOKENS, layers, shape.num_experts, shape.top_k, expert_bytes=shape.expert_bytes)
    run = simulate(trace, policy, num_slots=num_slots)
    if hardware.host_ram_bytes is not None:
        share = max(hardware.host_ram_bytes * layers // shape.num_layers, shape.expert_bytes or 1)
        hardware = hardware.replace(host_ram_bytes=share)
    warm = estimate_seconds(run, hardware).summary(TRIED_TOKENS // 2)["seconds_per_token"]
    in_layers = (warm - hardware.token_seconds) * shape.num_layers / layers
    return float(run.summary()["hit_rate"]), hardware.token_seconds + in_layers
