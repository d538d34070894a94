"""Composition at equal mass: one heavy call against several light ones of the same step and the same summed weight.

At the chosen steps one pass substitutes the call of a heavy rank, another the light calls that weigh as much. Tokens,
layers and substituted gate mass are the same, so what differs in loss is due to how the mass is made up. Three kinds
of stand-in: the best resident, a random resident, and nobody.

The steps are drawn on the exact model's calls, before any loss is known. Behind an earlier site the running model may
call others, so the realised mass is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from moecache import designs
from moecache.experiments.planned_sites import Block, document_rows, read_block, rounded, stored_blocks
from moecache.intervene import intervene

EXPERIMENT = "06_composition"
HEAVY_RANKS = (1, 0, 2)  # the first is the primary one
STAND_INS = ("best", "random", "drop")
SIDES = ("heavy", "light")


def label_of(rank: int, side: str, stand_in: str) -> str:
    """The name of a cell."""
    return f"rank {rank}, {side}, {stand_in}"


def stored(
    model_names: Sequence[str],
    num_documents: int,
    num_tokens: int,
    num_warmup_documents: int,
    documents_per_block: int,
    resident_fraction: float,
    most_steps_fraction: float,
    gap: int,
    tolerance: float,
    seed: int,
) -> pd.DataFrame:
    """`measure` for all blocks of all models, each stored as it is finished."""
    parameters = {
        "num_tokens": num_tokens,
        "resident_fraction": resident_fraction,
        "most_steps_fraction": most_steps_fraction,
        "gap": gap,
        "tolerance": tolerance,
        "seed": seed,
    }
    return stored_blocks(EXPERIMENT, measure, model_names, num_documents, num_warmup_documents, documents_per_block, parameters)


def measure(
    model_name: str,
    first_document: int,
    num_documents: int,
    num_warmup_documents: int,
    num_tokens: int,
    resident_fraction: float,
    most_steps_fraction: float,
    gap: int,
    tolerance: float,
    seed: int,
) -> pd.DataFrame:
    """All cells of one block on a reference model; the parameters are those of `read_block` and `measure_block`."""
    block = read_block(model_name, first_document, num_documents, num_tokens, num_warmup_documents, resident_fraction)
    return measure_block(block, most_steps_fraction, gap, tolerance, seed=seed + first_document)


def measure_block(
    block: Block,
    most_steps_fraction: float = 0.25,
    gap: int = 3,
    tolerance: float = 0.04,
    *,
    seed: int = 0,
    stand_ins: Sequence[str] = STAND_INS,
) -> pd.DataFrame:
    """All cells of one block.

    Parameters
    ----------
    block : Block
    most_steps_fraction : float
        Sites are at most this share of the steps of each document and layer.
    gap, tolerance : int, float
        Of `designs.match_in_step`.
    seed : int
        Of the draw of steps and of random stand-ins.
    stand_ins : sequence of str

    Returns
    -------
    DataFrame
        One row per (heavy rank, side, stand-in, document), as `document_rows`; besides `rank`, `side`, `stand_in`,
        `num_steps` and `relative_error2` (mean a step; only with the best resident).
    """
    frames = []
    for rank in HEAVY_RANKS:
        sides = dict(zip(SIDES, designs.match_in_step(block.gate_weights, rank, gap, tolerance), strict=True))
        steps = _drawn_steps(block, np.asarray(sides["heavy"].any(axis=2)), most_steps_fraction, seed + 1000 * rank)
        for stand_in in stand_ins:
            for side, calls in sides.items():
                frames.append(_cell(block, calls & steps[..., None], rank, side, stand_in, seed))
    return pd.concat(frames, ignore_index=True)


def _drawn_steps(block: Block, is_matched: np.ndarray, most_steps_fraction: float, seed: int) -> np.ndarray:
    """Steps [T, L] to use: at most this share of those of each document and layer, drawn at random."""
    if not (is_matched & designs.not_last(block.starts)[:, None]).any():
        return np.zeros_like(is_matched)
    longest = max(text.size for text in block.texts)
    return designs.draw_alike([is_matched], block.starts, max(1, round(most_steps_fraction * longest)), seed)[0]


def _cell(block: Block, calls: np.ndarray, rank: int, side: str, stand_in: str, seed: int) -> pd.DataFrame:
    run = intervene(
        block.model,
        block.texts,
        calls,
        block.num_slots,
        stand_in=stand_in,
        before=block.before,
        seed=seed,
        layer_error=stand_in == "best",
    )
    frame = document_rows(
        block,
        run,
        calls.any(axis=2).sum(axis=1),
        policy=label_of(rank, side, stand_in),
        family=f"rank {rank}",
        rank=rank,
        side=side,
        stand_in=stand_in,
    )
    error = run.extra.get("relative_error2")
    bounds = designs.document_bounds(block.starts)
    return frame.assign(
        num_steps=[(stop - start) * block.call_shape[1] for start, stop in bounds],
        relative_error2=[0.0 if error is None else rounded(error[start:stop].mean()) for start, stop in bounds],
    )
