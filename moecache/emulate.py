"""The emulator: the model as it would answer if only some experts of each layer were resident, in one pass.

Every expert is in memory; only the *choice* is restricted. When a router has run, its output goes to the same
compiled decision that the simulator and the runtime use, and where a call is substituted, dropped or computed at low precision, that is
what the layer's experts do. The model then computes what it would compute on the small machine: exact logits, token
losses and layer errors for a policy, without any copying. (A call that another processor computes is computed as called.)

Layers decide independently of one another and a layer's decisions need its own tokens in order, so a full forward
(all tokens of layer 0, then all of layer 1) decides as token by token does. `stepped=True` runs token by token with
the model's decoding cache, as generation does; it is slow, and is there to check that claim.

A token with no replaced call keeps the router's own numbers, so a policy that fetches every miss changes no logit.
Seconds are not known here: the emulator computes what a policy costs in quality, not in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.expert_sum import IMPLEMENTATION
from moecache.families import model_shape
from moecache.live import Emulation, WaitValues, check_use
from moecache.low_bit import LowBitCopies, low_bit_copies
from moecache.policy import Policy, check_policy
from moecache.provenance import provenance
from moecache.run import Run
from moecache.score import (
    DocumentScores,
    as_documents,
    check_evaluation,
    describe_model,
    document_starts,
    exact_document,
    score_document,
    with_progress,
)
from moecache.shared_start import SharedStart
from moecache.wait_values import check_waits_by_value

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
    buddies: np.ndarray | None = None,
    low_bits: int | LowBitCopies | None = None,
    predict: str | None = None,
    wait_values: WaitValues | None = None,
    compare_with_exact: bool = False,
    experts: str = hf_internals.EXPERTS_IMPLEMENTATION,
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
        Also measure the relative layer error (a second pass of the experts over tokens whose output is not exact).
    keep_logits : bool
        Keep all logits; T x V float32 numbers.
    progress : bool
        Show a bar over documents.
    buddies : array [L, E, H], for fallback "buddy"
        Each expert's stand-ins, best first: `moecache.calibrate.buddy_table` of another text.
    low_bits : {8, 4, 3, 2} or LowBitCopies, for fallback "low_precision"
        Bits of the copies that compute such calls, or copies made before by `moecache.low_bit.low_bit_copies`.
    predict : {"previous_token", "stale_gate"}, for a policy that prefetches
        What each step is expected to call, see `moecache.foresight`.
    wait_values : array [T, L, K] or a function, for miss rule "protect"
        What is compared with `gate_threshold` in the gate weight's place, see `moecache.wait_values`: the values of all calls in rank
        order, or a function of (layer, routing, first token) such as `moecache.contribution.contribution_oracle()`.
    compare_with_exact : bool
        Also run the exact model, and keep how far from it each token's distribution is.
    experts : {"grouped_mm", "moecache"}
        Who computes experts: transformers, or the runtime's own sum (`moecache.expert_sum`), for comparing the two to the last bit.

    Returns
    -------
    Run
        With `decisions`, `loss_nats` and `near_ties`. `extra` holds per layer [T, L] float32, and as mean over layers [T] under the name
        without `_by_layer`: `squared_mass_by_layer` (sum of squared gate weights of substituted and dropped calls), with low precision
        `low_precision_mass_by_layer`, and with `layer_error` `relative_error2_by_layer`.
        Where asked for also `wait_values` [T, L, K] and `logits` [T, V] float32.
        With `compare_with_exact`, [T] float64 and NaN at a document's first token: `exact_loss_nats`, `kl_nats` = KL(exact || policy),
        `same_top_token` (1 where both hold the same token for the likeliest).

    Raises
    ------
    UnknownRouter
        If the family is not understood, or the model does not follow its rule.
    CapacityError
        If `num_slots` is below the top-k or above the number of experts.
    ValueError
        For an argument that the policy needs and lacks, or has and does not use; a policy that knows the future; a model in training mode;
        or token ids outside the vocabulary.
    """
    return emulate_policies(
        model,
        token_ids,
        [check_policy(policy)],
        num_slots,
        cold_start,
        documents,
        exact_prefix_tokens,
        seed=seed,
        stepped=stepped,
        layer_error=layer_error,
        keep_logits=keep_logits,
        progress=progress,
        buddies=buddies,
        low_bits=low_bits,
        predict=predict,
        wait_values=wait_values,
        compare_with_exact=compare_with_exact,
        experts=experts,
    )[0]


def emulate_policies(
    model: Any,
    token_ids: Any,
    policies: Sequence[Policy],
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
    buddies: np.ndarray | None = None,
    low_bits: int | LowBitCopies | None = None,
    predict: str | None = None,
    wait_values: WaitValues | None = None,
    compare_with_exact: bool = False,
    experts: str = hf_internals.EXPERTS_IMPLEMENTATION,
) -> list[Run]:
    """Several policies over the same documents: the runs that `emulate` gives for each, bit for bit, in less time.

    Shared are the exact model's answers, the low-bit copies, and all that is computed before the first MoE layer's experts.

    Parameters
    ----------
    model, token_ids, num_slots, cold_start, documents, exact_prefix_tokens, seed, stepped : as for `emulate`.
    layer_error, keep_logits, progress, wait_values, compare_with_exact, experts : as for `emulate`.
    buddies, low_bits, predict : as for `emulate`; given to the policies that use them, and must be of use to one.
    policies : sequence of Policy
        Each with a cache of its own.

    Returns
    -------
    list of Run
        In the order of `policies`.

    Raises
    ------
    ValueError
        As `emulate`, or without a policy.
    """
    texts = as_documents(model, token_ids)
    check_evaluation(model)
    _check_documents(documents, exact_prefix_tokens)
    if experts not in (known := (hf_internals.EXPERTS_IMPLEMENTATION, IMPLEMENTATION)):
        raise ValueError(f"experts={experts!r} is unknown; choose one of {', '.join(known)}")
    check_use(policies, buddies, low_bits, predict)
    is_stepped = stepped or any(policy.couples_layers for policy in policies)
    if wait_values is not None:
        _check_wait_values(policies, wait_values, is_stepped, document_starts(texts).size)
    shape, copies = model_shape(model), low_bit_copies(model, low_bits) if isinstance(low_bits, int) else low_bits
    caches = [ExpertCache(shape, policy, num_slots, cold_start=cold_start, seed=seed, buddies=buddies) for policy in policies]
    emulations = [
        Emulation(model, policy, cache, has_layer_errors=layer_error, copies=copies, predict=predict, wait_values=wait_values)
        for policy, cache in zip(policies, caches, strict=True)
    ]
    scores: list[list[DocumentScores]] = [[] for _ in policies]
    exact_losses = []
    is_shared = len(policies) + compare_with_exact > 1 and not is_stepped and not callable(wait_values)  # a function may run layers itself
    start = SharedStart(model) if is_shared else None
    with torch.no_grad(), hf_internals.experts_implementation(model, experts):
        for position, text in enumerate(with_progress(texts, progress, _label(policies))):
            if start is not None:
                start.begin()
            exact = None
            if compare_with_exact:
                with _sharing(start):
                    exact = exact_document(model, text, is_stepped)
                exact_losses.append(exact.loss_nats)
            for emulation, kept in zip(emulations, scores, strict=True):
                if position > 0 and documents == "reset":
                    emulation.reset()
                emulation.begin(np.arange(text.size) < exact_prefix_tokens)
                with emulation.hooks(), _sharing(start):
                    kept.append(score_document(model, text, keep_logits, is_stepped, exact))
                emulation.end()
    settings = {"cold_start": cold_start if isinstance(cold_start, str) else "profile", "documents": documents}
    source = provenance() | {"model": describe_model(model, texts)}
    return [
        _run(emulation, kept, settings, document_starts(texts), source, exact_losses)
        for emulation, kept in zip(emulations, scores, strict=True)
    ]


def _run(
    emulation: Emulation,
    scores: list[DocumentScores],
    settings: dict[str, Any],
    document_start: npt.NDArray[np.bool_],
    source: dict[str, Any],
    exact_losses: list[np.ndarray],
) -> Run:
    cache = emulation.cache
    fields = {name: [getattr(score, name) for score in scores] for name in ("logits", "kl_nats", "same_top_token")}
    extra = {name: np.concatenate(parts) for name, parts in fields.items() if parts[0] is not None}
    extra |= {"exact_loss_nats": np.concatenate(exact_losses)} if exact_losses else {}
    return Run(
        instrument="emulator",
        policy=emulation.policy,
        shape=cache.shape,
        num_slots=cache.num_slots,
        replay="atomic",
        document_start=document_start,
        decisions=emulation.decisions(),
        counts=cache.counts,
        mass_sum=float(cache.state.mass_sum.sum()),
        loss_nats=np.concatenate([score.loss_nats for score in scores]),
        near_ties=emulation.num_near_ties,
        provenance=source | emulation.describe(),
        extra=emulation.extra() | extra,
        **settings,
    )


def _sharing(start: SharedStart | None) -> AbstractContextManager[None]:
    return nullcontext() if start is None else start.sharing()


def _label(policies: Sequence[Policy]) -> str:
    return policies[0].label if len(policies) == 1 else f"{len(policies)} policies"


def _check_documents(documents: str, exact_prefix_tokens: int) -> None:
    if documents not in DOCUMENTS:
        raise ValueError(f"documents={documents!r} is unknown; choose one of {', '.join(DOCUMENTS)}")
    if exact_prefix_tokens < 0:
        raise ValueError(f"exact_prefix_tokens={exact_prefix_tokens} must be 0 or more tokens of each document")


def _check_wait_values(policies: Sequence[Policy], wait_values: WaitValues, is_stepped: bool, num_tokens: int) -> None:
    for policy in policies:
        check_waits_by_value(policy)
    if is_stepped and hasattr(wait_values, "listening"):
        raise ValueError("this oracle runs each layer twice, which would fill the decoding cache twice; use stepped=False")
    if not callable(wait_values) and len(wait_values) != num_tokens:
        raise ValueError(f"wait_values are of {len(wait_values)} tokens, but the documents have {num_tokens}")
