"""Blocks of tokens: what is larger than memory is looked at piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_VALUES = 2**20  # numbers looked at together: small enough for the processor's cache, large enough to hide the loop


def token_blocks(start: int, stop: int, values_a_token: int, block_values: int = BLOCK_VALUES) -> Iterator[slice]:
    """Slices of start..stop-1, each of at most `block_values` numbers (and at least one token)."""
    size = max(1, block_values // max(1, values_a_token))
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
