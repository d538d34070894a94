"""Copies that nobody asked to wait for, in seconds: background admission on a busy link, and prefetching by a predictor.

Both make experts resident before they are called, and both use the link that the fetches need. Whether that pays is a question of
seconds, not of hits.

A predictor is judged here by its *accuracy*: the share of the experts it names that the router then calls. `predict_with_accuracy` makes
one of any accuracy from the trace itself, for every layer (for the first one, as if the token before could tell). It names K experts;
each is a called one with this probability, and otherwise one of the experts that the router ranked just below its top-k, the mistakes
that a good predictor makes. This is a what-if, not a method: it reads the future, and its mistakes are independent.
`moecache.calibrate.predict_previous_token` is a method, and so are the predictions that a recorded trace brings along: the router of the
next layer asked about the input of this one (the *stale gate*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from moecache.calibrate import predict_previous_token
from moecache.experiments.seconds import STUDY_CACHE, SYNTHETIC, Setting, decided, timed
from moecache.policy import FIRST_CHOICE, GATE_015, Policy
from moecache.run import Run
from moecache.simulate import simulate
from moecache.trace import RouterTrace

TOKENS_AT_ONCE = 256
PREVIOUS_TOKEN, RECORDED_PREDICTION = "previous token", "stale gate"
RULES = {"0.15 rule": GATE_015, "first choice": FIRST_CHOICE}
EVICTIONS: dict[str, dict[str, Any]] = {"LRU": {}, "decayed count (128)": {"eviction": "decayed_count", "half_life": 128}}


def corners(mass_threshold: float) -> list[tuple[dict[str, Any], Policy]]:
    """Rule x eviction x admission, so that what each of them costs can be told apart: (`rule`, `eviction`, `is_admitting`; policy)."""
    admission = {"admission": "background", "mass_threshold": mass_threshold}
    found = []
    for rule, policy in RULES.items():
        for eviction, fields in EVICTIONS.items():
            for is_admitting in (False, True):
                label = f"{rule}, {eviction}{', admitting' if is_admitting else ''}"
                corner = policy.replace(**fields, **(admission if is_admitting else {}), label=label)
                found.append(({"rule": rule, "eviction": eviction, "is_admitting": is_admitting}, corner))
    return found


def by_corner(
    traces: dict[str, RouterTrace], hardware: Sequence[str], mebibytes: float, mass_threshold: float, setting: Setting
) -> pd.DataFrame:
    """Time of every corner on every machine.

    Returns
    -------
    DataFrame : `trace`, `rule`, `eviction`, `is_admitting`, `policy`, the rates that were decided, the times of `seconds.timed`.
    """
    return _timed_rows(traces, corners(mass_threshold), hardware, mebibytes, setting)


def by_admission(
    traces: dict[str, RouterTrace],
    hardware: Sequence[str],
    mebibytes: float,
    mass_thresholds: Sequence[float],
    delays_tokens: Sequence[int],
    setting: Setting,
) -> pd.DataFrame:
    """The 0.15 rule with decayed counts, admitting sooner or later, and landing sooner or later.

    Returns
    -------
    DataFrame : `trace`, `mass_threshold`, `delay_tokens`, `policy`, rates, times. Thresholds are varied at a delay of 1 token, delays at
        the presets' threshold.
    """
    usual = float(STUDY_CACHE["mass_threshold"])
    pairs = sorted({*((float(mass), 1) for mass in mass_thresholds), *((usual, delay) for delay in delays_tokens)})
    tried = []
    for mass, delay in pairs:
        policy = GATE_015.replace(**{**STUDY_CACHE, "mass_threshold": mass, "admission_delay": delay})
        tried.append(({"mass_threshold": mass, "delay_tokens": delay}, policy))
    return _timed_rows(traces, tried, hardware, mebibytes, setting)


def _timed_rows(
    traces: dict[str, RouterTrace],
    tried: Sequence[tuple[dict[str, Any], Policy]],
    hardware: Sequence[str],
    mebibytes: float,
    setting: Setting,
) -> pd.DataFrame:
    rows = []
    for name, trace in traces.items():
        start = setting.start(trace)
        for named, policy in tried:
            run = simulate(trace, policy, setting.slots(trace))
            known = {"trace": name, **named, "policy": policy.label, **decided(run, start)}
            rows += [known | timed(run, machine, mebibytes, setting, start) for machine in hardware]
    return pd.DataFrame(rows)


def predict_with_accuracy(trace: RouterTrace, accuracy: float, seed: int = 0, runners_up: np.ndarray | None = None) -> RouterTrace:
    """The trace with `predicted_ids` [T,L,K] of which this share, on average, is called.

    Parameters
    ----------
    runners_up : [T,L,K] of `best_outside`, where it is known already.

    Raises
    ------
    ValueError : an accuracy outside 0..1, or a trace without scores.
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy={accuracy} is outside 0..1: the share of the predicted experts that is called")
    is_right = np.random.default_rng(seed).random(trace.topk_ids.shape) < accuracy
    wrong = best_outside(trace) if runners_up is None else runners_up
    return replace(trace, predicted_ids=np.where(is_right, trace.topk_ids, wrong))


def best_outside(trace: RouterTrace) -> np.ndarray:
    """[T,L,K] int16 : the K best experts outside each step's top-k, best first.

    Raises
    ------
    ValueError : a trace without scores.
    """
    if trace.selection_scores is None:
        raise ValueError("a predictor that errs plausibly needs the scores of all experts; record the trace with them")
    found, top_k = np.empty_like(trace.topk_ids), trace.shape.top_k
    for start in range(0, trace.num_tokens, TOKENS_AT_ONCE):
        part = slice(start, start + TOKENS_AT_ONCE)
        outside = trace.selection_scores[part].astype(np.float32)
        np.put_along_axis(outside, trace.topk_ids[part].astype(np.int64), -np.inf, axis=-1)
        best = np.argpartition(-outside, top_k - 1, axis=-1)[..., :top_k]
        order = np.argsort(-np.take_along_axis(outside, best, axis=-1), axis=-1, kind="stable")
        found[part] = np.take_along_axis(best, order, axis=-1)
    return found


def accuracy_of(trace: RouterTrace, first_token: int = 0) -> float:
    """Share of the predicted experts that are called, from a token on (NaN where nothing is predicted)."""
    assert trace.predicted_ids is not None
    predicted, called = trace.predicted_ids[first_token:], trace.topk_ids[first_token:]
    is_right = np.zeros(predicted.shape, bool)
    for rank in range(called.shape[-1]):
        is_right |= predicted == called[..., rank : rank + 1]
    is_prediction = predicted >= 0
    return float(is_right[is_prediction].mean()) if is_prediction.any() else float("nan")


def predictors(trace: RouterTrace, accuracies: Sequence[float]) -> list[tuple[str, RouterTrace, int]]:
    """(name, trace with predictions, layers of lead) of every predictor: the previous token, the recorded one if any, the what-ifs."""
    num_layers = trace.shape.num_layers
    found = [(PREVIOUS_TOKEN, predict_previous_token(trace), num_layers)]
    if trace.predicted_ids is not None:
        found.append((RECORDED_PREDICTION, trace, 1))
    wrong = best_outside(trace)
    return found + [(f"accuracy {value:g}", predict_with_accuracy(trace, value, runners_up=wrong), 1) for value in accuracies]


def by_predictor(
    traces: dict[str, RouterTrace],
    policies: Sequence[Policy],
    hardware: Sequence[str],
    mebibytes: float,
    accuracies: Sequence[float],
    limits: Sequence[int],
    setting: Setting,
) -> pd.DataFrame:
    """Every policy without prefetch, and with each predictor at each limit of prefetches a step (the synthetic trace: the first limit).

    Returns
    -------
    DataFrame : `trace`, `policy`, `predictor` ("none" without), `accuracy`, `max_prefetches`, the rates that were decided,
        `prefetches_per_step`, `useful_mebibytes`, `wasted_mebibytes` (a token, of the whole run, scaled like the times; wasted = evicted
        or left uncalled), the times of `seconds.timed`, `ms_without` (the same policy and machine without prefetch).
    """
    rows = []
    for name, trace in traces.items():
        tried = [("none", trace, 1, 0)] + [(*found, limit) for found in predictors(trace, accuracies) for limit in _limits_of(name, limits)]
        for predictor, predicted, lead, limit in tried:
            accuracy = float("nan") if limit == 0 else accuracy_of(predicted, setting.start(trace))
            named = {"trace": name, "predictor": predictor, "accuracy": accuracy, "max_prefetches": limit}
            for policy in policies:
                run = simulate(predicted, policy.replace(max_prefetches=limit), setting.slots(trace))
                rows += _prefetch_rows(named | {"policy": policy.label}, run, hardware, mebibytes, setting, lead, setting.start(trace))
    frame = pd.DataFrame(rows)
    keys = ["trace", "policy", "hardware"]
    without = frame[frame["predictor"] == "none"].set_index(keys)["ms_per_token"].rename("ms_without")
    return frame.join(without, on=keys)


def _limits_of(name: str, limits: Sequence[int]) -> Sequence[int]:
    return limits[:1] if name == SYNTHETIC else limits


def _prefetch_rows(
    named: dict[str, Any], run: Run, hardware: Sequence[str], mebibytes: float, setting: Setting, lead: int, start: int
) -> list[dict[str, Any]]:
    totals = run.summary()
    steps, per_token = run.num_tokens * run.shape.num_layers, mebibytes * setting.scaled_layers
    copies = {
        "prefetches_per_step": totals["prefetched"] / steps,
        "useful_mebibytes": per_token * totals["prefetch_useful"] / steps,
        "wasted_mebibytes": per_token * (totals["prefetched"] - totals["prefetch_useful"]) / steps,
    }
    known = named | copies | decided(run, start)
    return [known | timed(run, machine, mebibytes, setting, start, lead) for machine in hardware]
