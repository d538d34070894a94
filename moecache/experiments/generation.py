"""What a model writes under a policy, against what it writes exactly, problem by problem.

Every policy reads the same prompts in the same order, keeps its expert cache from problem to problem, and decodes greedily
(`moecache.generate`). Fetching every miss is one of the rows and gives the exact answer. Of each answer three things are kept: how much of
it agrees with the exact one, whether it is right, and what was substituted while it was written.

*Agreement* counts the written tokens after the first, which the prompt alone decides. Up to the first difference: leading tokens that are
the exact ones, as a share of the exact answer. Over the whole answer: places that hold the same token, as a share of the longer answer.
*Mass* is the substituted gate mass a step over the written tokens that the model read; prompts have none.

The list of policies is fixed beforehand (`listed_policies`): between the cheapest threshold and substituting every miss. The two chosen
policies are read beside it, and are no part of it, since their residency differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache import results
from moecache.experiments import inputs
from moecache.experiments.chosen_policies import scaled
from moecache.experiments.generation_problems import TASKS, Problem, has_ended, in_turns, is_right
from moecache.experiments.mass_hypothesis import geometry
from moecache.experiments.mass_hypothesis import listed_policies as mass_list
from moecache.experiments.misses_that_matter import check_evictions
from moecache.generate import Generation, emulated_generations
from moecache.policy import FETCH_EVERY_MISS, QUALITY_FIRST, SPEED_FIRST, SUBSTITUTE_EVERY_MISS, Policy
from moecache.reference import load_model, load_tokenizer

EXPERIMENT, ELSEWHERE_EXPERIMENT = "12_generation", "12_elsewhere"
STAYS_OUT, ADMITTED = "stays_out", "admitted_anyway"
CHOSEN = "chosen policy"
MAX_NEW_TOKENS = 48
_KEPT = (
    *("weight 1.5/K", "weight 1.0/K", "weight 0.8/K", "weight 1.5/K and first choice", "weight 1.2/K and first choice"),
    *("first choice", "first 3", "mass budget 0.1", "mass budget 0.3", "cache prior 0.2"),
)
_SUMS = ["hits", "fetched", "forced", "substituted", "dropped", "first_choices_substituted", "copies"]
Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


def listed_policies(top_k: int) -> list[tuple[str, Policy]]:
    """The fixed list as (family, policy): eleven policies of six families."""
    kept = [(family, policy) for family, policy in mass_list(top_k) if policy.label in _KEPT]
    return [*kept, ("substitute every miss", SUBSTITUTE_EVERY_MISS)]


def all_policies(top_k: int, regime: str = STAYS_OUT) -> list[tuple[str, Policy]]:
    """What one batch reads: the exact model, the list, and (where a substituted miss stays out) the two chosen policies."""
    exact = ("fetch every miss", FETCH_EVERY_MISS)
    if regime == ADMITTED:
        return [exact, *((family, policy.admitted_anyway().replace(label=policy.label)) for family, policy in listed_policies(top_k))]
    return [exact, *listed_policies(top_k), *((CHOSEN, scaled(policy, top_k)) for policy in (QUALITY_FIRST, SPEED_FIRST))]


def measure(
    model: Any,
    encode: Encode,
    decode: Decode,
    problems: Sequence[Problem],
    policies: Sequence[tuple[str, Policy]],
    num_slots: int,
    *,
    num_warmup_problems: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    end_ids: Sequence[int] = (),
    has_to_evict: bool = False,
) -> pd.DataFrame:
    """Let each policy answer the problems, and describe every (policy, scored problem).

    Parameters
    ----------
    model : a causal language model of an understood family, in evaluation mode.
    encode, decode : text to the ids of a prompt, and written ids to text.
    problems : read in this order.
    policies : sequence of (family, Policy)
        The first is the exact one; labels must differ.
    num_slots : int
        Slots a layer.
    num_warmup_problems : int
        Problems answered first and left out of the rows.
    max_new_tokens : int
        Most tokens of an answer.
    end_ids : ids that end an answer whatever its kind.
    has_to_evict : refuse a capacity at which fetching every miss hardly evicts.

    Returns
    -------
    DataFrame
        One row per (policy, scored problem): policy, family, num_slots, document (the problem), cluster (the same), domain (its kind),
        template, num_tokens (1: every problem counts once), agreement_before, agreement_whole (0 to 1), is_same, is_right, exact_is_right,
        num_written, num_exact, substituted_mass (mean a step), steps, and calls of those steps by outcome.

    Raises
    ------
    ValueError
        If no problem is left to score, or (`TooFewEvictions`) hardly anything is evicted where that was asked for.
    """
    if num_warmup_problems >= len(problems):
        raise ValueError(f"num_warmup_problems={num_warmup_problems} leaves none of {len(problems)} problems to score")
    stop = _stop(problems, decode, end_ids)
    prompts = [np.asarray(encode(problem.prompt)) for problem in problems]
    found = emulated_generations(model, prompts, [policy for _, policy in policies], num_slots, max_new_tokens=max_new_tokens, stop=stop)
    exact, right, frames = found[0], _Judge(decode), []
    if has_to_evict:
        check_evictions(exact.run, int(np.flatnonzero(exact.run.document_start)[num_warmup_problems]))
    for (family, _), one in zip(policies, found, strict=True):
        rows = _problem_rows(one, exact, problems, right).assign(family=family, num_slots=num_slots)
        frames.append(rows.iloc[num_warmup_problems:])
    return pd.concat(frames, ignore_index=True)


def _stop(problems: Sequence[Problem], decode: Decode, end_ids: Sequence[int]) -> Callable[[Sequence[int]], bool]:
    """Ends an answer at any mark of the problems' kinds; kinds that are read together have the same marks."""
    kinds, ends = sorted({problem.kind for problem in problems}), set(end_ids)
    return lambda written: written[-1] in ends or any(has_ended(kind, decode(written)) for kind in kinds)


class _Judge:
    """Whether answers are right; the same answer to a problem is judged once."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.known: dict[tuple[str, str], bool] = {}

    def __call__(self, problem: Problem, token_ids: np.ndarray) -> bool:
        written = self.decode(token_ids.tolist())
        key = (problem.name, written)
        if key not in self.known:
            self.known[key] = is_right(problem, written)
        return self.known[key]


def _problem_rows(one: Generation, exact: Generation, problems: Sequence[Problem], right: _Judge) -> pd.DataFrame:
    tokens = one.run.frame()
    written = tokens[~one.run.extra["is_prompt"]].groupby("document")
    all_problems = pd.RangeIndex(len(problems))
    rows = written[_SUMS].sum().reindex(all_problems, fill_value=0)
    rows["substituted_mass"] = written["substituted_mass"].mean().reindex(all_problems, fill_value=0.0).round(9)
    rows["steps"] = written.size().reindex(all_problems, fill_value=0) * one.run.shape.num_layers
    agreements = [agreement(mine, true) for mine, true in zip(one.token_ids, exact.token_ids, strict=True)]
    return rows.assign(
        policy=one.policy.label,
        document=[problem.name for problem in problems],
        cluster=[problem.name for problem in problems],
        domain=[problem.kind for problem in problems],
        template=[problem.template for problem in problems],
        num_tokens=1,
        agreement_before=[round(before, 9) for before, _ in agreements],
        agreement_whole=[round(whole, 9) for _, whole in agreements],
        is_same=[np.array_equal(mine, true) for mine, true in zip(one.token_ids, exact.token_ids, strict=True)],
        is_right=[right(problem, ids) for problem, ids in zip(problems, one.token_ids, strict=True)],
        exact_is_right=[right(problem, ids) for problem, ids in zip(problems, exact.token_ids, strict=True)],
        num_written=[len(ids) for ids in one.token_ids],
        num_exact=[len(ids) for ids in exact.token_ids],
    )


def agreement(token_ids: np.ndarray, exact_ids: np.ndarray) -> tuple[float, float]:
    """Shares of tokens after the first that agree: up to the first difference, and over the whole answer.

    The first is the share of the exact answer, the second of the longer of the two; both are 1 for equal answers of a single token.
    """
    mine, exact = token_ids[1:], exact_ids[1:]
    shared = min(len(mine), len(exact))
    is_equal = mine[:shared] == exact[:shared]
    leading = int(np.argmin(is_equal)) if not is_equal.all() else shared
    if len(mine) == len(exact) == 0:
        return 1.0, 1.0
    return leading / max(len(exact), 1), int(is_equal.sum()) / max(len(mine), len(exact))


def rows(
    model_name: str, resident_fraction: float, regime: str, num_problems: int, num_warmup_problems: int, experiment: str = EXPERIMENT
) -> pd.DataFrame:
    """Rows of a reference model on both generated task families, their problems in turns; measured where they are not stored.

    Parameters
    ----------
    model_name : a reference model.
    resident_fraction : share of a layer's experts that is resident.
    regime : "stays_out" or "admitted_anyway".
    num_problems, num_warmup_problems : of each family; the first ones warm the cache.
    experiment : name in the store.

    Returns
    -------
    DataFrame
        As `measure`, with `model` and `regime`.
    """
    num_experts, top_k = geometry(model_name)
    num_slots, policies = max(math.ceil(resident_fraction * num_experts), top_k), all_policies(top_k, regime)
    parameters = {
        "model": model_name,
        "num_slots": num_slots,
        "policies": [[family, policy.label, policy] for family, policy in policies],
        "tasks": list(TASKS),
        "num_problems": num_problems,
        "num_warmup_problems": num_warmup_problems,
        "max_new_tokens": MAX_NEW_TOKENS,
        "regime": regime,
    }

    def run() -> pd.DataFrame:
        model, encode, decode = _reference(model_name)
        problems, warmup = in_turns(TASKS, num_warmup_problems + num_problems), len(TASKS) * num_warmup_problems
        settings: dict[str, Any] = {"num_warmup_problems": warmup, "end_ids": (0,), "has_to_evict": True}
        found = measure(model, encode, decode, problems, policies, num_slots, **settings)
        return found.assign(model=model_name, regime=regime)

    return results.load_or_run(experiment, parameters, run, inputs=inputs.reference_inputs(model_name)).frame


@lru_cache(maxsize=1)
def _reference(model_name: str) -> tuple[Any, Encode, Decode]:
    """A reference model; a prompt starts with the mark that begins a document."""
    tokenizer = load_tokenizer(model_name)
    return load_model(model_name), lambda text: [0, *tokenizer.encode(text).ids], lambda ids: tokenizer.decode(list(ids))
