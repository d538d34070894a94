"""Routing of one token: what `routing_of` and `reroute` compute, bit for bit, without the price of many small tensors.

A decoding step has K weights to sort and, where a call was replaced, K new ones to compute. As operations on tensors that takes longer than
the decision itself, so compiled code does it at the addresses of the router's own tensors. Additions, products and quotients of float32
are the same in both, and whatever is not (softmax, sigmoid, groups) is computed by the very functions that the general path uses. So the
two agree to the last bit, in every family and under every weight rule.

It is for a model on the CPU. Whatever else is unusual (numbers that are not finite, weights that sum to nothing) is left to the general
path, which also knows the errors. Policies and slots are not known here.
"""

from __future__ import annotations

from functools import partial

import torch

from moecache.families import Family, Routing, exact_selection_scores, selection_scores
from moecache.hf_internals import RouterOutput
from moecache.one_token import compiled
from moecache.one_token.compiled import IS_COMPILED, reweigh
from moecache.one_token.decider import OneToken
from moecache.policy import WeightRule

FLOAT32 = torch.float32
RULES = {
    WeightRule.OWN: compiled.OWN,
    WeightRule.OWN_RAW: compiled.OWN_RAW,
    WeightRule.INHERIT: compiled.INHERIT,
    WeightRule.RESCALE: compiled.RESCALE,
}


class OneRow:
    """One token's routing at a time.

    Parameters
    ----------
    family : Family
    rule : WeightRule
        Which weights the final set gets.
    door : OneToken
        Told what is heard; asked what was decided.
    """

    def __init__(self, family: Family, rule: WeightRule, door: OneToken) -> None:
        self.family, self.door = family, door
        self._rule, self._is_normalised, self._scaling = RULES[rule], bool(family.norm_topk_prob), float(family.scaling)
        self._needs_own = rule != WeightRule.INHERIT
        self._own_scores = partial(torch.softmax, dim=-1) if family.scoring == "softmax" else torch.sigmoid  # as `families.own_scores`
        is_selected_by_logits = family.scoring == "softmax" and family.num_groups == 1 and not family.is_corrected
        self._makes_scores = door.needs_scores and not is_selected_by_logits

    def hear(self, output: RouterOutput) -> bool:
        """Tell the door a router's output of one token; the same numbers as `routing_of`.

        Returns
        -------
        bool
            False where the general path must be asked; nothing is told then.
        """
        logits, weights, ids = output.logits, output.weights, output.ids
        if not (IS_COMPILED and logits.is_cpu):
            return False
        if not (logits.dtype is weights.dtype is FLOAT32 and logits.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()):
            logits, weights, ids = _plain(logits), _plain(weights), ids.contiguous()
        self._heard = logits, weights, ids
        scores = _plain(exact_selection_scores(self.family, output.logits, output.correction)) if self._makes_scores else logits
        return self.door.hear(logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), scores.data_ptr())

    def routing(self, output: RouterOutput) -> Routing:
        """What was heard last, as `routing_of` returns it."""
        door = self.door
        return Routing(
            selection_scores=selection_scores(self.family, output.logits, output.correction).numpy(),
            topk_ids=door.ids[None].copy(),
            gate_weights=door.weights[None].copy(),
            column=door.column[None].copy(),
        )

    def reroute(self, output: RouterOutput) -> RouterOutput:
        """The router's output after the door's decision; the same numbers as `experts.reroute`.

        Parameters
        ----------
        output : RouterOutput
            The one that was heard last.
        """
        logits, weights, ids = self._heard
        scores = self._own_scores(logits) if self._needs_own else weights
        new_weights, new_ids = torch.empty_like(weights), torch.empty_like(ids)
        rule = self._rule, self._is_normalised, self._scaling
        said = weights.data_ptr(), ids.data_ptr(), scores.data_ptr()
        reweigh(self.door.address, *rule, *said, new_weights.data_ptr(), new_ids.data_ptr())
        new_weights = new_weights if output.weights.dtype is FLOAT32 else new_weights.to(output.weights.dtype)
        return RouterOutput(output.logits, new_weights, new_ids, output.correction)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 in one piece; the tensor itself where it is that already."""
    return tensor if tensor.dtype is FLOAT32 and tensor.is_contiguous() else tensor.to(FLOAT32).contiguous()
