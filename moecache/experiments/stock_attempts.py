"""Where a token's time goes in this project's runtime under a cap, and what was tried to make it shorter.

Each *attempt* adds one change to those before it, and is run in the same cells and on the same texts as the comparison, in turns with
llama.cpp as the sweep chose it. They are exploratory: they were thought of after the comparison had been seen. The seconds of a token are
the runtime's own account (`runtime.counters`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from moecache import results
from moecache.experiments import inputs, stock_runs
from moecache.experiments.stock import ENGINES, STOCK, Options, best_choice
from moecache.experiments.stock_figures import MEBIBYTE, figures
from moecache.experiments.stock_files import files_of
from moecache.experiments.stock_runs import Cell, Choice, Engine, Text, decode, own_options
from moecache.policy import FETCH_EVERY_MISS, Policy

EXPERIMENT, PART = "11_attempts", "11_attempt"
LEAN_MEBIBYTES = 592  # what the runtime's process was seen to have beside its weights: 375 of its own, 190 mapped, and the system's account
NUM_PREFETCHES = 2
USES = ("waiting", "experts", "dense", "routing", "overhead")  # of a token's seconds


class Attempt(NamedTuple):
    """One change more than the attempt before."""

    name: str
    policy: Policy
    process_mebibytes: int | None = None  # of the cap, left for the process; None: as in the comparison
    threads: int = 1  # that compute


def attempts(policy_rule: Policy) -> list[Attempt]:
    """What was tried, in order; the last one is the rule that substitutes, with all of it.

    Parameters
    ----------
    policy_rule : the 0.15 rule as the comparison runs it.
    """
    decayed = {"eviction": "decayed_count", "half_life": 128}
    ahead = {**decayed, "max_prefetches": NUM_PREFETCHES}
    label = FETCH_EVERY_MISS.label
    return [
        Attempt("as compared", FETCH_EVERY_MISS),
        Attempt("two threads compute", FETCH_EVERY_MISS, None, 2),
        Attempt("slots in what the process leaves", FETCH_EVERY_MISS, LEAN_MEBIBYTES, 2),
        Attempt("eviction by a decayed count", FETCH_EVERY_MISS.replace(**decayed, label=label), LEAN_MEBIBYTES, 2),
        Attempt(f"prefetching {NUM_PREFETCHES} experts a layer", FETCH_EVERY_MISS.replace(**ahead, label=label), LEAN_MEBIBYTES, 2),
        Attempt("0.15 rule, without prefetching", policy_rule.replace(**decayed, label=policy_rule.label), LEAN_MEBIBYTES, 2),
    ]


def measure(text: Text, cells: Sequence[Cell], swept: pd.DataFrame, options: Options, num_repeats: int) -> pd.DataFrame:
    """Run llama.cpp and every attempt in every cell, repeat by repeat; each run is kept as it ends.

    Returns
    -------
    DataFrame : `attempt` ("llama.cpp" for the stock engine), `cell`, `repeat`, `outcome`, `slots`, `threads`, `tokens_per_second`,
        `hit_rate`, `read_mebibytes_per_token`, `peak_mebibytes`, and milliseconds of a token by use (`waiting_ms` .. `overhead_ms`, NaN
        for llama.cpp).

    Raises
    ------
    StockError : an engine is not installed, or fails for another reason than its memory.
    """
    asked = {**text.asked(), "cells": [list(cell) for cell in cells], "num_repeats": num_repeats}
    rule = stock_runs.policy_of(ENGINES["moecache, 0.15 rule"], files_of(*text[:3], 16, "ours").shape.top_k)
    tried = attempts(rule)
    choices = {cell: best_choice(swept, ENGINES[STOCK], cell, options) for cell in cells}
    asked["stock_choices"] = [list(choice) for choice in choices.values()]
    asked["attempts"] = [[one.name, one.policy, one.process_mebibytes, one.threads] for one in tried]

    def run_all() -> pd.DataFrame:
        stock_runs.check_installed([ENGINES[STOCK]])
        stock_runs.compile_ahead(text, ENGINES.values())
        return pd.concat(list(_runs(text, choices, num_repeats, tried)), ignore_index=True)

    return results.load_or_run(EXPERIMENT, asked, run_all, inputs=inputs.reference_inputs(text.model_name)).frame


def _runs(text: Text, choices: Mapping[Cell, Choice], num_repeats: int, tried: Sequence[Attempt]) -> Iterator[pd.DataFrame]:
    for repeat in range(1, num_repeats + 1):
        for cell, choice in choices.items():
            yield _part(text, ENGINES[STOCK], cell, choice, repeat, Attempt(STOCK, FETCH_EVERY_MISS))
            for one in tried:
                engine = Engine(one.name, "ours", policy=one.policy.label)
                yield _part(text, engine, cell, Choice(one.threads), repeat, one)


def _part(text: Text, engine: Engine, cell: Cell, choice: Choice, repeat: int, one: Attempt) -> pd.DataFrame:
    """One run, from disk where it has ended before."""
    asked = {**text.asked(), **cell._asdict(), **choice._asdict(), "repeat": repeat, "attempt": one.name, "policy": one.policy}
    asked["own_process_mebibytes"] = one.process_mebibytes

    def run() -> pd.DataFrame:
        return pd.DataFrame([run_once(text, engine, cell, choice, repeat, one)])

    return results.load_or_run(PART, asked, run, inputs=inputs.reference_inputs(text.model_name), is_part=True).frame


def run_once(text: Text, engine: Engine, cell: Cell, choice: Choice, repeat: int, one: Attempt) -> dict[str, Any]:
    """One run of an attempt, or of llama.cpp: a row as of `measure`."""
    files = files_of(*text[:3], cell.bits, engine.module)
    spare = 0 if one.process_mebibytes is None else (text.process_mebibytes - one.process_mebibytes) * MEBIBYTE
    options = own_options(files, engine, cell, one.policy, spare)
    run, answer, _ = decode(text, files, engine, cell, choice, repeat, options)
    found = figures(run, answer)
    kept = ("tokens_per_second", "hit_rate", "read_mebibytes_per_token", "peak_mebibytes", "threads")
    stats = {} if answer is None else answer.stats
    slots = int(options[options.index("--slots") + 1]) if "--slots" in options else 0
    return {
        "attempt": one.name,
        "cell": cell.words,
        "repeat": repeat,
        "outcome": stock_runs.outcome_of(run, engine),
        "slots": slots,
        **{name: found[name] for name in kept},
        **{f"{use}_ms": 1000 * stats.get(f"seconds_{use}", float("nan")) / text.measured_tokens for use in USES},
    }
