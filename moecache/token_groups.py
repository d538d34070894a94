"""Tokens put into groups: by document and domain, cold and warm, and by how far they are from the last change of topic.

A policy's loss is compared between documents, not tokens, and a cache that has just started or has just met another topic is another
case than one that has settled. The columns made here are added to `run.frame()`; nothing is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

CHANGE_BINS = (0, 16, 48, 112, 240)  # tokens since the change: where each bin starts; the last is open
_NOT_MEANS = ("token", "document", "is_cold", "domain", "tokens_since_change")


def with_groups(frame: pd.DataFrame, domains: Sequence[Any], cold_tokens: int = 512) -> pd.DataFrame:
    """A token frame with its groups as columns.

    Parameters
    ----------
    frame : DataFrame [T]
        Of `run.frame()`, of a run that keeps its cache across documents.
    domains : sequence
        The domain of each document, in order.
    cold_tokens : int
        Tokens after the start of the run that count as cold.

    Returns
    -------
    DataFrame [T]
        With `domain`, `is_cold`, and `tokens_since_change` (float): how many tokens lie between this one and the first of a document of
        another domain than the one before; NaN until the first such change.

    Raises
    ------
    ValueError
        If the domains are not one a document.
    """
    documents = frame["document"].to_numpy()
    num_documents = int(documents.max()) + 1
    if len(domains) != num_documents:
        raise ValueError(f"domains names {len(domains)} documents, but the frame has {num_documents}; give one domain a document, in order")
    names = np.asarray(domains, dtype=object)
    has_changed = np.concatenate([[False], names[1:] != names[:-1]])
    is_start = np.concatenate([[True], documents[1:] != documents[:-1]])
    changes = np.flatnonzero(is_start & has_changed[documents])
    position = np.arange(len(frame))
    last = np.searchsorted(changes, position, side="right") - 1
    since = np.where(last >= 0, position - changes[np.maximum(last, 0)] if changes.size else 0, np.nan)
    return frame.assign(domain=names[documents], is_cold=position < cold_tokens, tokens_since_change=since)


def change_bins(tokens_since_change: Any, starts: Sequence[int] = CHANGE_BINS) -> pd.Categorical:
    """Which bin of distance from the last change of topic each token lies in: "0-16", "16-48" .. "240+"; missing before any change."""
    labels = [f"{low}-{high}" for low, high in pairwise(starts)] + [f"{starts[-1]}+"]
    return pd.Categorical(pd.cut(np.asarray(tokens_since_change, float), [*starts, np.inf], right=False, labels=labels))


def document_frame(frame: pd.DataFrame, is_warm_only: bool = False) -> pd.DataFrame:
    """One row a document: the means over its tokens of every number, and `tokens`, how many they are.

    Parameters
    ----------
    frame : DataFrame [T]
        As `with_groups` gives it, or any token frame.
    is_warm_only : bool
        Leave out cold tokens (and documents that have no others).
    """
    kept = frame[~frame["is_cold"]] if is_warm_only else frame
    groups = kept.groupby("document", sort=True)
    numbers = [name for name in kept.columns if name not in _NOT_MEANS and pd.api.types.is_numeric_dtype(kept[name])]
    means = groups[numbers].mean()
    means.insert(0, "tokens", groups.size())
    if "domain" in kept:
        means.insert(0, "domain", groups["domain"].first())
    return means.reset_index()


def domain_frame(frame: pd.DataFrame, is_warm_only: bool = False) -> pd.DataFrame:
    """One row a domain: the means over its documents' means, every document counting alike, and `documents`, how many they are."""
    documents = document_frame(frame, is_warm_only)
    groups = documents.groupby("domain", sort=True)
    means = groups[[name for name in documents.columns if name not in ("document", "domain", "tokens")]].mean()
    means.insert(0, "documents", groups.size())
    return means.reset_index()
