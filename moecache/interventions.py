"""What an intervention does to a layer: replace the named calls, or add a known error to the layer's output.

Both ask the same question first: who serves a named call? Both act on what an `Observation` shows them, and know
nothing of how the calls were named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecache import hf_internals
from moecache.experts import LayerErrors, reroute
from moecache.families import Routing, sum_of_calls
from moecache.hf_internals import RouterOutput
from moecache.kernel import Outcome
from moecache.observe import LayerCalls, Setting
from moecache.policy import WeightRule
from moecache.stand_ins import best_stand_ins, outside_topk
from moecache.trace import DecisionLog

Rule = Callable[[LayerCalls], npt.ArrayLike]


def _served_ids(seen: LayerCalls, named: np.ndarray, stand_in: str | np.ndarray, setting: Setting) -> np.ndarray:
    """Who serves each named call of a layer's tokens [n, K] int16; -1 where not named, or by nobody."""
    if not isinstance(stand_in, str):
        ids = np.where(named, stand_in[seen.tokens, seen.layer], -1)
        _check_given(ids, seen)
        return ids
    ids = np.full(named.shape, -1, np.int16)
    rows = np.flatnonzero(named.any(axis=1))
    if stand_in == "drop" or rows.size == 0:
        return ids
    scores: np.ndarray = seen.selection_scores[rows]
    may_serve = outside_topk(seen.expert[rows], setting.shape.num_experts) & np.isfinite(scores)
    if stand_in != "outside":
        may_serve &= seen.residents(rows)
    if stand_in == "random":
        scores = np.random.default_rng([setting.seed, seen.layer, seen.document]).random(scores.shape)
    ids[rows] = best_stand_ins(scores, may_serve, named[rows])
    return ids


def _check_given(ids: np.ndarray, seen: LayerCalls) -> None:
    is_given = ids >= 0
    is_called = (ids[:, :, None] == seen.expert[:, None, :]).any(axis=2) & is_given
    is_twice = ((ids[:, :, None] == ids[:, None, :]) & is_given[:, :, None]).sum(axis=2) > 1
    wrong = np.argwhere(is_called | is_twice)
    if len(wrong):
        row, rank = wrong[0]
        why = "is called by the token itself" if is_called[row, rank] else "serves two calls of the token"
        raise ValueError(
            f"the given stand-in {ids[row, rank]} of token {seen.tokens[row]}, layer {seen.layer}, rank {rank} {why}; give another"
        )


@dataclass(eq=False)
class Substitution:
    """Replaces the named calls."""

    named: np.ndarray | Rule
    stand_in: str | np.ndarray
    rule: WeightRule
    setting: Setting

    label = "intervention: named calls substituted"

    def __post_init__(self) -> None:
        self.is_named = np.zeros(self.setting.call_shape, bool)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Nothing beside the routers."""
        yield

    def at(
        self, errors: LayerErrors | None, seen: LayerCalls, log: DecisionLog, routing: Routing, output: RouterOutput
    ) -> tuple[DecisionLog, RouterOutput | None]:
        """The log with the named calls as substituted, and what the experts are to compute."""
        named = self._marks(seen)
        ids = _served_ids(seen, named, self.stand_in, self.setting)
        self.is_named[seen.tokens, seen.layer] = named
        may_drop = not isinstance(self.stand_in, str) or self.stand_in == "drop"
        is_served = named & ((ids >= 0) | may_drop)
        outcome = np.where(is_served, np.where(ids >= 0, Outcome.SUBSTITUTED, Outcome.DROPPED), log.outcome[:, 0]).astype(np.uint8)
        computed = np.where(is_served, ids, routing.topk_ids).astype(np.int16)
        mass = np.where(is_served, routing.gate_weights, 0).sum(axis=1, dtype=np.float64)[:, None].astype(np.float32)
        changed = replace(log, outcome=outcome[:, None], computed_ids=computed[:, None], substituted_mass=mass)
        rows = np.flatnonzero(is_served.any(axis=1))
        if rows.size == 0:
            return changed, None
        if errors is not None:
            errors.note(seen.layer, seen.first_position, rows, output)
        return changed, reroute(self.setting.family, self.rule, output, routing, rows, computed)

    def _marks(self, seen: LayerCalls) -> np.ndarray:
        if not callable(self.named):
            return self.named[seen.tokens, seen.layer]
        marks = np.asarray(self.named(seen))
        if marks.dtype != bool:
            raise ValueError(f"the function that names calls returned {marks.dtype}; it must return bool marks that broadcast to [n, K]")
        return np.broadcast_to(marks, seen.gate_weight.shape)

    def extra(self) -> dict[str, np.ndarray]:
        """Which calls were named."""
        return {"is_named": self.is_named}


@dataclass(eq=False)
class Injection:
    """Adds q (f_s - f_r) to the output of a layer's experts at the sites."""

    named: np.ndarray
    stand_in: str | np.ndarray
    gate_weight: np.ndarray
    setting: Setting

    label = "intervention: error injected"

    def __post_init__(self) -> None:
        self.injected_rank = np.full(self.gate_weight.shape, -1, np.int8)
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Add inside the block; the hooks are gone after it."""
        handles = []
        try:
            for index, layer in enumerate(self.setting.layers):
                handles.append(layer.experts.register_forward_hook(partial(self._add, index)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def at(
        self, errors: LayerErrors | None, seen: LayerCalls, log: DecisionLog, routing: Routing, output: RouterOutput
    ) -> tuple[DecisionLog, None]:
        """Note what is to be added once the layer's experts have run."""
        named = self.named[seen.tokens, seen.layer]
        ids = _served_ids(seen, named, self.stand_in, self.setting)
        rows, ranks = np.nonzero(ids >= 0)
        if rows.size:
            self.injected_rank[seen.tokens[rows], seen.layer] = ranks
            device, weights = output.ids.device, output.weights
            at = torch.from_numpy(rows).to(device)
            pair = torch.from_numpy(np.stack([ids[rows, ranks], routing.topk_ids[rows, ranks]], axis=1).astype(np.int64)).to(device)
            share = torch.from_numpy(self.gate_weight[seen.tokens[rows], seen.layer].copy()).to(device)
            q = (share * sum_of_calls(weights[at].to(torch.float32))[:, 0]).to(weights.dtype)
            self.pending[seen.layer] = (at, pair, torch.stack([q, -q], dim=1))
            if errors is not None:
                errors.note(seen.layer, seen.first_position, rows, output)
        return log, None

    def _add(self, layer: int, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        if layer not in self.pending:
            return None
        rows, ids, weights = self.pending.pop(layer)
        added = hf_internals.compute_experts(module, args[0][rows], ids, weights)
        return output.index_add(0, rows, added.to(output.dtype))

    def extra(self) -> dict[str, np.ndarray]:
        """Where something was added."""
        return {"injected_rank": self.injected_rank}
