"""Decoding a given text in blocks of tokens, timed: the loop in which every figure of speed is measured.

Several decoders take turns, one block of tokens each, so that what the machine does meanwhile meets all of them. Every decoder has a model,
slots and threads of its own, and only one of them works at a time: before the next begins, background copies are let end (`rest`).

*A token of which everything is resident* is measured in the same loop and the same slots: a block that was decoded under fetch-every-miss
is decoded once more from the state it began with. Its calls are the same, and the slots hold the experts called last, so all of them hit,
as long as the block's calls fit into the slots (tokens x top-k <= slots). Nothing else changes: contents and order of the slots are
afterwards what they were. So the difference of both readings is what waiting costs, token by token.

Nothing here knows links, policies' names or what is concluded from the seconds.
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moecache import hf_internals
from moecache.cache import ExpertCache, slots_per_layer
from moecache.families import model_shape
from moecache.policy import Policy
from moecache.reference.loading import quiet_library
from moecache.runtime.engine import Runtime
from moecache.runtime.loading import load_dense
from moecache.runtime.transfer import NUM_READERS, Ticket, Transfer
from moecache.stores.blocks import Store
from moecache.trace import DecisionLog, RouterTrace

REST_SECONDS = 0.01
CALLS = ("hit", "fetched", "forced", "substituted")
COUNTED = ("bytes_demand", "bytes_background", "num_stalls", "num_late")
SECONDS = ("seconds_routing", "seconds_overhead", "seconds_waiting", "seconds_experts", "seconds_dense")


class TimedTransfer(Transfer):
    """Notes for every demand read when it was asked for and when its last byte was there. Set `token` before each token."""

    def __init__(self, store: Store, num_readers: int = NUM_READERS) -> None:
        super().__init__(store, num_readers)
        self.token = -1
        self._asked: list[tuple[int, float, Ticket]] = []
        self._ended: dict[Ticket, float] = {}

    def fetch(self, layer: int, expert: int, block: Tensor) -> Ticket:
        """See `Transfer.fetch`."""
        start = perf_counter()
        ticket = super().fetch(layer, expert, block)
        self._asked.append((self.token, start, ticket))
        return ticket

    def _move(self, ticket: Ticket, first_byte: int, num_bytes: int) -> None:
        super()._move(ticket, first_byte, num_bytes)
        if not ticket.is_background:
            self._ended[ticket] = perf_counter()

    def taken_groups(self) -> list[tuple[int, float]]:
        """(bytes, seconds from the first asking to the last byte) of each step's demand reads since the last call; all must have ended."""
        groups: dict[tuple[int, int], list[Any]] = {}
        for token, start, ticket in self._asked:
            group = groups.setdefault((token, ticket.layer), [0, start, start])
            group[0] += ticket.num_bytes
            group[2] = max(group[2], self._ended[ticket])
        self._asked, self._ended = [], {}
        return [(num_bytes, end - start) for num_bytes, start, end in groups.values()]


@dataclass(frozen=True)
class Recorded:
    """What one policy's routers said, and what was decided, over the whole text: [T] tokens from a cold start."""

    trace: RouterTrace
    decisions: DecisionLog


class Decoder:
    """A model that decodes one text under one policy.

    Parameters
    ----------
    folder : a packed checkpoint; its experts are read from `store`.
    store : where experts come from; it stays open.
    policy, num_slots : as for `moecache.offload`.
    text : [T] token ids.
    num_readers : threads that read.
    """

    def __init__(
        self, folder: Path, store: Store, policy: Policy, num_slots: int, text: np.ndarray, num_readers: int = NUM_READERS
    ) -> None:
        with quiet_library():
            self.model = load_dense(folder)
        self.policy, self.store = policy, store
        self.transfer = TimedTransfer(store, num_readers)
        shape = replace(model_shape(self.model), expert_bytes=store.layout.expert_bytes)
        self.runtime = Runtime(
            self.model, partial(ExpertCache, shape, policy, slots_per_layer(shape, num_slots), "first", 0, None), self.transfer
        )
        self._keyword = hf_internals.cache_keyword(self.model)
        self._ids = torch.from_numpy(np.asarray(text, np.int64))
        self._position, self._cache, self._cache_before, self._last = 0, None, None, (0, 0)
        self.transfer.taken_groups()

    def rewind(self) -> None:
        """Back to the first token and the cold start."""
        self.runtime.reset()
        self.transfer.taken_groups()
        self._position, self._cache, self._cache_before = 0, None, None

    def read(self, num_tokens: int, will_repeat: bool = False) -> dict[str, float]:
        """Decode the next tokens; `will_repeat` = keep the state, for `read_again`.

        Returns
        -------
        dict
            num_tokens; seconds (wall time of the forwards, vocabulary head included); num_preempted (how often another process took the
            computing thread's core from it); calls by outcome (hit, fetched, forced, substituted);
            bytes_demand, bytes_background, num_stalls, num_late and the parts of the seconds (see `Counters`); fetch_bytes and
            fetch_seconds (of each step's demand reads, from the first asking to the last byte).
        """
        self._cache_before = copy.deepcopy(self._cache) if will_repeat else None
        self._last = (self._position, num_tokens)
        row, self._cache = self._decode(self._position, num_tokens, self._cache)
        self._position += num_tokens
        return row

    def read_again(self) -> dict[str, float]:
        """Decode the last block once more, every call a hit; see `read`.

        Raises
        ------
        ValueError : a call that missed: the policy does not keep the experts called last, or the block is too long for the slots.
        """
        first, num_tokens = self._last
        if first and self._cache_before is None:
            raise ValueError("the state before the block was not kept; read it with will_repeat=True")
        row, _ = self._decode(first, num_tokens, self._cache_before)
        self._cache_before = None
        shape = self.runtime.shape
        if row["hit"] != num_tokens * shape.num_layers * shape.top_k:
            raise ValueError(
                f"{num_tokens} tokens decoded again had only {row['hit']:.0f} hits under {self.policy.label!r}: use a policy that keeps "
                f"the experts called last, and blocks of at most {int(self.runtime.num_slots.min()) // shape.top_k} tokens"
            )
        return row

    def record(self, num_tokens: int) -> Recorded:
        """Decode the first tokens from a cold start and keep what was said and decided; not timed."""
        self.rewind()
        with self.runtime.record_trace() as recording:
            self.read(num_tokens)
        self.rewind()
        return Recorded(recording.trace(), recording.decisions())

    def rest(self) -> None:
        """Wait until the store is no longer read: background copies have ended."""
        now, before = self.store.counters.num_bytes, -1
        while now != before:
            sleep(REST_SECONDS)
            now, before = self.store.counters.num_bytes, now

    def close(self) -> None:
        """Give the memory back; the store stays open."""
        self.runtime.close()

    def _decode(self, first: int, num_tokens: int, cache: Any) -> tuple[dict[str, float], Any]:
        before, seconds = self.runtime.stats(), 0.0
        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        for token in range(first, first + num_tokens):
            ids = self._ids[None, token : token + 1]
            self.transfer.token = token
            start = perf_counter()
            output = self.model(input_ids=ids, use_cache=True, **{self._keyword: cache})
            seconds += perf_counter() - start
            cache = hf_internals.decoding_cache(output)
        after = self.runtime.stats()
        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - preempted
        row: dict[str, float] = {"num_tokens": num_tokens, "seconds": seconds, "num_preempted": preempted}
        row |= {name: after[name] - before[name] for name in (*CALLS, *COUNTED, *SECONDS)}
        groups = self.transfer.taken_groups()
        return row | {"fetch_bytes": sum(group[0] for group in groups), "fetch_seconds": sum(group[1] for group in groups)}, cache


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch inside the block; the readers have threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
