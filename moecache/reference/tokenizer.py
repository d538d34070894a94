"""The tokenizer of the reference models: byte-level BPE with 4,096 entries, trained on the training texts.

Bytes make every text representable; each digit is an entry of its own, so that numbers are read digit by digit.
Entry 0 is the mark that ends a document. The trained tokenizer is committed beside the model; this module makes it
again. It knows texts and shares, not models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moecache.reference.settings import MIXTURE, VOCABULARY_SIZE
from moecache.reference.texts import Text, load_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|end|>"
SAMPLE_CHARACTERS = 12_000_000
SAMPLE_SEED = 1


def _sample(texts: list[Text], num_characters: int) -> Iterator[str]:
    for index in np.random.default_rng(SAMPLE_SEED).permutation(len(texts)):
        if num_characters <= 0:
            return
        yield texts[index].text[:num_characters]
        num_characters -= len(texts[index].text)


def train_tokenizer(domains: dict[str, list[Text]], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Train the tokenizer on a sample of the training texts in the proportions of the training mixture.

    Parameters
    ----------
    domains : training documents of each domain.
    vocabulary_size : number of entries, the end mark and the 256 bytes included.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split_digits = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    samples = (s for d, texts in domains.items() for s in _sample(texts, int(MIXTURE[d] * SAMPLE_CHARACTERS)))
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def make_tokenizer(path: Path) -> None:
    """Train the tokenizer on the training texts and write it to a file."""
    tokenizer = train_tokenizer({domain: load_texts(domain, "training") for domain in MIXTURE})
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
