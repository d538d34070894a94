"""Compiled steps of one token: what a router said is sorted, and the kernel decides, in calls that take addresses.

What a router said is given by the addresses of its tensors, and all else by that of `parts`, so a step is a few calls with a few
plain numbers.

What is computed here is what `families.routing_of` and `experts.final_weights` compute, bit for bit: only sums in the order of the calls,
products, quotients and the rounding to float16 are made, which are the same everywhere. Softmax and sigmoid are not, so their values are
given.

Whoever passes an address keeps its array alive, contiguous and of the type named here. Models, policies and devices are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from moecache.kernel import Admission, Outcome, replay
from moecache.kernel.jit import source_digest
from moecache.kernel.state import MOST_TOKENS
from moecache.one_token.parts import (
    HEARD_AT,
    LOG_AT,
    RULES_AT,
    STEPS_AT,
    bits,
    floats,
    integers,
    read_heard,
    read_log,
    read_rules,
    read_state,
    read_steps,
)

IS_COMPILED = hasattr(replay, "stats")  # addresses are for compiled code; with NUMBA_DISABLE_JIT=1 the general path does the same
LARGEST_FLOAT16 = 65504.0
BACKGROUND = int(Admission.BACKGROUND)
HIT, FORCED, SUBSTITUTED, DROPPED = int(Outcome.HIT), int(Outcome.FORCED), int(Outcome.SUBSTITUTED), int(Outcome.DROPPED)
OWN, OWN_RAW, INHERIT, RESCALE = 0, 1, 2, 3  # the weight rules
# Of all sources, other than this file, that the compiled code is made from.
_DIGEST = sha256((source_digest() + Path(__file__).with_name("parts.py").read_text()).encode()).hexdigest()[:16]


def _entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code that Python calls, kept on disk under a digest: it holds a copy of the kernel, which must not outlive an edit of it.

    The GIL is kept: giving it away and taking it back would take longer than the call.
    """
    function.__qualname__ += f"_{_DIGEST}"
    return njit(cache=True, _nrt=False)(function)  # pyright: ignore[reportCallIssue]


_inside = njit(_nrt=False)  # pyright: ignore[reportCallIssue]
# What compiled code does; `words` is the address of the words of `Parts`


@_entry
def hear(words, logits, weights, ids, scores):
    """Sort what a router said; false, and nothing is said about the step, where the general path must look at it.

    Parameters
    ----------
    words : address of the words of `Parts`.
    logits : address of [E] float32.
    weights : address of [K] float32, in the router's own order, as `ids`.
    ids : address of [K] int64.
    scores : address of [E] float32, selection scores; read only where the policy needs them.
    """
    heard = read_heard(words + HEARD_AT)
    num_experts, top_k = heard.is_called.size, heard.ids.size
    if not _are_finite(floats(logits, num_experts)):
        return False
    called = integers(ids, top_k)
    if not _sort(heard, floats(weights, top_k), called) or not _are_distinct(heard, called):
        return False
    if heard.score_bits.size > 0:
        _round(floats(scores, num_experts), bits(scores, num_experts), heard.score_bits)
    return True


@_entry
def advance(words, layer, is_exact):
    """Decide the step that was heard; see `step`."""
    return step(
        read_state(words),
        read_rules(words + RULES_AT),
        read_steps(words + STEPS_AT),
        read_log(words + LOG_AT),
        read_heard(words + HEARD_AT),
        layer,
        is_exact,
    )


@_entry
def reweigh(words, rule, is_normalised, scaling, weights, ids, scores, new_weights, new_ids):
    """The router's output after the decision, in its own order.

    Parameters
    ----------
    words : address of the words of `Parts`.
    rule : the weight rule.
    is_normalised, scaling : of the family.
    weights, ids : addresses of what the router said, [K] float32 and int64.
    scores : address of [E] float32, each expert's own score; not read by the rule "inherit".
    new_weights, new_ids : addresses of [K] float32 and int64, filled in.
    """
    heard = read_heard(words + HEARD_AT)
    num_experts, top_k = heard.is_called.size, heard.ids.size
    original, own = floats(weights, top_k), floats(new_weights, top_k)
    called, final = integers(ids, top_k), integers(new_ids, top_k)
    for row in range(1, 1 + top_k):
        final[heard.calls[row, 0]] = heard.calls[row, 1]  # nobody is -1 until the end
    if rule == INHERIT:
        for place in range(top_k):
            own[place] = original[place] if final[place] >= 0 else np.float32(0)
    else:
        _weigh(rule, is_normalised, np.float32(scaling), original, called, final, floats(scores, num_experts), own)
    for place in range(top_k):
        if final[place] < 0:
            final[place] = called[place]


@_inside
def step(state, rules, steps, log, heard, layer, is_exact):
    """Decide the step that was heard; `heard.calls` then says what is to be carried out.

    False, and nothing is done, where the table of growth must be continued first, or no more tokens can be counted.
    """
    heard.is_exact[0] = is_exact
    clock = state.clock[layer] + 1
    if clock > MOST_TOKENS:
        return False
    if heard.growth_table.size > 0:
        place = clock - heard.first_clock[0]
        if place < 0 or place >= heard.growth_table.size:
            return False
        heard.growth[0], heard.growth_epoch[0] = heard.growth_table[place], heard.epoch_table[place]
    log.num_arrivals[0] = 0
    replay(state, rules, steps, log, layer)
    note(state, rules, log, heard, layer)
    return True


@_inside
def note(state, rules, log, heard, layer):
    """Write down what is to be carried out of the step that was just decided."""
    top_k, outcome, computed, calls = heard.ids.size, log.outcome[0, 0], log.computed_ids[0, 0], heard.calls
    num_residents, num_booked, is_rerouted = 0, 0, False
    for rank in range(top_k):
        num_residents += (outcome[rank] == HIT) | (outcome[rank] == SUBSTITUTED)
        is_rerouted |= (outcome[rank] == SUBSTITUTED) | (outcome[rank] == DROPPED)
        if rules.admission == BACKGROUND and outcome[rank] > FORCED:
            expert = np.int64(heard.ids[rank])
            if state.due[layer, expert] == state.clock[layer] + rules.admission_delay:
                heard.booked[num_booked] = expert
                num_booked += 1
    calls[0, 0], calls[0, 1], calls[0, 2], calls[0, 3] = num_residents, num_booked, log.num_arrivals[0], is_rerouted
    resident, other = 1, 1 + num_residents
    for rank in range(top_k):
        is_resident, expert = (outcome[rank] == HIT) | (outcome[rank] == SUBSTITUTED), np.int64(computed[rank])
        row = resident if is_resident else other
        calls[row, 0], calls[row, 1], calls[row, 3] = heard.column[rank], expert, outcome[rank]
        calls[row, 2] = state.slot_of_expert[layer, expert] if expert >= 0 else -1
        resident, other = resident + is_resident, other + (not is_resident)


@_inside
def _are_finite(logits):
    num_bad = 0
    for expert in range(logits.size):
        num_bad += not abs(logits[expert]) <= np.float32(LARGEST_FLOAT16)
    return num_bad == 0


@_inside
def _sort(heard, weights, called):
    """Ranks by gate weight, the lower expert id first among equals; false where the weights have no sum to be shares of."""
    total = _sum(weights)
    if not 0 < total < np.inf:
        return False
    for place in range(weights.size):
        gate, expert, rank = weights[place] / total, called[place], place
        while rank > 0 and (heard.weights[rank - 1] < gate or (heard.weights[rank - 1] == gate and heard.ids[rank - 1] > expert)):
            heard.weights[rank], heard.ids[rank], heard.column[rank] = heard.weights[rank - 1], heard.ids[rank - 1], heard.column[rank - 1]
            rank -= 1
        heard.weights[rank], heard.ids[rank], heard.column[rank] = gate, expert, place
    return True


@_inside
def _are_distinct(heard, called):
    """Whether a step calls different experts that there are: the kernel takes its ids for indices."""
    is_step, num_marked = True, 0
    for place in range(called.size):
        expert = called[place]
        if expert < 0 or expert >= heard.is_called.size or heard.is_called[expert] != 0:
            is_step = False
            break
        heard.is_called[expert] = 1
        num_marked += 1
    for place in range(num_marked):
        heard.is_called[called[place]] = 0
    return is_step


@_inside
def _round(values, patterns, halves):
    """Float32 to the bits of float16, to nearest and even, as torch does it; -0 becomes 0. `patterns`: the bits of `values`."""
    for place in range(values.size):
        sign, size = (patterns[place] >> 16) & 0x8000, np.int64(patterns[place] & 0x7FFFFFFF)
        half = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13  # another bias of the exponent, and 13 bits fewer
        steps = abs(values[place]) * np.float32(2.0**24)  # below 2^-14 float16 goes in steps of 2^-24
        small = np.int64(steps + np.float32(2.0**23)) - 2**23 if size < 0x38800000 else 0  # a float32 as large as that is a whole number
        half = small if size < 0x38800000 else half
        half = 0x7C00 if size >= 0x7F800000 else half  # an expert outside the chosen groups: -infinity
        halves[place] = np.int16(half | sign) if half != 0 else np.int16(0)


@_inside
def _sum(row):
    """In the order of the calls, as `families.sum_of_calls`."""
    total = row[0]
    for place in range(1, row.size):
        total += row[place]
    return total


@_inside
def _ratio(numerator, denominator):
    return numerator / denominator if denominator > 0 else np.float32(0)


@_inside
def _weigh(rule, is_normalised, scaling, original, called, final, scores, own):
    """Weights by the rules that use own scores; `own` is filled in, 0 where nobody computes (final = -1)."""
    for place in range(own.size):
        own[place] = scores[final[place]] if final[place] >= 0 else np.float32(0)
    scale, keeps_original = scaling, True
    if rule == RESCALE:
        scale, keeps_original = _ratio(_sum(original), _sum(own)), False
    elif rule == OWN and is_normalised:
        scale, keeps_original = _ratio(scaling, _sum(own)), False
    elif is_normalised:
        total = scores[called[0]]
        for place in range(1, called.size):
            total += scores[called[place]]
        scale = _ratio(scaling, total)
    for place in range(own.size):
        own[place] = original[place] if keeps_original and final[place] == called[place] else own[place] * scale
