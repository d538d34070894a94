"""Runs of policies on the same documents, paired with the exact model document by document.

A *reading* is a model, documents in the order in which they are read, and the exact token losses. Every policy reads the same: the first
documents only warm the cache, the rest are scored. What a policy costs is its token loss minus the exact one, averaged over a document,
or over a *span* of a document (tokens 16 to 47, say), so that losses near a document's start can be told from later ones.

The documents may be read in another order. A document's exact losses stay the same (attention never crosses a boundary); what the cache
holds when the document starts does not.

Which policies are compared, and why, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache.emulate import emulate
from moecache.experiments.misses_that_matter import check_evictions
from moecache.families import model_shape
from moecache.policy import FETCH_EVERY_MISS, Policy
from moecache.reference import held_out_documents, load_model
from moecache.reference.texts import DOMAINS
from moecache.run import Run
from moecache.score import score
from moecache.trace import ModelShape

Span = tuple[int, int]
END = 2**31  # of a span that runs to the end of its document
_SUMS = ["hits", "fetched", "forced", "substituted", "dropped", "first_choices_substituted", "copies"]
_DIGITS = 9  # of means, in a stored table


@dataclass(frozen=True, eq=False)
class Reading:
    """A model and documents in the order of reading.

    Attributes
    ----------
    model : a causal language model of an understood family.
    documents : objects with `tokens`, `domain`, `cluster` and `name`.
    exact_losses : one array [n] a document, nats, NaN at its first token.
    num_warmup_documents : how many of the documents are read first and not scored.
    """

    model: Any
    documents: tuple[Any, ...]
    exact_losses: tuple[np.ndarray, ...]
    num_warmup_documents: int

    @property
    def shape(self) -> ModelShape:
        """L, E and K of the model."""
        return model_shape(self.model)

    @property
    def warmup_tokens(self) -> int:
        """Tokens before the first scored document."""
        return sum(len(document.tokens) for document in self.documents[: self.num_warmup_documents])

    def reordered(self, order: Sequence[int]) -> Reading:
        """The same reading with its documents in another order; the warm-up documents must stay first.

        Raises
        ------
        ValueError : `order` is not an order of all documents, or moves a warm-up document.
        """
        fixed = self.num_warmup_documents
        if sorted(order) != list(range(len(self.documents))) or list(order[:fixed]) != list(range(fixed)):
            raise ValueError(f"order={list(order)} must hold 0..{len(self.documents) - 1} once each, beginning with 0..{fixed - 1}")
        documents, losses = ([kept[i] for i in order] for kept in (self.documents, self.exact_losses))
        return replace(self, documents=tuple(documents), exact_losses=tuple(losses))


def read(model: Any, documents: Sequence[Any], num_warmup_documents: int) -> Reading:
    """A reading of these documents: one exact pass.

    Raises
    ------
    ValueError : no document is left to score.
    """
    if num_warmup_documents >= len(documents):
        raise ValueError(f"num_warmup_documents={num_warmup_documents} leaves none of {len(documents)} documents to score")
    losses = score(model, [np.asarray(document.tokens) for document in documents])
    ends = np.cumsum([len(document.tokens) for document in documents])[:-1]
    return Reading(model, tuple(documents), tuple(np.split(losses, ends)), num_warmup_documents)


@lru_cache(maxsize=1)
def read_reference(
    model_name: str, num_documents: int, num_tokens: int, num_warmup_documents: int, domains: tuple[str, ...] = DOMAINS
) -> Reading:
    """A reading of a reference model's held-out documents; the last one is kept, since parts of a chapter share it."""
    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, domains=domains, name=model_name)
    return read(load_model(model_name), documents, num_warmup_documents)


def quarter_slots(shape: ModelShape, resident_fraction: float = 0.25) -> int:
    """Slots a layer for a share of resident experts, at least top-k."""
    return max(math.ceil(resident_fraction * shape.num_experts), shape.top_k)


def carry_out(reading: Reading, policy: Policy, num_slots: int, **arguments: Any) -> Run:
    """Emulate a policy on a reading; `arguments` as for `emulate`."""
    return emulate(reading.model, [np.asarray(document.tokens) for document in reading.documents], policy, num_slots, **arguments)


def rows_of(reading: Reading, policies: Sequence[Policy], num_slots: int, spans: Sequence[Span] = (), **arguments: Any) -> pd.DataFrame:
    """Emulate policies and describe each of their scored documents.

    Parameters
    ----------
    reading : Reading
    policies : sequence of Policy
        With different labels.
    num_slots : int
        Slots a layer.
    spans : sequence of (start, stop)
        Parts of a document, in tokens from its start, for which losses and mass are wanted too.
    arguments : as for `emulate`.

    Returns
    -------
    DataFrame : see `document_rows`; policies in order, each with all documents in the order of reading.
    """
    frames = [document_rows(carry_out(reading, policy, num_slots, **arguments), reading, spans) for policy in policies]
    return pd.concat(frames, ignore_index=True)


def fetching_rows(reading: Reading, policies: Sequence[Policy], num_slots: int, spans: Sequence[Span] = ()) -> pd.DataFrame:
    """`rows_of` for policies that fetch every miss, refusing a capacity at which plain LRU hardly evicts.

    Raises
    ------
    TooFewEvictions : fewer than 100 evictions in some layer after the warm-up.
    """
    frames = []
    for policy in policies:
        run = carry_out(reading, policy, num_slots)
        if policy == FETCH_EVERY_MISS:
            check_evictions(run, reading.warmup_tokens)
        frames.append(document_rows(run, reading, spans))
    return pd.concat(frames, ignore_index=True)


def document_rows(run: Run, reading: Reading, spans: Sequence[Span] = ()) -> pd.DataFrame:
    """One row for each scored document of a run.

    Returns
    -------
    DataFrame : policy (its label), num_slots, document ("domain: name"), domain, cluster, domain_before (of the document read before
        it, "" for the first), num_tokens (scored), mean_difference_nats, exact_loss_nats, steps, calls, calls by outcome,
        first_choices_substituted, copies, substituted_mass (mean a step), and for every span (a, b) `nats_a_b` (mean difference of its
        scored tokens; NaN where the document is too short) and `mass_a_b`.
    """
    assert run.loss_nats is not None
    exact = np.concatenate(reading.exact_losses)
    tokens = run.frame().assign(difference=run.loss_nats - exact, exact=exact)
    grouped = tokens.groupby("document")
    rows = grouped[_SUMS].sum()
    rows["num_tokens"] = grouped["difference"].count()
    rows["mean_difference_nats"] = grouped["difference"].mean()
    rows["exact_loss_nats"] = grouped["exact"].mean()
    rows["substituted_mass"] = grouped["substituted_mass"].mean()
    rows["steps"] = grouped.size() * run.shape.num_layers
    rows["calls"] = rows["steps"] * run.shape.top_k
    position = grouped.cumcount()
    for start, stop in spans:
        part = tokens[(position >= start) & (position < stop)].groupby("document")
        rows[f"nats_{span_name((start, stop))}"] = part["difference"].mean()
        rows[f"mass_{span_name((start, stop))}"] = part["substituted_mass"].mean()
    means = [name for name in rows.columns if name.startswith(("mean_", "exact_", "substituted_mass", "nats_", "mass_"))]
    rows[means] = rows[means].round(_DIGITS)
    rows = _named(rows.reset_index(drop=True), reading.documents)
    rows = rows.assign(policy=run.policy.label, num_slots=int(run.num_slots.max()))
    return rows.iloc[reading.num_warmup_documents :].reset_index(drop=True)


def span_name(span: Span) -> str:
    """How columns name a span: `16_48`, and `240_end` for one without an end."""
    return f"{span[0]}_{'end' if span[1] == END else span[1]}"


def _named(rows: pd.DataFrame, documents: Sequence[Any]) -> pd.DataFrame:
    domains = [document.domain for document in documents]
    return rows.assign(
        document=[f"{document.domain}: {document.name}" for document in documents],
        domain=domains,
        domain_before=["", *domains[:-1]],
        cluster=[document.cluster for document in documents],
    )


def moved(rows: pd.DataFrame) -> pd.DataFrame:
    """What each policy moved: `fetches` (waited for) and `copies` (nobody waited) a step, and `moved`, their sum.

    Returns
    -------
    DataFrame indexed by policy, in the order of the rows.
    """
    totals = rows.groupby("policy", sort=False)[["fetched", "forced", "copies", "steps"]].sum()
    fetches, copies = (totals["fetched"] + totals["forced"]) / totals["steps"], totals["copies"] / totals["steps"]
    return pd.DataFrame({"fetches": fetches, "copies": copies, "moved": fetches + copies})


def all_rows(measure: Callable[[str], pd.DataFrame], model_names: Sequence[str]) -> pd.DataFrame:
    """The rows of several models under one another."""
    return pd.concat([measure(name) for name in model_names], ignore_index=True)
