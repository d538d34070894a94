"""Widening: a small trained model with the bytes of a large one, computing the same thing.

Timing needs experts of real size, and real routes need a trained model; a model that is both does not fit everywhere. So a small one is
padded with zeros: hidden states of H0 numbers become H1, experts of width F0 become F1. Padding alone is not exact, because RMSNorm
divides by the mean over all H1 numbers, of which H1 - H0 are zero: normalised hidden states grow by S = sqrt(H1 / H0). Hence

- what *reads* normalised hidden states (projections of attention, routers, gate and up matrices, the vocabulary head) is divided by S,
- what *writes* the residual stream (embeddings, output projections, down matrices) is multiplied by S, so that the epsilon inside the norm
  keeps its share,
- norms and inner sizes stay as they are.

H1 / H0 must be a power of four: then S is a power of two, the stored weights are exact, and only sums round otherwise. Routes and text
are the small model's, bytes and time the large one's. The added entries are zeros, so what rounding to few bits costs is to be measured
on the small model. A family that normalises queries and keys over all heads (olmoe) gets heads of zeros: there queries and keys keep
their matrices, whose results are S times as large and divided by a mean over S^2 times as many numbers, and it is the weights of their
norms that are divided by S.

Almost all bytes of a widened expert are padding. Where it meets only zeros its value changes nothing, so it may be *noise* as large as the
weights: a disk or a host that treats zeros apart then gains nothing from them. Zeros stay where padding would reach the result: gate and
up rows of added units see no real hidden number, and added hidden numbers see no real unit.

Vocabulary heads that are tied to the embeddings are untied, because one of them reads and the other writes.

The checkpoint is written tensor by tensor; memory holds the small model and one expert.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, log2
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from moecache import hf_checkpoints
from moecache.stores.checkpoint import read_config, shard_paths
from moecache.stores.shard_writer import ShardWriter

LAYOUTS = ("fused", "hub")
PADDINGS = ("zeros", "noise")
_EXPERT = re.compile(r"^(?P<layer>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$")
_READS = ("q_proj", "k_proj", "v_proj", "in_proj_ba", "in_proj_qkvz", "gate", "gate_proj", "up_proj", "shared_expert_gate", "lm_head")
_WRITES = ("embed_tokens", "o_proj", "out_proj", "down_proj")
_KEEPS = ("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "conv1d", "A_log", "dt_bias")
_OTHERWISE = {"olmoe": {"q_proj": 0, "k_proj": 0, "q_norm": -1, "k_norm": -1}}  # powers of S


@dataclass(frozen=True)
class _Widening:
    """One widening: S, the widened configuration, the shapes of its parameters, their type, and what experts are padded with."""

    scale: int
    config: Any
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    padding: str


def widen(
    source: str | Path,
    target: str | Path,
    *,
    hidden_size: int = 2048,
    expert_width: int = 512,
    num_layers: int | None = None,
    layout: str = "fused",
    dtype: str = "bfloat16",
    padding: str = "zeros",
    shard_bytes: int = 2 * 2**30,
    progress: bool = True,
) -> Path:
    """Write a widened checkpoint of a small model.

    Parameters
    ----------
    source : folder of a qwen3_next or olmoe model, one matrix for each expert and projection.
    target : the folder to make; it appears when it is whole.
    hidden_size, expert_width : H1 and F1.
    num_layers : write only the first of the layers: their bytes and routes stay right, the text does not. Where none of them has full
        attention, the next layer that has follows them without its experts, because a decoding cache needs one.
    layout : "fused" = all experts of a layer in one tensor, "hub" = one matrix for each expert and projection.
    dtype : of all weights; bfloat16 holds the weights of a bfloat16 model exactly.
    padding : what fills the experts where it changes nothing, "zeros" or "noise" (normal, as large as the expert's weights).
    shard_bytes : about how much a file holds.
    progress : show a progress bar.

    Returns
    -------
    Path : the new folder.

    Raises
    ------
    ValueError : sizes that cannot be exact, a family or a weight that is not understood, or a target that exists.
    """
    source, target = Path(source), Path(target)
    for name, value, known in (("layout", layout, LAYOUTS), ("padding", padding, PADDINGS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    if target.exists():
        raise ValueError(f"{target} is there already; remove it or name another folder")
    weights = {key: weight for path in shard_paths(source) for key, weight in load_file(path).items()}
    config = read_config(source)
    if num_layers is not None:
        weights = _first_layers(config, weights, num_layers)
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    widening = _widening(config, hidden_size, expert_width, getattr(torch, dtype), padding)
    announced = _announced(weights, widening, layout)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    temporary.mkdir(parents=True)
    try:
        _write_shards(weights, widening, announced, temporary, shard_bytes, progress)
        widening.config.save_pretrained(temporary)
        for path in source.glob("tokenizer*"):
            shutil.copyfile(path, temporary / path.name)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _widening(config: Any, hidden_size: int, expert_width: int, dtype: torch.dtype, padding: str) -> _Widening:
    if config.model_type not in ("qwen3_next", "olmoe"):
        raise ValueError(f"{config.model_type!r} cannot be widened; understood are qwen3_next and olmoe")
    ratio = hidden_size // config.hidden_size
    if config.hidden_size * ratio != hidden_size or ratio < 1 or log2(ratio) % 2:
        raise ValueError(f"hidden_size={hidden_size} must be {config.hidden_size} times a power of four, so that scales are powers of two")
    wide = type(config)(**config.to_dict())
    wide.hidden_size, wide.dtype = hidden_size, dtype
    if config.model_type == "olmoe":
        before = wide.intermediate_size
        wide.intermediate_size = expert_width
        wide.num_attention_heads, wide.num_key_value_heads = wide.num_attention_heads * ratio, wide.num_key_value_heads * ratio
    else:
        before = wide.moe_intermediate_size
        wide.moe_intermediate_size = wide.shared_expert_intermediate_size = expert_width
    if expert_width < before:
        raise ValueError(f"expert_width={expert_width} must be at least {before}")
    shapes = {name: tuple(weight.shape) for name, weight in hf_checkpoints.skeleton(wide).state_dict().items()}
    return _Widening(isqrt(ratio), wide, shapes, dtype, padding)


def _first_layers(config: Any, weights: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """The weights of the first layers; the configuration is changed to match."""
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ValueError(f"num_layers={num_layers} must be in 1..{config.num_hidden_layers}")
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    kept = {key: weight for key, weight in weights.items() if _layer_of(key) < num_layers}
    config.num_hidden_layers, new_kinds = num_layers, kinds[:num_layers]
    if "full_attention" not in new_kinds:
        following = kinds.index("full_attention")
        for key, weight in weights.items():
            if _layer_of(key) == following and ".mlp." not in key:
                kept[key.replace(f".layers.{following}.", f".layers.{num_layers}.")] = weight
        kept |= {f"model.layers.{num_layers}.mlp.{name}_proj.weight": torch.zeros(1, 1) for name in ("gate", "up", "down")}
        config.num_hidden_layers, config.mlp_only_layers = num_layers + 1, [num_layers]
        new_kinds.append("full_attention")
    if getattr(config, "layer_types", None):
        config.layer_types = new_kinds
    return kept


def _layer_of(key: str) -> int:
    """The layer that a weight belongs to, -1 outside the layers."""
    found = re.search(r"\.layers\.(\d+)\.", key)
    return int(found[1]) if found else -1


@dataclass(frozen=True)
class _Written:
    """A tensor of the new checkpoint: the keys it is made of, written one after the other, each with this shape."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]


def _announced(weights: Mapping[str, torch.Tensor], widening: _Widening, layout: str) -> dict[str, _Written]:
    """What is written, in order, by name."""
    found: dict[str, _Written] = {}
    experts: dict[str, dict[str, dict[int, str]]] = {}
    for key in sorted(weights):
        match = _EXPERT.match(key)
        if match is None:
            if key in widening.shapes:
                found[key] = _Written(widening.shapes[key], ((key, widening.shapes[key]),))
            else:
                raise ValueError(f"weight {key!r} has no place in the widened model")
        elif f"{match['layer']}.gate_up_proj" in widening.shapes:
            experts.setdefault(match["layer"], {}).setdefault(match["part"], {})[int(match["expert"])] = key
    for layer, parts in experts.items():
        down = widening.shapes[f"{layer}.down_proj"][1:]
        shapes = {"gate": (down[1], down[0]), "up": (down[1], down[0]), "down": down}
        if layout == "hub":
            found |= {key: _Written(shapes[part], ((key, shapes[part]),)) for part, keys in parts.items() for key in keys.values()}
            continue
        for name, joined in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            pieces = tuple((parts[part][expert], shapes[part]) for expert in range(len(parts["gate"])) for part in joined)
            found[f"{layer}.{name}"] = _Written(widening.shapes[f"{layer}.{name}"], pieces)
    return found


def _write_shards(
    weights: Mapping[str, torch.Tensor],
    widening: _Widening,
    announced: Mapping[str, _Written],
    folder: Path,
    shard_bytes: int,
    progress: bool,
) -> None:
    item_bytes, dtype = widening.dtype.itemsize, str(widening.dtype).removeprefix("torch.")
    sizes = {name: torch.Size(written.shape).numel() * item_bytes for name, written in announced.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc="writing the widened model", disable=not progress) as bar:
        for file, shard in zip(names, shards, strict=True):
            with ShardWriter(folder / file, {name: (dtype, announced[name].shape) for name in shard}) as writer:
                for name in shard:
                    for key, shape in announced[name].parts:
                        part = _widened(key, weights[key], shape, widening)
                        writer.write(name, part)
                        bar.update(part.nbytes)
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _widened(key: str, weight: torch.Tensor, shape: tuple[int, ...], widening: _Widening) -> Any:
    """The bytes of a weight in the leading corner of its padding, scaled."""
    scaled = weight.to(torch.float32) * _factor(key, widening)
    wide = torch.zeros(shape, dtype=widening.dtype)
    if widening.padding == "noise" and _EXPERT.match(key):
        noise = torch.randn(shape[0], shape[1] - weight.shape[1], generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
        wide[:, weight.shape[1] :] = noise * scaled.std()
    wide[tuple(slice(size) for size in weight.shape)] = scaled.to(widening.dtype)
    return wide.view(torch.uint8).flatten().numpy() if wide.ndim else wide[None].view(torch.uint8).numpy()


def _factor(key: str, widening: _Widening) -> float:
    """What a weight is multiplied by.

    Raises
    ------
    ValueError : a weight that is not understood.
    """
    name = next(part for part in reversed(key.split(".")) if part not in ("weight", "bias"))
    powers = {**dict.fromkeys(_KEEPS, 0), **dict.fromkeys(_READS, -1), **dict.fromkeys(_WRITES, 1)}
    powers |= _OTHERWISE.get(widening.config.model_type, {})
    if name in powers:
        return float(widening.scale) ** powers[name]
    raise ValueError(f"weight {key!r} is not understood: does it read or write the residual stream?")
