"""What each policy substituted in each document and what that cost: the rows that chapters relate to one another.

A row is one (policy, document). It pairs the policy's token losses with the exact model's, and holds beside them what
might explain the difference: calls by outcome, substituted gate mass, squared gate weights and ages by layer and rank
group (`moecache.substituted_calls`), and the relative layer error where it was asked for.

The policies are given: `measure` runs them on a model and documents, `stored_rows` keeps them one group of policies a
file, so that a run that was cut loses one group. Chapters with other policies use the same functions under another
experiment's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from moecache import hf_internals, results
from moecache.emulate import emulate
from moecache.experiments import inputs
from moecache.families import model_shape, routing_of
from moecache.hf_internals import RouterOutput
from moecache.policy import FETCH_EVERY_MISS, Policy
from moecache.record import Recorder
from moecache.reference import held_out_documents, load_model
from moecache.run import Run
from moecache.substituted_calls import RANK_GROUPS, describe_substituted

PolicyGroups = Mapping[str, Sequence[tuple[str, Policy]]]
_SUMS = ["hits", "fetched", "forced", "substituted", "dropped", "first_choices_substituted", "copies", "evictions"]
_MEANS = {
    "mean_difference_nats": "difference",
    "exact_loss_nats": "exact",
    "substituted_mass": "substituted_mass",
    "relative_error2": "relative_error2",
}
_NO_SCORES = np.zeros((0, 0), np.float16)
SIGNIFICANT_DIGITS = 6


def stored_rows(
    experiment: str,
    model_name: str,
    num_slots: int,
    groups: PolicyGroups,
    num_documents: int,
    num_tokens: int,
    num_warmup_documents: int = 8,
    regime: str = "stays_out",
    layer_error: bool = True,
) -> pd.DataFrame:
    """Rows of all groups of policies on a reference model and its held-out documents, stored one group a file.

    Parameters
    ----------
    experiment : str
        Name in the store, starting with the chapter's number.
    model_name : str
        A reference model.
    num_slots : int
        Slots a layer.
    groups : mapping of str to sequence of (family, Policy)
        By the group's name; policies need labels that differ within a group.
    num_documents, num_tokens, num_warmup_documents : int
        The first held-out documents; the first `num_warmup_documents` of them are read and not scored.
    regime : str
        Goes into the rows; "stays_out" unless the policies admit what they substitute.
    layer_error : bool
        As for `measure`.

    Returns
    -------
    DataFrame
        As `measure`, all groups together.
    """
    frames = []
    for name, policies in groups.items():
        parameters = {
            "model": model_name,
            "num_slots": num_slots,
            "group": name,
            "policies": [[family, policy.label, policy] for family, policy in policies],
            "num_documents": num_documents,
            "num_tokens": num_tokens,
            "num_warmup_documents": num_warmup_documents,
            "regime": regime,
            **({} if layer_error else {"layer_error": False}),
        }

        def run(policies: Sequence[tuple[str, Policy]] = policies) -> pd.DataFrame:
            model, documents, exact = _reading(model_name, num_documents, num_tokens)
            rows = measure(
                model,
                documents,
                policies,
                num_slots,
                num_warmup_documents=num_warmup_documents,
                exact_losses=exact,
                layer_error=layer_error,
            )
            return rows.assign(model=model_name, regime=regime)

        frames.append(results.load_or_run(experiment, parameters, run, inputs=inputs.reference_inputs(model_name)).frame)
    return pd.concat(frames, ignore_index=True)


@lru_cache(maxsize=1)
def _reading(model_name: str, num_documents: int, num_tokens: int) -> tuple[Any, list[Any], np.ndarray]:
    """A reference model, documents, and the exact token losses; kept, because several groups of policies read the same."""
    model = load_model(model_name)
    documents = held_out_documents(num_documents=num_documents, num_tokens=num_tokens, name=model_name)
    return model, documents, exact_losses_of(model, documents)


def exact_losses_of(model: Any, documents: Sequence[Any]) -> np.ndarray:
    """Token losses [T] in nats when every miss is waited for (then the number of slots changes nothing)."""
    texts = [np.asarray(document.tokens) for document in documents]
    run = emulate(model, texts, FETCH_EVERY_MISS, model_shape(model).num_experts)
    assert run.loss_nats is not None
    return run.loss_nats


def measure(
    model: Any,
    documents: Sequence[Any],
    policies: Sequence[tuple[str, Policy]],
    num_slots: int,
    *,
    num_warmup_documents: int = 8,
    layer_error: bool = True,
    exact_losses: np.ndarray | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Emulate each policy on the documents and describe every (policy, document).

    Parameters
    ----------
    model : a causal language model of an understood family, in evaluation mode.
    documents : objects with `tokens` (int [n]), `domain`, `cluster` and `name`, in the order they are read.
    policies : sequence of (family, Policy)
        Labels must differ.
    num_slots : int
        Slots a layer.
    num_warmup_documents : int
        Documents read first, by every policy, and left out of the rows.
    layer_error : bool
        Also measure the relative layer error (about a third more time).
    exact_losses : ndarray [T], optional
        Of the same documents (`exact_losses_of`); measured here when absent.
    progress : bool
        Show a bar for each policy.

    Returns
    -------
    DataFrame
        One row per (policy, scored document): num_slots, policy, family, document, domain, cluster, num_tokens (scored),
        mean_difference_nats, exact_loss_nats, steps, calls, calls by outcome, first_choices_substituted, copies,
        evictions, substituted_mass (mean a step), relative_error2 (mean a step), squared_weights (sum of squared gate
        weights of substituted calls, mean a step), and for every layer l and rank group g `squared_l{l}_{g}` (mean a
        token of that layer), `age_l{l}_{g}` (tokens) and `log_age_l{l}_{g}`.

    Raises
    ------
    ValueError
        If no document is left to score, or two policies share a label.
    """
    if num_warmup_documents >= len(documents):
        raise ValueError(f"num_warmup_documents={num_warmup_documents} leaves none of {len(documents)} documents to score")
    labels = [policy.label for _, policy in policies]
    if len(set(labels)) < len(labels):
        raise ValueError(f"policies need different labels, got {sorted(labels)}")
    exact = exact_losses_of(model, documents) if exact_losses is None else exact_losses
    texts = [np.asarray(document.tokens) for document in documents]
    frames = []
    for family, policy in policies:
        calls = _Calls(model)
        with hf_internals.watched(calls.layers, calls.listen):
            run = emulate(model, texts, policy, num_slots, layer_error=layer_error, progress=progress)
        rows = _document_rows(run, exact, *calls.arrays(), documents)
        frames.append(rows.assign(num_slots=num_slots, policy=policy.label, family=family))
    rows = pd.concat(frames, ignore_index=True)
    return rows[rows["document_index"] >= num_warmup_documents].drop(columns="document_index").reset_index(drop=True)


def _document_rows(run: Run, exact: np.ndarray, topk_ids: np.ndarray, gate_weights: np.ndarray, documents: Sequence[Any]) -> pd.DataFrame:
    """One row a document of one run."""
    assert run.decisions is not None
    frame = run.frame()
    frame["difference"], frame["exact"] = frame["loss_nats"] - exact, exact
    grouped = frame.groupby("document")
    rows = grouped[_SUMS].sum().assign(num_tokens=grouped["difference"].count(), steps=grouped.size() * run.shape.num_layers)
    means = dict(_MEANS) if "relative_error2" in frame else {k: v for k, v in _MEANS.items() if k != "relative_error2"}
    rows = rows.assign(calls=rows["steps"] * run.shape.top_k, **{name: grouped[column].mean() for name, column in means.items()})
    described = describe_substituted(topk_ids, gate_weights, run.decisions.outcome, frame["document"].to_numpy())
    rows["squared_weights"] = described["squared"].sum(axis=2).mean(axis=1)
    rows = pd.concat([rows, *(_by_cell(name, values) for name, values in described.items())], axis=1)
    facts = {name: [getattr(document, name) for document in documents] for name in ("domain", "cluster")}
    rows = rows.reset_index(names="document_index").assign(document=[document.name for document in documents], **facts)
    return _rounded(rows)


def _by_cell(name: str, values: np.ndarray) -> pd.DataFrame:
    """Columns `name_l{layer}_{group}` from values [D, L, G]."""
    columns = {f"{name}_l{layer}_{group}": values[:, layer, g] for layer in range(values.shape[1]) for g, group in enumerate(RANK_GROUPS)}
    return pd.DataFrame(columns)


def _rounded(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with descriptions at a few significant digits, so that a stored file stays small; losses keep theirs."""
    described = [c for c in rows.columns if c.startswith(("squared_", "age_", "log_age_"))]
    return rows.assign(**{c: [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in rows[c]] for c in described})


class _Calls(Recorder):
    """Keeps who was called and with which gate weight, without the scores, which would fill the memory."""

    def listen(self, layer: int, output: RouterOutput) -> None:
        """Keep one router's choice; it is not replaced."""
        self.blocks[layer].append(replace(routing_of(self.family, output), selection_scores=_NO_SCORES))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and gate weights [T, L, K], in rank order."""
        return self._stack("topk_ids"), self._stack("gate_weights")
