"""Seconds per token: what the chapter on the runtime's speed asks of `runtime_seconds`, and how its answers are kept.

One `Question` is one widened model, measured once on the disk and once over emulated links. Its answer is a few tidy frames that belong
together: the timed blocks of tokens, the reads beside a plain reader, seconds by link and policy, the simulator's prediction for the very
same tokens, the gain against the link's rate, and the formula between and beyond the links that were tried. Other chapters read the same
frames by the same key, so nothing is timed twice.

A gate threshold is given for ten calls a token; a model with other calls keeps the same multiple of the uniform weight.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd

from moecache import results
from moecache.experiments import runtime_curve
from moecache.experiments.chosen_policies import scaled
from moecache.experiments.inputs import reference_inputs
from moecache.experiments.runtime_checkpoint import Geometry, TimedCheckpoint, timed_checkpoint, timed_text
from moecache.experiments.runtime_seconds import DISK, LATENCY_SECONDS, Plan, Timed, timed_on_disk, timed_on_links
from moecache.hardware import Hardware
from moecache.policy import FETCH_EVERY_MISS, PRESETS, Policy
from moecache.reference import held_out_documents
from moecache.reference.loading import model_folder
from moecache.results import Result
from moecache.stores.checkpoint import read_config
from moecache.stores.packed_file import FILE_NAME

FRAMES = ("blocks", "reads", "policies", "predicted", "curve", "formula", "facts")
NUM_RATES = 33  # at which the formula is drawn


@dataclass(frozen=True)
class Question:
    """What is timed.

    Parameters
    ----------
    model_name : reference model that is widened.
    num_layers, hidden_size, expert_width : of the widened model.
    resident_fraction : slots as a share of a layer's experts; at least top-k.
    warm_tokens, measured_tokens : tokens of each policy that do not count, and that do (rounded up to whole blocks).
    gigabytes_per_second : rates of the emulated links.
    """

    model_name: str
    num_layers: int
    hidden_size: int
    expert_width: int
    resident_fraction: float
    warm_tokens: int
    measured_tokens: int
    gigabytes_per_second: tuple[float, ...]

    @property
    def geometry(self) -> Geometry:
        """Of the widened checkpoint."""
        return Geometry(self.model_name, self.num_layers, self.hidden_size, self.expert_width)

    @property
    def links(self) -> dict[str, float]:
        """Bytes per second of the emulated links, by name."""
        return {f"{rate:g} GB/s": 1e9 * rate for rate in self.gigabytes_per_second}

    def plan(self) -> Plan:
        """Slots, blocks and policies; a block has as many tokens as surely fit into the slots."""
        config = read_config(model_folder(self.model_name))
        num_experts, top_k = config.num_experts, config.num_experts_per_tok
        slots = max(int(np.ceil(self.resident_fraction * num_experts)), top_k)
        block_tokens = slots // top_k
        return Plan(slots, self.warm_tokens, max(-(-self.measured_tokens // block_tokens), 2), block_tokens, policies(top_k))

    def parameters(self) -> dict[str, Any]:
        """Everything that the answer depends on, beside model and texts."""
        plan = self.plan()
        return asdict(self) | {"policies": list(plan.policies), "num_slots": plan.num_slots, "latency_seconds": LATENCY_SECONDS}


def policies(top_k: int) -> tuple[Policy, ...]:
    """The presets for a router that calls `top_k` experts, fetching every miss first."""
    return tuple(policy if policy == FETCH_EVERY_MISS else scaled(policy, top_k) for policy in PRESETS)


def answer(question: Question, name: str) -> Result:
    """One of the `FRAMES`, stored or measured now with all the others.

    Raises
    ------
    ValueError : an unknown name.
    MissingResult : only stored results may be shown, and there is none.
    """
    return results.load_or_run(f"09_{name}", question.parameters(), partial(_frame, question, name), inputs=_inputs(question, name))


def kept(question: Question, name: str) -> Result | None:
    """The same frame where it has been measured already, None where it has not; nothing is measured."""
    return results.find(f"09_{name}", question.parameters(), partial(_frame, question, name), inputs=_inputs(question, name))


def _inputs(question: Question, name: str) -> dict[str, str]:
    if name not in FRAMES:
        raise ValueError(f"frame {name!r} is unknown; there are {', '.join(FRAMES)}")
    return reference_inputs(question.model_name)


def _frame(question: Question, name: str) -> pd.DataFrame:
    return measured(question)[name]


@lru_cache(maxsize=2)
def measured(question: Question) -> dict[str, pd.DataFrame]:
    """Time everything: the checkpoint is made where it is missing, then the disk, then the links.

    Returns
    -------
    dict of str to DataFrame
        Each with `model`, `num_slots`. blocks: as `runtime_seconds.Timed`. reads: as there. policies, predicted and curve: as
        `runtime_curve.by_policy`, `predicted` and `curve`, the disk's rows first. formula: `bytes_per_second`, `ratio` = 1 + W / T
        (ESTIMATED from the mean constants of the links' runs), `wait_seconds`, `floor_seconds`. facts: one row, sizes and counts.
    """
    plan = question.plan()
    held_out_documents(1, 500, name=question.model_name, say=lambda _: None)  # texts are built once, silently
    checkpoint = timed_checkpoint(question.geometry, progress=False)
    text = timed_text(plan.num_tokens, question.model_name)
    disk = timed_on_disk(checkpoint.packed, text, plan, progress=False)
    links = timed_on_links(checkpoint.packed, text, question.links, plan, progress=False)
    frames = frames_of(disk, links) | {"facts": facts_of(checkpoint, disk)}
    return {name: frame.assign(model=question.model_name, num_slots=plan.num_slots) for name, frame in frames.items()}


def frames_of(disk: Timed, links: Timed) -> dict[str, pd.DataFrame]:
    """The tidy frames of both measurements, see `measured`."""
    parts = {
        "blocks": [disk.blocks, links.blocks],
        "policies": [runtime_curve.by_policy(disk), runtime_curve.by_policy(links)],
        "predicted": [runtime_curve.predicted(disk), runtime_curve.predicted(links)],
        "curve": [runtime_curve.curve(disk), runtime_curve.curve(links)],
    }
    frames = {name: pd.concat(both, ignore_index=True) for name, both in parts.items()}
    return frames | {"reads": disk.reads, "formula": formula(links)}


def formula(links: Timed) -> pd.DataFrame:
    """1 + W / T at many rates of a link, from below the slowest to above the fastest that was tried.

    W is computed from what fetching every miss waited for, with the constants of the links' own runs (their mean).

    Returns
    -------
    DataFrame : `bytes_per_second`, `ratio`, `wait_seconds`, `floor_seconds`.
    """
    names = list(dict.fromkeys(links.blocks["link"]))
    kept = links.recorded[FETCH_EVERY_MISS.label]
    shape, machines = kept.trace.shape, [runtime_curve.machine(links, name) for name in names]
    assert shape.expert_bytes is not None
    layer = float(np.mean([machine.layer_seconds for machine in machines]))
    expert = float(np.mean([machine.seconds_per_expert(shape.expert_bytes) for machine in machines]))
    floor = shape.num_layers * (layer + shape.top_k * expert)
    rates = [machine.link_bytes_per_second for machine in machines]
    rows = []
    for rate in np.geomspace(min(rates) / 2, max(rates) * 2, NUM_RATES):
        machine = Hardware("formula", float(rate), LATENCY_SECONDS, layer_seconds=layer, expert_seconds=expert)
        wait = runtime_curve.unhidden_wait(kept.decisions, machine, shape.expert_bytes, links.plan.warm_tokens)
        rows.append((float(rate), 1 + wait / floor, wait, floor))
    return pd.DataFrame(rows, columns=["bytes_per_second", "ratio", "wait_seconds", "floor_seconds"])


def facts_of(checkpoint: TimedCheckpoint, timed: Timed) -> pd.DataFrame:
    """One row: sizes of the model and of the measurement."""
    shape, plan = timed.recorded[FETCH_EVERY_MISS.label].trace.shape, timed.plan
    return pd.DataFrame(
        [
            {
                "num_layers": shape.num_layers,
                "num_experts": shape.num_experts,
                "top_k": shape.top_k,
                "expert_bytes": int(shape.expert_bytes or 0),
                "packed_bytes": (checkpoint.packed / FILE_NAME).stat().st_size,
                "warm_tokens": plan.warm_tokens,
                "block_tokens": plan.block_tokens,
                "num_blocks": plan.num_blocks,
                "num_policies": len(plan.policies),
            }
        ]
    )


def on_disk(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the disk."""
    return frame[frame["link"] == DISK].reset_index(drop=True)


def on_links(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the emulated links."""
    return frame[frame["link"] != DISK].reset_index(drop=True)
