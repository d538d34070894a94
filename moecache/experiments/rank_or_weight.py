"""Rank or weight: four ways to ask what makes a substituted call cost what it costs.

- *Crossed injection*: at the same random tokens, q (f_s - f_r) is added to the output of every layer, for six ranks r and three
  weights q. Who is replaced and with how much weight are set apart from each other.
- *Bands*: calls of neighbouring ranks and nearly the same weight, substituted as they are.
- *Missed calls and hits* of the same rank and weight.
- *Single calls*, far enough apart to give each its own loss.

Beside every loss stands the relative layer error e/h of its sites: how far the layer's output was moved, over the length
of the residual stream. All sites are drawn on the exact model's calls, before any loss is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moecache import designs
from moecache.experiments.planned_sites import Block, document_rows, read_block, rounded, stored_blocks
from moecache.intervene import inject, intervene
from moecache.kernel import Outcome
from moecache.run import Run

WEIGHTS = (0.5, 1.0, 2.0)  # of injected differences, in multiples of 1/K
POWERS = (1, 2, 3, 4)  # of e/h, summed over the sites of a document and layer
BANDS = {"heaviest": (1.6, 2.4), "heavy": (1.2, 1.6), "medium": (0.9, 1.15), "light": (0.65, 0.8)}  # in multiples of 1/K
NEVER_CALLED = -1.0


def crossed_ranks(top_k: int) -> list[int]:
    """The ranks 0, 1, 2, two between and the last, for a router that calls `top_k` experts: 0, 1, 2, 4, 6, 9 of 10."""
    last = top_k - 1
    return sorted({0, 1, 2, round(0.44 * last), round(0.67 * last), last} & set(range(top_k)))


def ranks_of_bands(top_k: int) -> dict[str, list[int]]:
    """Which ranks are compared in each band of weight."""
    ranks = crossed_ranks(top_k)
    return {"heaviest": ranks[:2], "heavy": ranks[:3], "medium": ranks[1:4], "light": ranks[3:]}


def measure_crossed(block: Block, seed: int, site_fraction: float) -> pd.DataFrame:
    """Rows of the crossed injection: as `document_rows`, with rank, multiple (of 1/K) and powers of e/h summed by layer.

    Parameters
    ----------
    block : Block
    seed : int
    site_fraction : float
        Share of the tokens at which something is added, at all layers.
    """
    top_k, frames = block.call_shape[2], []
    tokens = designs.random_tokens(block.starts, site_fraction, seed)
    sites = np.broadcast_to(tokens[:, None], block.call_shape[:2])
    for rank in crossed_ranks(top_k):
        for multiple in WEIGHTS:
            run = inject(block.model, block.texts, sites, rank, multiple / top_k, block.num_slots, before=block.before, layer_error=True)
            label = f"rank {rank}, {multiple:g}/K"
            is_site = run.extra["injected_rank"] >= 0
            frame = document_rows(block, run, is_site.sum(axis=1), policy=label, family="injected", rank=rank, multiple=multiple)
            frames.append(pd.concat([frame, _error_sums(block, run)], axis=1))
    return pd.concat(frames, ignore_index=True)


def _error_sums(block: Block, run: Run) -> pd.DataFrame:
    """Sums of (e/h)^p over each document's sites, one column a power and layer."""
    error = np.sqrt(run.extra["relative_error2_by_layer"].astype(np.float64))
    bounds = designs.document_bounds(block.starts)
    return pd.DataFrame(
        {
            f"error{power}_layer{layer}": [rounded((error[start:stop, layer] ** power).sum()) for start, stop in bounds]
            for layer in range(error.shape[1])
            for power in POWERS
        }
    )


def measure_bands(block: Block, seed: int, most_sites: int) -> pd.DataFrame:
    """Rows of calls substituted within bands of weight, drawn among misses; `rank`, `band` and their mean gate weight beside.

    Parameters
    ----------
    block : Block
    seed : int
    most_sites : int
        Of each rank, in one document and layer.
    """
    assert block.exact.decisions is not None
    top_k, frames = block.call_shape[2], []
    is_miss = block.exact.decisions.outcome != Outcome.HIT
    for band, ranks in ranks_of_bands(top_k).items():
        low, high = (bound / top_k for bound in BANDS[band])
        eligible = {rank: designs.in_band(block.gate_weights, rank, low, high) & is_miss for rank in ranks}
        enough = {rank: marks for rank, marks in eligible.items() if marks.sum() >= len(block.texts)}
        if len(enough) >= 2:
            drawn = designs.draw_alike(list(enough.values()), block.starts, most_sites, seed)
            for rank, calls in zip(enough, drawn, strict=True):
                frames.append(_substituted(block, calls, rank, seed, policy=f"{band}, rank {rank}", family=band))
    return pd.concat(frames, ignore_index=True)


def measure_missed(block: Block, seed: int, most_sites: int) -> pd.DataFrame:
    """Rows of missed calls and of hits of the same rank and weight (within 10 %); the parameters are those of `measure_bands`."""
    assert block.exact.decisions is not None
    is_miss, frames = block.exact.decisions.outcome != Outcome.HIT, []
    ranks = crossed_ranks(block.call_shape[2])
    for rank in (ranks[0], ranks[2], ranks[3]):
        is_rank = designs.of_ranks(block.gate_weights, rank)
        pair = designs.pair_by_weight(is_rank & is_miss, is_rank & ~is_miss, block.gate_weights, block.starts, most_sites, seed=seed)
        for kind, calls in zip(("missed", "hit"), pair, strict=True):
            frames.append(_substituted(block, calls, rank, seed, policy=f"{kind}, rank {rank}", family=kind))
    return pd.concat(frames, ignore_index=True)


def _substituted(block: Block, calls: np.ndarray, rank: int, seed: int, **facts: Any) -> pd.DataFrame:
    """Rows of one pass in which these calls are substituted."""
    run = intervene(block.model, block.texts, calls, block.num_slots, before=block.before, seed=seed, layer_error=True)
    frame = document_rows(block, run, calls.sum(axis=(1, 2)), **facts, rank=rank)
    error2, weights = run.extra["relative_error2_by_layer"], np.where(calls, run.extra["gate_weights"], 0.0)
    bounds = designs.document_bounds(block.starts)
    return frame.assign(
        gate_weight_sum=[rounded(weights[start:stop].sum()) for start, stop in bounds],
        relative_error2_sum=[rounded(error2[start:stop].sum()) for start, stop in bounds],
    )


def measure_single(block: Block, seed: int, spacing: int, num_passes: int) -> pd.DataFrame:
    """One row a substituted call, with the loss of its own token and of the `spacing` tokens from there on.

    Parameters
    ----------
    block : Block
    seed : int
    spacing : int
        Tokens from one site to the next.
    num_passes : int
        Passes over the documents, each with its own sites.

    Returns
    -------
    DataFrame : model, num_slots, cluster, layer, rank, gate_weight, age (-1: never called before), is_miss,
        relative_error (e/h), loss_nats (summed over the window), own_token_loss_nats.
    """
    ranks = [0, 0, *range(block.call_shape[2])]
    frames = []
    for place in range(num_passes):
        calls = designs.spaced_calls(block.starts, block.call_shape, spacing, ranks, seed + place)
        run = intervene(block.model, block.texts, calls, block.num_slots, before=block.before, layer_error=True)
        frames.append(_site_rows(block, run, calls, spacing))
    return pd.concat(frames, ignore_index=True)


def _site_rows(block: Block, run: Run, calls: np.ndarray, spacing: int) -> pd.DataFrame:
    assert run.loss_nats is not None
    assert block.exact.loss_nats is not None
    assert block.exact.decisions is not None
    token, layer, rank = np.nonzero(calls)
    change = np.nan_to_num(run.loss_nats - block.exact.loss_nats)
    total = np.concatenate([[0.0], np.cumsum(change)])
    age = block.exact.extra["ages"][token, layer, rank]
    document = np.cumsum(block.starts)[token] - 1
    columns: dict[str, Any] = {
        "gate_weight": run.extra["gate_weights"][token, layer, rank],
        "relative_error": np.sqrt(run.extra["relative_error2_by_layer"][token, layer]),
        "loss_nats": total[token + 1 + spacing] - total[token + 1],
        "own_token_loss_nats": change[token + 1],
    }
    facts: dict[str, Any] = {
        "model": block.model_name,
        "num_slots": block.num_slots,
        "cluster": [block.documents[place].cluster for place in document],
        "layer": layer,
        "rank": rank,
        "age": np.where(np.isinf(age), NEVER_CALLED, age).astype(np.int64),
        "is_miss": block.exact.decisions.outcome[token, layer, rank] != Outcome.HIT,
    }
    return pd.DataFrame(facts | {name: [rounded(value) for value in values] for name, values in columns.items()})


PARTS: Mapping[str, Callable[..., pd.DataFrame]] = {
    "crossed": measure_crossed,
    "bands": measure_bands,
    "missed": measure_missed,
    "single": measure_single,
}


def stored(
    part: str,
    model_names: Sequence[str],
    num_documents: int,
    num_warmup_documents: int,
    documents_per_block: int,
    num_tokens: int,
    resident_fraction: float,
    seed: int,
    **design: Any,
) -> pd.DataFrame:
    """One part of the chapter for all blocks of all models, each block stored as it is finished.

    Parameters
    ----------
    part : {"crossed", "bands", "missed", "single"}
    model_names, num_documents, num_warmup_documents, documents_per_block
        As for `planned_sites.stored_blocks`.
    num_tokens, resident_fraction, seed
        As for `planned_sites.read_block`, and of every draw.
    **design
        What the part's own function takes.
    """
    parameters = {"part": part, "num_tokens": num_tokens, "resident_fraction": resident_fraction, "seed": seed, **design}
    experiment = f"07_rank_or_weight_{part}"
    return stored_blocks(experiment, measure, model_names, num_documents, num_warmup_documents, documents_per_block, parameters)


def measure(
    part: str,
    model_name: str,
    first_document: int,
    num_documents: int,
    num_warmup_documents: int,
    num_tokens: int,
    resident_fraction: float,
    seed: int,
    **design: Any,
) -> pd.DataFrame:
    """One part on one block of a reference model."""
    block = read_block(model_name, first_document, num_documents, num_tokens, num_warmup_documents, resident_fraction)
    return PARTS[part](block, seed + first_document, **design)
