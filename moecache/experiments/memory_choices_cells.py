"""Who fits into a number of bytes: the contenders of a cell and their slots.

A *cell* is a base precision (the bits in which experts are served exactly) and a *budget* (a share of what all experts take at that
precision). In a cell several contenders may spend the budget:

| contender | what lies in memory | a miss that is not waited for |
|---|---|---|
| waiting | slots | (every miss is waited for) |
| substitution | slots | gets a stand-in |
| b-bit copies | a copy of *every* expert in b bits; slots for what is left | is computed from its copy |
| b-bit copies of some | half the budget in slots, half in copies of some experts | is computed from its copy, or waited for |
| prefetch | slots, less the experts in flight | gets a stand-in, or is waited for |
| everything at b bits | all experts in the most bits that fit, no slots | (there is none) |

A contender that computes a miss from its copy where it has one and substitutes it elsewhere cannot be expressed: a policy has one
fallback. Where copies of all experts fit no stand-in is ever needed, so there that contender is the copies themselves; elsewhere it is
left out.

All bytes count: scales and zeros of few bits, and blocks in flight. Where the bytes lie does not matter here, only how many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moecache.families import model_shape
from moecache.low_bit import low_bit_expert_bytes
from moecache.reference import load_model

FULL_BITS, FEW_BITS = 16, (8, 4, 3, 2)
WAITING, SUBSTITUTION, COPIES, SOME_COPIES, PREFETCH, ALL_FEW = FAMILIES = (
    "waiting",
    "substitution",
    "low-bit copies",
    "copies of some",
    "prefetch",
    "everything in few bits",
)


@dataclass(frozen=True)
class Sizes:
    """A model in numbers: L, E, K, and the bytes of one expert by bits a weight."""

    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: dict[int, int]


@dataclass(frozen=True)
class Contender:
    """One way to spend a layer's budget; `copy_bits` is 0 without copies, `num_copies` are a layer's."""

    family: str
    name: str
    num_slots: int
    copy_bits: int = 0
    num_copies: int = 0


@dataclass(frozen=True)
class Sweep:
    """What is varied within a contender.

    Attributes
    ----------
    gate_thresholds : the substitution curve, gate weights at ten calls a token; scaled for another top-k.
    copy_gate_thresholds : further points of the other contenders.
    copy_bits : bits of copies that are tried.
    num_prefetches : experts brought ahead for a step at most.
    """

    gate_thresholds: Sequence[float]
    copy_gate_thresholds: Sequence[float]
    copy_bits: Sequence[int]
    num_prefetches: int


def sizes_of(model: Any) -> Sizes:
    """The model's numbers; at 16 bits an expert has two bytes a parameter."""
    shape = model_shape(model)
    assert shape.expert_bytes is not None
    full = shape.expert_bytes * 2 // next(model.parameters()).element_size()
    few = {bits: low_bit_expert_bytes(model, bits) for bits in FEW_BITS}
    return Sizes(shape.num_layers, shape.num_experts, shape.top_k, {FULL_BITS: full} | few)


def contenders(sizes: Sizes, base_bits: int, budget: float, sweep: Sweep) -> list[Contender]:
    """Who fits into the budget, and with how many slots a layer; nobody runs with fewer slots than the router's top-k.

    Parameters
    ----------
    sizes : Sizes
    base_bits : 16, 8 or 4.
    budget : share of the bytes of all experts at the base precision, in (0, 1).
    sweep : Sweep

    Raises
    ------
    ValueError : a base precision without stated bytes, or a budget outside (0, 1).
    """
    if base_bits not in sizes.expert_bytes:
        raise ValueError(f"base_bits={base_bits!r} is unknown; choose one of {', '.join(map(str, sizes.expert_bytes))}")
    if not 0 < budget < 1:
        raise ValueError(f"budget={budget!r} must lie between 0 and 1, a share of all experts' bytes")
    one, total = sizes.expert_bytes[base_bits], budget * sizes.num_experts * sizes.expert_bytes[base_bits]
    slots = _whole(total / one)
    found = [Contender(WAITING, WAITING, slots), Contender(SUBSTITUTION, SUBSTITUTION, slots)]
    for bits in (bits for bits in sweep.copy_bits if bits < base_bits):
        left = _whole((total - sizes.num_experts * sizes.expert_bytes[bits]) / one)
        found.append(Contender(COPIES, f"{bits}-bit copies", left, bits, sizes.num_experts))
    fitting = [contender for contender in found if contender.num_slots >= sizes.top_k]
    if all(contender.family != COPIES for contender in fitting):
        fitting += _copies_of_some(sizes, total, one, min(sweep.copy_bits, default=base_bits), base_bits)
    ahead = Contender(PREFETCH, PREFETCH, slots - math.ceil(sweep.num_prefetches / sizes.num_layers))
    fitting += [ahead] if sweep.num_prefetches and ahead.num_slots >= sizes.top_k else []
    for bits in FEW_BITS:
        if bits < base_bits and _whole(total / sizes.expert_bytes[bits]) >= sizes.num_experts:
            return [*fitting, Contender(ALL_FEW, f"everything at {bits} bits", 0, bits, sizes.num_experts)]
    return fitting


def _whole(number: float) -> int:
    """The whole number below, where a rounding error does not cost one."""
    return math.floor(number + 1e-9)


def _copies_of_some(sizes: Sizes, total: float, one: int, bits: int, base_bits: int) -> list[Contender]:
    slots = max(sizes.top_k, _whole(total / one) // 2)
    copies = _whole((total - slots * one) / sizes.expert_bytes[bits]) if bits < base_bits else 0
    return [Contender(SOME_COPIES, f"{bits}-bit copies of some", slots, bits, copies)] if 0 < copies < sizes.num_experts else []


def size_rows(model: str, base_bits: Sequence[int], budgets: Sequence[float], sweep: dict[str, Any]) -> pd.DataFrame:
    """What fits where, for a reference model.

    Returns
    -------
    DataFrame : one row per (base_bits, budget, contender): family, copy_bits, num_slots, num_copies, copy_fraction (a copy's bytes over
        an expert's), num_experts, top_k, num_layers, expert_bytes. A cell into which nobody fits has no row.
    """
    sizes, asked = sizes_of(load_model(model)), Sweep(**sweep)
    rows = []
    for base in base_bits:
        one = sizes.expert_bytes[base]
        facts = {"num_experts": sizes.num_experts, "top_k": sizes.top_k, "num_layers": sizes.num_layers, "expert_bytes": one}
        for budget in budgets:
            for who in contenders(sizes, base, budget, asked):
                share = sizes.expert_bytes.get(who.copy_bits, 0) / one
                made_of = {"family": who.family, "contender": who.name, "copy_bits": who.copy_bits, "copy_fraction": share}
                counts = {"num_slots": who.num_slots, "num_copies": who.num_copies}
                rows.append({"base_bits": base, "budget": budget, **made_of, **counts, **facts})
    return pd.DataFrame(rows)
