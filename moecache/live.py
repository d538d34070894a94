"""What goes on inside the hooks of an emulation: at each router decide, count, and say what the experts are to compute.

One `Emulation` is one policy with its cache, for all documents of a run. It hears the routers of whatever forward runs inside `hooks`,
one pass or token by token, and keeps the log. How a decision is carried out lies in `experts.py` (replaced calls) and `low_bit_calls.py`;
which forward runs, and what is done with its logits, lies in `emulate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.experts import REPLACED, LayerErrors, changed_rows, replaced_rows, reroute
from moecache.families import Routing, check_router, family_of, routing_of
from moecache.foresight import PREDICTIONS, Foresight, check_prediction
from moecache.hf_internals import RouterOutput
from moecache.kernel import Fallback, Outcome
from moecache.low_bit import LowBitCopies, check_bits
from moecache.low_bit_calls import LowBitCalls
from moecache.policy import Policy, WeightRule, check_policy
from moecache.ties import near_ties
from moecache.trace import DecisionLog, concatenate_layers, concatenate_tokens
from moecache.wait_values import checked_values, decide_by_values

WaitFunction = Callable[[int, Routing, int], NDArray[np.float32]]
WaitValues = NDArray[np.float32] | WaitFunction


class Emulation:
    """One policy at work in a model.

    Parameters
    ----------
    model, policy, cache : what runs, and what decides.
    has_layer_errors : measure the relative layer error.
    copies : LowBitCopies, for a policy whose fallback is low precision.
    predict : what prefetching expects, see `foresight.PREDICTIONS`.
    wait_values : what the miss rule compares in the gate weight's place: values [T, L, K] of the run's calls in rank order, or a function
        of (layer, routing, first token of the run) that gives those of the layer's next tokens [n, K].
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        cache: ExpertCache,
        *,
        has_layer_errors: bool = False,
        copies: LowBitCopies | None = None,
        predict: str | None = None,
        wait_values: WaitValues | None = None,
    ) -> None:
        self.family = family_of(model)
        self.layers = hf_internals.moe_layers(model)
        self.policy, self.cache = policy, cache
        self.weight_rule = WeightRule(policy.weight_rule)
        self.errors = LayerErrors(self.layers) if has_layer_errors else None
        self.low_bit = LowBitCalls(self.layers, copies) if copies is not None and policy.fallback == Fallback.LOW_PRECISION else None
        self.foresight = Foresight(self.layers, predict) if predict is not None and policy.max_prefetches else None
        self.wait_values = wait_values
        self.logs: list[DecisionLog] = []
        self.cancelled: list[np.ndarray] = []
        self.squared_errors: list[np.ndarray] = []
        self.kept: dict[str, list[np.ndarray]] = {}
        self.num_near_ties = 0
        self.num_tokens = 0
        self.begin(np.zeros(0, bool))

    def begin(self, is_exact: NDArray[np.bool_]) -> None:
        """Start a document of `is_exact.size` tokens."""
        self.is_exact = is_exact
        self.blocks: list[list[DecisionLog]] = [[] for _ in self.layers]
        self.columns: list[dict[str, list[np.ndarray]]] = [{} for _ in self.layers]
        self.num_seen = [0 for _ in self.layers]
        if self.errors is not None:
            self.errors.begin(is_exact.size)
        if self.foresight is not None:
            self.foresight.begin()

    def end(self) -> None:
        """Close the document: lay its blocks together."""
        self.logs.append(concatenate_layers([concatenate_tokens(blocks) for blocks in self.blocks]))
        for name in self.columns[0]:
            by_layer = [np.concatenate(columns[name]) for columns in self.columns]
            self.kept.setdefault(name, []).append(np.stack(by_layer, axis=1))
        if self.errors is not None:
            self.squared_errors.append(self.errors.squared)
        self.num_tokens += self.is_exact.size

    def reset(self) -> None:
        """Cold start again at a document boundary."""
        self.cancelled.append(self.cache.reset())

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Decide at every router inside the block; the model is as it was after it."""
        listening = getattr(self.wait_values, "listening", None)
        with ExitStack() as hooks:
            if listening is not None:
                hooks.enter_context(listening(self.layers))
            if self.foresight is not None:
                hooks.enter_context(self.foresight.listening())
            if self.low_bit is not None:
                hooks.enter_context(self.low_bit.computing())
            hooks.enter_context(hf_internals.watched(self.layers, self.listen))
            if self.errors is not None:
                hooks.enter_context(self.errors.measuring())
            yield

    def listen(self, layer: int, output: RouterOutput) -> RouterOutput | None:
        """Decide the next tokens of a layer, and return what its experts are to compute."""
        if not self.logs and not self.blocks[layer]:
            check_router(self.family, self.layers[layer].name, output)
        routing = routing_of(self.family, output)
        first_token = self.num_seen[layer]
        log = self.decide(layer, routing)
        outcome, computed_ids = log.outcome[:, 0], log.computed_ids[:, 0]
        self._count(layer, routing, outcome, computed_ids)
        rows = changed_rows(outcome)
        if rows.size == 0:
            return None
        if self.errors is not None:
            self.errors.note(layer, first_token, rows, output)
        if self.low_bit is not None:
            return self.low_bit.announce(layer, output, routing, outcome)
        return reroute(self.family, self.weight_rule, output, routing, replaced_rows(outcome), computed_ids)

    def decide(self, layer: int, routing: Routing) -> DecisionLog:
        """Decide the next tokens of a layer and log them; what its experts then compute is the caller's."""
        first_token = self.num_seen[layer]
        self.num_seen[layer] += len(routing.topk_ids)
        self.blocks[layer].append(self._decide(layer, first_token, routing))
        return self.blocks[layer][-1]

    def _decide(self, layer: int, first_token: int, routing: Routing) -> DecisionLog:
        expected = None if self.foresight is None else self.foresight.expect(layer, routing.topk_ids)[:, None]
        decide = self.cache.decide
        if self.wait_values is not None:
            decide = partial(decide_by_values, self.cache, self._values(layer, first_token, routing)[:, None])
        log = decide(
            routing.topk_ids[:, None],
            routing.gate_weights[:, None],
            routing.selection_scores[:, None],
            first_layer=layer,
            is_exact=self.is_exact[first_token : self.num_seen[layer]],
            predicted_ids=expected,
        )
        assert log is not None
        return log

    def _values(self, layer: int, first_token: int, routing: Routing) -> NDArray[np.float32]:
        """Wait values [n, K] of the layer's next tokens; kept, so that a simulator can replay them."""
        first, size = self.num_tokens + first_token, routing.topk_ids.shape
        given = self.wait_values
        values = given(layer, routing, first) if callable(given) else given[first : first + size[0], layer]  # type: ignore[index]
        values = checked_values(values, size)
        self._keep(layer, "wait_values", values)
        return values

    def _count(self, layer: int, routing: Routing, outcome: NDArray[np.uint8], computed_ids: NDArray[np.int16]) -> None:
        """Near ties, and what a log does not show: sums over each step's weights."""
        scores = torch.from_numpy(routing.selection_scores).to(torch.float32).numpy()
        calls = (routing.topk_ids, routing.gate_weights, outcome, computed_ids)
        rules = self.cache.rules
        self.num_near_ties += int(near_ties(scores, *calls, Fallback(rules.fallback), rules.gate_threshold).sum())
        replaced = np.where(np.isin(outcome, REPLACED), routing.gate_weights, np.float32(0))
        self._keep(layer, "squared_mass_by_layer", np.square(replaced).sum(axis=1))
        if self.low_bit is not None:
            is_low = outcome == Outcome.LOW_PRECISION
            self._keep(layer, "low_precision_mass_by_layer", np.where(is_low, routing.gate_weights, np.float32(0)).sum(axis=1))

    def _keep(self, layer: int, name: str, values: np.ndarray) -> None:
        self.columns[layer].setdefault(name, []).append(values)

    def extra(self) -> dict[str, np.ndarray]:
        """Per-token arrays beyond losses and decisions, by name: [T, L, ..] by layer, and the mean over layers [T]."""
        by_layer = {name: np.concatenate(parts) for name, parts in self.kept.items()}
        if self.errors is not None:
            by_layer["relative_error2_by_layer"] = np.concatenate(self.squared_errors)
        means = {name.removesuffix("_by_layer"): values.mean(axis=1) for name, values in by_layer.items() if name.endswith("_by_layer")}
        return by_layer | means

    def describe(self) -> dict[str, Any]:
        """What this policy was given beside itself, as plain JSON values."""
        bits = {} if self.low_bit is None else {"low_bits": self.low_bit.copies.bits}
        return bits | ({} if self.foresight is None else {"predict": self.foresight.predict})

    def decisions(self) -> DecisionLog:
        """The log of all documents."""
        log = concatenate_tokens(self.logs)
        return replace(log, arrivals=np.concatenate([log.arrivals, *self.cancelled]))


def check_use(policies: Sequence[Policy], buddies: Any, low_bits: Any, predict: str | None) -> None:
    """Refuse policies that the emulator cannot carry out, and what none of them would use.

    Raises
    ------
    ValueError : no policy, or one that is none; one that knows the future; an argument that is missing, unknown or without effect.
    """
    if not policies:
        raise ValueError("policies is empty; give at least one Policy")
    check_prediction(predict)
    for policy in policies:
        check_policy(policy)
        if policy.needs_future:
            raise ValueError(f"policy {policy.label!r} knows the future, which only the simulator can tell from a recorded trace")
    wanted = {
        "low_bits": (low_bits, lambda policy: policy.fallback == Fallback.LOW_PRECISION, 'fallback="low_precision"', "8, 4, 3 or 2 bits"),
        "buddies": (buddies, lambda policy: policy.fallback == Fallback.BUDDY, 'fallback="buddy"', "a table"),
        "predict": (predict, lambda policy: policy.max_prefetches > 0, "max_prefetches", " or ".join(PREDICTIONS)),
    }
    for name, (value, uses, field, choices) in wanted.items():
        users = [policy for policy in policies if uses(policy)]
        if value is None and users:
            raise ValueError(f"policy {users[0].label!r} sets {field}, which the emulator carries out with {name}=; give it {choices}")
        if value is not None and not users:
            raise ValueError(f"{name} is given, but no policy sets {field}: it would have no effect; leave it out")
    if low_bits is not None and not isinstance(low_bits, LowBitCopies):
        check_bits(low_bits)
