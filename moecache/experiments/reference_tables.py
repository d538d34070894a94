"""The tables of chapter 01 by name, from plain parameters: each opens the model and the held-out text that it needs.

Models and readings are kept while tables of one model are asked for in turn. What is measured stands in `reference_model`,
`reference_controls`, `baselines` and `capacity`; this module only hands text and models to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pandas as pd

from moecache.experiments import baselines, capacity, capacity_slots, reference_controls, reference_model
from moecache.reference import Document, held_out_documents, load_model, load_tokenizer

QUARTER = 0.25


def measure(table: str, **parameters: Any) -> pd.DataFrame:
    """A table by its name.

    Raises
    ------
    ValueError : no such table; lists those that exist.
    """
    if table not in TABLES:
        raise ValueError(f"there is no table {table!r}; choose one of {', '.join(TABLES)}")
    return TABLES[table](**parameters)


def documents_of(model: str, num_documents: int, num_tokens: int) -> list[Document]:
    """The held-out documents, in their fixed order."""
    return held_out_documents(num_documents, num_tokens, name=model, say=lambda _: None)


@lru_cache(maxsize=1)
def open_model(model: str) -> Any:
    """The model, loaded once for all of its tables."""
    return load_model(model)


@lru_cache(maxsize=1)
def read(model: str, num_documents: int, num_tokens: int) -> reference_model.Reading:
    """What the model makes of the text, read once for all tables."""
    return reference_model.reading(open_model(model), load_tokenizer(model), documents_of(model, num_documents, num_tokens))


def hits(model: str, num_documents: int, num_tokens: int, shares: Sequence[float], warmup_tokens: int) -> pd.DataFrame:
    """LRU's hits by document at several capacities: `capacity.by_document`."""
    return capacity.by_document(read(model, num_documents, num_tokens).trace, _lru(), shares, warmup_tokens)


def quarter(model: str, num_documents: int, num_tokens: int, warmup_tokens: int) -> pd.DataFrame:
    """LRU's hits by layer with a quarter of the experts resident: `capacity.by_layer`."""
    return capacity.by_layer(read(model, num_documents, num_tokens).trace, _lru(), [QUARTER], warmup_tokens)


def _lru() -> list[Any]:
    return capacity.policies(["lru"], [])


def target(model: str, num_documents: int, num_tokens: int, hit_rate: float, warmup_tokens: int) -> pd.DataFrame:
    """The fewest slots at which LRU hits so often: `capacity_slots.target_slots`."""
    return capacity_slots.target_slots(read(model, num_documents, num_tokens).trace, [hit_rate], warmup_tokens)


def target_by_layer(model: str, num_documents: int, num_tokens: int, hit_rate: float, warmup_tokens: int) -> pd.DataFrame:
    """The same, each layer for itself: `reference_model.target_slots_by_layer`."""
    return reference_model.target_slots_by_layer(read(model, num_documents, num_tokens).trace, hit_rate, warmup_tokens)


def ablation(model: str, num_documents: int, num_tokens: int, num_ablation_documents: int, seed: int) -> pd.DataFrame:
    """Losses of the controls on the first of the documents: `reference_controls.ablation`."""
    documents = documents_of(model, num_documents, num_tokens)[:num_ablation_documents]
    return reference_controls.ablation(open_model(model), documents, seed)


def tasks(model: str, num_documents: int, num_tokens: int, num_questions: int) -> pd.DataFrame:
    """Held-out questions: `reference_model.tasks`; the documents play no part."""
    del num_documents, num_tokens
    return reference_model.tasks(open_model(model), load_tokenizer(model), num_questions)


def ngram(model: str, num_documents: int, num_tokens: int, training_tokens: int, order: int, seed: int) -> pd.DataFrame:
    """The n-gram model on the same documents: `baselines.ngram_losses`."""
    documents = documents_of(model, num_documents, num_tokens)
    return baselines.ngram_losses(documents, load_tokenizer(model), training_tokens, order, seed)


def xz(model: str, num_documents: int, num_tokens: int, training_bytes: int, seed: int) -> pd.DataFrame:
    """xz on the same documents: `baselines.xz_sizes`."""
    return baselines.xz_sizes(documents_of(model, num_documents, num_tokens), load_tokenizer(model), training_bytes, seed)


TABLES = {
    "documents": lambda **text: reference_model.by_document(read(**text)),
    "layers": lambda **text: reference_model.layers(read(**text)),
    "gates": lambda **text: reference_model.gates(read(**text)),
    "use": lambda **text: reference_model.use(read(**text)),
    "overlaps": lambda hot_fraction, **text: reference_model.overlaps(read(**text), hot_fraction),
    "hits": hits,
    "quarter": quarter,
    "target": target,
    "target_by_layer": target_by_layer,
    "ablation": ablation,
    "tasks": tasks,
    "ngram": ngram,
    "xz": xz,
}
