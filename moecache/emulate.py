"""The emulator: the model as it would answer if only some experts of each layer were resident, in one pass.

Every expert is in memory; only the *choice* is restricted. When a router has run, its output goes to the same
compiled decision that the simulator and the runtime use, and where a call is substituted or dropped the output's ids
and weights are replaced. The model then computes what it would compute on the small machine: exact logits, token
losses and layer errors for a policy, without any copying.

Layers decide independently of one another and a layer's decisions need its own tokens in order, so a full forward
(all tokens of layer 0, then all of layer 1) decides as token by token does. `stepped=True` runs token by token with
the model's decoding cache, as generation does; it is slow, and is there to check that claim.

A token with no replaced call keeps the router's own numbers, so a policy that fetches every miss changes no logit.
Seconds are not known here: the emulator computes what a policy costs in quality, not in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.experts import LayerErrors, replaced_rows, reroute
from moecache.families import Routing, check_router, family_of, model_shape, routing_of
from moecache.hf_internals import RouterOutput
from moecache.kernel import Fallback
from moecache.policy import Policy, WeightRule, check_policy
from moecache.provenance import provenance
from moecache.run import Run
from moecache.score import (
    as_documents,
    check_evaluation,
    describe_model,
    document_losses,
    document_starts,
    with_progress,
)
from moecache.ties import near_ties
from moecache.trace import DecisionLog, concatenate_layers, concatenate_tokens

CARRIED_OUT = (Fallback.SUBSTITUTE, Fallback.RANDOM_RESIDENT, Fallback.DROP)
DOCUMENTS = ("keep", "reset")


def emulate(
    model: Any,
    token_ids: Any,
    policy: Policy,
    num_slots: int | Sequence[int],
    cold_start: str | npt.ArrayLike = "first",
    documents: str = "keep",
    exact_prefix_tokens: int = 0,
    *,
    seed: int = 0,
    stepped: bool = False,
    layer_error: bool = False,
    keep_logits: bool = False,
    progress: bool = False,
) -> Run:
    """Run documents through a model whose layers hold only `num_slots` experts, under a policy.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode, of an understood family, with every expert in memory.
    token_ids : array-like of int [T], or a list of such
        Each document is its own forward: attention never crosses a boundary.
    policy : Policy
        What waits, what is substituted, who is evicted and admitted.
    num_slots : int, or one int a layer
        Experts resident in each MoE layer; at least the model's top-k.
    cold_start : str or array [L, n]
        Who is resident at first: "first", "random", "empty", or a profile.
    documents : {"keep", "reset"}
        Whether the slots keep their experts across a document boundary.
    exact_prefix_tokens : int
        Tokens at the start of each document whose misses are all waited for, as in a prompt.
    seed : int
        Of the random cold start.
    stepped : bool
        Token by token with the model's decoding cache instead of one pass.
    layer_error : bool
        Also measure the relative layer error (a second pass of the experts over tokens with replaced calls).
    keep_logits : bool
        Keep all logits; T x V float32 numbers.
    progress : bool
        Show a bar over documents.

    Returns
    -------
    Run
        With `decisions`, `loss_nats` and `near_ties`. `extra` holds, where asked for, `relative_error2_by_layer`
        [T, L] float32 and its mean over layers `relative_error2` [T], and `logits` [T, V] float32.

    Raises
    ------
    UnknownRouter
        If the family is not understood, or the model does not follow its rule.
    CapacityError
        If `num_slots` is below the top-k or above the number of experts.
    ValueError
        For a policy the emulator cannot carry out, a model in training mode, or token ids outside the vocabulary.
    """
    texts = as_documents(model, token_ids)
    check_evaluation(model)
    check_policy(policy)
    _check_arguments(policy, documents, exact_prefix_tokens)
    shape = model_shape(model)
    cache = ExpertCache(shape, policy, num_slots, cold_start=cold_start, seed=seed)
    emulation = _Emulation(model, policy, cache, LayerErrors(hf_internals.moe_layers(model)) if layer_error else None)
    losses, logits = [], []
    with torch.no_grad(), hf_internals.experts_implementation(model), emulation.hooks():
        for position, text in enumerate(with_progress(texts, progress, policy.label)):
            if position > 0 and documents == "reset":
                emulation.reset()
            emulation.begin(np.arange(text.size) < exact_prefix_tokens)
            loss, kept = document_losses(model, text, keep_logits, stepped or policy.couples_layers)
            emulation.end()
            losses.append(loss)
            logits.append(kept)
    log = emulation.decisions()
    return Run(
        instrument="emulator",
        policy=policy,
        shape=shape,
        num_slots=cache.num_slots,
        cold_start=cold_start if isinstance(cold_start, str) else "profile",
        documents=documents,
        replay="atomic",
        document_start=document_starts(texts),
        decisions=log,
        counts=cache.counts,
        mass_sum=float(cache.state.mass_sum.sum()),
        loss_nats=np.concatenate(losses),
        near_ties=emulation.num_near_ties,
        provenance=provenance() | {"model": describe_model(model, texts)},
        extra=emulation.extra() | ({"logits": np.concatenate(logits)} if keep_logits else {}),
    )


def _check_arguments(policy: Policy, documents: str, exact_prefix_tokens: int) -> None:
    if documents not in DOCUMENTS:
        raise ValueError(f"documents={documents!r} is unknown; choose one of {', '.join(DOCUMENTS)}")
    if exact_prefix_tokens < 0:
        raise ValueError(f"exact_prefix_tokens={exact_prefix_tokens} must be 0 or more tokens of each document")
    if policy.fallback not in CARRIED_OUT:
        names = ", ".join(fallback.name.lower() for fallback in CARRIED_OUT)
        raise ValueError(f"the emulator cannot carry out fallback={policy.fallback!r}; it can {names}")


class _Emulation:
    """What goes on inside the hooks: decide, count, replace. One for all documents of a run."""

    def __init__(self, model: Any, policy: Policy, cache: ExpertCache, errors: LayerErrors | None) -> None:
        self.family = family_of(model)
        self.layers = hf_internals.moe_layers(model)
        self.cache, self.errors = cache, errors
        self.weight_rule = WeightRule(policy.weight_rule)
        self.fallback, self.gate_threshold = Fallback(cache.rules.fallback), cache.rules.gate_threshold
        self.logs: list[DecisionLog] = []
        self.cancelled: list[np.ndarray] = []
        self.squared_errors: list[np.ndarray] = []
        self.num_near_ties = 0
        self.begin(np.zeros(0, bool))

    def begin(self, is_exact: npt.NDArray[np.bool_]) -> None:
        """Start a document of `is_exact.size` tokens."""
        self.is_exact = is_exact
        self.blocks: list[list[DecisionLog]] = [[] for _ in self.layers]
        self.num_seen = [0 for _ in self.layers]
        if self.errors is not None:
            self.errors.begin(is_exact.size)

    def end(self) -> None:
        """Close the document: lay its blocks together."""
        self.logs.append(concatenate_layers([concatenate_tokens(blocks) for blocks in self.blocks]))
        if self.errors is not None:
            self.squared_errors.append(self.errors.squared)

    def reset(self) -> None:
        """Cold start again at a document boundary."""
        self.cancelled.append(self.cache.reset())

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Decide at every router inside the block; the model is as it was after it."""
        measuring = nullcontext() if self.errors is None else self.errors.measuring()
        with hf_internals.watched(self.layers, self.listen), measuring:
            yield

    def listen(self, layer: int, output: RouterOutput) -> RouterOutput | None:
        """Decide the next tokens of a layer, and return what its experts are to compute."""
        if not self.logs and not self.blocks[layer]:
            check_router(self.family, self.layers[layer].name, output)
        routing = routing_of(self.family, output)
        first_token = self.num_seen[layer]
        self.num_seen[layer] += len(routing.topk_ids)
        log = self._decide(layer, first_token, routing)
        self.blocks[layer].append(log)
        outcome, computed_ids = log.outcome[:, 0], log.computed_ids[:, 0]
        self.num_near_ties += self._count_near_ties(routing, outcome, computed_ids)
        rows = replaced_rows(outcome)
        if rows.size == 0:
            return None
        if self.errors is not None:
            self.errors.note(layer, first_token, rows, output)
        return reroute(self.family, self.weight_rule, output, routing, rows, computed_ids)

    def _decide(self, layer: int, first_token: int, routing: Routing) -> DecisionLog:
        log = self.cache.decide(
            routing.topk_ids[:, None],
            routing.gate_weights[:, None],
            routing.selection_scores[:, None],
            first_layer=layer,
            is_exact=self.is_exact[first_token : self.num_seen[layer]],
        )
        assert log is not None
        return log

    def _count_near_ties(self, routing: Routing, outcome: np.ndarray, computed_ids: np.ndarray) -> int:
        scores = torch.from_numpy(routing.selection_scores).to(torch.float32).numpy()
        calls = (routing.topk_ids, routing.gate_weights, outcome, computed_ids)
        return int(near_ties(scores, *calls, self.fallback, self.gate_threshold).sum())

    def extra(self) -> dict[str, np.ndarray]:
        """Per-token arrays beyond losses and decisions, by name."""
        if self.errors is None:
            return {}
        by_layer = np.concatenate(self.squared_errors)
        return {"relative_error2_by_layer": by_layer, "relative_error2": by_layer.mean(axis=1)}

    def decisions(self) -> DecisionLog:
        """The log of all documents."""
        log = concatenate_tokens(self.logs)
        return replace(log, arrivals=np.concatenate([log.arrivals, *self.cancelled]))
