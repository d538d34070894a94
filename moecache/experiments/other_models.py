"""The planned comparisons of capacity and of seconds, repeated in every reference model.

One model is one draw: its routers were trained once, on one order of texts. A conclusion that holds in two routing geometries says more
than a narrow interval in one. Each function measures one model; what the rows say together is the report's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from moecache import results
from moecache.experiments import capacity, capacity_report, seconds, seconds_report
from moecache.policy import Policy
from moecache.trace import ModelShape


def _of_each(
    experiment: str,
    model_names: Sequence[str],
    text: Mapping[str, int],
    parameters: Callable[[str], Mapping[str, Any]],
    measure: Callable[[str], pd.DataFrame],
) -> dict[str, pd.DataFrame]:
    """The stored answer of every model; `parameters` and `measure` are told which."""
    frames = {}
    for model in model_names:
        asked, inputs = capacity.key_of("", 0, text["num_documents"], text["num_tokens"], model)
        asked |= {"model": model, **parameters(model)}
        frames[model] = results.load_or_run(experiment, asked, lambda model=model: measure(model), inputs=inputs).frame
    return frames


def hits_by_model(
    model_names: Sequence[str],
    text: Mapping[str, int],
    policies: Sequence[Policy],
    fractions: Sequence[float],
    warmup_tokens: int,
    other_fractions: Sequence[float] | None = None,
) -> dict[str, pd.DataFrame]:
    """`capacity.by_document` of every model.

    Parameters
    ----------
    model_names : reference models.
    text : `num_documents` and `num_tokens` (of each) of the held-out text.
    policies, fractions, warmup_tokens : as for `capacity.by_document`.
    other_fractions : shares for every model but the first; None = the same.

    Raises
    ------
    ValueError : a share that is no more of a model's experts than one step calls: there every eviction decides alike.
    """
    fractions_of = {model: list(other_fractions or fractions) for model in model_names} | {model_names[0]: list(fractions)}

    def measure(model: str) -> pd.DataFrame:
        trace = capacity.open_trace("", 0, text["num_documents"], text["num_tokens"], model)
        _check_choice(model, trace.shape, fractions_of[model])
        return capacity.by_document(trace, policies, fractions_of[model], warmup_tokens)

    def asked(model: str) -> Mapping[str, Any]:
        return {"policies": policies, "fractions": fractions_of[model], "warmup_tokens": warmup_tokens}

    return _of_each("02_model", model_names, text, asked, measure)


def _check_choice(model: str, shape: ModelShape, fractions: Sequence[float]) -> None:
    for fraction in fractions:
        if round(fraction * shape.num_experts) <= shape.top_k:
            raise ValueError(
                f"{fraction} of the {shape.num_experts} experts of {model} is no more than the {shape.top_k} that a step calls, "
                "so that no eviction has a choice; give it larger shares (other_fractions)"
            )


def seconds_by_model(
    model_names: Sequence[str],
    text: Mapping[str, int],
    kin: Sequence[seconds.Kin],
    hardware: Sequence[str],
    mebibytes: float,
    setting: seconds.Setting,
) -> dict[str, pd.DataFrame]:
    """`seconds.by_unit` of every model; parameters as there, and as for `hits_by_model`."""

    def measure(model: str) -> pd.DataFrame:
        trace = seconds.open_recorded("", text["num_documents"], text["num_tokens"], model)
        return seconds.by_unit(trace, kin, hardware, mebibytes, setting)

    asked = {"policies": [policy for _, policy in kin], "hardware": list(hardware), "expert_mebibytes": mebibytes, **setting._asdict()}
    return _of_each("03_model", model_names, text, lambda _: asked, measure)


def hits_table(frames: Mapping[str, pd.DataFrame], policy: str, against: str = capacity_report.LRU) -> pd.DataFrame:
    """A row per model and capacity: `model`, `slots`, both hit rates in percent, `gain` (points), `low`, `high`, `p`, `verdict`.

    Parameters
    ----------
    frames : from `hits_by_model`.
    policy, against : labels.
    """
    rows = []
    for model, frame in frames.items():
        totals = frame.groupby(["policy", "num_slots"])[["hits", "calls"]].sum()
        rates = 100 * totals["hits"] / totals["calls"]
        for test in capacity_report.compare(frame, [(policy, against)], sorted(set(frame["num_slots"]))).to_dict("records"):
            slots, verdict = test["num_slots"], capacity_report.verdict(test["low"], test["high"])
            points = {name: 100 * test[key] for name, key in {"gain": "difference", "low": "low", "high": "high"}.items()}
            rates_here = {against: rates[against, slots], policy: rates[policy, slots]}
            rows.append({"model": model, "slots": slots, **rates_here, **points, "verdict": f"{verdict} {against}"})
    return pd.DataFrame(rows)


def seconds_table(frames: Mapping[str, pd.DataFrame], policy: str, against: str, hardware: Sequence[str]) -> pd.DataFrame:
    """A row per model and machine: `model`, `hardware`, `speed_up`, `low`, `high`, `p_holm`."""
    columns = ["hardware", "speed_up", "low", "high", "p_holm"]
    tables = [
        pd.DataFrame(seconds_report.compare(frame, [(policy, against)], hardware)[columns]).assign(model=model)
        for model, frame in frames.items()
    ]
    return pd.concat(tables, ignore_index=True)[["model", *columns]]
