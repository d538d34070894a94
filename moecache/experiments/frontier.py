"""More policies in the rows of `misses_that_matter`: the frontier of miss rules, single ranks, controls, a third capacity, two ages.

A *frontier* asks which rule loses least for the same waiting. A family of rules has one knob, from waiting seldom to waiting often, so it
is a curve of loss against fetches that are waited for. Points which the first experiment holds already are not measured again.

Two families do not compare the gate weight with their knob, but another number a call (`wait_values`):

- *random misses*: a number drawn for every call of every step, so a share of the misses waits whatever is known of them. All points
  share the draws: what waits at one share waits at a larger one too.
- *true contribution*: w x ||f|| / h of the called expert, which nobody knows in time. It bounds what a better guess could gain.

In both, `gate_threshold` is a *share*: of all calls, those with the largest numbers wait if missed. For contributions the number is the
quantile over the exact model's calls in the warm-up documents, which are not scored.

Every group of policies is stored by itself, so that a run that was cut loses one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache import results
from moecache.contribution import contribution_oracle
from moecache.emulate import emulate, emulate_policies
from moecache.experiments import inputs
from moecache.experiments.mass_hypothesis import geometry
from moecache.experiments.misses_that_matter import document_rows, in_regime, miss_rules
from moecache.families import model_shape
from moecache.policy import FETCH_EVERY_MISS, GATE_015, Policy, first_j, mass_budget, only_rank_substituted, threshold
from moecache.reference import held_out_documents, load_model
from moecache.stats import unique_documents

FRONTIER, RANKS, CONTROLS = "04_frontier", "04_ranks", "04_controls"
HALF_CAPACITY, TWO_AGES = "04_half_capacity", "04_two_ages"
GATE_WEIGHT, RANDOM, CONTRIBUTION = "gate weight", "random", "contribution"
SEED = 0


@dataclass(frozen=True)
class Group:
    """Policies that are measured and stored together, as (family, policy), and what their `gate_threshold` is compared with."""

    policies: tuple[tuple[str, Policy], ...]
    waits: str = GATE_WEIGHT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for the key of the stored rows."""
        return {"policies": [[family, policy.to_dict()] for family, policy in self.policies], "waits": self.waits, "seed": SEED}


@dataclass(frozen=True)
class Reading:
    """What is read: the first held-out documents; the first `num_warmup_documents` warm the cache and are not scored."""

    num_documents: int
    num_tokens: int
    num_warmup_documents: int


def frontier_groups(top_k: int) -> dict[str, Group]:
    """The points of each family that the first experiment lacks; weights are multiples of the uniform weight 1/K."""
    shares = (0.05, 0.12, 0.3, 0.6, 0.9)
    return {
        "threshold": _group("threshold", [_threshold(weight) for weight in (2.0, 1.3, 0.9, 0.7)]),
        "threshold and first choice": _group("threshold and first choice", [_threshold(w, first_choice=True) for w in (1.3, 1.0, 0.8)]),
        "first J": _group("first J", more_first_ranks(top_k)),
        "mass budget": _group("mass budget", [mass_budget(b, label=f"mass budget {b:g}") for b in (0.1, 0.2, 0.3, 0.45, 0.6)]),
        "squared budget": _group(
            "squared budget",
            [mass_budget(b / top_k, is_squared=True, label=f"squared budget {b:g}/K") for b in (0.06, 0.15, 0.3, 0.5, 0.8)],
        ),
        "random misses": _group(
            "random misses", [threshold(s, label=f"random {100 * s:g} % of the misses wait") for s in (0.03, 0.1, 0.2, 0.45, 0.8)], RANDOM
        ),
        "true contribution": _group(
            "true contribution", [threshold(s, label=f"the {100 * s:g} % largest contributions wait") for s in shares], CONTRIBUTION
        ),
    }


def more_first_ranks(top_k: int) -> list[Policy]:
    """Two more rules that protect first ranks: the first 2, and the first 70 %."""
    return [first_j(j, label=f"first {j}") for j in (2, round(0.7 * top_k))]


def rank_groups(top_k: int) -> dict[str, Group]:
    """The rules by rank that the first experiment lacks: each rank alone, more first ranks protected, more last ranks protected."""
    alone = [only_rank_substituted(r, top_k, label=f"only rank {r} substituted") for r in range(3, top_k - 1)]
    last = [Policy(wait_ranks=tuple(range(top_k - r, top_k)), label=f"last {r}") for r in (top_k - 3, top_k - 2)]
    return {
        "one rank": _group("one rank", alone),
        "first J": _group("first J", more_first_ranks(top_k)),
        "last J": _group("last J", last),
    }


def control_groups(top_k: int) -> dict[str, Group]:
    """Two rules with worse fallbacks: a random resident stands in, or nobody does (the others' weights grow, or stay as they are)."""
    gate = GATE_015.replace(gate_threshold=1.5 / top_k, label=GATE_015.label)
    first = only_rank_substituted(0, top_k, label="only rank 0 substituted")
    fallbacks: Mapping[str, dict[str, Any]] = {
        "random resident": {"fallback": "random_resident"},
        "dropped": {"fallback": "drop", "weight_rule": "own_raw"},
        "dropped, others grow": {"fallback": "drop"},
    }
    return {
        rule.label: _group("control", [rule.replace(**fields, label=f"{rule.label}, {name}") for name, fields in fallbacks.items()])
        for rule in (gate, first)
    }


def few_groups(top_k: int) -> dict[str, Group]:
    """The rules of the first experiment that its claims and its main sentences speak of, for further settings."""
    half = max(top_k // 2, 1)
    wanted = ("0.15 rule", "first choice", "gate weight 0.10", "only rank 0 substituted", f"first {half}", f"last {half}")
    return {"few": Group(tuple(pair for pair in miss_rules(top_k) if pair[1].label in wanted))}


def _group(family: str, policies: Sequence[Policy], waits: str = GATE_WEIGHT) -> Group:
    return Group(tuple((family, policy) for policy in policies), waits)


def _threshold(weight: float, first_choice: bool = False) -> Policy:
    label = f"weight {weight:.1f}/K" + (" and first choice" if first_choice else "")
    return threshold(weight, first_choice=first_choice, threshold_unit="uniform", label=label)


def slots_of(model_name: str, resident_fraction: float) -> int:
    """Slots a layer of a reference model at a share of resident experts; at least K."""
    num_experts, top_k = geometry(model_name)
    return max(math.ceil(resident_fraction * num_experts), top_k)


def top_k_of(model_name: str) -> int:
    """Calls a step of a reference model."""
    return geometry(model_name)[1]


def stored(
    experiment: str, model_name: str, groups: Mapping[str, Group], num_slots: int, reading: Reading, regime: str = "stays_out"
) -> pd.DataFrame:
    """Rows of all groups on a reference model, measured where they are not stored, one group a file.

    Parameters
    ----------
    experiment : name in the store.
    model_name : a reference model.
    groups : by name.
    num_slots : slots a layer.
    reading : documents.
    regime : of `misses_that_matter.REGIMES`.

    Returns
    -------
    DataFrame : as `measure`.
    """
    frames = []
    for name, group in groups.items():
        parameters = {"model": model_name, "num_slots": num_slots, "regime": regime, "group": name, **group.to_dict(), **vars(reading)}

        def run(group: Group = group) -> pd.DataFrame:
            model, documents, exact = _read(model_name, reading.num_documents, reading.num_tokens)
            rows = measure(model, documents, group, num_slots, regime, reading.num_warmup_documents, exact)
            return rows.assign(model=model_name)

        frames.append(results.load_or_run(experiment, parameters, run, inputs=inputs.reference_inputs(model_name)).frame)
    return unique_documents(pd.concat(frames, ignore_index=True))


@lru_cache(maxsize=1)
def _read(model_name: str, num_documents: int, num_tokens: int) -> tuple[Any, list[Any], np.ndarray]:
    """A reference model, documents and the exact token losses; kept, because many groups read the same."""
    model = load_model(model_name)
    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, name=model_name)
    return model, documents, exact_losses_of(model, _texts(documents))


def exact_losses_of(model: Any, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Token losses [T] in nats when every miss is waited for (then the number of slots changes nothing)."""
    losses = emulate(model, texts, FETCH_EVERY_MISS, model_shape(model).num_experts).loss_nats
    assert losses is not None
    return losses


def _texts(documents: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(document.tokens) for document in documents]


def measure(
    model: Any,
    documents: Sequence[Any],
    group: Group,
    num_slots: int,
    regime: str = "stays_out",
    num_warmup_documents: int = 8,
    exact_losses: np.ndarray | None = None,
) -> pd.DataFrame:
    """Emulate a group of policies and describe every (policy, scored document).

    Parameters
    ----------
    model : a causal language model of an understood family, in evaluation mode.
    documents : objects with `tokens` (int [n]), `domain`, `cluster` and `name`, in the order they are read.
    group : policies, and what they compare.
    num_slots : slots a layer.
    regime : of `misses_that_matter.REGIMES`.
    num_warmup_documents : documents read first and left out of the rows; contributions are ranked in them.
    exact_losses : [T] of the same documents; measured here when absent.

    Returns
    -------
    DataFrame : the columns of `misses_that_matter.measure` but `model`.

    Raises
    ------
    ValueError : no document is left to score, an unknown regime or value, or contributions without warm-up documents.
    """
    if num_warmup_documents >= len(documents):
        raise ValueError(f"num_warmup_documents={num_warmup_documents} leaves none of {len(documents)} documents to score")
    texts = _texts(documents)
    exact = exact_losses_of(model, texts) if exact_losses is None else exact_losses
    thresholds, values = _wait_values(model, texts, group, num_warmup_documents)
    policies = [
        in_regime(policy if number is None else policy.replace(gate_threshold=number, label=policy.label), regime)
        for (_, policy), number in zip(group.policies, thresholds, strict=True)
    ]
    runs = emulate_policies(model, texts, policies, num_slots, wait_values=values)
    frames = []
    for (family, _), run in zip(group.policies, runs, strict=True):
        assert run.loss_nats is not None
        frames.append(document_rows(run, run.loss_nats, exact, documents, {"regime": regime, "num_slots": num_slots}, family))
    rows = pd.concat(frames, ignore_index=True)
    return rows[rows["document_index"] >= num_warmup_documents].drop(columns="document_index").reset_index(drop=True)


def _wait_values(model: Any, texts: Sequence[np.ndarray], group: Group, num_warmup: int) -> tuple[list[float | None], Any]:
    """The number that stands for each policy's share, and the values of the calls."""
    shares = [float(policy.gate_threshold) for _, policy in group.policies]  # type: ignore[arg-type]
    if group.waits == GATE_WEIGHT:
        return [None] * len(shares), None
    if group.waits == RANDOM:
        shape = model_shape(model)
        size = (sum(text.size for text in texts), shape.num_layers, shape.top_k)
        return [1.0 - share for share in shares], np.random.default_rng(SEED).random(size, dtype=np.float32)
    if group.waits != CONTRIBUTION:
        raise ValueError(f"waits={group.waits!r} is unknown; choose one of {GATE_WEIGHT!r}, {RANDOM!r}, {CONTRIBUTION!r}")
    if num_warmup < 1:
        raise ValueError("contributions are ranked in the warm-up documents: read at least one")
    numbers = np.quantile(exact_contributions(model, texts[:num_warmup]), [1.0 - share for share in shares])
    return [float(number) for number in numbers], contribution_oracle()


def exact_contributions(model: Any, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Each call's w x ||f|| / h [T, L, K] where every miss is waited for."""
    lowest = threshold(1e-30, label="every contribution waits")
    return emulate(model, texts, lowest, model_shape(model).num_experts, wait_values=contribution_oracle()).extra["wait_values"]
