"""What a forward takes and returns besides tokens: the decoding cache, hidden states, logits over the vocabulary."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from moecache.hf_internals.layers import text_config


def cache_keyword(model: nn.Module) -> str:
    """Name of the forward argument that takes the decoding cache: it is being renamed across families."""
    names = inspect.signature(inspect.unwrap(model.forward)).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ValueError(f"the forward of {type(model).__name__} takes no decoding cache: it cannot be stepped")


def decoding_cache(output: Any) -> Any:
    """The decoding cache that a forward with ``use_cache=True`` returned, under whichever name."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def repeated_cache(cache: Any, num_rows: int) -> Any:
    """The decoding cache of a batch whose rows all start from the one row of this cache, which is used up."""
    if num_rows > 1:
        cache.reorder_cache(torch.zeros(num_rows, dtype=torch.long))
    return cache


def final_hidden_states(model: Any, input_ids: torch.Tensor, **keywords: Any) -> Any:
    """Output of the model without its vocabulary head; `last_hidden_state` is [1, T, H] after the last norm."""
    return model.base_model(input_ids=input_ids, **keywords)


def vocabulary_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits over the vocabulary [n, V] of hidden states [n, H] after the last norm, scaled as the family scales them."""
    scaling = getattr(text_config(model), "logits_scaling", None)
    logits = vocabulary_head(model)(hidden)
    return logits if scaling is None else logits / scaling


def vocabulary_head(model: Any) -> nn.Module:
    """The layer that turns hidden states into logits over the vocabulary.

    Raises
    ------
    ValueError
        If the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no vocabulary head; load it as a causal language model")
    return head
