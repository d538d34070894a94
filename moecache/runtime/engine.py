"""The runtime: the engine of a model whose experts live in main memory or on disk and visit a fixed number of slots.

It is the library's model with two things added: a hook on every router, where the kernel decides as it does in the simulator and in the
emulator, and an experts implementation that computes from slots. The clock that decides is the token; the wall clock only measures. A late
copy makes the step wait, and never changes what is computed.

Prompts (several tokens in one forward) wait for every miss and are computed exactly; then each token is a step under the policy. One
sequence at a time. A forward that fails or is interrupted leaves nothing half done: the next one starts cold, as after opening.

Where checkpoints and stores come from is not known here; `moecache.runtime.offload` puts the parts together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import numpy as np
import torch

from moecache import hf_internals
from moecache.cache import ExpertCache
from moecache.expert_sum import IMPLEMENTATION, ClosedError, ClosedSource, set_source
from moecache.families import family_of
from moecache.kernel import Outcome
from moecache.run import Run
from moecache.runtime import call as runtime_call
from moecache.runtime.budget import num_reserved, num_staging
from moecache.runtime.counters import Counters
from moecache.runtime.low_bit_experts import LowBitExperts
from moecache.runtime.reading import read_documents
from moecache.runtime.recording import Recording
from moecache.runtime.residency import Residency
from moecache.runtime.slots import SlotPool
from moecache.runtime.steps import Decider
from moecache.runtime.transfer import Transfer

SERVED = ("hit", "fetched", "forced", "substituted", "dropped", "low_precision")


class BusyError(ValueError):
    """A forward was called while another one of the same offloaded model runs."""


class Runtime:
    """The engine of one offloaded model, ``model.moecache``.

    Parameters
    ----------
    model : transformers.PreTrainedModel, its experts taken out.
    new_cache : makes the cache of slots in its cold start.
    transfer : brings experts; closed with the runtime.
    low_bits : copies for a policy that computes misses in low precision.
    chunk_tokens : of a prompt that are computed together.
    predict : what prefetching expects, see `foresight.PREDICTIONS`.
    on_close : called last by `close`.
    """

    def __init__(
        self,
        model: Any,
        new_cache: Callable[[], ExpertCache],
        transfer: Transfer,
        low_bits: LowBitExperts | None = None,
        chunk_tokens: int = 1024,
        predict: str = "stale_gate",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._new_cache, self._cache = model, new_cache, new_cache()
        self.policy, self.shape, self.num_slots = self._cache.policy, self._cache.shape, self._cache.num_slots
        self.counters = Counters()
        self._earlier_counts = np.zeros_like(self._cache.counts)
        self._recordings: list[Recording] = []
        self._lock = threading.Lock()
        self._is_torn = self.is_closed = False
        self._cleanup: ExitStack = ExitStack()
        self._cleanup.callback(on_close)
        self._cleanup.callback(transfer.close)
        try:
            self._open(transfer, low_bits, chunk_tokens, predict)
        except BaseException:
            self.close()
            raise

    def _open(self, transfer: Transfer, low_bits: LowBitExperts | None, chunk_tokens: int, predict: str) -> None:
        """Take the memory, fill the slots, and hang the hooks into the model."""
        policy, shape = self.policy, self.shape
        reserved = num_reserved(policy, shape)
        num_blocks = int(self.num_slots.sum()) + num_staging(policy, shape) + reserved
        self._pool = SlotPool(transfer.store.layout, num_blocks, self._model.device)
        self._cleanup.callback(self._pool.close)
        self._residency = Residency(self._pool, transfer, self.num_slots.tolist(), reserved, self.counters)
        layers = hf_internals.moe_layers(self._model)
        self._decider = Decider(family_of(self._model), layers, self._cache, self._residency, low_bits, chunk_tokens, predict)
        self._residency.fill(self._residents())
        self._attach(layers)

    def _attach(self, layers: tuple[hf_internals.MoeLayer, ...]) -> None:
        model, base, undo = self._model, self._model.base_model, self._cleanup
        undo.enter_context(self._decider.hooks())
        model.set_experts_implementation(IMPLEMENTATION)
        for layer, source in zip(layers, self._decider.sources, strict=True):
            set_source(layer.experts, source)
            undo.callback(set_source, layer.experts, ClosedSource())
        self._cache_keyword = hf_internals.cache_keyword(base)
        undo.callback(runtime_call.around(base, self._forward))
        if model is not base:
            undo.callback(runtime_call.around(model, self._kernels))

    # What a user asks

    @property
    def hit_rate(self) -> float:
        """Share of all calls so far whose expert was resident; NaN before the first."""
        calls = self._counts()[: len(Outcome)]
        return float(calls[Outcome.HIT] / calls.sum()) if calls.sum() else float("nan")

    def stats(self) -> dict[str, Any]:
        """What happened since the model was opened, as plain values.

        Returns
        -------
        dict
            Calls by outcome (`hit`, `fetched`, `forced`, `substituted`, `dropped`, `low_precision`) as the kernel counts them, `hit_rate`,
            then the fields of `Counters`: bytes and reads by source, stalls, late and wasted copies, and seconds by use. A copy is
            counted once, when somebody waited for it or gave it up.
        """
        counts = self._counts()
        calls = {outcome.name.lower(): int(counts[outcome]) for outcome in Outcome if outcome.name.lower() in SERVED}
        threads = {"torch_threads": torch.get_num_threads(), "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset")}
        return {"policy": self.policy.label, **calls, "hit_rate": self.hit_rate, **self.counters.to_dict(), **threads}

    def reset(self) -> None:
        """Cold start again, as at a document boundary: scores, accounts and copies under way are forgotten."""
        with self._alone():
            cancelled = self._cache.reset()
            for recording in self._recordings:
                recording.was_reset(cancelled)
            self._residency.fill(self._residents())

    @contextmanager
    def record_trace(self) -> Iterator[Recording]:
        """Keep what routers say and what is decided in every forward inside the block.

        Yields
        ------
        Recording
            Call its `trace()` and `decisions()` after the block.
        """
        self._check_open()
        name = str(getattr(hf_internals.text_config(self._model), "name_or_path", ""))
        recording = Recording(
            self.shape, {"model": name or type(self._model).__name__, "instrument": "runtime", "policy": self.policy.label}
        )
        self._recordings.append(recording)
        self._decider.listeners.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)
            if not self.is_closed:
                self._decider.listeners.remove(recording)

    def read(
        self, token_ids: Any, documents: str = "keep", exact_prefix_tokens: int = 0, keep_logits: bool = False, progress: bool = False
    ) -> Run:
        """Read documents token by token, as in decoding.

        Parameters
        ----------
        token_ids : one document [T], or a list of them.
        documents : whether the slots are kept across documents, or "reset" to the cold start.
        exact_prefix_tokens : first tokens of each document whose misses are all waited for.
        keep_logits : keep all logits [T, V] as ``run.extra["logits"]``.
        progress : show a bar.

        Returns
        -------
        Run
            With decisions, token losses and measured seconds; slots go on from where they were, so `cold_start` says "kept" or "cold".
        """
        return read_documents(self, self._model, token_ids, documents, exact_prefix_tokens, keep_logits, progress)

    @contextmanager
    def deciding_exactly(self, is_exact: bool = True) -> Iterator[None]:
        """Decide every token inside the block as a prompt's, all misses waited for, or not."""
        self._check_open()
        decider = self._decider
        before, decider.is_exact = decider.is_exact, is_exact
        try:
            yield
        finally:
            decider.is_exact = before

    def close(self) -> None:
        """Stop the threads, give the memory back and take the hooks away; the model cannot compute afterwards.

        A model that was given whole gets its experts back and is as it was before.
        """
        if self.is_closed:
            return
        if not self._lock.acquire(blocking=False):
            raise BusyError("a forward of this model is running; close it when the forward has ended")
        try:
            self.is_closed = True
            self._cleanup.close()
            for name in ("_residency", "_decider", "_pool"):  # nothing may keep a block alive
                self.__dict__.pop(name, None)
        finally:
            self._lock.release()

    # A forward

    @contextmanager
    def _forward(self, arguments: runtime_call.Arguments) -> Iterator[None]:
        """Around the forward of the model's body."""
        num_tokens = runtime_call.num_tokens(arguments)
        with self._alone():
            self._note(arguments, num_tokens)
            start = perf_counter()
            self._is_torn = True
            with torch.no_grad(), self._one_row(num_tokens):
                yield
            self._is_torn = False
            self._count(num_tokens, perf_counter() - start)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else uses the model inside the block, and it begins whole."""
        if not self._lock.acquire(blocking=False):
            raise BusyError("a forward of this model is running; an offloaded model computes one sequence at a time")
        try:
            self._check_open()
            if self._is_torn:
                self._start_cold()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _kernels(self, arguments: runtime_call.Arguments) -> Iterator[None]:
        """Around the forward of the whole model: the vocabulary head, too, is computed for one row."""
        with torch.no_grad(), self._one_row(runtime_call.num_tokens(arguments)):
            yield

    def _one_row(self, num_tokens: int) -> Any:
        is_slow = num_tokens == 1 and self._model.dtype == torch.bfloat16 and self._model.device.type == "cpu"
        return runtime_call.without_onednn() if is_slow else nullcontext()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("this runtime is closed; open the model again with moecache.offload")

    def _start_cold(self) -> None:
        """After a failure: layers may stand at different tokens and blocks may be half filled, so everything begins anew."""
        self._earlier_counts += self._cache.counts
        self._cache = self._new_cache()
        self._decider.use(self._cache)
        self._residency.fill(self._residents())
        self._is_torn = False

    def _note(self, arguments: runtime_call.Arguments, num_tokens: int) -> None:
        is_start = runtime_call.is_start(arguments, self._cache_keyword)
        if is_start:
            self._decider.begin()
        ids = runtime_call.token_ids(arguments) if self._recordings else None
        for recording in self._recordings:
            known = np.full(num_tokens, -1) if ids is None else ids.cpu().numpy()
            recording.began(known, is_start, num_tokens > 1 or self._decider.is_exact)

    def _count(self, num_tokens: int, seconds: float) -> None:
        self.counters.num_forwards += 1
        self.counters.num_tokens += num_tokens
        self.counters.num_prefill_tokens += num_tokens if num_tokens > 1 else 0
        self.counters.seconds_total += seconds

    def _residents(self) -> list[list[int]]:
        rows = zip(self._cache.state.expert_in_slot, self.num_slots, strict=True)
        return [row[:number].tolist() for row, number in rows]

    def counts_by_layer(self) -> np.ndarray:
        """[L,17] int64 of all that was decided since the model was opened, see `ExpertCache.counts`."""
        return self._earlier_counts + self._cache.counts

    @property
    def mass_sum(self) -> float:
        """Substituted gate mass since the last failure."""
        return float(self._cache.state.mass_sum.sum())

    def _counts(self) -> np.ndarray:
        """[17] int64 over all layers."""
        return self.counts_by_layer().sum(axis=0)
