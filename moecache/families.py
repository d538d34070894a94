"""How each family of mixture-of-experts models turns router logits into routing weights.

A router gives every expert a score, keeps the top-k and weighs their outputs. Families differ in few things only, so a family is a row
of a table:

- the scores that weights are made of: a softmax over all experts, or a sigmoid for each;
- whether the kept scores are divided by their sum (then a stand-in changes every weight of its token) or used as they are (then it
  changes only its own), and the number that all weights are multiplied by afterwards;
- the *selection score* that picks the top-k, and so the stand-ins. For the softmax families it is the router logit itself; for the
  sigmoid families it is the sigmoid plus a learned correction, which weights never see;
- groups: some families first choose a few groups of experts and select inside them only. The selection score of an expert in any
  other group is -infinity: it cannot be called for this token, and so cannot stand in.

A softmax over the chosen logits (gpt_oss, granitemoe) is a softmax over all, divided by the sum of the kept, so it needs no row of its own.
Whether a router returns its calls sorted does not matter either: ranks are made here, by weight.

A family without a row is refused by name, and a row is checked against the model's own weights before it is used:
weights that do not follow the row are an error, never a wrong emulation. Policies are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moecache import hf_internals
from moecache.cache import rank_order
from moecache.hf_internals import RouterOutput
from moecache.trace import ModelShape

Scoring = Literal["softmax", "sigmoid"]
LARGEST_FLOAT16 = 65504.0
NUM_CHECKED_TOKENS = 8
WEIGHT_TOLERANCE = 0.02  # relative; bfloat16 keeps 8 bits of a weight
CHOICE_TOLERANCE = 1e-4  # of selection scores; the model compares the same numbers


@dataclass(frozen=True)
class Family:
    """One row: how the model types it names score, choose and weigh experts. A string is the configuration's field that holds the value.

    Parameters
    ----------
    model_types : tuple of str
        The configurations' `model_type` that follow this row.
    scoring : {"softmax", "sigmoid"}
        The score that routing weights are made of.
    norm_topk_prob : bool or str
        Whether the kept scores are divided by their sum.
    scaling : float or str
        What all routing weights are multiplied by.
    is_corrected : bool
        Whether experts are selected by score plus the router's correction.
    num_groups, kept_groups : int or str
        Groups of experts, and how many of them a token may choose from; 1 and 1 where there are none.
    best_of_group : int
        How many of a group's best selection scores are summed to choose groups.
    grouped_if : (str, value), optional
        A field of the configuration and the value it has where groups are used.
    """

    model_types: tuple[str, ...]
    scoring: Scoring
    norm_topk_prob: bool | str
    scaling: float | str = 1.0
    is_corrected: bool = False
    num_groups: int | str = 1
    kept_groups: int | str = 1
    best_of_group: int = 1
    grouped_if: tuple[str, Any] | None = None


_GROUPS: dict[str, Any] = {"num_groups": "n_group", "kept_groups": "topk_group"}
FAMILIES = (
    Family(("qwen3_next", "qwen3_moe", "qwen2_moe", "olmoe"), "softmax", "norm_topk_prob"),
    Family(("mixtral", "granitemoe", "gpt_oss"), "softmax", True),
    Family(("deepseek_v3", "glm4_moe"), "sigmoid", "norm_topk_prob", "routed_scaling_factor", True, best_of_group=2, **_GROUPS),
    Family(("deepseek_v2",), "softmax", False, "routed_scaling_factor", grouped_if=("topk_method", "group_limited_greedy"), **_GROUPS),
)


class UnknownRouter(ValueError):
    """The model's router is not understood, so nothing about it can be emulated or recorded faithfully."""


def understood_families() -> tuple[str, ...]:
    """Model types whose routers moecache understands, sorted."""
    return tuple(sorted(name for family in FAMILIES for name in family.model_types))


def family_of(model: Any) -> Family:
    """The model's row, with the numbers that its configuration holds.

    Raises
    ------
    UnknownRouter
        If no row names the model's type.
    """
    name = hf_internals.model_type(model)
    for family in FAMILIES:
        if name in family.model_types:
            return _resolved(replace(family, model_types=(name,)), hf_internals.text_config(model))
    raise UnknownRouter(
        f"moecache does not understand the router of {name!r}; understood are {', '.join(understood_families())}. "
        f"A family is added as a row of FAMILIES in moecache/families.py"
    )


def _resolved(family: Family, config: Any) -> Family:
    """The row with numbers in the place of the configuration's fields."""

    def value(of: Any) -> Any:
        return getattr(config, of) if isinstance(of, str) else of

    is_grouped = family.grouped_if is None or value(family.grouped_if[0]) == family.grouped_if[1]
    return replace(
        family,
        norm_topk_prob=bool(value(family.norm_topk_prob)),
        scaling=float(value(family.scaling)),
        num_groups=int(value(family.num_groups) or 1) if is_grouped else 1,
        kept_groups=int(value(family.kept_groups) or 1) if is_grouped else 1,
        grouped_if=None,
    )


def model_shape(model: Any) -> ModelShape:
    """Shape of the model's routing: the number of MoE layers, experts and calls, and the bytes of one expert.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model of an understood family.

    Returns
    -------
    ModelShape
        `num_layers` counts layers with routed experts only; `expert_bytes` are those of the parameters in memory.

    Raises
    ------
    UnknownRouter
        If the family is not understood.
    ValueError
        If the model's MoE layers differ in their number of experts, in their top-k or in the bytes of an expert.
    """
    family = family_of(model)
    shapes = {_layer_shape(layer) for layer in hf_internals.moe_layers(model)}
    if len(shapes) != 1:
        raise ValueError(f"MoE layers of one (experts, top-k, expert bytes) are needed, got {sorted(shapes)}")
    num_experts, top_k, expert_bytes = shapes.pop()
    return ModelShape(
        num_layers=len(hf_internals.moe_layers(model)),
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=expert_bytes,
        scoring=family.scoring,
        norm_topk_prob=bool(family.norm_topk_prob),
    )


def _layer_shape(layer: hf_internals.MoeLayer) -> tuple[int, int, int]:
    num_experts = int(layer.router.num_experts)  # type: ignore[arg-type]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in layer.experts.parameters())
    return num_experts, int(layer.router.top_k), num_bytes // num_experts  # type: ignore[arg-type]


@dataclass(frozen=True)
class Routing:
    """A router's output as the decision sees it: rounded to the trace's types and in rank order.

    `selection_scores` [T, E] float16, `topk_ids` [T, K] int16, `gate_weights` [T, K] float32 (sums to 1), and
    `column` [T, K] int64: where in the router's own order the call of each rank stands.
    """

    selection_scores: NDArray[np.float16]
    topk_ids: NDArray[np.int16]
    gate_weights: NDArray[np.float32]
    column: NDArray[np.int64]


def routing_of(family: Family, output: RouterOutput) -> Routing:
    """Round and sort a router's output: by gate weight, the lower expert id first among equals.

    Raises
    ------
    ValueError
        If a selection score is not finite in float16, the type that decisions are made on.
    """
    scores = selection_scores(family, output.logits, output.correction)
    ids = output.ids.cpu().numpy().astype(np.int16)
    gate = gate_weights(output.weights).cpu().numpy()
    column = rank_order(gate, ids)
    return Routing(
        selection_scores=scores.cpu().numpy(),
        topk_ids=np.take_along_axis(ids, column, axis=1),
        gate_weights=np.take_along_axis(gate, column, axis=1),
        column=column,
    )


def ranked_ids(output: RouterOutput) -> NDArray[np.int16]:
    """The router's calls [T, K] in rank order."""
    ids = output.ids.cpu().numpy().astype(np.int16)
    return np.take_along_axis(ids, rank_order(gate_weights(output.weights).cpu().numpy(), ids), axis=1)


def selection_scores(family: Family, logits: torch.Tensor, correction: torch.Tensor | None = None) -> torch.Tensor:
    """Scores [T, E] float16 by which the family selects experts, for router logits [T, E]; -infinity outside the chosen groups."""
    largest = float(logits.detach().abs().max())
    if not largest <= LARGEST_FLOAT16:
        raise ValueError(f"router logits must be finite in float16 (at most {LARGEST_FLOAT16:g} in size), got {largest:g}")
    scores = exact_selection_scores(family, logits.detach(), correction)
    return scores.to(torch.float16) + 0.0  # -0.0 becomes 0.0, so that equal scores have equal bits


def exact_selection_scores(family: Family, logits: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
    """Selection scores [T, E] before they are rounded; see `selection_scores`."""
    if family.is_corrected != (correction is not None):
        raise UnknownRouter(f"the router of {family.model_types[0]} {'lacks' if family.is_corrected else 'has'} a correction of its scores")
    scores = logits if family.scoring == "softmax" else own_scores(family, logits)
    if correction is not None:
        scores = scores + correction
    if family.num_groups == 1:
        return scores
    by_group = (own_scores(family, logits) if family.scoring == "softmax" else scores).unflatten(1, (int(family.num_groups), -1))
    group_scores = by_group.topk(family.best_of_group, dim=-1)[0].sum(dim=-1)
    chosen = torch.topk(group_scores, k=int(family.kept_groups), dim=-1, sorted=False)[1]
    is_chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
    return scores.masked_fill(~is_chosen.repeat_interleave(by_group.shape[2], dim=1), float("-inf"))


def gate_weights(weights: torch.Tensor) -> torch.Tensor:
    """Routing weights [T, K] of the router's own top-k as float32 that sum to 1.

    The sum runs call by call, so that a token's weights do not depend on how many tokens are computed at once.
    """
    weights = weights.detach().to(torch.float32)
    return weights / sum_of_calls(weights)


def sum_of_calls(weights: torch.Tensor) -> torch.Tensor:
    """Sums [T, 1] of weights [T, K], added in the order of the calls."""
    total = weights[:, 0:1].clone()
    for call in range(1, weights.shape[1]):
        total += weights[:, call : call + 1]
    return total


def own_scores(family: Family, logits: torch.Tensor) -> torch.Tensor:
    """Each expert's own score [T, E] float32, before any normalisation over the chosen."""
    if family.scoring == "softmax":
        return torch.softmax(logits.detach().to(torch.float32), dim=-1)
    return torch.sigmoid(logits.detach().to(torch.float32))


def check_router(family: Family, layer_name: str, output: RouterOutput) -> None:
    """Refuse a router whose weights or choice do not follow the family's row (seen on the first few tokens).

    Raises
    ------
    UnknownRouter
        If the weights differ by more than 2 %, or an expert outside the top-k has a higher selection score than one inside.
    """
    logits, weights, ids = (tensor[:NUM_CHECKED_TOKENS].detach() for tensor in (output.logits, output.weights, output.ids))
    chosen = own_scores(family, logits).gather(1, ids)
    expected = float(family.scaling) * (chosen / sum_of_calls(chosen) if family.norm_topk_prob else chosen)
    selection = exact_selection_scores(family, logits, output.correction).to(torch.float32)
    outside, inside = selection.scatter(1, ids, -torch.inf).amax(dim=1), selection.gather(1, ids).amin(dim=1)
    follows = torch.allclose(weights.to(torch.float32), expected, rtol=WEIGHT_TOLERANCE, atol=1e-6)
    if not follows or bool((outside > inside + CHOICE_TOLERANCE).any()):
        raise UnknownRouter(
            f"the router of {layer_name} ({family.model_types[0]}) does not weigh its top-k as {family.scoring} scores "
            f"{'divided by their sum' if family.norm_topk_prob else 'as they are'}"
            f"{'' if family.scaling == 1.0 else f', times {family.scaling:g}'}; its outputs cannot be replaced faithfully"
        )
