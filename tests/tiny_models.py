"""Tiny random models of several families, small enough to run in milliseconds and lively enough to miss.

Weights are drawn wider than the library's initial ones: with those, every router is nearly uniform and every token is
routed alike, and a test of which expert stands in would pass by luck.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

logging.getLogger("transformers").setLevel(logging.ERROR)
torch.set_num_threads(1)

VOCABULARY = 96
ATTENTION = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def qwen3_next(seed: int = 0, num_layers: int = 4, num_experts: int = 16, top_k: int = 4, **fields: Any) -> Any:
    """Three linear-attention layers to one full, a gated shared expert, weights renormalised over the top-k."""
    config = Qwen3NextConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **fields,
    )
    return lively(Qwen3NextForCausalLM, config, seed)


def olmoe(seed: int = 0, num_layers: int = 3, num_experts: int = 8, top_k: int = 2, **fields: Any) -> Any:
    """Full attention, no shared expert, weights not renormalised."""
    config = OlmoeConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=2,
        intermediate_size=16,
        **fields,
    )
    return lively(OlmoeForCausalLM, config, seed)


def qwen3_moe(seed: int = 0, num_layers: int = 3, num_experts: int = 12, top_k: int = 3, **fields: Any) -> Any:
    """Full attention; the middle layer is dense, so MoE layers are not the model's layers."""
    config = Qwen3MoeConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
        **fields,
    )
    return lively(Qwen3MoeForCausalLM, config, seed)


def mixtral(seed: int = 0, num_layers: int = 2, num_experts: int = 8, top_k: int = 2, **fields: Any) -> Any:
    """Full attention, weights renormalised and kept in float32."""
    config = MixtralConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        intermediate_size=16,
        **fields,
    )
    return lively(MixtralForCausalLM, config, seed)


def qwen2_moe(seed: int = 0, num_layers: int = 2, num_experts: int = 12, top_k: int = 3, **fields: Any) -> Any:
    """Full attention, a gated shared expert, weights not renormalised."""
    config = Qwen2MoeConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **fields,
    )
    return lively(Qwen2MoeForCausalLM, config, seed)


def granitemoe(seed: int = 0, num_layers: int = 2, num_experts: int = 8, top_k: int = 3, **fields: Any) -> Any:
    """A softmax over the chosen; residuals and logits are scaled."""
    config = GraniteMoeConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        intermediate_size=16,
        residual_multiplier=0.7,
        logits_scaling=1.5,
        **fields,
    )
    return lively(GraniteMoeForCausalLM, config, seed)


def gpt_oss(seed: int = 0, num_layers: int = 2, num_experts: int = 8, top_k: int = 3, **fields: Any) -> Any:
    """A softmax over the chosen, biases everywhere, transposed and interleaved matrices, sliding windows."""
    config = GptOssConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        sliding_window=16,
        **fields,
    )
    return lively(GptOssForCausalLM, config, seed)


def deepseek_v3(seed: int = 0, num_layers: int = 3, num_experts: int = 16, top_k: int = 3, **fields: Any) -> Any:
    """Sigmoid scores with a correction, two of four groups, weights renormalised and scaled, unsorted; the first layer is dense."""
    config = DeepseekV3Config(
        **ATTENTION,
        **_LATENT_ATTENTION,
        num_hidden_layers=num_layers,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        n_group=4,
        topk_group=2,
        q_lora_rank=16,
        first_k_dense_replace=1,
        **fields,
    )
    return lively(DeepseekV3ForCausalLM, config, seed)


def deepseek_v2(seed: int = 0, num_layers: int = 3, num_experts: int = 16, top_k: int = 3, **fields: Any) -> Any:
    """Softmax scores inside two of four groups, weights scaled and not renormalised, unsorted; the first layer is dense."""
    config = DeepseekV2Config(
        **ATTENTION,
        **_LATENT_ATTENTION,
        num_hidden_layers=num_layers,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        q_lora_rank=None,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        **fields,
    )
    return lively(DeepseekV2ForCausalLM, config, seed)


def glm4_moe(seed: int = 0, num_layers: int = 3, num_experts: int = 12, top_k: int = 3, **fields: Any) -> Any:
    """Sigmoid scores with a correction, one group, weights renormalised and scaled, unsorted; the first layer is dense."""
    config = Glm4MoeConfig(
        **ATTENTION,
        num_hidden_layers=num_layers,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        routed_scaling_factor=1.4,
        **fields,
    )
    return lively(Glm4MoeForCausalLM, config, seed)


_LATENT_ATTENTION = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
FAMILIES = {
    "qwen3_next": qwen3_next,
    "olmoe": olmoe,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "granitemoe": granitemoe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": deepseek_v2,
    "glm4_moe": glm4_moe,
}


def lively(kind: Any, config: Any, seed: int) -> Any:
    """A model in evaluation mode whose matrices keep the size of signals, with routers that have preferences."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                gain = 1.5 if name.endswith((".gate.weight", ".router.weight")) else 1.0
                weight.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=generator)
            elif name.endswith((".bias", "sinks")):  # their library leaves them as memory was
                weight.normal_(0.0, 0.1, generator=generator)
            elif name.endswith("A_log"):  # slow decay: a state that fades at once is divided by almost nothing
                weight.copy_(torch.linspace(-3.0, 0.0, weight.numel()))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    return model


def documents(seed: int = 0, lengths: tuple[int, ...] = (40, 1, 33)) -> list[np.ndarray]:
    """Random documents of the tiny models' vocabulary."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length) for length in lengths]
