"""Sensitivity: how much each choice that a rule leaves open moves its loss.

A miss rule is completed by choices that its description leaves open: who stands in and with which weight, what counts as a call, where the
cache starts. Each is switched here by itself, and every switch is compared with the run that differs in that choice only. A switch that
changed no decision in a whole run is *inert*, and said to be so: its zero is not a measurement of a small effect.

Most switches are compared with the default run of the rule (LRU, nothing admitted). What counts as a call for a decayed count is compared
with decayed counts, and the delay of an admission with an admission after one token.

Copies of every expert in few bits take their bytes from the slots: the cell is that of equal bytes, with the experts at 16 bits. Prefetch
brings experts into the same slots.

Rounding is another kind of switch: it changes the router itself. Its logits are rounded before the top-k is taken, so that the exact model
changes too; the exact losses stay those of the unrounded router.

All comparisons are exploratory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import torch

from moecache import hf_internals
from moecache.calibrate import most_called
from moecache.experiments.chosen_policies import BARE, HALF_LIFE, scaled
from moecache.experiments.memory_choices_cells import FULL_BITS, sizes_of
from moecache.experiments.paired_runs import END, Reading, carry_out, document_rows, quarter_slots, read_reference
from moecache.families import family_of, own_scores, sum_of_calls
from moecache.hf_internals import RouterOutput
from moecache.low_bit import low_bit_copies
from moecache.policy import Policy
from moecache.record import record
from moecache.run import Run

DEFAULT, DECAYED, ADMITTED = "default", "decayed count", "admitted at 0.5"
PROMPT_TOKENS = 64
SPANS = ((0, PROMPT_TOKENS), (PROMPT_TOKENS, END))
ORDER_SEED = 1
COPY_BITS, NUM_PREFETCHES, PREDICTION = 2, 4, "stale_gate"
Calls = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Switch:
    """One setting of one choice.

    Attributes
    ----------
    setting : what is chosen, in words.
    policy : Policy.
    against : the base that it differs from in this choice only: DEFAULT, DECAYED or ADMITTED.
    arguments : further arguments of `emulate`.
    reorder : whether the scored documents are read in another, seeded order.
    rounding : name of the torch type to which router logits are rounded, or "".
    copy_bits : bits of the copies of every expert for which slots are given up, or 0.
    """

    setting: str
    policy: Policy
    against: str = DEFAULT
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reorder: bool = False
    rounding: str = ""
    copy_bits: int = 0


def bases(rule: str, top_k: int) -> dict[str, Policy]:
    """The runs that switches are compared with."""
    default = scaled(BARE[rule], top_k)
    return {
        DEFAULT: default,
        DECAYED: default.replace(eviction="decayed_count", half_life=HALF_LIFE),
        ADMITTED: default.replace(admission="background", mass_threshold=0.5),
    }


def switches(rule: str, top_k: int, profile: Callable[[], np.ndarray] | None = None, do_copies_fit: bool = True) -> dict[str, list[Switch]]:
    """Every choice with its settings, for a rule and a router that calls `top_k` experts.

    Parameters
    ----------
    rule : "0.15 rule" or "first choice".
    top_k : K.
    profile : makes the cold start that holds the experts called most in other texts; without it that setting is left out.
    do_copies_fit : whether the copies of every expert leave slots for top-k; otherwise that setting is left out.

    Returns
    -------
    dict of list of Switch, by the choice in words.
    """
    base = bases(rule, top_k)
    default, decayed, admitted = base[DEFAULT], base[DECAYED], base[ADMITTED]
    prefetching = default.replace(max_prefetches=NUM_PREFETCHES)
    ahead = Switch(f"up to {NUM_PREFETCHES} prefetches a step", prefetching, arguments={"predict": PREDICTION})
    copied = Switch(f"{COPY_BITS}-bit copies of all, fewer slots", default.replace(fallback="low_precision"), copy_bits=COPY_BITS)
    return {
        "substituted expert": [Switch("admitted anyway", default.admitted_anyway()), Switch("admitted at 0.5", admitted)],
        "stand-in": [
            Switch("a random resident", default.replace(fallback="random_resident")),
            Switch("nobody, the rest keeps its weight", default.replace(fallback="drop", weight_rule="own_raw")),
            Switch("nobody, the rest is rescaled", default.replace(fallback="drop", weight_rule="rescale")),
        ],
        "weight of the stand-in": [
            Switch("its own, not normalised", default.replace(weight_rule="own_raw")),
            Switch("the missed expert's", default.replace(weight_rule="inherit")),
            Switch("its own, rescaled to the old sum", default.replace(weight_rule="rescale")),
        ],
        "threshold": [Switch("0.15 whatever K", BARE[rule])] if rule == "0.15 rule" else [],
        "eviction": [
            Switch("decayed count, half-life 64", default.replace(eviction="decayed_count", half_life=64)),
            Switch("decayed count, half-life 128", decayed),
            Switch("plain count", default.replace(eviction="plain_count")),
            Switch("plain count, forgotten at eviction", default.replace(eviction="plain_count_forget")),
        ],
        "what counts as a call": [
            Switch("standing in counts (LRU)", default.replace(stand_ins_count=True)),
            Switch("only served calls count (LRU)", default.replace(counted_calls="served")),
            Switch("standing in counts (decayed count)", decayed.replace(stand_ins_count=True), DECAYED),
            Switch("only served calls count (decayed count)", decayed.replace(counted_calls="served"), DECAYED),
        ],
        "delay of an admission": [
            Switch(f"{tokens} tokens, not 1", admitted.replace(admission_delay=tokens), ADMITTED) for tokens in (16, 64)
        ],
        "cold start": [
            Switch("random", default, arguments={"cold_start": "random", "seed": 0}),
            Switch("empty", default, arguments={"cold_start": "empty"}),
            *([Switch("called most in the warm-up", default, arguments={"cold_start": profile()})] if profile else []),
        ],
        "documents": [
            Switch("cold start at each", default, arguments={"documents": "reset"}),
            Switch("another order", default, reorder=True),
        ],
        "prompt": [
            Switch(f"{PROMPT_TOKENS} tokens waited for, later ones judged", default, arguments={"exact_prefix_tokens": PROMPT_TOKENS})
        ],
        "low-bit copies, prefetch": [ahead, *([copied] if do_copies_fit else [])],
        "router logits": [Switch(f"rounded to {name}", default, rounding=name) for name in ("float16", "bfloat16")],
    }


CHOICES = tuple(switches("0.15 rule", 10))


@contextmanager
def rounded_router(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Round every router's logits inside the block, and take the top-k and its weights from what is left.

    Of experts whose rounded logits are equal at the edge of the top-k, any may be called.
    """
    family = family_of(model)

    def listen(_: int, output: RouterOutput) -> RouterOutput:
        logits = output.logits.to(dtype).to(output.logits.dtype)
        weights, ids = own_scores(family, logits).topk(output.ids.shape[1], dim=1)
        if family.norm_topk_prob:
            weights = weights / sum_of_calls(weights)
        return RouterOutput(logits, weights.to(output.weights.dtype), ids)

    with hf_internals.watched(hf_internals.moe_layers(model), listen):
        yield


def measure(reading: Reading, rule: str, choice: str, num_slots: int) -> pd.DataFrame:
    """Emulate every setting of one choice, or with the name of a base the run that settings are compared with.

    Returns
    -------
    DataFrame : as `document_rows` (policies named "choice: setting", bases by their own names), with `rule`, `choice`, `setting`,
        `against` and `changed_fraction`, the share of a document's calls that were decided otherwise than in the run it is compared
        with.

    Raises
    ------
    ValueError : an unknown choice; those that exist are listed.
    """
    if choice in bases(rule, reading.shape.top_k):
        return _base_rows(reading, rule, choice, num_slots)
    do_copies_fit = slots_beside_copies(reading.model, num_slots, COPY_BITS) >= reading.shape.top_k
    known = switches(rule, reading.shape.top_k, lambda: most_called_in_warmup(reading), do_copies_fit)
    if choice not in known:
        raise ValueError(f"choice={choice!r} is unknown; choose one of {DEFAULT}, {', '.join(known)}")
    frames = []
    for switch in known[choice]:
        rows, calls = _switched_run(reading, rule, switch, num_slots)
        changed = _with_changes(rows, calls, _base_run(reading, rule, switch.against, num_slots)[1])
        names = {"rule": rule, "choice": choice, "setting": switch.setting, "against": switch.against}
        frames.append(changed.assign(policy=f"{choice}: {switch.setting}", **names))
    return pd.concat(frames, ignore_index=True)


def _switched_run(reading: Reading, rule: str, switch: Switch, num_slots: int) -> tuple[pd.DataFrame, Calls]:
    """Rows and decisions of one setting; where it is a base itself, that run serves."""
    if not (switch.arguments or switch.reorder or switch.rounding or switch.copy_bits):
        for name, policy in bases(rule, reading.shape.top_k).items():
            if policy == switch.policy:
                return _base_run(reading, rule, name, num_slots)
    order = _other_order(reading) if switch.reorder else reading
    rounding = rounded_router(reading.model, getattr(torch, switch.rounding)) if switch.rounding else nullcontext()
    copies = {"low_bits": low_bit_copies(reading.model, switch.copy_bits)} if switch.copy_bits else {}
    slots = slots_beside_copies(reading.model, num_slots, switch.copy_bits) if switch.copy_bits else num_slots
    with rounding:
        run = carry_out(order, switch.policy, slots, **switch.arguments, **copies)
    return document_rows(run, order, SPANS), _calls(run, order)


def slots_beside_copies(model: Any, num_slots: int, bits: int) -> int:
    """Slots a layer that remain, of the same bytes, beside a copy of every expert; may be below 0."""
    sizes = sizes_of(model)
    return num_slots - math.ceil(sizes.num_experts * sizes.expert_bytes[bits] / sizes.expert_bytes[FULL_BITS])


def most_called_in_warmup(reading: Reading) -> np.ndarray:
    """Experts of each layer by how often the warm-up documents call them [L, E]; those documents are not scored."""
    texts = [np.asarray(document.tokens) for document in reading.documents[: reading.num_warmup_documents]]
    return most_called(record(reading.model, texts))


def _base_rows(reading: Reading, rule: str, name: str, num_slots: int) -> pd.DataFrame:
    rows = _base_run(reading, rule, name, num_slots)[0]
    return rows.assign(policy=name, rule=rule, choice=DEFAULT, setting=name, against=name, changed_fraction=0.0)


@lru_cache(maxsize=3)
def _base_run(reading: Reading, rule: str, name: str, num_slots: int) -> tuple[pd.DataFrame, Calls]:
    """Rows and decisions of one base; kept, because the settings of several choices are compared with it."""
    run = carry_out(reading, bases(rule, reading.shape.top_k)[name], num_slots)
    return document_rows(run, reading, SPANS), _calls(run, reading)


def _calls(run: Run, reading: Reading) -> Calls:
    """Outcome and computing expert of every call [n, L, K], by document."""
    assert run.decisions is not None
    ends = np.flatnonzero(run.document_start)[1:]
    split = zip(np.split(run.decisions.outcome, ends), np.split(run.decisions.computed_ids, ends), strict=True)
    return {f"{document.domain}: {document.name}": calls for document, calls in zip(reading.documents, split, strict=True)}


def _with_changes(rows: pd.DataFrame, calls: Calls, compared: Calls) -> pd.DataFrame:
    changed = [float(np.mean((calls[name][0] != compared[name][0]) | (calls[name][1] != compared[name][1]))) for name in rows["document"]]
    return rows.assign(changed_fraction=changed)


def _other_order(reading: Reading) -> Reading:
    fixed, number = reading.num_warmup_documents, len(reading.documents)
    order = fixed + np.random.default_rng(ORDER_SEED).permutation(number - fixed)
    return reading.reordered([*range(fixed), *order.tolist()])


def measure_reference(
    model: str, rule: str, choice: str, num_documents: int, num_tokens: int, num_warmup_documents: int, resident_fraction: float
) -> pd.DataFrame:
    """`measure` on a reference model's held-out documents at a share of resident experts."""
    reading = read_reference(model, num_documents, num_tokens, num_warmup_documents)
    return measure(reading, rule, choice, quarter_slots(reading.shape, resident_fraction)).assign(model=model)


def asked(rule: str, choices: Sequence[str]) -> list[str]:
    """The parts to measure for a rule: the bases that are needed, then each of the choices (all, if none is named) that has a setting
    for it.

    Raises
    ------
    ValueError : an unknown choice; the known ones are listed.
    """
    known = switches(rule, 10)
    if unknown := sorted(set(choices) - set(known)):
        raise ValueError(f"choices {', '.join(unknown)} are unknown; choose among {', '.join(known)}")
    wanted = [choice for choice in (choices or known) if known[choice]]
    needed = {DEFAULT} | {switch.against for choice in wanted for switch in known[choice]}
    return [*(name for name in bases(rule, 10) if name in needed), *wanted]
