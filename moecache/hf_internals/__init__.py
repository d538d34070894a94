"""Every private or undocumented name of transformers that moecache relies on, in one package (and `hf_checkpoints`, for files).

Three things are needed of a loaded model: its routers, its experts, and how a decoding cache is passed. transformers
names them without promising to keep the names: each family declares the class whose output is recorded as router
logits and the class whose output is recorded as hidden states, and a decorator marks every experts module. Here they
are turned into a plain list of MoE layers. What a family's router *means* (softmax or sigmoid, renormalised or not)
is not known here, and neither are policies or caches of experts.

A new version of transformers is a change to this package and to the version it demands, nothing else.
"""

from moecache.hf_internals.experts import (
    EXPERTS_IMPLEMENTATION,
    apply_gate,
    argument_names,
    compute_experts,
    experts_implementation,
    give_experts,
    register_experts,
    replace_forward,
    restore_forward,
    take_experts,
)
from moecache.hf_internals.layers import (
    TRANSFORMERS_SERIES,
    MoeLayer,
    before_first_experts,
    is_experts,
    is_split_over_devices,
    is_transposed,
    model_type,
    moe_layers,
    text_config,
)
from moecache.hf_internals.outputs import (
    cache_keyword,
    decoding_cache,
    final_hidden_states,
    repeated_cache,
    vocabulary_head,
    vocabulary_logits,
)
from moecache.hf_internals.routers import RouterListener, RouterOutput, overheard, route, router_output, unheard, watched

__all__ = [
    "EXPERTS_IMPLEMENTATION",
    "TRANSFORMERS_SERIES",
    "MoeLayer",
    "RouterListener",
    "RouterOutput",
    "apply_gate",
    "argument_names",
    "before_first_experts",
    "cache_keyword",
    "compute_experts",
    "decoding_cache",
    "experts_implementation",
    "final_hidden_states",
    "give_experts",
    "is_experts",
    "is_split_over_devices",
    "is_transposed",
    "model_type",
    "moe_layers",
    "overheard",
    "register_experts",
    "repeated_cache",
    "replace_forward",
    "restore_forward",
    "route",
    "router_output",
    "take_experts",
    "text_config",
    "unheard",
    "vocabulary_head",
    "vocabulary_logits",
    "watched",
]
