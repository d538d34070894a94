"""Do the instruments agree? The agreements of the design, measured by running them.

| comparison | what runs | what has to be equal |
|---|---|---|
| 1. all experts resident, emulator | the emulator in one pass, and the model as transformers runs it | logits, bit for bit |
| 1. all experts resident, runtime | the runtime, and that model token by token | logits, bit for bit |
| 1. every miss fetched, emulator | as above, with few slots | logits, bit for bit |
| 1. every miss fetched, runtime | as above, with few slots | logits, bit for bit |
| 2. replay of the emulator | the emulator, and the simulator in a new process with the trace from a file | decisions |
| 3. runtime and emulator | both token by token | decisions, and logits bit for bit |
| 3. replay of the runtime | the runtime, and the simulator with the trace that the runtime recorded | decisions |
| 4. one pass and token by token | the emulator in both ways | decisions but for near ties, logits within 1e-3 |

A decision log is compared whole: what became of each call, who computed it, who was evicted, every arrival of a background copy, and the
substituted gate mass, to the last bit. Four different things are allowed, and stated as a bound on logits (`LOGIT_BOUNDS`) or on decisions:
gpt_oss multiplies by transposed matrices, which the plain model's grouped product rounds otherwise; and a model that reads a text in one
pass rounds otherwise than token by token, so steps whose choice hangs on less than that rounding (near ties) may be decided otherwise.

The fifth agreement, between the kernel and its plain twin, and a second computation of the experts that shares no code with the package are
parts of the tests, where the twins live. Models, policies and texts are the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moecache import hf_internals
from moecache.emulate import emulate
from moecache.experiments.agreements_replay import replay_in_new_process
from moecache.experiments.paired_runs import quarter_slots
from moecache.experiments.tiny_families import FAMILIES, VOCABULARY, tiny_model
from moecache.expert_sum import IMPLEMENTATION
from moecache.families import model_shape
from moecache.kernel import Outcome
from moecache.policy import FETCH_EVERY_MISS, PRESETS, Policy
from moecache.record import recording
from moecache.reference import held_out_documents, load_model
from moecache.run import Run
from moecache.runtime.offload import offload
from moecache.score import document_losses
from moecache.simulate import simulate
from moecache.trace import DecisionLog

RESIDENT_EMULATOR = "1. all experts resident, emulator"
RESIDENT_RUNTIME = "1. all experts resident, runtime"
FETCHED_EMULATOR = "1. every miss fetched, emulator"
FETCHED_RUNTIME = "1. every miss fetched, runtime"
REPLAY = "2. replay of the emulator"
STEP_BY_STEP = "3. runtime and emulator"
RUNTIME_REPLAY = "3. replay of the runtime"
ORDER = "4. one pass and token by token"
COMPARISONS = (RESIDENT_EMULATOR, RESIDENT_RUNTIME, FETCHED_EMULATOR, FETCHED_RUNTIME, REPLAY, STEP_BY_STEP, RUNTIME_REPLAY, ORDER)
LOGIT_BOUNDS = {ORDER: 1e-3}
TRANSPOSED_BOUNDS = {RESIDENT_RUNTIME: 1e-5, FETCHED_RUNTIME: 1e-5}  # gpt_oss against the grouped product
Texts = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Case:
    """One model with the texts that it reads, under `num_slots` slots a layer."""

    name: str
    model: Any
    texts: Texts
    num_slots: int


def case_of(name: str, num_tokens: int, resident_fraction: float) -> Case:
    """A family's random model with random texts, or a reference model with held-out ones: two documents of together `num_tokens`.

    Raises
    ------
    ValueError : fewer than 4 tokens.
    """
    if num_tokens < 4:
        raise ValueError(f"num_tokens={num_tokens} must be at least 4, for two documents")
    lengths = (num_tokens - num_tokens // 3, num_tokens // 3)
    if name in FAMILIES:
        random = np.random.default_rng(FAMILIES.index(name))
        model, texts = tiny_model(name), [random.integers(0, VOCABULARY, length) for length in lengths]
    else:
        found = held_out_documents(len(lengths), max(lengths), name=name)
        model, texts = load_model(name), [document.tokens[:length] for document, length in zip(found, lengths, strict=True)]
    return Case(name, model, [np.asarray(text, np.int64) for text in texts], quarter_slots(model_shape(model), resident_fraction))


def measure(model: str, policies: Sequence[str], num_tokens: int, resident_fraction: float) -> pd.DataFrame:
    """Run every comparison on one model.

    Parameters
    ----------
    model : a family of `tiny_families`, or a reference model.
    policies : labels of presets.
    num_tokens : of the texts.
    resident_fraction : slots a layer, as a share of its experts; at least top-k.

    Returns
    -------
    DataFrame : a row for each comparison and policy, see `row`.

    Raises
    ------
    ValueError : an unknown preset.
    """
    known = {policy.label: policy for policy in PRESETS}
    if unknown := [label for label in policies if label not in known]:
        raise ValueError(f"policies {unknown} are no presets; choose among {', '.join(known)}")
    return compare(case_of(model, num_tokens, resident_fraction), [known[label] for label in policies])


def compare(case: Case, policies: Sequence[Policy]) -> pd.DataFrame:
    """Run every comparison of one case; see `measure`."""
    rows = [*_plain_rows(case, policies), *_replay_rows(case, policies)]
    for policy in policies:
        rows += _stepped_rows(case, policy)
    return pd.DataFrame(rows)


def row(case: Case, comparison: str, policy: Policy, run: Run, **found: float) -> dict[str, Any]:
    """One comparison of one policy.

    `num_calls` and `num_misses` (calls whose expert was not resident) say how much there was to disagree about. `differing` counts
    decisions that differ (calls, arrivals, steps with another substituted mass), `allowed` how many may, and `largest_difference` is
    that of logits, NaN where none are compared; `bound` is what it may be.
    """
    log = _log(run)
    is_transposed = hf_internals.is_transposed(hf_internals.moe_layers(case.model)[0].experts)
    bounds = {**LOGIT_BOUNDS, **(TRANSPOSED_BOUNDS if is_transposed else {})}
    return {
        "comparison": comparison,
        "model": case.name,
        "policy": policy.label,
        "num_slots": int(run.num_slots[0]),
        "num_layers": run.shape.num_layers,
        "num_tokens": len(run.document_start),
        "num_calls": log.outcome.size,
        "num_misses": log.outcome.size - log.count(Outcome.HIT),
        "differing": 0,
        "allowed": 0,
        "largest_difference": np.nan,
        "bound": bounds.get(comparison, 0.0),
        **found,
    }


def _log(run: Run) -> DecisionLog:
    assert run.decisions is not None
    return run.decisions


def num_differing(one: DecisionLog, other: DecisionLog) -> int:
    """Calls, arrivals and substituted masses that are not the same in two logs of the same steps."""
    names = ("outcome", "computed_ids", "evicted_ids")
    calls = np.any([getattr(one, name) != getattr(other, name) for name in names], axis=0).sum()
    arrivals = len({tuple(row) for row in one.arrivals.tolist()} ^ {tuple(row) for row in other.arrivals.tolist()})
    return int(calls) + arrivals + int((one.substituted_mass != other.substituted_mass).sum())


def _plain_rows(case: Case, policies: Sequence[Policy]) -> list[dict[str, Any]]:
    """Agreement 1: nothing that is resident or fetched changes a logit."""
    plain = {is_stepped: _plain_logits(case, is_stepped) for is_stepped in (False, True)}
    every = model_shape(case.model).num_experts
    asked = [(RESIDENT_EMULATOR, RESIDENT_RUNTIME, policy, every) for policy in policies]
    asked.append((FETCHED_EMULATOR, FETCHED_RUNTIME, FETCH_EVERY_MISS, case.num_slots))
    rows = []
    for by_emulator, by_runtime, policy, num_slots in asked:
        for comparison, run, is_stepped in (
            (by_emulator, emulate(case.model, case.texts, policy, num_slots, keep_logits=True), False),
            (by_runtime, _runtime_run(case, policy, num_slots)[0], True),
        ):
            rows.append(row(case, comparison, policy, run, largest_difference=_largest(run.extra["logits"], plain[is_stepped])))
    return rows


def _replay_rows(case: Case, policies: Sequence[Policy]) -> list[dict[str, Any]]:
    """Agreement 2: the simulator, handed what the emulated routers said, decides the same."""
    runs, traces = [], []
    for policy in policies:
        with recording(case.model) as recorder:
            runs.append(emulate(case.model, case.texts, policy, case.num_slots))
        traces.append(recorder.trace(case.texts))
    with tempfile.TemporaryDirectory() as folder:
        logs = replay_in_new_process(traces, policies, case.num_slots, Path(folder))
    return [
        row(case, REPLAY, policy, run, differing=num_differing(_log(run), log))
        for policy, run, log in zip(policies, runs, logs, strict=True)
    ]


def _stepped_rows(case: Case, policy: Policy) -> list[dict[str, Any]]:
    """Agreements 3 and 4: runtime, emulator token by token and emulator in one pass."""
    given = (case.model, case.texts, policy, case.num_slots)
    stepped = emulate(*given, stepped=True, keep_logits=True, experts=IMPLEMENTATION)
    one_pass = emulate(*given, keep_logits=True)
    ran, replayed = _runtime_run(case, policy, case.num_slots)
    logits = stepped.extra["logits"]
    return [
        row(
            case,
            STEP_BY_STEP,
            policy,
            ran,
            differing=num_differing(_log(ran), _log(stepped)),
            largest_difference=_largest(ran.extra["logits"], logits),
        ),
        row(case, RUNTIME_REPLAY, policy, ran, differing=num_differing(_log(ran), replayed)),
        row(
            case,
            ORDER,
            policy,
            one_pass,
            differing=_steps_differing(_log(one_pass), _log(stepped)),
            allowed=one_pass.near_ties or 0,
            largest_difference=_largest(one_pass.extra["logits"], logits),
        ),
    ]


def _steps_differing(one: DecisionLog, other: DecisionLog) -> int:
    """Steps (a token at a layer) in which some call was decided otherwise."""
    names = ("outcome", "computed_ids", "evicted_ids")
    return int(np.any([(getattr(one, name) != getattr(other, name)).any(axis=2) for name in names], axis=0).sum())


def _runtime_run(case: Case, policy: Policy, num_slots: int) -> tuple[Run, DecisionLog]:
    """What the runtime did, and what the simulator makes of the trace that it recorded."""
    model = offload(case.model, policy, num_slots)
    with closing(model.moecache) as engine, engine.record_trace() as recorded:
        run = engine.read(case.texts, keep_logits=True)
    replayed = simulate(recorded.trace(), policy, num_slots).decisions
    assert replayed is not None
    return run, replayed


def _plain_logits(case: Case, is_stepped: bool) -> NDArray[np.float32]:
    """Logits [T, V] of the model as transformers runs it."""
    with hf_internals.experts_implementation(case.model):
        found = [document_losses(case.model, text.astype(np.int32), keep_logits=True, stepped=is_stepped)[1] for text in case.texts]
    return np.concatenate([logits for logits in found if logits is not None])


def _largest(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(one - other).max())
