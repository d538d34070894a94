"""The arrays of one step of one token, and how compiled code finds them again by an address.

numba unpacks every array that compiled code is given, anew in each call; the kernel takes some forty, which costs more than its decision.
Here its named tuples are written down once as the words in which compiled code holds them (`words_of`), and compiled code reads them back
from the address of those words. That is numba's data model of arrays, numbers and tuples, and this module is the one place that knows it.

An address is only a number: whoever passes one keeps its arrays alive. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from moecache.kernel import CacheState, Rules, StepLog, Steps, new_state
from moecache.steps import ABSENT


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
    ids, weights, bits, predicted = (row[None, None] for row in (heard.ids, heard.weights, heard.score_bits, heard.predicted))
    nothing = ABSENT.astype(np.int64)
    steps = Steps(ids, weights, bits, predicted, nothing, heard.is_exact, heard.growth, heard.growth_epoch)
    log = StepLog(
        outcome=np.zeros(one_step, np.uint8),
        computed_ids=np.zeros(one_step, np.int16),
        evicted_ids=np.zeros(one_step, np.int16),
        substituted_mass=np.zeros((1, 1), np.float32),
        arrivals=np.zeros((num_experts + 2 * top_k, 7), np.int64),  # under way, booked and predicted
        num_arrivals=np.zeros(1, np.int64),
    )
    return Parts(state, rules, Steps(*map(_read_only, steps)), log, heard)


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


floats, bits, integers = _row_reader(types.float32), _row_reader(types.uint32), _row_reader(types.int64)


_ONE = new_state(1, 1, 1, np.ones(1, np.int64), ABSENT)
_RULES = types.NamedTuple([types.float64 if hint is float else types.int64 for hint in get_type_hints(Rules).values()], Rules)
_NO_RULES = Rules(*[0] * len(Rules._fields))
_EXAMPLE = new_parts(_ONE, _NO_RULES, False, False, 0)
_KINDS = [_RULES if part is _NO_RULES else typeof(part) for part in _EXAMPLE]
read_state, read_rules, read_steps, read_log, read_heard = (_reader(kind) for kind in _KINDS)
RULES_AT, STEPS_AT, LOG_AT, HEARD_AT = (8 * int(at) for at in np.cumsum([len(words_of(part)) for part in _EXAMPLE])[:-1])
