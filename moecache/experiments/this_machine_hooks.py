"""The time of one router hook: what the runtime adds to every layer of every token, beside products and waits.

It is measured in the small reference model with its real routes; its experts are tiny, so nothing else takes long. On a shared machine a
median still says what a quiet layer costs; the slowest tenth shows what the others did to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from moecache import hf_internals
from moecache.policy import Policy
from moecache.reference import held_out_documents, load_model
from moecache.runtime.offload import offload


def measure_hooks(model: Any, policies: Sequence[Policy], num_slots: int, text: np.ndarray, num_warm_tokens: int) -> pd.DataFrame:
    """Wall time of every router hook of an offloaded model, from the router's output to the experts' input.

    Parameters
    ----------
    model : a loaded model; it is offloaded into main memory under each policy in turn.
    policies : what decides.
    num_slots : slots a layer.
    text : [T] token ids, decoded one by one.
    num_warm_tokens : first tokens, not counted.

    Returns
    -------
    DataFrame
        A row a policy: `policy`, `num_hooks`, `median_us`, `high_us` (nine of ten take less), `routing_us` and `moving_us` (means:
        deciding and writing back; keeping books and handing copies out), `fetched` and `substituted` (calls a hook).
    """
    return pd.DataFrame([_hooks_of(model, policy, num_slots, text, num_warm_tokens) for policy in policies])


def _hooks_of(model: Any, policy: Policy, num_slots: int, text: np.ndarray, num_warm_tokens: int) -> dict[str, Any]:
    offload(model, policy, num_slots)
    begun, times, keyword, cache, before = [0.0], [], hf_internals.cache_keyword(model), None, {}
    with ExitStack() as undo:
        undo.callback(model.moecache.close)
        for layer in hf_internals.moe_layers(model):
            first = layer.router.register_forward_hook(lambda *_: begun.__setitem__(0, perf_counter()), prepend=True)
            last = layer.router.register_forward_hook(lambda *_: times.append(perf_counter() - begun[0]))
            undo.callback(first.remove)
            undo.callback(last.remove)
        for token, token_id in enumerate(text.tolist()):
            if token == num_warm_tokens:
                times.clear()
                before = model.moecache.stats()
            output = model(input_ids=torch.tensor([[token_id]]), use_cache=True, **{keyword: cache})
            cache = hf_internals.decoding_cache(output)
        after = model.moecache.stats()
    spent = {name: (after[name] - before[name]) / len(times) for name in ("seconds_routing", "seconds_overhead", "fetched", "substituted")}
    return {
        "policy": policy.label,
        "num_hooks": len(times),
        "median_us": 1e6 * float(np.median(times)),
        "high_us": 1e6 * float(np.quantile(times, 0.9)),
        "routing_us": 1e6 * spent["seconds_routing"],
        "moving_us": 1e6 * spent["seconds_overhead"],
        "fetched": spent["fetched"],
        "substituted": spent["substituted"],
    }


def measure_hooks_of_reference(
    model_name: str, policies: Sequence[Policy], num_slots: int, num_tokens: int, num_warm_tokens: int
) -> pd.DataFrame:
    """`measure_hooks` of a reference model on its held-out texts."""
    documents = held_out_documents(num_documents=4, num_tokens=num_tokens + num_warm_tokens, say=lambda _: None)
    text = np.concatenate([np.asarray(document.tokens) for document in documents])[: num_tokens + num_warm_tokens]
    return measure_hooks(load_model(model_name), policies, num_slots, text, num_warm_tokens)
