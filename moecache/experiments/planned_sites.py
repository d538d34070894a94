"""What the chapters on planned interventions share: documents in blocks, the exact model's word on each, rows by document.

A block is a few scored documents and the documents just before them, which only set the slots. Blocks know nothing of
each other, so each can be stored as it is finished, and a run that is cut loses one block. A row is one (cell, document),
where a cell is one pass with one set of named sites; its loss is paired with the exact model's on the same document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd

from moecache import results
from moecache.designs import document_bounds
from moecache.experiments import inputs
from moecache.families import model_shape
from moecache.intervene import intervene
from moecache.kernel import Outcome
from moecache.record import record
from moecache.reference import held_out_documents, load_model
from moecache.run import Run
from moecache.stats import unique_documents
from moecache.trace import RouterTrace

REGIME = "planned sites, slots as under fetching every miss"
SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True, eq=False)
class Block:
    """Scored documents, and the exact model on them.

    Attributes
    ----------
    model_name : str
    model : the loaded model.
    documents : the scored documents.
    texts : their token ids.
    before : RouterTrace of the documents before them.
    num_slots : int, slots a layer.
    exact : Run in which no call is named: exact losses, gate weights, ages and misses of every call.
    """

    model_name: str
    model: Any
    documents: Sequence[Any]
    texts: list[np.ndarray]
    before: RouterTrace
    num_slots: int
    exact: Run

    @property
    def starts(self) -> np.ndarray:
        """Marks [T] of first tokens."""
        return self.exact.document_start

    @property
    def gate_weights(self) -> np.ndarray:
        """[T, L, K] of the exact model, in rank order."""
        return self.exact.extra["gate_weights"]

    @property
    def call_shape(self) -> tuple[int, int, int]:
        """T, L, K."""
        tokens, layers, ranks = self.gate_weights.shape
        return tokens, layers, ranks


@lru_cache(maxsize=8)  # the parts of a chapter read the same blocks
def read_block(
    model_name: str, first_document: int, num_documents: int, num_tokens: int, num_warmup_documents: int, resident_fraction: float
) -> Block:
    """Read one block with a reference model.

    Parameters
    ----------
    model_name : str
    first_document, num_documents : int
        The scored documents, of the held-out documents in their fixed order.
    num_tokens : int
        Of each document.
    num_warmup_documents : int
        Documents read just before the scored ones; at most `first_document`.
    resident_fraction : float
        Share of a layer's experts that has slots.

    Raises
    ------
    ValueError
        If there are no documents before the scored ones.
    """
    if not 0 < num_warmup_documents <= first_document:
        raise ValueError(f"num_warmup_documents={num_warmup_documents} must be from 1 to first_document={first_document}")
    model = _model(model_name)
    all_documents = held_out_documents(num_documents=first_document + num_documents, num_tokens=num_tokens, name=model_name)
    earlier, documents = all_documents[first_document - num_warmup_documents : first_document], all_documents[first_document:]
    return block_of(model_name, model, earlier, documents, resident_fraction)


def block_of(model_name: str, model: Any, earlier: Sequence[Any], documents: Sequence[Any], resident_fraction: float) -> Block:
    """A block of given documents on a given model."""
    shape = model_shape(model)
    num_slots = max(math.ceil(resident_fraction * shape.num_experts), shape.top_k)
    texts = [np.asarray(document.tokens) for document in documents]
    before = replace(record(model, [np.asarray(document.tokens) for document in earlier]), selection_scores=None)
    nothing = np.zeros((sum(text.size for text in texts), shape.num_layers, shape.top_k), bool)
    exact = intervene(model, texts, nothing, num_slots, before=before)
    return Block(model_name, model, documents, texts, before, num_slots, exact)


@lru_cache(maxsize=1)
def _model(name: str) -> Any:
    return load_model(name)


def stored_blocks(
    experiment: str,
    measure: Callable[..., pd.DataFrame],
    model_names: Sequence[str],
    num_documents: int,
    num_warmup_documents: int,
    documents_per_block: int,
    parameters: Mapping[str, Any],
) -> pd.DataFrame:
    """All blocks of all models, each measured once and stored as it is finished.

    Parameters
    ----------
    experiment : str
        Name in the store.
    measure : function
        Called with `model_name`, `first_document`, `num_documents`, `num_warmup_documents` and the parameters.
    model_names : sequence of str
    num_documents : int
        Documents in all; the first `num_warmup_documents` of them are never scored.
    num_warmup_documents, documents_per_block : int
    parameters : mapping
        What else the numbers depend on.

    Returns
    -------
    DataFrame
        The rows of all blocks; two documents of one name (of two domains) are told apart.

    Raises
    ------
    ValueError
        If no document is left to score.
    """
    if num_warmup_documents >= num_documents:
        raise ValueError(f"num_warmup_documents={num_warmup_documents} leaves none of {num_documents} documents to score")
    frames = []
    for model_name in model_names:
        for first in range(num_warmup_documents, num_documents, documents_per_block):
            asked = {
                "model_name": model_name,
                "first_document": first,
                "num_documents": min(documents_per_block, num_documents - first),
                "num_warmup_documents": num_warmup_documents,
                **parameters,
            }
            found = results.load_or_run(experiment, asked, partial(measure, **asked), inputs=inputs.reference_inputs(model_name))
            frames.append(found.frame)
    rows = pd.concat(frames, ignore_index=True)
    return unique_documents(rows) if "document" in rows.columns else rows


def document_rows(block: Block, run: Run, num_sites: np.ndarray, **facts: Any) -> pd.DataFrame:
    """One row a document of one cell.

    Parameters
    ----------
    block : Block
    run : Run
        The intervention.
    num_sites : ndarray [T]
        Sites at each token.
    **facts
        What names the cell; `policy` is its label.

    Returns
    -------
    DataFrame : model, regime, num_slots, the facts, document, domain, cluster, num_tokens (scored), mean_difference_nats and
        exact_loss_nats (a token), num_sites, calls substituted, dropped and first choices among them, substituted_mass (mean a step).
    """
    assert run.loss_nats is not None
    assert block.exact.loss_nats is not None
    assert run.decisions is not None
    difference = run.loss_nats - block.exact.loss_nats
    rows = []
    for (start, stop), document in zip(document_bounds(block.starts), block.documents, strict=True):
        inside = slice(start, stop)
        rows.append(
            {
                "model": block.model_name,
                "regime": REGIME,
                "num_slots": block.num_slots,
                **facts,
                "document": document.name,
                "domain": document.domain,
                "cluster": document.cluster,
                "num_tokens": stop - start - 1,
                "mean_difference_nats": rounded(np.nanmean(difference[inside])),
                "exact_loss_nats": rounded(np.nanmean(block.exact.loss_nats[inside])),
                "num_sites": int(num_sites[inside].sum()),
                "substituted": int((run.decisions.outcome[inside] == Outcome.SUBSTITUTED).sum()),
                "dropped": int((run.decisions.outcome[inside] == Outcome.DROPPED).sum()),
                "first_choices_substituted": int((run.decisions.outcome[inside, :, 0] > Outcome.FORCED).sum()),
                "substituted_mass": rounded(run.decisions.substituted_mass[inside].mean(dtype=np.float64)),
            }
        )
    return pd.DataFrame(rows)


def rounded(value: Any) -> float:
    """A number with as many digits as a stored row keeps."""
    return float(f"{float(value):.{SIGNIFICANT_DIGITS}g}")
