"""Which misses matter: the loss of every document under every miss rule, at two capacities and in two regimes.

A miss rule says which misses are waited for. What the others cost depends on how often they come, so every rule runs

- at a given share of resident experts, and at the number of slots where LRU reaches a given hit rate, and
- with the substituted expert *staying out*, and *admitted anyway* (not waited for, but resident from the next token on).

When it stays out, a rule that seldom waits starves its own cache, and rules meet different misses. Admitted anyway, all rules meet
nearly the same misses, and the rule alone is compared.

The first documents only warm the cache. All runs read the same documents in the same order; the exact losses come from the same
emulator, fetching every miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache import results
from moecache.emulate import emulate
from moecache.experiments import inputs
from moecache.experiments.capacity_report import FEWEST_EVICTIONS, TooFewEvictions
from moecache.experiments.capacity_slots import slots_for_hit_rate
from moecache.policy import (
    FETCH_EVERY_MISS,
    FIRST_CHOICE,
    GATE_015,
    SUBSTITUTE_EVERY_MISS,
    Policy,
    first_j,
    only_rank_substituted,
    threshold,
)
from moecache.record import record
from moecache.reference import held_out_documents, load_model
from moecache.run import Run
from moecache.simulate import simulate
from moecache.stats import unique_documents

EXPERIMENT = "04_misses_that_matter"
REGIMES = ("stays_out", "admitted_anyway")


def miss_rules(top_k: int) -> list[tuple[str, Policy]]:
    """The compared rules as (family, policy), for a router that calls `top_k` experts.

    Thresholds are absolute gate weights; at another `top_k` than 10 they are scaled to the same multiple of the uniform weight.
    """
    scale = 10 / top_k
    first_three, half = min(3, top_k), max(top_k // 2, 1)
    thresholds = [threshold(weight * scale, label=f"gate weight {weight:.2f}") for weight in (0.15, 0.12, 0.10, 0.08)]
    one_rank = [
        only_rank_substituted(rank, top_k, label=f"only rank {rank} substituted") for rank in sorted({0, 1, 2, top_k - 1}) if rank < top_k
    ]
    return [
        ("substitute every miss", SUBSTITUTE_EVERY_MISS),
        ("threshold and first choice", _scaled(GATE_015, scale)),
        ("first J", FIRST_CHOICE),
        ("first J", first_j(first_three, label=f"first {first_three}")),
        ("first J", first_j(half, label=f"first {half}")),
        ("last J", Policy(wait_ranks=tuple(range(top_k - half, top_k)), label=f"last {half}")),
        *(("threshold", policy) for policy in thresholds),
        *(("one rank", policy) for policy in one_rank),
    ]


def _scaled(policy: Policy, scale: float) -> Policy:
    assert policy.gate_threshold is not None
    return policy.replace(gate_threshold=policy.gate_threshold * scale, label=policy.label)


def in_regime(policy: Policy, regime: str) -> Policy:
    """The rule in one of the two regimes, under its own label."""
    if regime not in REGIMES:
        raise ValueError(f"regime={regime!r} is unknown; choose one of {', '.join(REGIMES)}")
    return policy if regime == "stays_out" else policy.admitted_anyway().replace(label=policy.label)


def stored(model_name: str, **settings: Any) -> pd.DataFrame:
    """The rows of a reference model, documents named apart; measured where they are not stored. Settings are `measure_reference`'s."""
    parameters = {"model": model_name, **settings}
    found = results.load_or_run(EXPERIMENT, parameters, lambda: measure_reference(**parameters), inputs=inputs.reference_inputs(model_name))
    return unique_documents(found.frame)


def measure_reference(model: str, num_documents: int, num_tokens: int, num_slots: int = 0, **settings: Any) -> pd.DataFrame:
    """`measure` on a reference model and the first of its held-out documents; 0 slots take the two capacities."""
    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, name=model)
    return measure(load_model(model), documents, model, num_slots=num_slots or None, **settings)


def measure(
    model: Any,
    documents: Sequence[Any],
    model_name: str,
    resident_fraction: float = 0.25,
    lru_hit_rate: float = 0.915,
    num_warmup_documents: int = 8,
    regimes: Iterable[str] = REGIMES,
    num_slots: int | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Emulate every rule at both capacities and in both regimes.

    Parameters
    ----------
    model : a causal language model of an understood family.
    documents : objects with `tokens` (int [n]), `domain`, `cluster` and `name`, in the order they are read.
    model_name : goes into the frame.
    resident_fraction : share of a layer's experts that is resident at the first capacity.
    lru_hit_rate : the second capacity is the fewest slots at which LRU hits this share.
    num_warmup_documents : documents read first and left out of the frame.
    regimes : of "stays_out" and "admitted_anyway".
    num_slots : one capacity instead of the two.
    progress : show a bar for each run.

    Returns
    -------
    DataFrame : one row per (regime, num_slots, policy, scored document): model, regime, num_slots, policy, family, document, domain,
        cluster, num_tokens, mean_difference_nats, exact_loss_nats, calls by outcome, first_choices_substituted, copies, evictions,
        substituted_mass (mean a step). The fetching policy has its own rows, with difference 0, in every regime.

    Raises
    ------
    TooFewEvictions : fewer than 100 evictions in some layer of the warm window under the fetching policy.
    """
    if num_warmup_documents >= len(documents):
        raise ValueError(f"num_warmup_documents={num_warmup_documents} leaves none of {len(documents)} documents to score")
    texts = [np.asarray(document.tokens) for document in documents]
    warmup_tokens = sum(text.size for text in texts[:num_warmup_documents])
    trace = record(model, texts)
    shape = trace.shape
    capacities = (
        [num_slots]
        if num_slots
        else sorted(
            {max(math.ceil(resident_fraction * shape.num_experts), shape.top_k), slots_for_hit_rate(trace, lru_hit_rate, warmup_tokens)}
        )
    )
    frames, exact_losses = [], None
    for slots in capacities:
        exact = emulate(model, texts, FETCH_EVERY_MISS, slots) if exact_losses is None else None
        if exact is not None:
            exact_losses = exact.loss_nats
        assert exact_losses is not None
        fetching = simulate(trace, FETCH_EVERY_MISS, slots)
        check_evictions(fetching, warmup_tokens)
        for regime in regimes:
            setting = {"model": model_name, "regime": regime, "num_slots": slots}
            frames.append(document_rows(fetching, exact_losses, exact_losses, documents, setting, "fetch every miss"))
            for family, policy in miss_rules(shape.top_k):
                run = emulate(model, texts, in_regime(policy, regime), slots, progress=progress)
                assert run.loss_nats is not None
                frames.append(document_rows(run, run.loss_nats, exact_losses, documents, setting, family))
    result = pd.concat(frames, ignore_index=True)
    return result[result["document_index"] >= num_warmup_documents].drop(columns="document_index").reset_index(drop=True)


def check_evictions(run: Run, warmup_tokens: int) -> None:
    """Refuse a warm window with too few evictions to learn from."""
    fewest = run.summary(warmup_tokens)["fewest_evictions_a_layer"]
    if fewest < FEWEST_EVICTIONS:
        raise TooFewEvictions(
            f"{run.policy.label} evicts only {fewest} times in some layer after {warmup_tokens} warm-up tokens at "
            f"{int(run.num_slots.max())} slots; at least {FEWEST_EVICTIONS} are needed: read more documents or use fewer slots"
        )


_SUMS = ["hits", "fetched", "forced", "substituted", "dropped", "first_choices_substituted", "copies", "evictions"]


def document_rows(
    run: Run, loss: np.ndarray, exact: np.ndarray, documents: Sequence[Any], setting: dict[str, Any], family: str
) -> pd.DataFrame:
    """One row a document of one run, with `document_index`; `setting` goes into every row."""
    frame = run.frame().assign(difference=loss - exact, exact_loss_nats=exact)
    grouped = frame.groupby("document")
    rows = grouped[_SUMS].sum()
    rows["num_tokens"] = grouped["difference"].count()
    rows["mean_difference_nats"] = grouped["difference"].mean()
    rows["exact_loss_nats"] = grouped["exact_loss_nats"].mean()
    rows["substituted_mass"] = grouped["substituted_mass"].mean()
    rows["steps"] = grouped.size() * run.shape.num_layers
    rows["calls"] = rows["steps"] * run.shape.top_k
    rows = rows.reset_index(names="document_index")
    facts = {name: [getattr(document, name) for document in documents] for name in ("domain", "cluster")}
    facts["document"] = [document.name for document in documents]
    return rows.assign(**setting, policy=run.policy.label, family=family, **facts)
