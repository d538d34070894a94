"""The order in which training tokens are read: a pure function of seed and row number.

Each domain's documents are shuffled once, joined with the end mark between two, and cut into rows of `row_tokens`
(plus one token, the last target). Row number r of the training stream belongs to block r // 100; within a block the
domains take turns in a seeded order that holds each domain exactly as often as its share says (0.24 -> 24 of 100).
The n-th row of a domain is row n of its shuffled rows; each pass over a domain shuffles anew. So a run can stop at any
step and go on from the step number alone.

Letters: N rows of a domain. This module knows token ids. It knows no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moecache.reference.packages import cache_folder, sha256_of
from moecache.reference.settings import MIXTURE
from moecache.reference.texts import load_manifest, load_texts

BLOCK_ROWS = 100


class Corpus:
    """Rows of token ids in a fixed order.

    Parameters
    ----------
    streams : of each domain the token ids [n] of all its documents.
    shares : of each domain its share of the rows, multiples of 0.01.
    row_tokens : tokens a row predicts; `row(r)` has one more.
    seed : decides the order.
    """

    def __init__(self, streams: Mapping[str, NDArray[np.uint16]], shares: Mapping[str, float], row_tokens: int, seed: int) -> None:
        counts = [round(shares[domain] * BLOCK_ROWS) for domain in streams]
        if sum(counts) != BLOCK_ROWS:
            raise ValueError(f"shares {dict(shares)} give {sum(counts)} rows of {BLOCK_ROWS}; they must sum to 1")
        for domain, stream in streams.items():
            if len(stream) <= row_tokens:
                raise ValueError(f"domain {domain} has {len(stream)} tokens, a row needs {row_tokens + 1}")
        self.streams, self.counts = list(streams.values()), counts
        self.row_tokens, self.seed = row_tokens, seed
        self._turns = np.repeat(np.arange(len(counts)), counts)
        self._shuffled = lru_cache(maxsize=4 * len(counts))(self._shuffle)

    def _shuffle(self, domain: int, epoch: int) -> NDArray[np.int64]:
        num_rows = (len(self.streams[domain]) - 1) // self.row_tokens
        return np.random.default_rng([self.seed, domain, epoch]).permutation(num_rows)

    def row(self, number: int) -> NDArray[np.uint16]:
        """Token ids [row_tokens + 1] of one row of the training stream."""
        block, within = divmod(number, BLOCK_ROWS)
        turns = np.random.default_rng([self.seed, 1_000_003, block]).permutation(self._turns)
        domain = int(turns[within])
        nth = block * self.counts[domain] + int(np.sum(turns[:within] == domain))
        num_rows = (len(self.streams[domain]) - 1) // self.row_tokens
        epoch, position = divmod(nth, num_rows)
        start = int(self._shuffled(domain, epoch)[position]) * self.row_tokens
        return self.streams[domain][start : start + self.row_tokens + 1]

    def batch(self, step: int, num_rows: int) -> NDArray[np.int64]:
        """Rows step * num_rows ... of the stream [num_rows, row_tokens + 1]."""
        return np.stack([self.row(step * num_rows + i) for i in range(num_rows)]).astype(np.int64)


def token_stream(domain: str, tokenizer_file: Path, seed: int = 1) -> NDArray[np.uint16]:
    """Token ids of a domain's training documents, in shuffled order, the end mark after each; cached.

    The cache's key holds the hashes of the texts and of the tokenizer, so neither can go stale.
    """
    text_hash = load_manifest()["files"][f"{domain}.training.jsonl"]["sha256"]
    key = hashlib.sha256(f"{text_hash} {sha256_of(tokenizer_file)} {seed}".encode()).hexdigest()[:16]
    path = cache_folder() / "tokens" / f"{domain}-{key}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npy")
        np.save(temporary, _encode(domain, tokenizer_file, seed))
        temporary.replace(path)
    return np.load(path)


def _encode(domain: str, tokenizer_file: Path, seed: int) -> NDArray[np.uint16]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts = load_texts(domain, "training")
    order = np.random.default_rng([seed, len(texts)]).permutation(len(texts))
    encoded = tokenizer.encode_batch([texts[i].text for i in order])
    return np.concatenate([np.array([*e.ids, 0], dtype=np.uint16) for e in encoded])


def training_corpus(tokenizer_file: Path, row_tokens: int, seed: int) -> Corpus:
    """The training stream of the reference models."""
    streams = {domain: token_stream(domain, tokenizer_file) for domain in MIXTURE}
    return Corpus(streams, MIXTURE, row_tokens, seed)
