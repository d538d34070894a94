"""Exact and near duplicates: what is dropped, and how it is found.

Text is cut into words; every run of `SHINGLE_WORDS` words is hashed to 64 bits, and a fixed quarter of the hash
space is kept as the sketch of a unit (sampling by value, so the same run of words is sampled everywhere: the idea of
MinHash and of winnowing). The share of a unit's sketch that was met before estimates how much of it is a copy.
Held-out units are met first, so that the training side gives way.

This module knows strings only: no domains, no files.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SHINGLE_WORDS = 8
SAMPLE_ONE_IN = 4
MAX_OVERLAP_WITH_HELD_OUT = 0.2
MAX_OVERLAP_WITHIN = 0.6
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def sketch(text: str) -> NDArray[np.uint64]:
    """Sampled hashes of the word runs of a text, without repetition [n]; short texts give their whole as one run."""
    words = np.array([zlib.crc32(w.encode()) for w in _WORD.findall(text.lower())], dtype=np.uint64)
    num_runs = max(1, len(words) - SHINGLE_WORDS + 1)
    runs = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(min(SHINGLE_WORDS, len(words))):
        runs = (runs ^ words[offset : offset + num_runs]) * _MULTIPLIER
        runs ^= runs >> np.uint64(29)
    if num_runs > 4 * SAMPLE_ONE_IN:
        runs = runs[runs % np.uint64(SAMPLE_ONE_IN) == 0]
    return np.unique(runs)


def overlap(of: NDArray[np.uint64], seen: set[int]) -> float:
    """Share of a sketch that is in a set of hashes, 0 to 1; 0 for an empty sketch."""
    return sum(value in seen for value in of.tolist()) / len(of) if len(of) else 0.0


@dataclass
class DuplicateFilter:
    """Remembers what was kept; `keeps(text, is_held_out)` says whether to keep the next unit and books it."""

    held_out: set[int] = field(default_factory=set)
    training: set[int] = field(default_factory=set)
    num_dropped: int = 0

    def keeps(self, text: str, is_held_out: bool) -> bool:
        """True when the unit is new enough; all held-out units must be asked before the first training unit."""
        of = sketch(text)
        own = self.held_out if is_held_out else self.training
        is_new = overlap(of, own) <= MAX_OVERLAP_WITHIN
        if not is_held_out:
            is_new = is_new and overlap(of, self.held_out) <= MAX_OVERLAP_WITH_HELD_OUT
        if is_new:
            own.update(of.tolist())
        self.num_dropped += not is_new
        return is_new
