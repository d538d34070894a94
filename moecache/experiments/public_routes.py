"""What is public about the routing of models that people use: the comparators of the reference models.

Two kinds of figures, told apart by `kind`. *Replayed*: somebody published the routes of a model, and the figures here were computed from
them by the functions that this study uses for its own models (every miss fetched, LRU, cache kept, experts 0 to C-1 resident at first; no
warm window, as the files are short). *Reported*: a figure that somebody else measured on texts of their own, as they state it.

Nothing here is a target; texts, lengths and cold starts differ. This module computes nothing.
"""

from __future__ import annotations

import pandas as pd

GPT_OSS = "gpt-oss-20b"
QWEN3 = "Qwen3-30B-A3B"
SOURCES = {
    GPT_OSS: "routes of AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting (commit 72b368f): 20 subjects, 10,220 tokens, replayed",
    QWEN3: "routes of Helldez/BigMoeOnEdge (commit 2d4f2b1): one prompt and its answer, 129 tokens, run with 6 experts, replayed",
}

ROUTING = pd.DataFrame(
    [
        (GPT_OSS, 32, 4, 0.996, 0.912, 0.968, 0.294, 0.441, 0.658, 0.356, 0.848, 17),
        (QWEN3, 128, 6, 0.501, 0.744, 0.909, 0.640, 0.379, 0.811, 0.382, 0.964, 53),
    ],
    columns=[
        "model", "num_experts", "top_k", "called_fraction", "use_entropy", "use_entropy_first_layer", "busiest_eighth_fraction",
        "neighbour_overlap", "lru_quarter", "lru_quarter_low", "lru_quarter_high", "target_slots",
    ],
)  # fmt: skip
"""Mean over layers; `low` and `high` over layers; `target_slots`: the fewest slots at which LRU hits 91.5 %."""

REPORTED_USE_ENTROPY, REPORTED_USE_ENTROPY_FIRST_LAYER = 0.90, 0.96
"""Normalised entropy reported for a model of 512 experts."""

GATE_WEIGHTS = {
    GPT_OSS: (0.348, 0.265, 0.212, 0.175),
    QWEN3: (0.265, 0.201, 0.166, 0.141, 0.121, 0.106),
    "OLMoE-1B-7B, layer 0 (reported)": (0.256, 0.176, 0.136, 0.112, 0.094, 0.083, 0.075, 0.069),
}
"""Mean gate weight by rank."""

HIT_RATES = pd.DataFrame(
    [
        (GPT_OSS, "replayed", 0.125, 0.441),
        (GPT_OSS, "replayed", 0.25, 0.658),
        (GPT_OSS, "replayed", 0.5, 0.904),
        (QWEN3, "replayed", 0.125, 0.610),
        (QWEN3, "replayed", 0.25, 0.811),
        (QWEN3, "replayed", 0.5, 0.937),
        ("512 experts, top-10 (llama.cpp PR 27861)", "reported", 64 / 512, 0.67),
        ("512 experts, top-10 (llama.cpp PR 27861)", "reported", 128 / 512, 0.81),
        ("512 experts, top-10 (kekzl/imp PR 2061)", "reported", 93 / 512, 0.435),
        ("512 experts, top-10 (kekzl/imp PR 2061)", "reported", 186 / 512, 0.620),
        ("512 experts, top-10 (kekzl/imp PR 2061)", "reported", 279 / 512, 0.720),
        ("OLMoE-1B-7B (colibri PR 1092)", "reported", 16 / 64, 0.514),
    ],
    columns=["source", "kind", "resident_fraction", "hit_rate"],
)
"""LRU hit rates; that of kekzl/imp is over 300 tokens from an empty cache, so it holds many first calls."""

QWEN3_NEXT = {
    "model": "Qwen3-Next-80B-A3B",
    "num_layers": 48,
    "num_experts": 512,
    "top_k": 10,
    "hidden_size": 2048,
    "expert_width": 512,
    "total_parameters": 80e9,
    "active_parameters": 3e9,
    "weight_rule": "renormalised",
    "shared_expert": "one, gated",
}
OLMOE = {
    "model": "OLMoE-1B-7B",
    "num_layers": 16,
    "num_experts": 64,
    "top_k": 8,
    "hidden_size": 2048,
    "expert_width": 1024,
    "total_parameters": 6.9e9,
    "active_parameters": 1.3e9,
    "weight_rule": "as the softmax gives them",
    "shared_expert": "none",
}
IMITATED = (QWEN3_NEXT, OLMOE)
"""Sizes from the published configurations and names of the models whose routing geometry the reference models have."""
