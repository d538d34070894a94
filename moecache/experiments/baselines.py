"""What a language model must beat: a 5-gram model on the same tokens, and xz on the same bytes.

The n-gram model is interpolated Kneser-Ney (S. Chen and J. Goodman, *An empirical study of smoothing techniques for language modeling*,
1999, section 2.7). With c(h, w) how often token w followed the history h, D a discount and N(h) how many different tokens followed h,

    p(w | h) = max(c(h, w) - D, 0) / c(h) + D N(h) / c(h) * p(w | h without its oldest token)

so a history that was never seen backs off entirely to the shorter one, and the empty history to an even spread over the vocabulary. The
highest order counts occurrences; every lower order counts in how many different longer contexts the n-gram occurs. D = n1 / (n1 + 2 n2) in
each order, from the numbers of n-grams with counts 1 and 2.

xz (LZMA2 without a container) is a general compressor that learns from the bytes themselves; after a stretch of training text it knows the
domain too. Its figure is a number of bytes; an n-gram's is a loss a token.

Letters: N training tokens, T tokens of a document. No neural model is known here.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moecache.reference.held_out import Document
from moecache.reference.settings import MIXTURE
from moecache.reference.texts import load_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = NDArray[np.int64]
TEXTS_AT_ONCE = 64
XZ_FILTER = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**23}


@dataclass(frozen=True)
class _Table:
    """Counts of one order: sorted packed n-grams [G] and their counts [G], sorted histories [H], their totals [H] and numbers of tokens
    that followed [H]."""

    keys: Ids
    counts: Ids
    histories: Ids
    totals: Ids
    followers: Ids
    discount: float


@dataclass(frozen=True)
class NGram:
    """A fitted n-gram model; `tables[n - 1]` holds order n, ids are packed `bits` each."""

    vocabulary_size: int
    bits: int
    tables: tuple[_Table, ...]

    def losses(self, tokens: NDArray) -> NDArray[np.float64]:
        """Loss in nats of every token given those before it [T - 1]; the first tokens have shorter histories, the very first has none."""
        tokens = np.asarray(tokens, np.int64)
        probability = np.full(tokens.size - 1, 1.0 / self.vocabulary_size)
        for order, table in enumerate(self.tables, 1):
            keys = _packed(tokens, order, self.bits)[max(0, 2 - order) :]
            if keys.size:
                probability[-keys.size :] = self._interpolated(table, keys, probability[-keys.size :])
        return -np.log(probability)

    def _interpolated(self, table: _Table, keys: Ids, shorter: NDArray[np.float64]) -> NDArray[np.float64]:
        history, is_known = _find(table.histories, keys >> self.bits)
        gram, is_seen = _find(table.keys, keys)
        total = table.totals[history]
        own = np.where(is_seen, np.maximum(table.counts[gram] - table.discount, 0.0), 0.0)
        return np.where(is_known, (own + table.discount * table.followers[history] * shorter) / total, shorter)


def fit_ngram(tokens: NDArray, vocabulary_size: int, order: int = 5) -> NGram:
    """Count n-grams of all orders up to `order`.

    Parameters
    ----------
    tokens : [N] integers, documents one after the other with the end mark between two.
    vocabulary_size : how many token ids there are.
    order : the longest n-gram.

    Raises
    ------
    ValueError : an n-gram does not fit into 63 bits, or the text is shorter than one.
    """
    bits = max(1, (vocabulary_size - 1).bit_length())
    if not 1 <= order <= 63 // bits:
        raise ValueError(f"order={order} must lie between 1 and {63 // bits}: {bits} bits a token must fit into 63")
    if len(tokens) < order:
        raise ValueError(f"{len(tokens)} training tokens do not hold one {order}-gram; train on more")
    keys, counts = np.unique(_packed(np.asarray(tokens, np.int64), order, bits), return_counts=True)
    tables = []
    for length in range(order, 0, -1):
        tables.append(_table(keys, counts, bits))
        keys, counts = np.unique(keys & ((1 << bits * (length - 1)) - 1), return_counts=True)
    return NGram(vocabulary_size, bits, tuple(reversed(tables)))


def _packed(tokens: Ids, order: int, bits: int) -> Ids:
    """n-grams as integers [T - order + 1], the newest token in the lowest bits."""
    num_keys = max(0, tokens.size - order + 1)
    keys = np.zeros(num_keys, np.int64)
    for place in range(order):
        keys = (keys << bits) | tokens[place : place + num_keys]
    return keys


def _table(keys: Ids, counts: Ids, bits: int) -> _Table:
    histories, starts = np.unique(keys >> bits, return_index=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5
    return _Table(keys, counts, histories, np.add.reduceat(counts, starts), np.diff(starts, append=keys.size), discount)


def _find(sorted_keys: Ids, keys: Ids) -> tuple[Ids, NDArray[np.bool_]]:
    """Places of keys in a sorted array, and whether they are there."""
    places = np.minimum(np.searchsorted(sorted_keys, keys), sorted_keys.size - 1)
    return places, sorted_keys[places] == keys


def training_tokens(tokenizer: Tokenizer, num_tokens: int, seed: int = 0) -> Ids:
    """Token ids of training texts in the proportions of the training mixture, at most about `num_tokens` (fewer where texts run out)."""
    streams = [_domain_tokens(tokenizer, domain, round(share * num_tokens), seed) for domain, share in MIXTURE.items()]
    return np.concatenate(streams)


def _domain_tokens(tokenizer: Tokenizer, domain: str, num_tokens: int, seed: int) -> Ids:
    texts, parts, missing = load_texts(domain, "training"), [], num_tokens
    order = np.random.default_rng([seed, len(texts)]).permutation(len(texts)).tolist()
    for start in range(0, len(order), TEXTS_AT_ONCE):
        encoded = tokenizer.encode_batch([texts[i].text for i in order[start : start + TEXTS_AT_ONCE]])
        parts += [[*one.ids, 0] for one in encoded]
        missing -= sum(len(part) for part in parts[-len(encoded) :])
        if missing <= 0:
            break
    return np.concatenate([np.array(part, np.int64) for part in parts])[:num_tokens]


def ngram_losses(
    documents: Sequence[Document], tokenizer: Tokenizer, num_training_tokens: int, order: int = 5, seed: int = 0
) -> pd.DataFrame:
    """Loss of every held-out document under an n-gram model of the training texts.

    Returns
    -------
    DataFrame : a row per document: `document`, `loss_nats` (sum), `training_tokens` (how many there were).
    """
    tokens = training_tokens(tokenizer, num_training_tokens, seed)
    model = fit_ngram(tokens, tokenizer.get_vocab_size(), order)
    losses = [float(model.losses(document.tokens).sum()) for document in documents]
    return pd.DataFrame({"document": [label(d) for d in documents], "loss_nats": losses, "training_tokens": tokens.size})


def label(document: Document) -> str:
    """A document's name, unique across domains."""
    return f"{document.domain}: {document.name}"


def text_of(tokenizer: Tokenizer, document: Document) -> bytes:
    """The bytes that a document's tokens after the first stand for."""
    return tokenizer.decode(document.tokens[1:].tolist()).encode()


def xz_sizes(documents: Sequence[Document], tokenizer: Tokenizer, num_training_bytes: int, seed: int = 0) -> pd.DataFrame:
    """Compressed sizes of the held-out documents, a domain's documents in one stream.

    Returns
    -------
    DataFrame : a row per domain: `domain`, `num_bytes`, `xz_bytes` (alone), `xz_after_training_bytes` (what they add to the size of
        `num_training_bytes` bytes of training text before them).
    """
    rows = []
    for domain in dict.fromkeys(document.domain for document in documents):
        text = b"\n\n".join(text_of(tokenizer, document) for document in documents if document.domain == domain)
        before = _training_bytes(domain, num_training_bytes, seed)
        rows.append((domain, len(text), compressed_size(text), compressed_size(before + text) - compressed_size(before)))
    return pd.DataFrame(rows, columns=["domain", "num_bytes", "xz_bytes", "xz_after_training_bytes"])


def compressed_size(text: bytes) -> int:
    """Bytes that xz needs at its strongest setting, without a container; it remembers the last 8 MiB."""
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=[XZ_FILTER]))


def _training_bytes(domain: str, num_bytes: int, seed: int) -> bytes:
    texts = load_texts(domain, "training")
    found = b""
    for index in np.random.default_rng([seed, len(texts)]).permutation(len(texts)).tolist():
        if len(found) >= num_bytes:
            break
        found += texts[index].text.encode() + b"\n\n"
    return found[:num_bytes]
