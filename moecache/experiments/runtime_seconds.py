"""Seconds per token of an offloaded model under several policies, measured on this machine's disk and over emulated links.

All policies decode the same held-out text (`runtime_decoding`): a pass that is only recorded, then from a cold start `warm_tokens` tokens
that do not count, then blocks of tokens in turns: A B C, C B A, A B C ... Ratios are made within one such run.

The *bound* that a policy's token is compared with: what a plain reader would need for the bytes that the policy waits for, and then a token
of which everything is resident, nothing overlapped:

    bound = demand bytes a token / plain reader's bytes per second + seconds of an all-hits token.

A runtime that hides reads behind products can be faster than that.

Links are emulated by a `PacedStore` in front of all experts in main memory (pages of the packed file, read beforehand). Such a link is
never faster than copying in main memory is: `late_fraction` says how many of its reads were finished later than the link would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from moecache.experiments.runtime_decoding import Decoder, Recorded, one_thread
from moecache.experiments.runtime_reads import PlainReader, demand_groups
from moecache.policy import FETCH_EVERY_MISS, PRESETS, Policy
from moecache.runtime.slots import free_bytes
from moecache.stores.blocks import Store
from moecache.stores.paced import PacedStore
from moecache.stores.packed_file import FILE_NAME, PackedStore
from moecache.stores.store import RamStore

ALL_HITS = "all hits"
DISK = "disk"
LATENCY_SECONDS = 80e-6
NO_LIMIT = 1e15  # bytes per second
LINKS = {
    "SATA SSD": 0.5e9,
    "slow NVMe": 1.3e9,
    "NVMe, PCIe 3": 3.5e9,
    "NVMe, PCIe 4": 7e9,
    "NVMe, PCIe 5": 12e9,
}


@dataclass(frozen=True)
class Plan:
    """How long is measured: tokens before it, tokens of it, slots a layer, and whose turns they are.

    `policies` begin with fetch-every-miss, which every ratio is against. A block has as many tokens as surely fit into the slots.
    """

    num_slots: int = 128
    warm_tokens: int = 120
    num_blocks: int = 15
    block_tokens: int = 12
    policies: tuple[Policy, ...] = PRESETS

    def __post_init__(self) -> None:
        if self.policies[0] != FETCH_EVERY_MISS:
            raise ValueError(f"policies must begin with {FETCH_EVERY_MISS.label!r}, got {self.policies[0].label!r}")
        if self.num_blocks < 2 or self.warm_tokens < 1:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 2 and warm_tokens={self.warm_tokens} at least 1")

    @property
    def num_tokens(self) -> int:
        """Of the text that is read."""
        return self.warm_tokens + self.num_blocks * self.block_tokens


@dataclass(frozen=True, eq=False)
class Timed:
    """What was measured.

    Attributes
    ----------
    blocks : DataFrame, one row a block of tokens and policy, and one for fetch-every-miss's block decoded again (policy "all hits"):
        link, link_bytes_per_second (NaN on the disk), late_fraction (of the link's reads, NaN on the disk), policy, block, then the numbers
        of `Decoder.read`.
    reads : DataFrame, one row a block of tokens on the disk, see `compared_reads`: block, num_groups, num_bytes, fetch_seconds,
        plain_seconds, is_plain_first. Empty for links.
    recorded : by policy, what was said and decided over all `plan.num_tokens` tokens.
    plan : Plan.
    sustained_bytes_per_second : of the plain reader reading all those blocks once more without a rest; NaN for links.
    """

    blocks: pd.DataFrame
    reads: pd.DataFrame
    recorded: Mapping[str, Recorded]
    plan: Plan
    sustained_bytes_per_second: float = float("nan")


def timed_on_disk(packed: Path, text: np.ndarray, plan: Plan = Plan(), progress: bool = True) -> Timed:
    """Measure every policy with experts read from the packed file, and the plain reader beside fetch-every-miss.

    Parameters
    ----------
    packed : folder of the packed checkpoint; checksums are not compared.
    text : at least `plan.num_tokens` token ids.
    plan, progress : how long; show a bar.
    """
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        store = stack.enter_context(closing(PackedStore(packed, check="never")))
        plain = stack.enter_context(closing(PlainReader(packed, store.is_direct)))
        decoders = _decoders(packed, store, text, plan, stack)
        bar = stack.enter_context(tqdm(total=len(decoders) * (2 + plan.num_blocks), desc="decoding from the disk", disable=not progress))
        recorded = _recorded(decoders, plan, bar)
        _warm(decoders, plan, bar)
        log, first = recorded[FETCH_EVERY_MISS.label].decisions, plan.warm_tokens
        rows, reads, rest = [], [], 0.0
        for block in range(plan.num_blocks):
            groups = demand_groups(log, first, first := first + plan.block_tokens)
            is_plain_first = block % 2 == 1
            before = plain.read(groups, rest) if is_plain_first else None
            for row in _turn(decoders[:1], block, plan, bar):
                rows.append(row)
            rest = rows[-1]["seconds"] / plan.block_tokens / store.num_layers
            num_bytes, seconds = before or plain.read(groups, rest)
            read = {"num_groups": len(groups), "num_bytes": num_bytes, "fetch_seconds": rows[-2]["fetch_seconds"], "plain_seconds": seconds}
            reads.append({"block": block, **read, "is_plain_first": is_plain_first})
            rows += _turn(decoders[1:], block, plan, bar)
        total, took = plain.read(demand_groups(log, plan.warm_tokens))
    blocks = pd.DataFrame(rows)
    for column, value in {"late_fraction": np.nan, "link_bytes_per_second": np.nan, "link": DISK}.items():
        blocks.insert(0, column, value)
    return Timed(blocks, pd.DataFrame(reads), recorded, plan, total / took)


def timed_on_links(
    packed: Path,
    text: np.ndarray,
    links: Mapping[str, float],
    plan: Plan = Plan(),
    progress: bool = True,
) -> Timed:
    """Measure every policy over emulated links, one after the other, each on the same tokens from the same cold start.

    Parameters
    ----------
    packed : folder of the packed checkpoint; all experts are read into main memory first.
    text : at least `plan.num_tokens` token ids.
    links : bytes per second by name; their latency is `LATENCY_SECONDS`.
    plan, progress : how long; show a bar.
    """
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        link = stack.enter_context(closing(PacedStore(_in_main_memory(packed, plan, progress), 0.0, NO_LIMIT)))
        decoders = _decoders(packed, link, text, plan, stack)
        total = len(decoders) * (1 + len(links) * (1 + plan.num_blocks))
        bar = stack.enter_context(tqdm(total=total, desc="decoding over links", disable=not progress))
        recorded = _recorded(decoders, plan, bar)
        frames = []
        for name, bytes_per_second in links.items():
            _warm(decoders, plan, bar)
            with _paced(link, bytes_per_second):
                late, reads = link.num_late, link.counters.num_reads
                blocks = pd.DataFrame([row for block in range(plan.num_blocks) for row in _turn(decoders, block, plan, bar)])
                late_fraction = (link.num_late - late) / max(link.counters.num_reads - reads, 1)
            for column, value in {"late_fraction": late_fraction, "link_bytes_per_second": bytes_per_second, "link": name}.items():
                blocks.insert(0, column, value)
            frames.append(blocks)
    return Timed(pd.concat(frames, ignore_index=True), pd.DataFrame(), recorded, plan)


def _in_main_memory(packed: Path, plan: Plan, progress: bool) -> RamStore:
    """All experts as pages of the packed file that have been read: in main memory, yet the system may drop them where it runs short."""
    with closing(PackedStore(packed, check="never")) as disk:
        header, layout = disk.header, disk.layout
    shape = (header.num_layers, header.num_experts, layout.block_bytes)
    needed, free = prod(shape) + len(plan.policies) * plan.num_slots * header.num_layers * layout.block_bytes, free_bytes("cpu")
    if free is not None and needed > free:
        raise ValueError(f"all experts and the slots need {needed} bytes of main memory, {free} are free; measure fewer policies at a time")
    blocks = np.memmap(packed / FILE_NAME, np.uint8, "r", header.offset(0, 0), shape)
    for block in tqdm(blocks.reshape(-1, layout.block_bytes), desc="reading experts", disable=not progress):
        block.max()
    return RamStore(layout, blocks)


@contextmanager
def _paced(link: PacedStore, bytes_per_second: float) -> Iterator[None]:
    link.latency_seconds, link.bytes_per_second = LATENCY_SECONDS, bytes_per_second
    try:
        yield
    finally:
        link.latency_seconds, link.bytes_per_second = 0.0, NO_LIMIT


def _decoders(packed: Path, store: Store, text: np.ndarray, plan: Plan, stack: ExitStack) -> list[Decoder]:
    if len(text) < plan.num_tokens:
        raise ValueError(f"the text has {len(text)} tokens, the plan reads {plan.num_tokens}; give a longer one or measure fewer blocks")
    return [stack.enter_context(closing(Decoder(packed, store, policy, plan.num_slots, text))) for policy in plan.policies]


def _recorded(decoders: Sequence[Decoder], plan: Plan, bar: tqdm) -> dict[str, Recorded]:
    recorded = {}
    for decoder in decoders:
        recorded[decoder.policy.label] = decoder.record(plan.num_tokens)
        bar.update()
    return recorded


def _warm(decoders: Sequence[Decoder], plan: Plan, bar: tqdm) -> None:
    for decoder in decoders:
        decoder.rewind()
        decoder.read(plan.warm_tokens)
        decoder.rest()
        bar.update()


def _turn(decoders: Sequence[Decoder], block: int, plan: Plan, bar: tqdm) -> list[dict[str, Any]]:
    """One block of tokens of every decoder, in turning order."""
    rows: list[dict[str, Any]] = []
    for decoder in decoders if block % 2 == 0 else decoders[::-1]:
        is_fetching = decoder.policy == FETCH_EVERY_MISS
        rows.append({"policy": decoder.policy.label, "block": block, **decoder.read(plan.block_tokens, will_repeat=is_fetching)})
        decoder.rest()
        if is_fetching:
            rows.append({"policy": ALL_HITS, "block": block, **decoder.read_again()})
        bar.update()
    return rows
