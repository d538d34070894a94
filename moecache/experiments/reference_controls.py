"""Controls: the same model, text and gate weights, but other experts.

If the router's choice carries what the model learnt, the loss must rise when other experts compute its calls: always the same wrong ones,
random ones, the next best ones, or none. Losses are paired by document with the model's own.

Letters: T tokens, E experts a layer, K top-k. No cache is involved: this asks about the model, not about a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from moecache import hf_internals
from moecache.experiments.baselines import label
from moecache.hf_internals import RouterOutput
from moecache.reference import Document
from moecache.score import score

UNCHANGED = "unchanged"
SHUFFLED, RANDOM, NEXT, NONE = "experts shuffled", "random experts", "the next best experts", "no routed experts"

Change = Callable[[int, RouterOutput], RouterOutput]


def changes(num_layers: int, num_experts: int, seed: int) -> dict[str, Change]:
    """The controls, by name: what a router's output becomes. Gate weights stay in their places, only the experts change.

    - experts shuffled: each expert's calls are computed by another one, always the same (a permutation a layer, without fixed points),
    - random experts: each call by an expert drawn anew among those that the token does not call,
    - the next best experts: by the K experts that the router likes best after its own K,
    - no routed experts: by none; what is left are the shared expert, where there is one, and the rest of the layer.
    """
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(num_experts, generator=generator) for _ in range(num_layers)]
    other = [torch.empty_like(order).scatter_(0, order, order.roll(1)) for order in orders]

    def drawn(_: int, output: RouterOutput) -> RouterOutput:
        lots = torch.rand(output.logits.shape, generator=generator).scatter(1, output.ids, -1.0)
        return _served_by(output, lots.topk(output.ids.shape[1]).indices)

    def next_best(_: int, output: RouterOutput) -> RouterOutput:
        rest = output.logits.scatter(1, output.ids, -torch.inf)
        return _served_by(output, rest.topk(output.ids.shape[1]).indices)

    return {
        SHUFFLED: lambda layer, output: RouterOutput(output.logits, output.weights, other[layer][output.ids]),
        RANDOM: drawn,
        NEXT: next_best,
        NONE: lambda _, output: RouterOutput(output.logits, torch.zeros_like(output.weights), output.ids),
    }


def _served_by(output: RouterOutput, ids: torch.Tensor) -> RouterOutput:
    """The n-th best of `ids` [T, K] takes the place of the call of rank n."""
    order = output.weights.argsort(dim=1, descending=True, stable=True)
    return RouterOutput(output.logits, output.weights, output.ids.scatter(1, order, ids))


def ablation(model: Any, documents: Sequence[Document], seed: int) -> pd.DataFrame:
    """Losses of the controls, paired by document with the model's own.

    Returns
    -------
    DataFrame : a row per (`policy`, `document`): `policy` ("unchanged" or a control), `document`, `domain`, `cluster`, `num_tokens`,
        `mean_difference_nats`.
    """
    watched = hf_internals.moe_layers(model)
    exact = [np.nansum(score(model, document.tokens)) for document in documents]
    rows = []
    for name, change in {UNCHANGED: None, **changes(len(watched), hf_internals.text_config(model).num_experts, seed)}.items():
        for document, own in zip(documents, exact, strict=True):
            total = own
            if change is not None:
                with hf_internals.watched(watched, change):
                    total = np.nansum(score(model, document.tokens))
            num_tokens = len(document.tokens) - 1
            rows.append((name, label(document), document.domain, document.cluster, num_tokens, (total - own) / num_tokens))
    return pd.DataFrame(rows, columns=["policy", "document", "domain", "cluster", "num_tokens", "mean_difference_nats"])
