"""Tiny random checkpoints of ten families in both layouts, and the experts put back into a model that was loaded without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from torch import nn

from moecache import hf_internals
from moecache.stores.blocks import Store, aligned_bytes

LAYOUTS = ("hub", "fused")


def _build(kind: str, seed: int = 0, **fields: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        **{**tiny_models.ATTENTION, "num_hidden_layers": 2, "num_key_value_heads": 1, "initializer_range": 0.2, **fields}
    )
    return tiny_models.lively(getattr(transformers, f"{kind}ForCausalLM"), config, seed)


def _deepseek(kind: str, **fields: Any) -> Any:
    return _build(
        kind,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        num_key_value_heads=2,
        intermediate_size=32,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_group=2,
        topk_group=1,
        **fields,
    )


def deepseek_v3() -> Any:
    """One dense layer, then two with sigmoid routers in groups."""
    return _deepseek("DeepseekV3")


def deepseek_v2() -> Any:
    """One dense layer, then two with softmax routers that do not renormalise."""
    return _deepseek("DeepseekV2", topk_method="greedy")


def gpt_oss() -> Any:
    """Transposed matrices with biases, gate and up interleaved."""
    sizes = {"intermediate_size": 16, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    return _build("GptOss", **sizes)


def granitemoe() -> Any:
    """All experts of a layer in one tensor in the hub's layout too; tied embeddings."""
    return _build(
        "GraniteMoe", num_key_value_heads=2, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=True
    )


def qwen2_moe() -> Any:
    """A gated shared expert, weights not renormalised."""
    sizes = {"intermediate_size": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return _build("Qwen2Moe", num_experts=8, num_experts_per_tok=2, **sizes)


def glm4_moe() -> Any:
    """One dense layer, then one with a sigmoid router."""
    sizes = {"intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "first_k_dense_replace": 1}
    return _build("Glm4Moe", n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, **sizes)


def qwen3_moe_tied() -> Any:
    """The word embedding is the vocabulary head."""
    return tiny_models.qwen3_moe(tie_word_embeddings=True)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": qwen3_moe_tied,
    "qwen3_next": tiny_models.qwen3_next,
    "olmoe": tiny_models.olmoe,
    "mixtral": tiny_models.mixtral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": deepseek_v2,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "qwen2_moe": qwen2_moe,
    "glm4_moe": glm4_moe,
}


def save(model: Any, folder: Path, layout: str = "hub", **fields: Any) -> Path:
    """Write a checkpoint in one of the two layouts; `max_shard_size` spreads it over shards."""
    model.save_pretrained(folder, save_original_format=layout == "hub", **fields)
    return folder


@torch.no_grad()
def put_back(model: Any, store: Store) -> Any:
    """Give a model that was loaded without experts its experts from a store."""
    out = aligned_bytes(store.layout.block_bytes)
    views = store.layout.views(torch.from_numpy(out))
    for layer, moe in enumerate(hf_internals.moe_layers(model)):
        stacks = {name: torch.empty(store.num_experts, *view.shape, dtype=view.dtype) for name, view in views.items()}
        for expert in range(store.num_experts):
            store.read(layer, expert, out)
            for name, view in views.items():
                stacks[name][expert] = view
        for name, stack in stacks.items():
            setattr(moe.experts, name, nn.Parameter(stack, requires_grad=False))
    return model
