"""What a layer's experts are asked for once some of a token's calls are served by others, and what that costs.

A decision names, for each call, the expert that computes it, or nobody. The routing weights follow from it by one of
four weight rules. Let p be the family's own scores, S the final set of the token's experts, w the model's weights:

| weight rule | a stand-in s for the missed expert m | the token's other calls |
|---|---|---|
| own | p_s, divided by the sum of p over S where the family normalises | likewise |
| own_raw | p_s, divided by the sum over the *original* top-k where the family normalises | unchanged |
| inherit | w_m | unchanged |
| rescale | p_s, then all scaled so that the token's weights sum to what they did | scaled |

A family that multiplies its weights by a number does so after any of these, except that `inherit` and `rescale` take it from w.

A dropped call is a stand-in of score 0: `own` renormalises the rest in a family that normalises, `own_raw` and
`inherit` leave the rest as it is, `rescale` renormalises in every family. Its id is left in place with weight 0.

Only tokens with a replaced call are touched; all others keep the router's own numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moecache import hf_internals
from moecache.families import Family, Routing, own_scores, sum_of_calls
from moecache.hf_internals import MoeLayer, RouterOutput
from moecache.kernel import Outcome
from moecache.policy import WeightRule

REPLACED = (int(Outcome.SUBSTITUTED), int(Outcome.DROPPED))
CHANGED = (*REPLACED, int(Outcome.LOW_PRECISION))


def replaced_rows(outcome: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Tokens with a call that its own expert does not compute, from outcomes [T, K]."""
    return np.flatnonzero(np.isin(outcome, REPLACED).any(axis=1))


def changed_rows(outcome: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Tokens whose output is not the exact one, from outcomes [T, K]: replaced calls, and calls of low precision."""
    return np.flatnonzero(np.isin(outcome, CHANGED).any(axis=1))


def reroute(
    family: Family,
    rule: WeightRule,
    output: RouterOutput,
    routing: Routing,
    rows: NDArray[np.int64],
    computed_ids: NDArray[np.int16],
) -> RouterOutput:
    """The router's output after a decision, in the router's own order of calls.

    Parameters
    ----------
    family : Family
        Scoring and normalisation.
    rule : WeightRule
        Which weights the final set gets.
    output : RouterOutput
        The model's own; not written to.
    routing : Routing
        The same output as the decision saw it.
    rows : ndarray [n] int64
        Tokens with a replaced call; all others are left alone.
    computed_ids : ndarray [T, K] int16
        Rank order, -1 where nobody computes the call.

    Returns
    -------
    RouterOutput
        New weights and ids; the logits are the model's own.
    """
    device = output.ids.device
    column = torch.from_numpy(routing.column[rows]).to(device)
    called = output.ids[rows]
    computed = torch.from_numpy(computed_ids[rows].astype(np.int64)).to(device)
    is_dropped = torch.zeros_like(called, dtype=torch.bool).scatter_(1, column, computed < 0)
    final = called.scatter(1, column, computed)
    final = torch.where(is_dropped, called, final)
    weights = final_weights(family, rule, output.logits[rows], output.weights[rows], called, final, is_dropped)
    new_ids, new_weights = output.ids.clone(), output.weights.clone()
    new_ids[rows] = final
    new_weights[rows] = weights.to(new_weights.dtype)
    return RouterOutput(output.logits, new_weights, new_ids, output.correction)


def final_weights(
    family: Family,
    rule: WeightRule,
    logits: torch.Tensor,
    weights: torch.Tensor,
    called: torch.Tensor,
    final: torch.Tensor,
    is_dropped: torch.Tensor,
) -> torch.Tensor:
    """Routing weights [n, K] float32 of the final experts, by the weight rule; all arguments in one order of calls.

    Parameters
    ----------
    logits : tensor [n, E]
    weights : tensor [n, K]
        The model's own weights of the called experts.
    called, final : tensor [n, K] int64
        The router's choice, and who computes each call.
    is_dropped : tensor [n, K] bool
        Calls that nobody computes.
    """
    original = weights.to(torch.float32)
    is_kept = (final == called) & ~is_dropped
    if rule == WeightRule.INHERIT:
        return torch.where(is_dropped, torch.zeros_like(original), original)
    scores = own_scores(family, logits)
    own = torch.where(is_dropped, torch.zeros_like(original), scores.gather(1, final))
    if rule == WeightRule.OWN_RAW:
        return torch.where(is_kept, original, own * _scale_of(family, original, scores.gather(1, called)))
    if rule == WeightRule.RESCALE:
        return own * _ratio(sum_of_calls(original), sum_of_calls(own))
    if family.norm_topk_prob:
        return own * _ratio(torch.full_like(own[:, :1], float(family.scaling)), sum_of_calls(own))
    return torch.where(is_kept, original, own * float(family.scaling))


def _scale_of(family: Family, original: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | float:
    """What the family multiplies own scores by for the original top-k."""
    scaling = float(family.scaling)
    return _ratio(torch.full_like(scores[:, :1], scaling), sum_of_calls(scores)) if family.norm_topk_prob else scaling


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Quotient [n, 1], 0 where every call was dropped and there is nothing to scale."""
    return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(denominator))


class LayerErrors:
    """Relative layer error of one document: per token and layer, (e / h)^2, filled in as the model runs.

    e is the length of the change in the experts' output, h that of the residual stream after the layer with the
    layer's exact output; both at the layer's actual input, so errors of earlier layers are not counted again. Steps
    without a replaced call have error 0. It costs a second pass of the experts over tokens with replaced calls.
    """

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        self.layers = layers
        self.begin(0)

    def begin(self, num_tokens: int) -> None:
        """Start a document; `squared` is then [num_tokens, L] float32."""
        self.squared = np.zeros((num_tokens, len(self.layers)), np.float32)
        self._replaced: dict[int, _Replaced] = {}

    def note(self, layer: int, first_token: int, rows: NDArray[np.int64], output: RouterOutput) -> None:
        """Announce that a layer is about to compute tokens `first_token + rows` with replaced calls."""
        at = torch.from_numpy(rows).to(output.ids.device)
        self._replaced[layer] = _Replaced(first_token + rows, at, output.ids[at], output.weights[at])

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure inside the block; the hooks are gone after it."""
        handles = []
        try:
            for index, layer in enumerate(self.layers):
                handles.append(layer.experts.register_forward_hook(partial(self._after_experts, index)))
                handles.append(layer.decoder.register_forward_hook(partial(self._after_layer, index)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after_experts(self, layer: int, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        replaced = self._replaced.get(layer)
        if replaced is not None:
            exact = hf_internals.compute_experts(module, args[0][replaced.rows], replaced.ids, replaced.weights)
            replaced.change = output[replaced.rows].to(torch.float32) - exact.to(torch.float32)

    def _after_layer(self, layer: int, module: nn.Module, args: object, output: Any) -> None:
        replaced = self._replaced.pop(layer, None)
        if replaced is None or replaced.change is None:
            return
        stream = output[0] if isinstance(output, tuple) else output
        exact = stream.reshape(-1, stream.shape[-1])[replaced.rows].to(torch.float32) - replaced.change
        change = replaced.change.square().sum(-1)
        squared = torch.where(change > 0, change / exact.square().sum(-1), 0.0)  # 0, not 0 / 0, for an all-zero token
        self.squared[replaced.tokens, layer] = squared.cpu().numpy()


@dataclass
class _Replaced:
    """Tokens of one layer whose output is being changed, with the router's own ids and weights of those rows."""

    tokens: NDArray[np.int64]
    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    change: torch.Tensor | None = None
