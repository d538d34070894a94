"""What goes wrong goes wrong clearly: no hang, no wrong logits afterwards, and the memory comes back."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from tiny_models import documents, qwen3_moe

import moecache as mc
from moecache import hf_internals
from moecache.expert_sum import ClosedError
from moecache.runtime import engine
from moecache.runtime.engine import BusyError
from moecache.runtime.transfer import FetchError
from moecache.score import document_losses
from moecache.stores.blocks import StoreError
from moecache.stores.store import RamStore

TEXT = documents(lengths=(20,))[0]
NUM_SLOTS = 5
PATIENCE_SECONDS = 60
POLICIES = (mc.FETCH_EVERY_MISS, mc.SPEED_FIRST, mc.SUBSTITUTE_EVERY_MISS.replace(eviction="fifo").admitted_anyway())
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)


class FaultyStore(RamStore):
    """A store in main memory that calls `fault` before every read."""

    def fault(self, layer, expert):
        pass

    def read(self, layer, expert, out, first_byte=0, num_bytes=None):
        self.fault(layer, expert)
        super().read(layer, expert, out, first_byte, num_bytes)


@pytest.fixture
def model():
    model = qwen3_moe()
    yield model
    engine = getattr(model, "moecache", None)
    if engine is not None:
        engine.close()


def open_faulty(model, policy):
    store = FaultyStore.from_model(model)
    mc.offload(model, policy, NUM_SLOTS, store=store)
    return store


def logits_of(model, text=TEXT):
    return document_losses(model, text, keep_logits=True, stepped=True)[1]


@functools.cache
def expected(policy):
    fresh = mc.offload(qwen3_moe(), policy, NUM_SLOTS)
    logits = logits_of(fresh)
    fresh.moecache.close()
    return logits


@every_policy
def test_read_error_in_a_thread_surfaces_and_the_same_runtime_is_right_afterwards(model, policy):
    store, num_reads = open_faulty(model, policy), 0

    def fail_late(layer, expert):
        nonlocal num_reads
        num_reads += 1
        if num_reads >= 16:
            raise StoreError("shard 2 is truncated")

    store.fault = fail_late
    with pytest.raises(FetchError, match=r"expert \d+ of layer \d could not be read: shard 2 is truncated"):
        logits_of(model)
    store.fault = lambda layer, expert: None
    assert np.array_equal(logits_of(model), expected(policy))
    assert model.moecache.stats()["num_failed_copies"] > 0


@pytest.mark.parametrize("admission_delay", [1, 500])
def test_failed_background_copy_is_read_again_by_whoever_needs_it_and_harms_nobody_else(model, admission_delay):
    policy = mc.SPEED_FIRST.replace(admission_delay=admission_delay, mass_threshold=0.1, label="copies fail")
    store = open_faulty(model, policy)

    def fail_in_background(layer, expert):
        if threading.current_thread().name == "moecache background":
            raise StoreError("unplugged")

    store.fault = fail_in_background
    assert np.array_equal(logits_of(model), expected(policy))
    model.moecache._residency.settle()
    assert model.moecache.stats()["num_failed_copies"] > 0


@every_policy
def test_prompt_interrupted_by_a_read_error_leaves_nothing_half_done(model, policy):
    store = open_faulty(model, policy)

    def fail(layer, expert):
        if (layer, expert) == (1, 9):
            raise OSError("I/O error")

    store.fault = fail
    with pytest.raises(FetchError, match="expert 9 of layer 1"):
        model(input_ids=torch.from_numpy(TEXT[None]))
    store.fault = lambda layer, expert: None
    assert np.array_equal(logits_of(model), expected(policy))


@every_policy
@pytest.mark.parametrize("place", ["experts", "decide"])
def test_interrupt_leaves_nothing_half_done(model, policy, place, monkeypatch):
    open_faulty(model, policy)
    engine, num_calls = model.moecache, 0
    where, name = {
        "experts": (engine._residency, "weights"),
        "decide": (engine._decider, "_carry_out"),
    }[place]
    right = getattr(where, name)

    def interrupted(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 12:
            raise KeyboardInterrupt
        return right(*args, **kwargs)

    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits_of(model)
    monkeypatch.undo()
    assert np.array_equal(logits_of(model), expected(policy))


def test_cold_start_that_cannot_be_read_gives_the_model_back_whole(model):
    store = FaultyStore.from_model(model)
    before, num_threads = plain(model), threading.active_count()

    def fail(layer, expert):
        raise StoreError("checksum differs")

    store.fault = fail
    with pytest.raises(FetchError, match="checksum differs"):
        mc.offload(model, mc.FETCH_EVERY_MISS, NUM_SLOTS, store=store)
    assert threading.active_count() == num_threads
    assert np.array_equal(plain(model), before)


def plain(model):
    with torch.no_grad(), hf_internals.experts_implementation(model, "grouped_mm"):
        return model(input_ids=torch.from_numpy(TEXT[None])).logits.numpy()


def test_memory_that_is_not_there_gives_the_model_back_whole(model, monkeypatch):
    from moecache.runtime import slots

    before, num_threads = plain(model), threading.active_count()
    monkeypatch.setattr(slots, "free_bytes", lambda device: 4096)
    with pytest.raises(slots.PoolTooLarge, match="fewer slots"):
        mc.offload(model, mc.FETCH_EVERY_MISS, NUM_SLOTS)
    assert threading.active_count() == num_threads
    assert np.array_equal(plain(model), before)


def test_second_call_while_one_runs_is_refused_and_the_first_is_right(model):
    store = open_faulty(model, mc.FETCH_EVERY_MISS)
    has_begun, may_go_on, found = threading.Event(), threading.Event(), []

    def pause(layer, expert):
        has_begun.set()
        assert may_go_on.wait(PATIENCE_SECONDS)

    store.fault = pause
    running = threading.Thread(target=lambda: found.append(logits_of(model)), daemon=True)
    running.start()
    assert has_begun.wait(PATIENCE_SECONDS)
    for refused in (lambda: model(input_ids=torch.tensor([[1]])), model.moecache.reset, model.moecache.close):
        with pytest.raises(BusyError, match="is running"):
            refused()
    may_go_on.set()
    running.join(PATIENCE_SECONDS)
    assert np.array_equal(found[0], expected(mc.FETCH_EVERY_MISS))


def test_two_offloaded_models_in_one_process_do_not_meet(model):
    other = qwen3_moe(seed=1)
    mc.offload(model, mc.SPEED_FIRST, NUM_SLOTS)
    mc.offload(other, mc.FETCH_EVERY_MISS, NUM_SLOTS + 1)
    alone = mc.offload(qwen3_moe(seed=1), mc.FETCH_EVERY_MISS, NUM_SLOTS + 1)
    keyword, caches, logits = hf_internals.cache_keyword(model), {}, {model: [], other: []}
    for token in TEXT:
        for each in (model, other):
            output = each(input_ids=torch.tensor([[token]]), use_cache=True, **{keyword: caches.get(each)})
            caches[each] = hf_internals.decoding_cache(output)
            logits[each].append(output.logits[0].numpy())
    assert np.array_equal(np.concatenate(logits[model]), expected(mc.SPEED_FIRST))
    assert np.array_equal(np.concatenate(logits[other]), logits_of(alone))
    other.moecache.close()
    alone.moecache.close()
    assert np.isfinite(logits_of(model)).all()


def test_offloading_twice_is_refused(model):
    mc.offload(model, mc.SPEED_FIRST, NUM_SLOTS)
    with pytest.raises(ValueError, match="offloaded already"):
        mc.offload(model, mc.SPEED_FIRST, NUM_SLOTS)


def test_closing_returns_memory_threads_and_the_model_as_it_was(model):
    before, num_threads, forwards = plain(model), threading.active_count(), (model.forward, model.base_model.forward)
    mc.offload(model, mc.SPEED_FIRST, NUM_SLOTS)
    logits_of(model)
    memory = weakref.ref(model.moecache._pool.blocks[0].untyped_storage())
    model.moecache.close()
    model.moecache.close()
    gc.collect()
    assert memory() is None
    assert threading.active_count() == num_threads
    assert (model.forward, model.base_model.forward) == forwards
    assert np.array_equal(plain(model), before)
    assert model.moecache.stats()["num_tokens"] == TEXT.size
    with pytest.raises(ClosedError, match=r"open the model again with moecache\.offload"):
        model.moecache.reset()


def test_closing_and_opening_again_gives_the_same_logits(model):
    for _ in range(2):
        mc.offload(model, mc.SPEED_FIRST, NUM_SLOTS)
        assert np.array_equal(logits_of(model), expected(mc.SPEED_FIRST))
        model.moecache.close()


def test_reset_starts_cold_and_cancels_copies(model):
    policy = mc.SPEED_FIRST.replace(admission_delay=6, mass_threshold=0.1, label="slow copies")
    mc.offload(model, policy, NUM_SLOTS)
    first = logits_of(model)
    model.moecache.reset()
    assert np.array_equal(logits_of(model), first)


def test_a_prompt_in_one_block_or_many_needs_no_more_than_the_reserved_blocks(model, monkeypatch):
    monkeypatch.setattr(engine, "num_reserved", lambda policy, shape: 1)
    before = plain(model)
    mc.offload(model, mc.FETCH_EVERY_MISS, NUM_SLOTS)
    found = model(input_ids=torch.from_numpy(TEXT[None])).logits.numpy()
    np.testing.assert_allclose(found, before, atol=2e-4)
