"""Routing of one token: what `routing_of` and `reroute` compute, bit for bit, without the price of many small tensors.

A decoding step has K weights to sort and, where a call was replaced, K new ones to compute. As operations on tensors that takes longer than
the decision itself, so here they are plain numbers and NumPy rows. Additions, products and quotients of float32 are the same in both, and
whatever is not (softmax, sigmoid, groups, rounding to float16) is computed by the very functions that the general path uses. So the
two agree to the last bit, in every family and under every weight rule.

The row is for a model on the CPU; elsewhere its numbers would have to be fetched one by one. Policies and slots are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moecache.cache import rank_order
from moecache.families import LARGEST_FLOAT16, Family, Routing, exact_selection_scores, gate_weights, own_scores
from moecache.hf_internals import RouterOutput
from moecache.kernel import Outcome
from moecache.policy import WeightRule

DROPPED = int(Outcome.DROPPED)


class OneRow:
    """One token's routing at a time.

    Parameters
    ----------
    family : Family
    rule : WeightRule
        Which weights the final set gets.
    scores : [E] float16
        Where selection scores are written.

    Attributes
    ----------
    ids, weights, column : list of K
        Calls in rank order, their gate weights, and where in the router's own order each stands.
    """

    def __init__(self, family: Family, rule: WeightRule, scores: NDArray[np.float16]) -> None:
        self.family, self.rule = family, rule
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.column: list[int] = []
        self._called: list[int] = []
        self._scores = torch.from_numpy(scores)[None]

    def hear(self, output: RouterOutput, with_scores: bool) -> None:
        """Sort a router's output of one token; the same numbers as `routing_of`.

        Parameters
        ----------
        output : RouterOutput
            On the CPU.
        with_scores : bool
            Whether selection scores are wanted, too.

        Raises
        ------
        ValueError
            Router logits that are not finite in float16.
        """
        least, most = torch.aminmax(output.logits.detach())
        largest = max(float(most), -float(least))
        if not largest <= LARGEST_FLOAT16:
            raise ValueError(f"router logits must be finite in float16 (at most {LARGEST_FLOAT16:g} in size), got {largest:g}")
        if with_scores:
            self._scores.copy_(exact_selection_scores(self.family, output.logits.detach(), output.correction))
            self._scores.add_(0.0)  # -0.0 becomes 0.0, so that equal scores have equal bits
        weights = _row(output.weights)
        total = _sum(weights)
        self._called = output.ids.tolist()[0]
        if total > 0:
            self._sort((weights / total).tolist())
        else:  # shares of nothing are no numbers, and have no order of their own
            gate = gate_weights(output.weights).numpy()[0]
            self._take(rank_order(gate, np.array(self._called)).tolist(), gate.tolist())

    def _sort(self, gate: list[float]) -> None:
        order = sorted(zip([-weight for weight in gate], self._called, range(len(gate)), strict=True))
        self._take([place for _, _, place in order], gate)

    def _take(self, column: list[int], gate: list[float]) -> None:
        self.column = column
        self.ids = [self._called[place] for place in column]
        self.weights = [gate[place] for place in column]

    def routing(self) -> Routing:
        """What was heard last, as `routing_of` returns it; selection scores only where they were wanted."""
        return Routing(
            selection_scores=self._scores.numpy().copy(),
            topk_ids=np.array([self.ids], np.int16),
            gate_weights=np.array([self.weights], np.float32),
            column=np.array([self.column], np.int64),
        )

    def reroute(self, output: RouterOutput, outcome: Sequence[int], computed: Sequence[int]) -> RouterOutput:
        """The router's output after a decision; the same numbers as `experts.reroute`.

        Parameters
        ----------
        output : RouterOutput
            The one that was heard last.
        outcome, computed : sequences of K
            The decision, in rank order.
        """
        final, dropped = list(self._called), []
        for place, became, expert in zip(self.column, outcome, computed, strict=True):
            if became == DROPPED:
                dropped.append(place)
            else:
                final[place] = expert
        weights = self._final_weights(output, final, dropped)
        new_weights = torch.from_numpy(weights[None]).to(output.weights.dtype)
        return RouterOutput(output.logits, new_weights, torch.tensor([final]), output.correction)

    def _final_weights(self, output: RouterOutput, final: list[int], dropped: list[int]) -> NDArray[np.float32]:
        """`experts.final_weights` of one row [K]."""
        family, rule, original = self.family, self.rule, _row(output.weights)
        if rule == WeightRule.INHERIT:
            return _without(original.copy(), dropped)
        scores, scaling = _row(own_scores(family, output.logits)), np.float32(family.scaling)
        own = _without(scores[final], dropped)
        if rule == WeightRule.RESCALE:
            return own * _ratio(_sum(original), _sum(own))
        if rule == WeightRule.OWN_RAW:
            scale = _ratio(scaling, _sum(scores[self._called])) if family.norm_topk_prob else scaling
            return self._keep(original, own * scale, final, dropped)
        if family.norm_topk_prob:
            return own * _ratio(scaling, _sum(own))
        return self._keep(original, own * scaling, final, dropped)

    def _keep(self, original: NDArray[np.float32], new: NDArray[np.float32], final: list[int], dropped: list[int]) -> NDArray[np.float32]:
        """The router's own weight wherever its own expert computes."""
        for place, (called, computes) in enumerate(zip(self._called, final, strict=True)):
            if called == computes and place not in dropped:
                new[place] = original[place]
        return new


def _row(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The one row of a tensor [1, n] in float32."""
    return tensor.detach().to(torch.float32).numpy()[0]


def _sum(row: NDArray[np.float32]) -> np.float32:
    """The sum in the order of the calls, as `families.sum_of_calls`."""
    return np.add.accumulate(row)[-1]


def _ratio(numerator: np.float32, denominator: np.float32) -> np.float32:
    return numerator / denominator if denominator > 0 else np.float32(0)


def _without(weights: NDArray[np.float32], dropped: list[int]) -> NDArray[Any]:
    if dropped:
        weights[dropped] = 0
    return weights
