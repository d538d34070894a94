"""How many slots fit: one sum for `plan`, before anything is loaded, and for `offload`.

    memory = dense weights + decoding cache + reserve + block x (slots + staging + reserved)

*Staging* blocks hold background copies until they land: at most top-k can be booked a step, so a layer needs top-k x admission_delay of
them, or `max_in_flight` where the policy bounds it. *Reserved* blocks are left for prompts and for experts that are computed and not kept.
The *reserve* is for activations and libraries.
"""

from __future__ import annotations

import re

import numpy as np

from moecache.cache import CapacityError
from moecache.kernel import Admission, Eviction, Insertion
from moecache.policy import Policy
from moecache.trace import ModelShape

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
FEWEST_RESERVED = 2  # one expert of a prompt is computed while the next arrives
CONTEXT_TOKENS = 4096  # of prompt and answer, where nobody says
GIB = 2**30


def parse_bytes(size: int | float | str) -> int:
    """A number of bytes from a number or from words such as ``"20 GiB"`` and ``"1.5 GB"``.

    Raises
    ------
    ValueError : anything else.
    """
    if isinstance(size, int | float):
        return int(size)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", size)
    if found is None or found[2].upper() not in UNITS or found[1].count(".") > 1:
        raise ValueError(f"{size!r} is no size in bytes; write a number, or for example '20 GiB' or '500 MB'")
    return int(float(found[1]) * UNITS[found[2].upper()])


def num_staging(policy: Policy, shape: ModelShape) -> int:
    """Blocks for background copies under way, over all layers."""
    rules = policy.compile(shape.top_k)
    a_layer = 0
    if rules.admission == int(Admission.BACKGROUND):
        a_layer = min(rules.max_in_flight, min(rules.max_bookings, shape.top_k) * rules.admission_delay, shape.num_experts)
    return shape.num_layers * a_layer + 2 * rules.max_prefetches  # what the next layer expects, and what this one has not used yet


def num_reserved(policy: Policy, shape: ModelShape) -> int:
    """Free blocks that background copies leave alone."""
    keeps_all = policy.insertion == Insertion.EVERY and policy.eviction != Eviction.STATIC
    return FEWEST_RESERVED if keeps_all else max(FEWEST_RESERVED, shape.top_k)


def num_copy_blocks(policy: Policy, shape: ModelShape) -> int:
    """Blocks beside the slots: staging and reserved."""
    return num_staging(policy, shape) + num_reserved(policy, shape)


def reserve_bytes(reserve: int | float | str | None, device: str) -> int:
    """Bytes for activations and libraries: as asked; else 256 MiB on a CPU and 1 GiB on a GPU."""
    if reserve is not None:
        return parse_bytes(reserve)
    return GIB // 4 if device == "cpu" else GIB


def slots_within(
    memory: int | float | str, dense_bytes: int, block_bytes: int, policy: Policy, shape: ModelShape, other_bytes: int = 0
) -> np.ndarray:
    """[L] int64, as many slots in every layer as fit.

    Parameters
    ----------
    memory : all that may be taken, in bytes or as `parse_bytes` reads it.
    dense_bytes, block_bytes : weights outside the experts; one expert in a slot.
    other_bytes : decoding cache and reserve.

    Raises
    ------
    CapacityError : a budget too small for top-k slots a layer; the message names the smallest that works.
    """
    extra = num_copy_blocks(policy, shape)
    room = (parse_bytes(memory) - dense_bytes - other_bytes) // block_bytes - extra
    slots = min(room // shape.num_layers, shape.num_experts)
    if slots < shape.top_k:
        smallest = dense_bytes + other_bytes + block_bytes * (extra + shape.top_k * shape.num_layers)
        raise CapacityError(
            f"memory={memory!r} is too small: it holds {max(slots, 0)} slots a layer beside {dense_bytes} dense bytes, {other_bytes} for "
            f"decoding cache and reserve, and {extra} blocks for copies; a token calls {shape.top_k} experts of {block_bytes} bytes; the "
            f"smallest budget that works is {smallest} bytes ({smallest / GIB:.2f} GiB)"
        )
    return np.full(shape.num_layers, slots, np.int64)
