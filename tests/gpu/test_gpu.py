"""What only a GPU can show, in one command: ``pytest -m gpu -s tests/gpu``. It prints the bandwidth that it measured.

With ``MOECACHE_KEEP_GPU_RESULT=1`` a passing run is kept beside the package, and `device="cuda"` no longer warns.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, documents

import moecache as mc
from moecache.provenance import provenance
from moecache.runtime.offload import GPU_RESULT
from moecache.runtime.slots import SlotPool
from moecache.runtime.transfer_cuda import CudaTransfer
from moecache.score import document_losses
from moecache.stores.blocks import BlockLayout, aligned_bytes
from moecache.stores.store import RamStore

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::moecache.runtime.offload.UnverifiedWarning")]
LAYOUT = BlockLayout.of({"gate_up_proj": ((1024, 2048), "bfloat16"), "down_proj": ((2048, 512), "bfloat16")})
NUM_EXPERTS = 64
TEXT = documents(lengths=(24,))[0]


def need_gpu():
    assert torch.cuda.is_available(), "this command checks a GPU, and torch sees none"
    return torch.device("cuda", torch.cuda.current_device())


def pinned_store():
    blocks = aligned_bytes(NUM_EXPERTS * LAYOUT.block_bytes, is_pinned=True).reshape(1, NUM_EXPERTS, -1)
    for expert in range(NUM_EXPERTS):
        blocks[0, expert] = 1 + expert
    return RamStore(LAYOUT, blocks)


def test_experts_arrive_whole_and_at_a_bandwidth_that_is_printed():
    device, store = need_gpu(), pinned_store()
    pool, transfer = SlotPool(LAYOUT, NUM_EXPERTS, device), CudaTransfer(store, need_gpu())
    try:
        for ticket in [transfer.fetch(0, expert, pool.blocks[expert]) for expert in range(8)]:
            transfer.wait(ticket)  # warm
        start = time.perf_counter()
        for ticket in [transfer.fetch(0, expert, pool.blocks[expert]) for expert in range(NUM_EXPERTS)]:
            transfer.wait(ticket)
        seconds = time.perf_counter() - start
        for expert, block in enumerate(pool.blocks):
            assert bool((block == 1 + expert).all())
        background = transfer.copy(0, 3, pool.blocks[0])
        transfer.wait(background)
        assert bool((pool.blocks[0] == 4).all())
    finally:
        transfer.close()
    bandwidth = NUM_EXPERTS * LAYOUT.block_bytes / seconds / 1e9
    print(f"\nMEASURED: {bandwidth:.2f} GB/s from page-locked memory to {torch.cuda.get_device_name(device)}, blocks of 6 MiB")
    if os.environ.get("MOECACHE_KEEP_GPU_RESULT"):
        GPU_RESULT.write_text(json.dumps({"gigabytes_per_second": bandwidth, **provenance()}, indent=1))


def test_a_block_is_not_overwritten_before_earlier_products_have_read_it():
    device, store = need_gpu(), pinned_store()
    pool, transfer = SlotPool(LAYOUT, 1, device), CudaTransfer(store, need_gpu())
    try:
        transfer.wait(transfer.fetch(0, 0, pool.blocks[0]))
        large = torch.randn(4096, 4096, device=device)
        for _ in range(50):
            large = large @ large / 64  # keep the computing stream busy
        read = pool.blocks[0].clone()
        transfer.wait(transfer.fetch(0, 1, pool.blocks[0]))
        assert bool((read == 1).all())
        assert bool((pool.blocks[0] == 2).all())
    finally:
        transfer.close()


@pytest.mark.parametrize("policy", mc.PRESETS, ids=lambda policy: policy.label)
@pytest.mark.parametrize("family", FAMILIES)
def test_runtime_on_the_gpu_agrees_with_the_emulator_there(family, policy):
    model = FAMILIES[family]().to(need_gpu())
    slots = mc.record(model, TEXT).shape.top_k + 2
    emulated = mc.emulate(model, TEXT, policy, slots, stepped=True, keep_logits=True, experts="moecache")
    mc.offload(model, policy, slots, device=need_gpu())
    with model.moecache.record_trace() as recording:
        logits = document_losses(model, TEXT, keep_logits=True, stepped=True)[1]
    model.moecache.close()
    assert recording.decisions().is_equal(emulated.decisions)
    assert logits is not None
    np.testing.assert_allclose(logits, emulated.extra["logits"], atol=1e-4)
