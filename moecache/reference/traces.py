"""Traces of the reference models on held-out documents: what is committed in `data/traces`, and longer ones.

A trace's header says what it was recorded from: the model's name and the hash of its weights, the version of the texts,
and of every document its name, domain and cluster. This module knows the reference models; what a trace is stands in
`moecache.trace`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moecache.reference.held_out import held_out_documents
from moecache.reference.loading import load_model, model_folder
from moecache.reference.packages import sha256_of
from moecache.reference.texts import load_manifest

if TYPE_CHECKING:
    from moecache.trace import RouterTrace


def record_held_out(
    name: str = "reference-512",
    num_documents: int = 35,
    num_best: int | None = None,
    directory: Path | str | None = None,
    num_tokens: int = 1000,
) -> RouterTrace:
    """Record what a reference model's routers say about the first held-out documents.

    Parameters
    ----------
    name, directory : which model (see `loading.load_model`).
    num_documents : how many documents; the domains take turns.
    num_best : None records every expert's selection score; M only the best M of each step (a compact trace).
    num_tokens : tokens of each document.

    Returns
    -------
    RouterTrace : with the documents' `name`, `domain` and `cluster` under `source["documents"]`, the hash of the weights under
        `source["weights_sha256"]` and the version of the texts under `source["texts_version"]`.
    """
    from moecache.record import record

    documents = held_out_documents(num_documents, num_tokens, name=name, directory=directory)
    source = {
        "documents": {key: [getattr(d, key) for d in documents] for key in ("name", "domain", "cluster")},
        "reference_model": name,
        "weights_sha256": sha256_of(model_folder(name, directory) / "model.safetensors"),
        "texts_version": load_manifest()["texts_version"],
    }
    trace = record(load_model(name, directory), [d.tokens for d in documents], source=source)
    return trace if num_best is None else trace.compact(num_best)
