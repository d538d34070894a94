"""Held-out documents: the texts that every quality figure of the study is measured on.

A document is `num_tokens` token ids of one held-out text. Its first token is the mark that in training stands before
every document; the rest is the text from its beginning. Documents come in a fixed, seeded order: the domains take turns,
and within a domain every cluster gives its first document before any gives its second, so that a small sample is
spread over as many clusters as possible. `cluster` is what a bootstrap resamples.

This module knows texts and the tokenizer. It knows no model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moecache.reference.loading import load_tokenizer, tokenizer_file
from moecache.reference.packages import cache_folder, sha256_of
from moecache.reference.texts import DOMAINS, Say, Text, load_manifest, load_texts

ORDER_SEED = 7


@dataclass(frozen=True)
class Document:
    """Token ids of one held-out text, with what statistics need to know about it.

    Attributes
    ----------
    tokens : [n] int32.
    domain : what kind of text it is, one of `texts.DOMAINS`.
    cluster : the origin it shares with other documents (a package, a generator's kind): they are no independent draws.
    name : unique within its domain.
    """

    tokens: NDArray[np.int32]
    domain: str
    cluster: str
    name: str


def held_out_documents(
    num_documents: int = 175,
    num_tokens: int = 1000,
    *,
    domains: Sequence[str] = DOMAINS,
    name: str = "reference-512",
    directory: Path | str | None = None,
    say: Say = print,
) -> list[Document]:
    """The first `num_documents` held-out documents of `num_tokens` tokens, domains interleaved.

    Parameters
    ----------
    num_documents : how many; a smaller number gives the beginning of the same list.
    num_tokens : tokens a document, the mark at its beginning included; shorter texts are left out.
    domains : which domains take turns. `word_problems` and `interpreter` are generated and need no package.
    name, directory : whose tokenizer (see `loading.load_model`).
    say : told about the first build of the texts.

    Returns
    -------
    list of Document

    Raises
    ------
    ValueError : there are fewer documents of that length; names both numbers.
    """
    by_domain = [_documents_of(domain, num_tokens, name, directory, say) for domain in domains]
    turns = max((len(found) for found in by_domain), default=0)
    ordered = [found[i] for i in range(turns) for found in by_domain if i < len(found)]
    if not 0 < num_documents <= len(ordered):
        raise ValueError(
            f"num_documents={num_documents}: between 1 and {len(ordered)} held-out documents of {num_tokens} tokens "
            f"exist in {tuple(domains)}; ask for fewer or for shorter ones"
        )
    return ordered[:num_documents]


def _documents_of(domain: str, num_tokens: int, name: str, directory: Path | str | None, say: Say) -> list[Document]:
    texts = load_texts(domain, "held_out", say)
    ids = _token_ids(domain, texts, tokenizer_file(name, directory))
    long_enough = [i for i, tokens in enumerate(ids) if len(tokens) >= num_tokens]
    order = spread_order([texts[i].cluster for i in long_enough], [ORDER_SEED, DOMAINS.index(domain)])
    chosen = [long_enough[i] for i in order]
    names = _numbered([texts[i].name for i in chosen])
    return [Document(ids[i][:num_tokens], domain, texts[i].cluster, name) for i, name in zip(chosen, names, strict=True)]


def _numbered(names: list[str]) -> list[str]:
    """Names made different: the second document cut from one text is "name #2"."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return numbered


def spread_order(clusters: Sequence[str], seed: Iterable[int]) -> list[int]:
    """An order of items in which every cluster's first comes before any cluster's second, seeded within a round."""
    shuffled: list[int] = np.random.default_rng(list(seed)).permutation(len(clusters)).tolist()
    taken: Counter[str] = Counter()
    rounds: list[tuple[int, int]] = []
    for place, item in enumerate(shuffled):
        cluster = clusters[item]
        rounds.append((taken[cluster], place))
        taken[cluster] += 1
    return [shuffled[place] for _, place in sorted(rounds)]


def _token_ids(domain: str, texts: list[Text], file: Path) -> list[NDArray[np.int32]]:
    text_hash = load_manifest()["files"][f"{domain}.held_out.jsonl"]["sha256"]
    key = hashlib.sha256(f"{text_hash} {sha256_of(file)}".encode()).hexdigest()[:16]
    path = cache_folder() / "tokens" / f"{domain}-held-out-{key}.npz"
    if not path.exists():
        encoded = load_tokenizer(directory=file.parent).encode_batch([text.text for text in texts])
        ids = [np.array([0, *e.ids], dtype=np.int32) for e in encoded]
        ends = np.cumsum([len(tokens) for tokens in ids])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, ids=np.concatenate(ids), ends=ends)
        temporary.replace(path)
    with np.load(path) as stored:
        return np.split(stored["ids"], stored["ends"][:-1])
