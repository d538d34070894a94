"""What else the memory could buy, measured: substitution, low-bit copies, prefetch and plain rounding in the same number of bytes.

Which contenders a cell has, and with how many slots, is decided in `memory_choices_cells`; here they run. Copies are rounded from the
weights of the base precision, and every loss is measured against the exact model of the base precision.

"Copies of some" is expressed by wait values: an expert without a copy is worth waiting for whatever its gate weight. What fetches every
miss changes no logit, so its fetches are replayed from the exact model's trace and its losses are the exact ones.

Planned comparisons read all documents, everything else the first of them (the map's). A cell is planned only if copies of all experts
fit into it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache.calibrate import most_called
from moecache.emulate import emulate_policies
from moecache.experiments.chosen_policies import scaled
from moecache.experiments.memory_choices_cells import (
    COPIES,
    FULL_BITS,
    PREFETCH,
    SOME_COPIES,
    SUBSTITUTION,
    WAITING,
    Contender,
    Sizes,
    Sweep,
    contenders,
    sizes_of,
)
from moecache.experiments.paired_runs import Reading, document_rows, read
from moecache.families import Routing
from moecache.low_bit import LowBitCopies, low_bit_copies, quantised_model
from moecache.policy import FETCH_EVERY_MISS, GATE_015, SUBSTITUTE_EVERY_MISS, Policy, threshold
from moecache.record import record
from moecache.reference import held_out_documents, load_model
from moecache.run import Run
from moecache.score import score
from moecache.simulate import simulate
from moecache.trace import RouterTrace

PLANNED = ((16, 0.25), (16, 0.5), (8, 0.5), (4, 0.75))
PLANNED_COPY_BITS = 2
PREDICTION = "stale_gate"
RULE, NO_WAIT = GATE_015.label, "nothing waits, admitted anyway"


@dataclass(frozen=True, eq=False)
class Base:
    """A model at its base precision, with documents and exact losses; keeps what several cells need.

    Attributes
    ----------
    bits : the base precision.
    sizes : Sizes
    reading : Reading
        All documents, for planned comparisons.
    num_map_documents : how many of them are read for everything else.
    """

    bits: int
    sizes: Sizes
    reading: Reading
    num_map_documents: int
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def map_reading(self) -> Reading:
        """The first documents only."""
        number = self.num_map_documents
        return replace(self.reading, documents=self.reading.documents[:number], exact_losses=self.reading.exact_losses[:number])

    def copies(self, bits: int) -> LowBitCopies:
        """Copies of all experts, rounded from the weights of the base precision."""
        if ("copies", bits) not in self.kept:
            self.kept["copies", bits] = low_bit_copies(self.reading.model, bits)
        return self.kept["copies", bits]

    def trace(self) -> RouterTrace:
        """What the exact model's routers say of the map's documents, and what a layer earlier foretold."""
        if "trace" not in self.kept:
            self.kept["trace"] = record(self.reading.model, _texts(self.map_reading), predict=PREDICTION)
        return self.kept["trace"]

    def losses_at(self, bits: int) -> np.ndarray:
        """Token losses of the map's documents when all experts are rounded once more."""
        if ("losses", bits) not in self.kept:
            with quantised_model(self.reading.model, bits, is_dense_rounded=False) as rounded:
                self.kept["losses", bits] = score(rounded, _texts(self.map_reading))
        return self.kept["losses", bits]


def based(model: Any, base_bits: int, documents: Sequence[Any], num_warmup_documents: int, num_map_documents: int) -> Base:
    """A model at a base precision (experts, and below 16 bits every other large matrix too), and its exact losses.

    Raises
    ------
    ValueError : the map has no document to score.
    """
    if not num_warmup_documents < num_map_documents <= len(documents):
        raise ValueError(
            f"num_map_documents={num_map_documents} must be more than the {num_warmup_documents} warm-up documents "
            f"and at most the {len(documents)} that are read"
        )
    sizes = sizes_of(model)
    if base_bits != FULL_BITS:
        with quantised_model(model, base_bits) as rounded:
            model = copy.deepcopy(rounded)
    return Base(base_bits, sizes, read(model, documents, num_warmup_documents), num_map_documents)


@lru_cache(maxsize=1)
def based_reference(
    model: str, base_bits: int, num_documents: int, num_tokens: int, num_warmup_documents: int, num_map_documents: int
) -> Base:
    """`based` on a reference model's held-out documents; the last one is kept, since cells share it."""
    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, name=model)
    return based(load_model(model), base_bits, documents, num_warmup_documents, num_map_documents)


def measure_reference(
    model: str,
    base_bits: int,
    budget: float,
    sweep: dict[str, Any],
    num_documents: int,
    num_tokens: int,
    num_warmup_documents: int,
    num_map_documents: int,
) -> pd.DataFrame:
    """`measure` on a reference model, with its name."""
    base = based_reference(model, base_bits, num_documents, num_tokens, num_warmup_documents, num_map_documents)
    return measure(base, budget, Sweep(**sweep)).assign(model=model)


def measure(base: Base, budget: float, sweep: Sweep) -> pd.DataFrame:
    """Run every contender of a cell.

    Returns
    -------
    DataFrame : as `document_rows`, with `slots` for `num_slots`, and base_bits, budget, family, contender, rule, copy_bits, num_layers,
        expert_bytes, `in_map` (whether the document belongs to the map). `policy` is "contender: rule". In a planned cell the
        policies of the planned comparison have rows for all documents.
    """
    found = contenders(base.sizes, base.bits, budget, sweep)
    is_planned = (base.bits, budget) in PLANNED and any(_is_planned(who) for who in found)
    frames = [_rows(base, who, sweep, is_planned).assign(family=who.family, contender=who.name, copy_bits=who.copy_bits) for who in found]
    rows = pd.concat(frames, ignore_index=True)
    in_map = {f"{document.domain}: {document.name}" for document in base.map_reading.documents}
    rows = rows.rename(columns={"policy": "rule", "num_slots": "slots"})
    return rows.assign(
        policy=rows["contender"] + ": " + rows["rule"],
        base_bits=base.bits,
        budget=budget,
        num_layers=base.sizes.num_layers,
        expert_bytes=base.sizes.expert_bytes[base.bits],
        in_map=rows["document"].isin(in_map),
    )


def _is_planned(who: Contender) -> bool:
    return who.family == COPIES and who.copy_bits == PLANNED_COPY_BITS


def _rows(base: Base, who: Contender, sweep: Sweep, is_planned: bool) -> pd.DataFrame:
    """Rows of one contender."""
    small, top_k = base.map_reading, base.sizes.top_k
    rule, no_wait = scaled(GATE_015, top_k), SUBSTITUTE_EVERY_MISS.admitted_anyway().replace(label=NO_WAIT)
    curve, few = gates(sweep.gate_thresholds, top_k), gates(sweep.copy_gate_thresholds, top_k)
    large = base.reading if is_planned else small
    if who.family == WAITING:
        return _replayed(base, FETCH_EVERY_MISS, who.num_slots)
    if who.family == SUBSTITUTION:
        return pd.concat([_emulated(small, [no_wait, rule], who.num_slots), _emulated(large, curve, who.num_slots)])
    if who.family == COPIES:
        copies = base.copies(who.copy_bits)
        first = large if _is_planned(who) else small
        return pd.concat([
            _emulated(first, _by_copies([rule]), who.num_slots, low_bits=copies),
            _emulated(small, _by_copies([no_wait, *few]), who.num_slots, low_bits=copies),
        ])  # fmt: skip
    if who.family == SOME_COPIES:
        some = {"low_bits": base.copies(who.copy_bits), "wait_values": WaitWithoutCopy(base.trace(), small, who.num_copies)}
        return _emulated(small, _by_copies([rule, *few]), who.num_slots, **some)
    if who.family == PREFETCH:
        ahead = [policy.replace(max_prefetches=sweep.num_prefetches, label=policy.label) for policy in (FETCH_EVERY_MISS, rule, *few)]
        waiting = _replayed(base, ahead[0], who.num_slots)
        return pd.concat([waiting, _emulated(small, ahead[1:], who.num_slots, predict=PREDICTION)])
    return _rounded(base, who)


def gates(weights: Sequence[float], top_k: int) -> list[Policy]:
    """Plain gate-weight rules, named by their weight at ten calls a token."""
    return [threshold(weight * 10 / top_k, label=f"gate weight {weight:g}") for weight in weights]


def _by_copies(policies: Sequence[Policy]) -> list[Policy]:
    return [policy.replace(fallback="low_precision", label=policy.label) for policy in policies]


class WaitWithoutCopy:
    """Wait values [n, K] of a layer's calls: the gate weight of an expert that has a copy, infinity for one that has none.

    Copies have the experts that are called most in the reading's warm-up documents.
    """

    def __init__(self, trace: RouterTrace, reading: Reading, num_copies: int) -> None:
        order = most_called(trace.tokens(0, reading.warmup_tokens))
        self.has_copy = np.zeros(order.shape, bool)
        np.put_along_axis(self.has_copy, order[:, :num_copies], True, axis=1)

    def __call__(self, layer: int, routing: Routing, first_token: int) -> np.ndarray:
        """See `moecache.emulate`."""
        return np.where(self.has_copy[layer][routing.topk_ids], routing.gate_weights, np.float32(np.inf))


def _texts(reading: Reading) -> list[np.ndarray]:
    return [np.asarray(document.tokens) for document in reading.documents]


def _emulated(reading: Reading, policies: Sequence[Policy], num_slots: int, **arguments: Any) -> pd.DataFrame:
    if not policies:
        return pd.DataFrame()
    runs = emulate_policies(reading.model, _texts(reading), policies, num_slots, **arguments)
    return pd.concat([document_rows(run, reading) for run in runs], ignore_index=True)


def _replayed(base: Base, policy: Policy, num_slots: int) -> pd.DataFrame:
    """Rows of a policy that fetches every miss: its losses are the exact ones, its fetches those of a replay."""
    return document_rows(_replay(base, policy, num_slots), base.map_reading)


def _replay(base: Base, policy: Policy, num_slots: int) -> Run:
    return replace(simulate(base.trace(), policy, num_slots), loss_nats=np.concatenate(base.map_reading.exact_losses))


def _rounded(base: Base, who: Contender) -> pd.DataFrame:
    """Rows of a model that has all experts in memory: every call is a hit."""
    run = _replay(base, FETCH_EVERY_MISS, base.sizes.top_k)
    rows = document_rows(replace(run, loss_nats=base.losses_at(who.copy_bits)), base.map_reading)
    nothing = dict.fromkeys(("fetched", "forced", "substituted", "dropped", "copies", "first_choices_substituted", "num_slots"), 0)
    return rows.assign(policy="every call", **nothing, hits=rows["calls"])
