"""Greedy decoding under a policy: what the model would write if only some experts of each layer were resident.

The hooks are the emulator's, the decoding cache is the model's own. A prompt is read in one pass and every miss in it is waited for, so
the model's numbers there are exact and decoding starts from the residency so reached. From the first written token on the policy decides.
The expert cache is kept from prompt to prompt, so prompts have an order, and nothing can be batched over them.

Policies can: the exact pass over a prompt is the same for all, and after it each policy is a row of one batch with an expert cache of its
own. A row's sums may then differ in the last bit from those of the policy alone, which matters where two logits are that near; pairs of
policies should therefore come from one call, with fetching every miss among them as the exact answer.

The first written token is decided by the prompt alone. The last one is never read by the model, so it has no decisions.
What is right or wrong in an answer is not known here, and neither are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.experts import replaced_rows, reroute
from moecache.families import Routing, check_router, model_shape, routing_of
from moecache.hf_internals import RouterOutput
from moecache.kernel import Fallback
from moecache.live import Emulation, check_use
from moecache.policy import Policy, WeightRule, check_policy
from moecache.provenance import provenance
from moecache.run import Run
from moecache.score import as_documents, check_evaluation, describe_model, with_progress

Stop = Callable[[Sequence[int]], bool]


@dataclass(frozen=True, eq=False)
class Generation:
    """What one policy wrote after each of Q prompts.

    Attributes
    ----------
    run : Run
        Decisions of all tokens that the model read: each prompt, then what was written after it but the last token. `extra["is_prompt"]`
        [T] bool tells them apart; `loss_nats` is None.
    token_ids : tuple of Q int32 arrays
        The written tokens, the one that ended the answer included.
    """

    run: Run
    token_ids: tuple[np.ndarray, ...]

    @property
    def policy(self) -> Policy:
        """What decided."""
        return self.run.policy


def emulated_generation(
    model: Any,
    prompts: Any,
    policy: Policy,
    num_slots: int | Sequence[int],
    *,
    max_new_tokens: int = 64,
    stop: Stop | None = None,
    **more: Any,
) -> Generation:
    """Write greedily after each prompt under one policy.

    Parameters
    ----------
    policy : Policy
    model, prompts, num_slots, max_new_tokens, stop : as for `emulated_generations`.
    **more : further arguments of `emulated_generations`.

    Returns
    -------
    Generation
    """
    return emulated_generations(model, prompts, [check_policy(policy)], num_slots, max_new_tokens=max_new_tokens, stop=stop, **more)[0]


@torch.no_grad()
def emulated_generations(
    model: Any,
    prompts: Any,
    policies: Sequence[Policy],
    num_slots: int | Sequence[int],
    *,
    max_new_tokens: int = 64,
    stop: Stop | None = None,
    cold_start: str | npt.ArrayLike = "first",
    seed: int = 0,
    buddies: np.ndarray | None = None,
    progress: bool = False,
) -> list[Generation]:
    """Write greedily after each prompt under several policies, as rows of one batch.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode, of an understood family, with every expert in memory.
    prompts : array-like of int [T], or a list of such
        Read in this order; the expert caches are kept from one to the next.
    policies : sequence of Policy
        Each with an expert cache of its own.
    num_slots : int, or one int a layer
        Experts resident in each MoE layer; at least the model's top-k.
    max_new_tokens : int
        Most tokens written after a prompt.
    stop : function of the token ids written so far
        True ends the answer. Without it an answer ends with the model's own end token.
    cold_start, seed, buddies : as for `moecache.emulate`.
    progress : bool
        Show a bar over prompts.

    Returns
    -------
    list of Generation
        In the order of `policies`.

    Raises
    ------
    ValueError
        For a policy that prefetches, computes from low-bit copies, couples layers or knows the future; a model in training mode; token
        ids outside the vocabulary; or fewer than one token to write.
    """
    texts = as_documents(model, prompts)
    check_evaluation(model)
    _check(policies, buddies, max_new_tokens)
    shape = model_shape(model)
    caches = [ExpertCache(shape, policy, num_slots, cold_start=cold_start, seed=seed, buddies=buddies) for policy in policies]
    rows = _Rows([Emulation(model, policy, cache) for policy, cache in zip(policies, caches, strict=True)])
    ended = _ends_at(model) if stop is None else stop
    written: list[list[np.ndarray]] = [[] for _ in policies]
    with hf_internals.experts_implementation(model), hf_internals.watched(rows.emulations[0].layers, rows.listen):
        for text in with_progress(texts, progress, f"{len(policies)} policies"):
            rows.begin(text.size, max_new_tokens)
            for kept, ids in zip(written, _answers(model, text, rows, ended, max_new_tokens), strict=True):
                kept.append(np.array(ids, np.int32))
            rows.end()
    source = provenance() | {"model": describe_model(model, texts)}
    cold = cold_start if isinstance(cold_start, str) else "profile"
    found = zip(rows.emulations, written, strict=True)
    return [Generation(_run(emulation, texts, kept, cold, source), tuple(kept)) for emulation, kept in found]


class _Rows:
    """Policies as rows of a batch: all hear a prompt, then each hears its own row while it is running."""

    def __init__(self, emulations: list[Emulation]) -> None:
        self.emulations = emulations
        self.running: list[int] | None = None

    def begin(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Start a prompt."""
        self.running = None
        for emulation in self.emulations:
            emulation.begin(np.arange(num_prompt_tokens + max_new_tokens) < num_prompt_tokens)

    def end(self) -> None:
        """Close the prompt and its answers."""
        for emulation in self.emulations:
            emulation.is_exact = emulation.is_exact[: emulation.num_seen[0]]
            emulation.end()

    def listen(self, layer: int, output: RouterOutput) -> RouterOutput | None:
        """Let each policy decide on what it reads."""
        first = self.emulations[0]
        if not first.logs and not first.blocks[layer]:
            check_router(first.family, first.layers[layer].name, output)
        routing = routing_of(first.family, output)
        if self.running is None:
            for emulation in self.emulations:
                emulation.decide(layer, routing)  # every miss is waited for, so nothing is replaced
            return None
        computed_ids = np.zeros(routing.topk_ids.shape, np.int16)
        changed: dict[WeightRule, list[int]] = {}
        for row in self.running:
            log = self.emulations[row].decide(layer, _row(routing, row))
            computed_ids[row] = log.computed_ids[0, 0]
            if replaced_rows(log.outcome[:, 0]).size:
                changed.setdefault(self.emulations[row].weight_rule, []).append(row)
        for rule, rows in changed.items():
            output = reroute(first.family, rule, output, routing, np.array(rows), computed_ids)
        return output if changed else None


def _row(routing: Routing, row: int) -> Routing:
    one = slice(row, row + 1)
    return replace(routing, **{field.name: getattr(routing, field.name)[one] for field in fields(routing)})


def _answers(model: Any, prompt: np.ndarray, rows: _Rows, ended: Stop, max_new_tokens: int) -> list[list[int]]:
    """Token ids written by each policy after one prompt."""
    keyword, num_rows = hf_internals.cache_keyword(model), len(rows.emulations)
    ids = torch.from_numpy(prompt).to(model.device, torch.int64)[None]
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache = hf_internals.repeated_cache(hf_internals.decoding_cache(output), num_rows)
    written = [[int(output.logits[0, -1].argmax())] for _ in range(num_rows)]
    while True:
        rows.running = [row for row, own in enumerate(written) if len(own) < max_new_tokens and not ended(own)]
        if not rows.running:
            return written
        last = torch.tensor([own[-1:] for own in written], device=model.device)  # rows that have ended are computed and not heard
        output = model(input_ids=last, use_cache=True, **{keyword: cache})
        best = output.logits[:, -1].argmax(-1).tolist()
        for row in rows.running:
            written[row].append(best[row])


def _ends_at(model: Any) -> Stop:
    """An answer ends with one of the model's own end tokens."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = set(found if isinstance(found, list) else [found]) - {None}
    return lambda written: written[-1] in ends


def _run(emulation: Emulation, prompts: list[np.ndarray], written: list[np.ndarray], cold_start: str, source: dict[str, Any]) -> Run:
    parts = [np.arange(prompt.size + ids.size - 1) for prompt, ids in zip(prompts, written, strict=True)]
    is_prompt = np.concatenate([part < prompt.size for part, prompt in zip(parts, prompts, strict=True)])
    cache = emulation.cache
    return Run(
        instrument="emulator",
        policy=emulation.policy,
        shape=cache.shape,
        num_slots=cache.num_slots,
        cold_start=cold_start,
        documents="keep",
        replay="atomic",
        document_start=np.concatenate([part == 0 for part in parts]),
        decisions=emulation.decisions(),
        counts=cache.counts,
        mass_sum=float(cache.state.mass_sum.sum()),
        provenance=source | emulation.describe(),
        extra={"is_prompt": is_prompt},
    )


def _check(policies: Sequence[Policy], buddies: Any, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    for policy in policies:
        fields = {
            'fallback="low_precision"': policy.fallback == Fallback.LOW_PRECISION,
            "max_prefetches": policy.max_prefetches > 0,
            "couples_layers": policy.couples_layers,
        }
        found = [name for name, is_set in fields.items() if is_set]
        if found:
            raise ValueError(
                f"policy {policy.label!r} sets {found[0]}, which is not carried out when policies write as rows of a batch; "
                "score given texts with moecache.emulate, or generate with moecache.offload"
            )
    check_use(policies, buddies, None, None)
