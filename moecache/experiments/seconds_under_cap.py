"""Fetching every miss against accelerate's disk offload in the same memory: run where it can be, told in words where it cannot.

The comparison needs memory cgroups and an interpreter with accelerate. A chapter that asks for it where either is missing shows what is
stored, and otherwise says why there is nothing to show.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moecache import results
from moecache.experiments import runtime_against_accelerate as rival
from moecache.experiments.inputs import reference_inputs
from moecache.experiments.runtime_checkpoint import timed_checkpoint, timed_text
from moecache.experiments.seconds_per_token import Question

WARM_TOKENS = 100
THREADS = (1, 2, 1, 2)  # of accelerate, one entry a round
ENGINES = {rival.OURS: "this runtime, fetch every miss", rival.THEIRS: "accelerate, disk offload"}


class Capped(NamedTuple):
    """What a page shows: a table of runs or none, and the paragraph above it."""

    table: pd.DataFrame | None
    story: str


def answer(question: Question, measured_tokens: int) -> Capped:
    """The comparison on one widened model, stored or run now, or why there is none.

    Parameters
    ----------
    question : names the widened model and its slots.
    measured_tokens : of each run, after `WARM_TOKENS`; 0 = do not ask.
    """
    if measured_tokens == 0:
        return Capped(
            None, "Left out of the quick run: each of its runs starts a process of its own under a cap of memory, from a cold cache."
        )
    try:
        runs, agreement = (_stored(question, measured_tokens, name) for name in ("runs", "agreement"))
    except (results.MissingResult, CannotRun) as reason:
        return Capped(None, f"Not measured here: {str(reason).partition(': measure')[0]}.")
    return Capped(table_of(runs), story_of(runs, agreement))


class CannotRun(ValueError):
    """This machine lacks what the comparison needs."""


def _stored(question: Question, measured_tokens: int, name: str) -> pd.DataFrame:
    plan = question.plan()
    parameters: dict[str, Any] = {"warm_tokens": WARM_TOKENS, "measured_tokens": measured_tokens, "threads": list(THREADS)}
    parameters |= {"num_slots": plan.num_slots, "cap_bytes": rival.CAP_BYTES, **vars(question.geometry)}
    inputs = reference_inputs(question.model_name)
    run = partial(_run, question, measured_tokens, name)
    return results.load_or_run(f"09_capped_{name}", parameters, run, inputs=inputs).frame


_kept: dict[tuple[Question, int], tuple[pd.DataFrame, pd.DataFrame]] = {}


def _run(question: Question, measured_tokens: int, name: str) -> pd.DataFrame:
    """One of the two frames; both are made by one run."""
    if reason := rival.why_not():
        raise CannotRun(reason)
    key = (question, measured_tokens)
    if key not in _kept:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        checkpoint = timed_checkpoint(question.geometry, progress=False)
        text = timed_text(WARM_TOKENS + measured_tokens, question.model_name)
        _kept[key] = rival.timed_under_cap(
            checkpoint,
            text,
            num_slots=question.plan().num_slots,
            warm_tokens=WARM_TOKENS,
            measured_tokens=measured_tokens,
            threads=THREADS,
            progress=False,
        )
    runs, agreement = _kept[key]
    return runs if name == "runs" else agreement if len(agreement) else pd.DataFrame({"num_tokens": np.zeros(0, np.int64)})


def table_of(runs: pd.DataFrame) -> pd.DataFrame:
    """A row a run, as a page shows it."""
    return pd.DataFrame(
        {
            "engine": [ENGINES[name] for name in runs["engine"]],
            "round": runs["round"] + 1,
            "threads": runs["threads"],
            "ended": runs["outcome"],
            "ms a token": 1e3 * runs["seconds_per_token"],
            "peak of the cap, GB": runs["peak_bytes"] / 1e9,
            "MB read a token": runs["read_bytes_per_token"] / 1e6,
            "seconds to load": runs["load_seconds"],
        }
    )


def story_of(runs: pd.DataFrame, agreement: pd.DataFrame) -> str:
    """What the runs say, in a paragraph."""
    cap = runs["cap_bytes"].iloc[0] / 1e9
    setting = (
        f"Both engines decode the same tokens of the same weights, each in a process of {cap:g} GB of memory (pages of files included) and "
        f"from a cold cache of files, in turns. accelerate gets the layout that it maps in place. MEASURED."
    )
    ratios = rival.against(runs)
    if ratios.empty:
        ended = "; ".join(f"{ENGINES[str(name)]}: {', '.join(dict.fromkeys(rows['outcome']))}" for name, rows in runs.groupby("engine"))
        return f"{setting} There is no ratio, because not both ran ({ended})."
    told = (
        f"accelerate's token takes {ratios['ratio'].min():.1f} to {ratios['ratio'].max():.1f} times as long, round by round, and its best "
        f"round {ratios['ratio_to_best'].iloc[0]:.1f} times as long as the runtime's best (n = {len(ratios)} rounds)."
    )
    if agreement.empty:
        return f"{setting} {told}"
    row = agreement.iloc[0]
    return (
        f"{setting} {told} Their logits differ by at most {row['largest_difference']:.3g} where the largest is {row['largest_logit']:.3g}; "
        f"the likeliest token is the same in {row['same_argmax_share']:.1%} of {int(row['num_tokens'])} tokens."
    )
