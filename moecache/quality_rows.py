"""Rows of (run, document) that a quality model is fitted to, or asked about.

What a run substituted is read off its decision log and the router's own choices. For an emulated run those are the choices that the
emulated model made, which differ a little from the exact model's: what is substituted in one layer changes what the next ones see. Record
them beside it:

    with recording(model) as recorder:
        run = mc.emulate(model, documents, policy, num_slots)
    rows = quality_rows(run, recorder.trace(documents), exact.loss_nats)

This module knows runs and traces; it fits nothing.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from moecache.quality.sums import LOSS, MASS, cell_columns
from moecache.run import Run
from moecache.substituted_calls import describe_substituted
from moecache.trace import RouterTrace


def quality_rows(run: Run, trace: RouterTrace, exact_loss_nats: np.ndarray | None = None, num_warmup_documents: int = 0) -> pd.DataFrame:
    """Describe what a run substituted in each document, and what it lost.

    Parameters
    ----------
    run : Run
        With its decisions.
    trace : RouterTrace
        What the routers said when those decisions were made.
    exact_loss_nats : ndarray [T], optional
        Token losses of the exact model; without them (or without the run's own) the rows have no loss.
    num_warmup_documents : int
        Documents read first and left out of the rows.

    Returns
    -------
    DataFrame
        One row a document: policy, document (its number), num_tokens, mean_difference_nats, substituted_mass (mean a step),
        ``squared_l{l}_{g}`` (mean a token) and ``log_age_l{l}_{g}``.

    Raises
    ------
    ValueError
        For a run without decisions, a trace of other tokens, or if no document is left.
    """
    if run.decisions is None:
        raise ValueError("only totals were kept; run with keep='log', because what was substituted is read off every decision")
    if trace.num_tokens != run.num_tokens or (trace.document_start != run.document_start).any():
        raise ValueError(f"the trace has {trace.num_tokens} tokens, the run {run.num_tokens}, or their documents differ")
    document = np.cumsum(trace.document_start) - 1
    if num_warmup_documents > document[-1]:
        raise ValueError(f"num_warmup_documents={num_warmup_documents} leaves none of {document[-1] + 1} documents")
    described = describe_substituted(trace.topk_ids, trace.gate_weights, run.decisions.outcome, document)
    has_loss = exact_loss_nats is not None and run.loss_nats is not None
    difference = run.loss_nats - exact_loss_nats if has_loss else np.where(trace.document_start, np.nan, 0.0)  # type: ignore[operator]
    is_scored = ~np.isnan(difference)
    num_tokens = np.bincount(document, is_scored)
    rows = pd.DataFrame({"policy": run.policy.label, "document": np.arange(document[-1] + 1), "num_tokens": num_tokens.astype(np.int64)})
    if has_loss:
        rows[LOSS] = np.bincount(document, np.where(is_scored, difference, 0.0)) / np.maximum(num_tokens, 1)
    rows[MASS] = np.bincount(document, run.decisions.substituted_mass.mean(axis=1, dtype=np.float64)) / np.bincount(document)
    cells = cell_columns(run.shape.num_layers)
    columns = [pd.DataFrame(described[k].reshape(len(rows), -1), columns=[f"{k}_{c}" for c in cells]) for k in ("squared", "log_age")]
    return pd.concat([rows, *columns], axis=1).iloc[num_warmup_documents:].reset_index(drop=True)
