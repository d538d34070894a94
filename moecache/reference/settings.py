"""The numbers that fix the reference models: geometries, mixture of the texts, training settings.

`reference-512` has the routing geometry of Qwen3-Next (512 experts, top-10, gate weights renormalised, a gated shared
expert, three linear-attention layers to one full-attention layer), and every width divided by 16: hidden 2048 -> 128,
heads in the same proportions. Four layers, 14 million parameters.

`reference-64` has the routing geometry of OLMoE (64 experts, top-8, routing weights left as the softmax gives them, no
shared expert, full attention), again every width divided by 16: hidden 2048 -> 128, expert width 1024 -> 64. Four
layers, 7 million parameters. Its embeddings are tied, which OLMoE's are not: so the file stays under 15 MB.

This module holds plain values. It imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

VOCABULARY_SIZE = 4096
MODELS_FOLDER = Path(__file__).resolve().parents[2] / "data" / "models"

MIXTURE: dict[str, float] = {
    "code": 0.24,
    "mathematics": 0.12,
    "api": 0.20,
    "scripture": 0.12,
    "languages": 0.08,
    "word_problems": 0.12,
    "interpreter": 0.12,
}
"""Share of each domain in the training tokens; multiples of 0.01 that sum to 1."""

GEOMETRY_512: dict = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.003,
    "initializer_range": 0.04,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

GEOMETRY_64: dict = {
    "model_type": "olmoe",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
    "initializer_range": 0.04,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
"""A geometry without `model_type` is one of Qwen3-Next."""


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides the loss curve. Rates: warm-up, then constant; the decay is a branch (`train`)."""

    name: str = "reference-512"
    geometry: dict = field(default_factory=lambda: dict(GEOMETRY_512))
    seed: int = 1
    rows_per_step: int = 4
    row_tokens: int = 1024
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    balance_coefficient: float = 0.003

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.rows_per_step * self.row_tokens


SETTINGS: dict[str, TrainSettings] = {
    "reference-512": TrainSettings(),
    "reference-64": TrainSettings("reference-64", dict(GEOMETRY_64), balance_coefficient=0.01),
}
"""The models that can be trained, by name. Balance coefficients are those that the models imitated report or scale to."""


def settings_of(name: str) -> TrainSettings:
    """Training settings of a reference model.

    Raises
    ------
    ValueError : no model of that name; lists the names.
    """
    if name not in SETTINGS:
        raise ValueError(f"no reference model named {name!r}; there are {', '.join(SETTINGS)}")
    return SETTINGS[name]
