"""Planned interventions: substitute exactly the calls that an experiment names, or add a known error at named sites.

A policy decides from what is resident; what it substitutes depends on its own history, so rank, weight and how often
an expert is missed come mixed as the policy mixes them. An experiment wants to choose. `intervene` substitutes the
named calls and no others, resident or not. `inject` leaves every call as it is and adds q (f_s - f_r) to the output of
a layer at the named sites, where f_r is what the called expert of rank r computes and f_s what the stand-in computes:
so *who* is replaced and *with how much weight* can be set apart from each other.

The slots of a simulated cache say who could stand in. It behaves as under fetching every miss (LRU), whatever is
named, so the sites do not disturb each other's residency; who is resident is read off when the token arrives. Calls
and misses are those of the running model: behind a site, the routers of later layers and tokens may say something
else than they would have.

This is an experiment and no policy. A run has `instrument="intervention"`, and its label says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moecache import hf_internals
from moecache.experts import LayerErrors
from moecache.interventions import Injection, Rule, Substitution
from moecache.observe import Observation, Setting, observed_run
from moecache.policy import WeightRule
from moecache.run import Run
from moecache.score import as_documents, check_evaluation
from moecache.trace import RouterTrace

STAND_INS = ("best", "outside", "random", "drop")


def intervene(
    model: Any,
    token_ids: Any,
    calls: npt.ArrayLike | Rule,
    num_slots: int | Sequence[int] | None = None,
    *,
    stand_in: str | npt.ArrayLike = "best",
    weight_rule: WeightRule | str = "own",
    cold_start: str | npt.ArrayLike = "first",
    before: RouterTrace | None = None,
    seed: int = 0,
    layer_error: bool = False,
    keep_logits: bool = False,
    progress: bool = False,
) -> Run:
    """Run documents through a model in which exactly the named calls are substituted, resident or not.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode, of an understood family, with every expert in memory.
    token_ids : array-like of int [T], or a list of such
        Each document is its own forward.
    calls : bool [T, L, K] in rank order, or a function
        The calls to substitute. A function is given the `LayerCalls` of one layer in one document (rank, gate weight,
        layer, position, age, whether it is a miss) and returns marks that broadcast to [n, K].
    num_slots : int, or one int a layer, optional
        Slots of the simulated cache. Without it every expert counts as resident.
    stand_in : {"best", "outside", "random", "drop"} or int [T, L, K]
        Who serves a named call: the best resident outside the top-k by selection score, the best of *all* experts
        outside it, a random resident, or nobody; or given expert ids, -1 for nobody.
    weight_rule : {"own", "own_raw", "inherit", "rescale"}
        As a policy's.
    cold_start : str or array [L, n]
        Who is resident at first.
    before : RouterTrace, optional
        What the routers said about the tokens before: the simulated cache starts as these leave it.
    seed : int
        Of random stand-ins and a random cold start.
    layer_error : bool
        Also measure the relative layer error.
    keep_logits, progress : bool
        Keep all logits; show a bar over documents.

    Returns
    -------
    Run
        `decisions` holds the named calls as substituted or dropped; the others, and a named call for which nobody can
        stand in (it is left alone), are the simulated cache's hits and fetches. `extra` holds `is_named`, `gate_weights`
        and `ages` [T, L, K], and what was asked for. `moecache.designs.realised_sites` sums it up.

    Raises
    ------
    UnknownRouter, CapacityError
        As `emulate`.
    ValueError
        For calls or stand-ins of the wrong shape, or a given stand-in that its token calls itself or uses twice.
    """
    texts = as_documents(model, token_ids)
    check_evaluation(model)
    setting = Setting.of(model, texts, num_slots, cold_start, before, seed)
    act = Substitution(
        named=_as_marks(calls, setting.call_shape),
        stand_in=_as_stand_in(stand_in, setting.call_shape),
        rule=WeightRule(weight_rule),
        setting=setting,
    )
    return _run(setting, act, texts, layer_error, keep_logits, progress)


def inject(
    model: Any,
    token_ids: Any,
    sites: npt.ArrayLike,
    rank: int | npt.ArrayLike,
    gate_weight: float | npt.ArrayLike,
    num_slots: int | Sequence[int] | None = None,
    *,
    stand_in: str | npt.ArrayLike = "best",
    cold_start: str | npt.ArrayLike = "first",
    before: RouterTrace | None = None,
    seed: int = 0,
    layer_error: bool = False,
    keep_logits: bool = False,
    progress: bool = False,
) -> Run:
    """Add q (f_s - f_r) to the output of a layer's experts at named sites; every call is computed as the router says.

    Parameters
    ----------
    model, token_ids, num_slots, cold_start, before, seed, layer_error, keep_logits, progress
        As for `intervene`.
    sites : bool [T, L]
        The steps at which something is added.
    rank : int, or int [T, L]
        Which call's expert is f_r.
    gate_weight : float, or float [T, L]
        q as a share of the token's routed sum: in a family that does not normalise, the routing weight added is q times
        the sum of the token's routing weights.
    stand_in : {"best", "outside", "random"} or int [T, L]
        Who is f_s, as for `intervene`.

    Returns
    -------
    Run
        No call counts as substituted. `extra` holds `injected_rank` [T, L] int8, -1 where nothing was added (no site,
        or nobody outside the top-k is resident), beside what `intervene` gives.

    Raises
    ------
    UnknownRouter, CapacityError, ValueError
        As `intervene`; also for ranks outside 0..K-1.
    """
    texts = as_documents(model, token_ids)
    check_evaluation(model)
    setting = Setting.of(model, texts, num_slots, cold_start, before, seed)
    steps = setting.call_shape[:2]
    marks = np.asarray(sites)
    if marks.dtype != bool or marks.shape != steps:
        raise ValueError(f"sites are {marks.dtype} {list(marks.shape)}; they must be bool {list(steps)}: tokens, layers")
    ranks = np.broadcast_to(np.asarray(rank), steps)
    if ranks.dtype.kind not in "iu" or not ((ranks >= 0) & (ranks < setting.shape.top_k))[marks].all():
        raise ValueError(f"rank must be integers from 0 to {setting.shape.top_k - 1} at every site")
    named = marks[..., None] & (np.arange(setting.shape.top_k) == ranks[..., None])
    served = stand_in if isinstance(stand_in, str) else np.where(named, np.asarray(stand_in)[..., None], -1)
    if isinstance(served, str) and served == "drop":
        raise ValueError("stand_in='drop' has no output to add; choose best, outside or random, or give ids")
    act = Injection(
        named=named,
        stand_in=_as_stand_in(served, setting.call_shape),
        gate_weight=np.broadcast_to(np.asarray(gate_weight, np.float32), steps),
        setting=setting,
    )
    return _run(setting, act, texts, layer_error, keep_logits, progress)


def _as_marks(calls: npt.ArrayLike | Rule, shape: tuple[int, int, int]) -> np.ndarray | Rule:
    if callable(calls):
        return calls
    marks = np.asarray(calls)
    if marks.dtype != bool or marks.shape != shape:
        raise ValueError(
            f"calls are {marks.dtype} {list(marks.shape)}; they must be bool {list(shape)} (tokens, layers, ranks), or a function"
        )
    return marks


def _as_stand_in(stand_in: str | npt.ArrayLike, shape: tuple[int, int, int]) -> str | np.ndarray:
    if isinstance(stand_in, str):
        if stand_in not in STAND_INS:
            raise ValueError(f"stand_in={stand_in!r} is unknown; choose one of {', '.join(STAND_INS)}, or give expert ids")
        return stand_in
    ids = np.asarray(stand_in)
    if ids.dtype.kind not in "iu" or ids.shape != shape:
        raise ValueError(f"given stand-ins are {ids.dtype} {list(ids.shape)}; they must be expert ids {list(shape)}, -1 for nobody")
    return ids.astype(np.int16)


def _run(
    setting: Setting, act: Substitution | Injection, texts: list[np.ndarray], layer_error: bool, keep_logits: bool, progress: bool
) -> Run:
    errors = LayerErrors(setting.layers) if layer_error else None
    with torch.no_grad(), hf_internals.experts_implementation(setting.model), act.hooks():
        observation = Observation(setting, partial(act.at, errors), errors)
        run = observed_run(observation, texts, keep_logits, progress, act.label)
    return replace(run, extra=run.extra | act.extra())
