"""How many slots fit: bytes of the dense weights, of one expert's block and of the blocks that copies under way need.

    memory = dense weights + block x (slots + staging + reserved)

*Staging* blocks hold background copies until they land: at most top-k can be booked a step, so a layer needs top-k x admission_delay of
them, or `max_in_flight` where the policy bounds it. *Reserved* blocks are left for prompts and for experts that are computed and not kept.
The decoding cache and the activations are not counted: leave room for them.
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


def slots_within(memory: int | float | str, dense_bytes: int, block_bytes: int, policy: Policy, shape: ModelShape) -> np.ndarray:
    """[L] int64, as many slots in every layer as fit.

    Raises
    ------
    CapacityError : a budget too small for top-k slots a layer; the message names the smallest that works.
    """
    extra = num_staging(policy, shape) + num_reserved(policy, shape)
    room = (parse_bytes(memory) - dense_bytes) // block_bytes - extra
    slots = min(room // shape.num_layers, shape.num_experts)
    if slots < shape.top_k:
        smallest = dense_bytes + block_bytes * (extra + shape.top_k * shape.num_layers)
        raise CapacityError(
            f"memory={memory!r} holds {max(slots, 0)} slots a layer beside {dense_bytes} dense bytes and {extra} blocks for copies, "
            f"but a token calls {shape.top_k} experts of {block_bytes} bytes; the smallest budget that works is {smallest} bytes"
        )
    return np.full(shape.num_layers, slots, np.int64)
