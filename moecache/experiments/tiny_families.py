"""Small random models of ten families: what differs between families is how they route and compute, and that needs no trained weights.

| family | scores | weights renormalised | besides |
|---|---|---|---|
| qwen3_next | softmax | yes | linear attention, a gated shared expert |
| qwen3_moe | softmax | yes | a dense layer between MoE layers |
| olmoe | softmax | no | |
| mixtral | softmax | yes, in float32 | |
| qwen2_moe | softmax | no | a gated shared expert |
| granitemoe | softmax over the chosen | - | scaled residuals |
| gpt_oss | softmax over the chosen | - | biases, transposed and interleaved matrices, sliding windows |
| deepseek_v3 | sigmoid with a correction, in groups | yes, then scaled | unsorted; the first layer is dense |
| deepseek_v2 | softmax, in groups | no, scaled | unsorted; the first layer is dense |
| glm4_moe | sigmoid with a correction | yes, then scaled | unsorted; the first layer is dense |

Weights are drawn so that signals keep their size and routers have preferences; with the libraries' initial weights every token would be
routed alike, and whatever one compares would agree by luck. What is compared is not known here.
"""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
NUM_EXPERTS, TOP_K, NUM_LAYERS, WIDTH = 16, 3, 3, 16
ROUTER_GAIN = 1.5

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": NUM_LAYERS,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_LATENT = {"num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_NARROW = {"intermediate_size": 32, "moe_intermediate_size": WIDTH}
_SHARED = {"shared_expert_intermediate_size": WIDTH}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_GROUPS = {"n_routed_experts": NUM_EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
_CLASSES_AND_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {"num_experts": NUM_EXPERTS, "head_dim": 16, "num_hidden_layers": 4, **_NARROW, **_SHARED, **_LINEAR}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": NUM_EXPERTS, "head_dim": 16, "mlp_only_layers": [1], **_NARROW}),
    "olmoe": ("Olmoe", {"num_experts": NUM_EXPERTS, "num_key_value_heads": 2, "intermediate_size": WIDTH}),
    "mixtral": ("Mixtral", {"num_local_experts": NUM_EXPERTS, "intermediate_size": WIDTH}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": NUM_EXPERTS, **_NARROW, **_SHARED}),
    "granitemoe": (
        "GraniteMoe",
        {"num_local_experts": NUM_EXPERTS, "intermediate_size": WIDTH, "residual_multiplier": 0.7, "logits_scaling": 1.5},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": NUM_EXPERTS, "head_dim": 16, "intermediate_size": WIDTH, "sliding_window": 16}),
    "deepseek_v3": ("DeepseekV3", {"q_lora_rank": 16, **_GROUPS, **_NARROW, **_LATENT}),
    "deepseek_v2": (
        "DeepseekV2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, **_GROUPS, **_NARROW, **_LATENT},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"head_dim": 16, "routed_scaling_factor": 1.4, **_GROUPS, **_NARROW, "n_group": 1, "topk_group": 1},
    ),
}
FAMILIES = tuple(_CLASSES_AND_FIELDS)


def tiny_model(family: str, seed: int = 0) -> Any:
    """A random model of a family, in evaluation mode; the same seed gives the same weights.

    Raises
    ------
    ValueError : an unknown family; the known ones are listed.
    """
    if family not in _CLASSES_AND_FIELDS:
        raise ValueError(f"family={family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    import transformers

    name, fields = _CLASSES_AND_FIELDS[family]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **fields})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    _draw(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _draw(model: torch.nn.Module, random: torch.Generator) -> None:
    """Weights and corrections, from a seed; what the library leaves as memory was is drawn too."""
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            gain = ROUTER_GAIN if name.endswith((".gate.weight", ".router.weight")) else 1.0
            weight.normal_(0.0, gain / weight.shape[-1] ** 0.5, generator=random)
        elif name.endswith((".bias", "sinks")):
            weight.normal_(0.0, 0.1, generator=random)
        elif name.endswith("A_log"):  # slow decay: a state that fades at once is divided by almost nothing
            weight.copy_(torch.linspace(-3.0, 0.0, weight.numel()))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1, generator=random)
