"""Compiled steps of one token: what a router said is sorted, and the kernel decides, in calls that take addresses.

numba unpacks every array that compiled code is given, anew in each call; the kernel takes some forty, which costs more than its decision.
Here the named tuples of the kernel are written down once as the words that compiled code holds them in (`words_of`), and a step reads them
back from that address. What a router said is given by address, too, so a step is a few calls with a few plain numbers.

What is computed here is what `families.routing_of` and `experts.final_weights` compute, bit for bit: only sums in the order of the calls,
products, quotients and the rounding to float16 are made, which are the same everywhere. Softmax and sigmoid are not, so their values are
given.

An address is only a number: whoever passes one keeps its array alive, contiguous and of the type named here. Models, policies and devices
are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numba import config, njit, typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from moecache.kernel import Admission, CacheState, Outcome, Rules, StepLog, Steps, new_state, replay
from moecache.kernel.jit import source_digest
from moecache.kernel.state import MOST_TOKENS
from moecache.steps import ABSENT

IS_COMPILED = not config.DISABLE_JIT  # addresses are for compiled code; without it the general path does the same
LARGEST_FLOAT16 = 65504.0
BACKGROUND = int(Admission.BACKGROUND)
HIT, FORCED, SUBSTITUTED, DROPPED = int(Outcome.HIT), int(Outcome.FORCED), int(Outcome.SUBSTITUTED), int(Outcome.DROPPED)
OWN, OWN_RAW, INHERIT, RESCALE = 0, 1, 2, 3  # the weight rules
_DIGEST = source_digest()[:16]


class Heard(NamedTuple):
    """One token at one layer: what the router said in rank order (memory that the kernel's `Steps` read), and what became of it."""

    ids: np.ndarray  # [K] int16
    weights: np.ndarray  # [K] float32
    score_bits: np.ndarray  # [E] int16, or [0] where no scores are needed
    predicted: np.ndarray  # [K] int16, or [0]
    is_exact: np.ndarray  # [1] uint8
    growth: np.ndarray  # [1] float64
    growth_epoch: np.ndarray  # [1] int64
    growth_table: np.ndarray  # [n] float64, of the clocks from `first_clock` on; [0] where counts do not decay
    epoch_table: np.ndarray  # [n] int64
    first_clock: np.ndarray  # [1] int64
    is_called: np.ndarray  # [E] uint8, scratch, all 0 between calls
    column: np.ndarray  # [K] int64, where in the router's own order each rank stands
    calls: np.ndarray  # [1 + K,4] int64: a row of `HEAD`, then the step's calls by `CALL`: residents, then others, in rank order both
    booked: np.ndarray  # [K] int64, background copies that the step asked for


HEAD = ("num_residents", "num_booked", "num_arrivals", "is_rerouted")
CALL = ("call", "computed", "slot", "outcome")  # `call` is the place in the router's own order; of nobody's call the slot is meaningless


class Parts(NamedTuple):
    """All that a step reads and writes."""

    state: CacheState
    rules: Rules
    steps: Steps
    log: StepLog
    heard: Heard


def new_parts(state: CacheState, rules: Rules, has_scores: bool, has_predictions: bool, table_size: int) -> Parts:
    """The arrays of one step of a cache: 1 token, 1 layer."""
    num_experts, top_k = state.slot_of_expert.shape[1], state.waits.size
    one_step = (1, 1, top_k)
    heard = Heard(
        ids=np.zeros(top_k, np.int16),
        weights=np.zeros(top_k, np.float32),
        score_bits=np.zeros(num_experts if has_scores else 0, np.int16),
        predicted=np.full(top_k if has_predictions else 0, -1, np.int16),
        is_exact=np.zeros(1, np.uint8),
        growth=np.ones(1),
        growth_epoch=np.zeros(1, np.int64),
        growth_table=np.zeros(table_size),
        epoch_table=np.zeros(table_size, np.int64),
        first_clock=np.full(1, 2**62),
        is_called=np.zeros(num_experts, np.uint8),
        column=np.zeros(top_k, np.int64),
        calls=np.zeros((1 + top_k, 4), np.int64),
        booked=np.zeros(top_k, np.int64),
    )
    seen = [_as_step(row) for row in (heard.ids, heard.weights, heard.score_bits, heard.predicted)]
    steps = Steps(*seen, ABSENT.astype(np.int64), heard.is_exact, heard.growth, heard.growth_epoch)
    log = StepLog(
        outcome=np.zeros(one_step, np.uint8),
        computed_ids=np.zeros(one_step, np.int16),
        evicted_ids=np.zeros(one_step, np.int16),
        substituted_mass=np.zeros((1, 1), np.float32),
        arrivals=np.zeros((num_experts + 2 * top_k, 7), np.int64),  # under way, booked and predicted
        num_arrivals=np.zeros(1, np.int64),
    )
    return Parts(state, rules, Steps(*map(_read_only, steps)), log, heard)


def _as_step(row: np.ndarray) -> np.ndarray:
    return row[None, None]


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


# Words and addresses


def words_of(value: Any) -> list[int]:
    """The 64-bit words in which compiled code holds arrays, int64 and float64 numbers, and tuples of them (numba's data model)."""
    if isinstance(value, np.ndarray):  # without an owner: compiled code must not count references
        return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
    if isinstance(value, tuple):
        return [word for part in value for word in words_of(part)]
    number = np.float64(value) if isinstance(value, float) else np.int64(value)
    return [int(number.view(np.int64))]


def _reader(kind: Any) -> Callable[..., Any]:
    """A function of compiled code: the value of a type whose words begin at an address."""

    @intrinsic
    def read(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer()))

        return kind(types.int64), generate

    return read


def _row_reader(number: Any) -> Callable[..., Any]:
    """A function of compiled code: the array of so many numbers that begins at an address."""
    kind, width = types.Array(number, 1, "C"), number.bitwidth // 8

    @intrinsic
    def read(context: Any, address: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, size = arguments
            row = cgutils.create_struct_proxy(kind)(context, builder)  # its other fields, the owner's, are null
            row.data = builder.inttoptr(address, context.get_value_type(number).as_pointer())
            row.nitems, row.itemsize = size, context.get_constant(types.intp, width)
            row.shape, row.strides = cgutils.pack_array(builder, [size]), cgutils.pack_array(builder, [row.itemsize])
            return row._getvalue()

        return kind(types.int64, types.int64), generate

    return read


_floats, _bits, _integers = _row_reader(types.float32), _row_reader(types.uint32), _row_reader(types.int64)


def _entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code that Python calls, kept on disk under the digest of the kernel: it holds a copy of it, which must not outlive an edit.

    The GIL is kept: giving it away and taking it back would take longer than the call.
    """
    function.__qualname__ += f"_{_DIGEST}"
    return njit(cache=True, _nrt=False)(function)  # pyright: ignore[reportCallIssue]


_inside = njit(_nrt=False)  # pyright: ignore[reportCallIssue]
_ONE = new_state(1, 1, 1, np.ones(1, np.int64), ABSENT)
_RULES = types.NamedTuple([types.float64 if hint is float else types.int64 for hint in get_type_hints(Rules).values()], Rules)
_NO_RULES = Rules(*[0] * len(Rules._fields))
_EXAMPLE = new_parts(_ONE, _NO_RULES, False, False, 0)
_KINDS = [_RULES if part is _NO_RULES else typeof(part) for part in _EXAMPLE]
_read_state, _read_rules, _read_steps, _read_log, _read_heard = (_reader(kind) for kind in _KINDS)
_RULES_AT, _STEPS_AT, _LOG_AT, _HEARD_AT = (8 * int(at) for at in np.cumsum([len(words_of(part)) for part in _EXAMPLE])[:-1])


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
    heard = _read_heard(words + _HEARD_AT)
    num_experts, top_k = heard.is_called.size, heard.ids.size
    if not _are_finite(_floats(logits, num_experts)):
        return False
    called = _integers(ids, top_k)
    if not _sort(heard, _floats(weights, top_k), called) or not _are_distinct(heard, called):
        return False
    if heard.score_bits.size > 0:
        _round(_floats(scores, num_experts), _bits(scores, num_experts), heard.score_bits)
    return True


@_entry
def advance(words, layer, is_exact):
    """Decide the step that was heard; see `step`."""
    return step(
        _read_state(words),
        _read_rules(words + _RULES_AT),
        _read_steps(words + _STEPS_AT),
        _read_log(words + _LOG_AT),
        _read_heard(words + _HEARD_AT),
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
    heard = _read_heard(words + _HEARD_AT)
    num_experts, top_k = heard.is_called.size, heard.ids.size
    original, own = _floats(weights, top_k), _floats(new_weights, top_k)
    called, final = _integers(ids, top_k), _integers(new_ids, top_k)
    for row in range(1, 1 + top_k):
        final[heard.calls[row, 0]] = heard.calls[row, 1]  # nobody is -1 until the end
    if rule == INHERIT:
        for place in range(top_k):
            own[place] = original[place] if final[place] >= 0 else np.float32(0)
    else:
        _weigh(rule, is_normalised, np.float32(scaling), original, called, final, _floats(scores, num_experts), own)
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
def _round(values, bits, halves):
    """Float32 to the bits of float16, to nearest and even, as the processor and torch do it; -0 becomes 0. `bits` are those of `values`."""
    for place in range(values.size):
        sign, size = (bits[place] >> 16) & 0x8000, np.int64(bits[place] & 0x7FFFFFFF)
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
