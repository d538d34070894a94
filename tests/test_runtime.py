"""The runtime agrees with the other instruments, keeps honest books, and survives what goes wrong."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np
import pytest
import tiny_checkpoints
import torch
from dense import logged_output
from tiny_models import FAMILIES, documents, lively

import moecache as mc
from moecache import hf_checkpoints, hf_internals
from moecache.expert_sum import ClosedError
from moecache.families import model_shape
from moecache.runtime.low_bit_experts import LowBitExperts
from moecache.runtime.transfer import FetchError
from moecache.score import document_losses
from moecache.stores.store import RamStore, open_store

TEXT = documents(lengths=(24,))[0]
SHORT = TEXT[:12]
OTHERS = (
    mc.SUBSTITUTE_EVERY_MISS.replace(fallback="random_resident", seed=5, label="random resident"),
    mc.FIRST_CHOICE.replace(fallback="drop", label="drop"),
    mc.FIRST_CHOICE.replace(fallback="drop", weight_rule="rescale", label="drop, rescaled"),
    mc.FIRST_CHOICE.replace(weight_rule="inherit", label="inherited weight"),
    mc.SUBSTITUTE_EVERY_MISS.replace(eviction="fifo", label="fifo").admitted_anyway(),
    mc.SPEED_FIRST.replace(admission_delay=3, mass_threshold=0.2, label="slow copies"),
    mc.SPEED_FIRST.replace(admission_delay=4, mass_threshold=0.0, max_in_flight=1, label="one in flight"),
    mc.GATE_015.replace(insertion="cap", insertion_cap=1, label="cap"),
    mc.FETCH_EVERY_MISS.replace(eviction="static", label="static"),
    mc.FETCH_EVERY_MISS.replace(insertion="tinylfu", half_life=16, label="tinylfu"),
    mc.FIRST_CHOICE.replace(max_prefetches=2, label="prefetch"),
    mc.SPEED_FIRST.replace(max_prefetches=1, label="prefetch and admission"),
)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_preset = pytest.mark.parametrize("policy", mc.PRESETS, ids=lambda policy: policy.label)
every_other = pytest.mark.parametrize("policy", OTHERS, ids=lambda policy: policy.label)


@pytest.fixture(scope="module")
def models():
    return {name: build() for name, build in FAMILIES.items()}


@pytest.fixture
def offloaded(models):
    """Offload a tiny model; it is whole again after the test."""
    opened = []

    def open_model(family="qwen3_moe", policy=mc.FETCH_EVERY_MISS, num_slots=None, **settings):
        model = models[family]
        slots = few_slots(model) if num_slots is None and "memory" not in settings else num_slots
        opened.append(mc.offload(model, policy, slots, **settings))
        return model

    yield open_model
    for model in opened:
        model.moecache.close()


def few_slots(model):
    return model_shape(model).top_k + 2


def logits_of(model, text):
    return document_losses(model, text, keep_logits=True, stepped=True)[1]


def plain_logits(model, text):
    with hf_internals.experts_implementation(model, "grouped_mm"):
        return logits_of(model, text)


def check_agreement(model, policy, text, predict=None):
    """Runtime, emulator and simulator: one log, and the first two the same logits bit for bit."""
    slots, settings = few_slots(model), {} if predict is None else {"predict": predict}
    emulated = mc.emulate(model, text, policy, slots, stepped=True, keep_logits=True, experts="moecache", **settings)
    mc.offload(model, policy, slots, **settings)
    try:
        with model.moecache.record_trace() as recording:
            logits = logits_of(model, text)
    finally:
        model.moecache.close()
    assert recording.decisions().is_equal(emulated.decisions)
    assert np.array_equal(logits, emulated.extra["logits"])
    replayed = mc.simulate(recording.trace(), policy, slots)
    assert replayed.decisions is not None
    assert replayed.decisions.is_equal(emulated.decisions)
    return emulated.decisions


# Agreement


@every_family
def test_runtime_emulator_and_simulator_agree_bit_for_bit(models, family):
    log = check_agreement(models[family], mc.SPEED_FIRST, TEXT)
    assert 0 < log.count(mc.Outcome.HIT) < log.outcome.size


@pytest.mark.long
@every_family
@every_preset
def test_instruments_agree_bit_for_bit_on_every_preset_of_every_family(models, family, policy):
    check_agreement(models[family], policy, TEXT)


@every_preset
def test_instruments_agree_on_every_preset(models, policy):
    check_agreement(models["olmoe"], policy, TEXT)


@every_other
@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_instruments_agree_on_everything_else_that_the_runtime_carries_out(models, family, policy):
    check_agreement(models[family], policy, TEXT, "stale_gate" if policy.max_prefetches else None)


def test_instruments_agree_on_prefetching_the_token_before(models):
    policy = mc.FIRST_CHOICE.replace(max_prefetches=2, label="prefetch")
    log = check_agreement(models["qwen3_moe"], policy, TEXT, "previous_token")
    assert (log.arrivals[:, 5] == mc.ArrivalKind.PREFETCH).sum() > 5


def test_instruments_agree_on_buddies(models):
    model = models["qwen3_moe"]
    shape = model_shape(model)
    ids = (np.arange(shape.num_experts)[:, None] + np.arange(1, shape.num_experts)) % shape.num_experts
    buddies = np.broadcast_to(ids, (shape.num_layers, *ids.shape)).astype(np.int16)
    policy = mc.FIRST_CHOICE.replace(fallback="buddy", label="buddy")
    mc.offload(model, policy, few_slots(model), buddies=buddies)
    with model.moecache.record_trace() as recording:
        logits_of(model, SHORT)
    model.moecache.close()
    replayed = mc.simulate(recording.trace(), policy, few_slots(model), buddies=buddies)
    assert replayed.decisions is not None
    assert recording.decisions().is_equal(replayed.decisions)
    assert replayed.decisions.count(mc.Outcome.SUBSTITUTED) > 0


@every_family
@pytest.mark.parametrize("policy", [mc.SUBSTITUTE_EVERY_MISS, mc.SPEED_FIRST, OTHERS[2]], ids=lambda policy: policy.label)
def test_runtime_computes_what_a_plain_computation_of_its_log_gives(models, offloaded, family, policy):
    whole, seen = FAMILIES[family](), {}
    model = offloaded(family, policy)

    def keep(index):
        return lambda module, args, output: seen.setdefault(index, []).append((args[0], output))

    hooks = [layer.experts.register_forward_hook(keep(i)) for i, layer in enumerate(hf_internals.moe_layers(model))]
    with model.moecache.record_trace() as recording:
        logits_of(model, TEXT)
    for hook in hooks:
        hook.remove()
    log = recording.decisions()
    assert log.count(mc.Outcome.HIT) < log.outcome.size
    for index, layer in enumerate(hf_internals.moe_layers(whole)):
        hidden, output = (torch.cat(tensors) for tensors in zip(*seen[index], strict=True))
        expected = logged_output(layer, hidden, log.computed_ids[:, index], policy.weight_rule, family)
        np.testing.assert_allclose(output.numpy(), expected.numpy(), atol=1e-5)


@every_family
def test_fetching_every_miss_gives_the_plain_models_logits(models, offloaded, family):
    expected = plain_logits(models[family], TEXT)
    found = logits_of(offloaded(family), TEXT)
    if family == "gpt_oss":  # its transposed product rounds differently
        np.testing.assert_allclose(found, expected, atol=1e-5)
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_low_precision_agrees_with_the_emulator(models, offloaded, bits):
    policy = mc.FIRST_CHOICE.replace(fallback="low_precision", label="low precision")
    emulated = mc.emulate(models["qwen3_moe"], TEXT, policy, 5, stepped=True, keep_logits=True, low_bits=bits)
    model = offloaded("qwen3_moe", policy, low_bits=bits)
    with model.moecache.record_trace() as recording:
        logits = logits_of(model, TEXT)
    assert recording.decisions().is_equal(emulated.decisions)
    np.testing.assert_allclose(logits, emulated.extra["logits"], atol=1e-4)
    assert model.moecache.stats()["low_precision"] > 10


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_products_of_low_bit_copies_agree_with_the_emulator(bits):
    policy = mc.FIRST_CHOICE.replace(fallback="low_precision", label="low precision")
    small = FAMILIES["granitemoe"]()
    small.config.intermediate_size = 64
    model = lively(type(small), small.config, 0)
    emulated = mc.emulate(model, TEXT, policy, few_slots(model), stepped=True, keep_logits=True, low_bits=bits)
    copies = LowBitExperts.rounded(RamStore.from_model(model), bits, is_transposed=False)
    assert copies.is_packed
    mc.offload(model, policy, few_slots(model), low_bits=copies)
    with model.moecache.record_trace() as recording:
        logits = logits_of(model, TEXT)
    model.moecache.close()
    assert recording.decisions().is_equal(emulated.decisions)
    np.testing.assert_allclose(logits, emulated.extra["logits"], atol=1e-3)


# From disk


@pytest.mark.parametrize("host_memory", [None, "64 kB"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_on_disk_gives_the_same_as_the_loaded_model(models, tmp_path, family, host_memory):
    model = models[family]
    model.save_pretrained(tmp_path)
    emulated = mc.emulate(model, TEXT, mc.SPEED_FIRST, few_slots(model), stepped=True, keep_logits=True, experts="moecache")
    offloaded = mc.offload(tmp_path, mc.SPEED_FIRST, few_slots(model), host_memory=host_memory)
    found = logits_of(offloaded, TEXT)
    if family == "gpt_oss":  # its transposed products round by the address of a matrix
        np.testing.assert_allclose(found, emulated.extra["logits"], atol=1e-6)
    else:
        assert np.array_equal(found, emulated.extra["logits"])
    offloaded.moecache.close()
    with pytest.raises(ClosedError, match="open the model again"):
        logits_of(offloaded, SHORT)


def test_a_truncated_shard_is_a_clear_error_and_a_whole_one_is_right(models, tmp_path):
    model = models["qwen3_moe"]
    expected = plain_logits(model, TEXT)
    model.save_pretrained(tmp_path)
    with closing(open_store(tmp_path)) as store:
        offloaded = mc.offload(model, mc.FETCH_EVERY_MISS, few_slots(model), store=store)
        shard = tmp_path / "model.safetensors"
        content = shard.read_bytes()
        os.truncate(shard, 20000)
        with pytest.raises(FetchError, match="could not be read"):
            logits_of(offloaded, TEXT)
        offloaded.moecache.close()
    shard.write_bytes(content)
    with closing(open_store(tmp_path)) as store:
        offloaded = mc.offload(model, mc.FETCH_EVERY_MISS, few_slots(model), store=store)
        assert np.array_equal(logits_of(offloaded, TEXT), expected)
        offloaded.moecache.close()


# Prompts


@pytest.mark.parametrize("policy", [mc.FETCH_EVERY_MISS, mc.SPEED_FIRST, OTHERS[7], OTHERS[8]], ids=lambda policy: policy.label)
@pytest.mark.parametrize(("family", "chunk_tokens"), [("qwen3_next", 1024), ("qwen3_moe", 5), ("gpt_oss", 7)])
def test_prompt_is_exact_and_decoding_starts_from_the_residency_so_reached(models, offloaded, family, policy, chunk_tokens):
    prompt, rest = torch.from_numpy(TEXT[None, :20]), TEXT[20:]
    with torch.no_grad():
        expected = models[family](input_ids=prompt).logits[0].numpy()
    model = offloaded(family, policy, chunk_tokens=chunk_tokens)
    keyword = hf_internals.cache_keyword(model)
    with model.moecache.record_trace() as recording:
        output = model(input_ids=prompt, use_cache=True)
        np.testing.assert_allclose(output.logits[0].numpy(), expected, atol=2e-4)
        for token in rest:
            output = model(input_ids=torch.tensor([[token]]), use_cache=True, **{keyword: hf_internals.decoding_cache(output)})
    replayed = mc.simulate(recording.trace(), policy, few_slots(model), exact_prefix_tokens=20)
    assert replayed.decisions is not None
    assert recording.decisions().is_equal(replayed.decisions)
    assert recording.is_exact.sum() == 20


def test_prompt_brings_each_missing_expert_once_a_chunk(offloaded):
    model = offloaded("qwen3_moe")
    with model.moecache.record_trace() as recording:
        model(input_ids=torch.from_numpy(TEXT[None]))
    called = [set(np.unique(recording.trace().topk_ids[:, layer])) for layer in range(2)]
    start = set(range(few_slots(model)))
    stats = model.moecache.stats()
    assert stats["reads_prefill"] == sum(len(ids - start) for ids in called)
    assert stats["fetched"] > stats["reads_prefill"]
    assert stats["reads_demand"] == 0


def test_prompt_in_a_conversation_is_exact_too(models, offloaded):
    expected = plain_logits(models["qwen3_moe"], TEXT)
    model = offloaded("qwen3_moe", mc.FETCH_EVERY_MISS)
    keyword, cache, parts = hf_internals.cache_keyword(model), None, []
    for part in (TEXT[:7], TEXT[7:8], TEXT[8:9], TEXT[9:20], TEXT[20:]):
        output = model(input_ids=torch.from_numpy(part[None]), use_cache=True, **{keyword: cache})
        cache = hf_internals.decoding_cache(output)
        parts.append(output.logits[0].numpy())
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_generated_text_is_the_plain_models_when_every_miss_is_fetched(models, offloaded, family):
    prompt, settings = torch.from_numpy(TEXT[None, :9]), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = models[family].generate(prompt, **settings)
    model = offloaded(family)
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert model.moecache.stats()["num_prefill_tokens"] == 9


# Books


@every_preset
def test_every_byte_is_counted_once(models, offloaded, policy):
    model = models["qwen3_moe"]
    store = RamStore.from_model(model)
    offloaded("qwen3_moe", policy, store=store)
    logits_of(model, TEXT)
    model.moecache._residency.settle()
    stats = model.moecache.stats()
    assert sum(stats[f"bytes_{source}"] for source in ("cold_start", "demand", "prefill", "background")) == store.counters.num_bytes
    assert stats["reads_demand"] == stats["fetched"] + stats["forced"]
    calls = sum(stats[name] for name in ("hit", "fetched", "forced", "substituted", "dropped", "low_precision"))
    assert calls == TEXT.size * model_shape(model).top_k * model_shape(model).num_layers
    assert stats["hit_rate"] == model.moecache.hit_rate == stats["hit"] / calls
    parts = [stats[f"seconds_{use}"] for use in ("routing", "overhead", "waiting", "experts", "dense")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(stats["seconds_total"])


def test_copies_that_nobody_used_are_counted_as_wasted(models, offloaded):
    policy = mc.SUBSTITUTE_EVERY_MISS.replace(eviction="fifo").admitted_anyway()
    model = offloaded("qwen3_moe", policy)
    with model.moecache.record_trace() as recording:
        logits_of(model, TEXT)
    stats, block_bytes = model.moecache.stats(), 4096 * 2
    landed = recording.decisions().arrivals
    assert (landed[:, 6] == mc.Landing.LANDED).sum() > 10
    assert 0 < stats["num_wasted"] <= stats["reads_background"]
    assert stats["wasted_bytes"] <= stats["num_wasted"] * block_bytes


def test_a_missing_staging_block_is_a_stall_and_changes_no_decision(models, monkeypatch):
    from moecache.runtime import engine

    monkeypatch.setattr(engine, "num_staging", lambda policy, shape: 0)
    policy = mc.SPEED_FIRST.replace(admission_delay=2, mass_threshold=0.0, label="no staging")
    model = models["qwen3_moe"]
    check_agreement(model, policy, TEXT)
    assert model.moecache.stats()["num_without_staging"] > 5
    assert model.moecache.stats()["bytes_background"] == 0


@pytest.mark.parametrize("documents_are", ["keep", "reset"])
def test_reading_gives_the_emulators_run_with_measured_seconds(models, offloaded, documents_are):
    texts, settings = [TEXT[:9], TEXT[9:10], TEXT[10:]], {"documents": documents_are, "exact_prefix_tokens": 3, "keep_logits": True}
    model = models["qwen3_moe"]
    expected = mc.emulate(model, texts, mc.SPEED_FIRST, few_slots(model), stepped=True, experts="moecache", **settings)
    run = offloaded("qwen3_moe", mc.SPEED_FIRST).moecache.read(texts, **settings)
    assert run.decisions.is_equal(expected.decisions)
    assert np.array_equal(run.extra["logits"], expected.extra["logits"])
    assert np.array_equal(run.loss_nats, expected.loss_nats, equal_nan=True)
    assert np.array_equal(run.counts, expected.counts)
    assert run.summary()["substituted_mass"] == pytest.approx(expected.summary()["substituted_mass"])
    assert run.seconds_kind == "measured"
    assert run.seconds.min() > 0


# Refusals


def test_what_cannot_be_carried_out_is_refused_by_name(models):
    model = models["qwen3_moe"]
    refused = {
        "fallback='cpu'": mc.FIRST_CHOICE.replace(fallback="cpu"),
        "eviction='belady'": mc.FETCH_EVERY_MISS.replace(eviction="belady"),
        "low_bits=": mc.FIRST_CHOICE.replace(fallback="low_precision"),
    }
    for name, policy in refused.items():
        with pytest.raises(ValueError, match=name):
            mc.offload(model, policy, 5)
    with pytest.raises(ValueError, match=r"num_slots .* or memory"):
        mc.offload(model, mc.SPEED_FIRST)
    with pytest.raises(mc.CapacityError, match="num_slots=2 is below top-k=3"):
        mc.offload(model, mc.SPEED_FIRST, 2)
    with pytest.raises(ValueError, match="device='mps'"):
        mc.offload(model, mc.SPEED_FIRST, 5, device="mps")
    assert np.array_equal(plain_logits(model, SHORT), plain_logits(FAMILIES["qwen3_moe"](), SHORT))


def test_a_policy_that_couples_layers_is_refused_by_name(models, monkeypatch):
    monkeypatch.setattr(mc.Policy, "couples_layers", property(lambda policy: True))
    with pytest.raises(ValueError, match="policy 'speed-first': its layers decide together"):
        mc.offload(models["qwen3_moe"], mc.SPEED_FIRST, 5)


def test_compiling_an_offloaded_model_changes_nothing(models, offloaded):
    text, settings = torch.from_numpy(SHORT[None]), {"backend": "eager"}
    expected = offloaded("qwen3_moe")(input_ids=text).logits
    assert torch.equal(torch.compile(models["qwen3_moe"], **settings)(input_ids=text).logits, expected)
    with pytest.raises(RuntimeError, match="no compiled frames"):
        torch.compile(models["qwen3_moe"], fullgraph=True, **settings)(input_ids=text)


def test_a_store_of_another_model_is_refused_and_the_model_is_whole_again(models):
    model = models["qwen3_moe"]
    with pytest.raises(ValueError, match="the store holds 3 layers of 8 experts, but the model has 2 of 12"):
        mc.offload(model, mc.SPEED_FIRST, 5, store=RamStore.from_model(models["olmoe"]))
    assert np.isfinite(plain_logits(model, SHORT)).all()


def test_batches_are_refused(offloaded):
    model = offloaded()
    with pytest.raises(ValueError, match="got a batch of 2"):
        model(input_ids=torch.zeros(2, 1, dtype=torch.int64))


def test_a_memory_budget_is_kept_and_one_too_small_is_refused_with_the_smallest_that_works(models, offloaded):
    model = models["qwen3_moe"]
    with pytest.raises(mc.CapacityError, match=r"smallest budget that works is [0-9]+ bytes") as refusal:
        mc.offload(model, mc.SPEED_FIRST, memory="1 kB")
    smallest = int(str(refusal.value).split("works is ")[1].split()[0])
    with pytest.raises(mc.CapacityError):
        mc.offload(model, mc.SPEED_FIRST, memory=smallest - 1)
    offloaded("qwen3_moe", mc.SPEED_FIRST, memory=smallest)
    assert model.moecache.num_slots.tolist() == [3, 3]
    dense = sum(weight.numel() * weight.element_size() for weight in (*model.parameters(), *model.buffers()))
    cache = hf_checkpoints.cache_bytes(hf_checkpoints.skeleton(model.config), 4096)
    assert dense + cache + 2**28 + model.moecache._pool.num_bytes == smallest


def test_a_budget_counts_as_a_plan_does(models, tmp_path):
    folder = tiny_checkpoints.save(models["qwen3_moe"], tmp_path)
    asked = {"memory": "300 KB", "context_tokens": 100, "reserve": "50 KB"}
    planned = mc.plan(folder, policy=mc.SPEED_FIRST, hardware="nvme", **asked)
    model = mc.offload(folder, mc.SPEED_FIRST, **asked)
    assert 3 <= planned.num_slots < 8
    assert model.moecache.num_slots.tolist() == [planned.num_slots] * 2
    model.moecache.close()


@pytest.mark.parametrize("size", ["20 GiB", "20GiB", 20 * 2**30, "21474.83648 MB"])
def test_sizes_are_understood(size):
    from moecache.runtime.budget import parse_bytes

    assert parse_bytes(size) == 20 * 2**30
    with pytest.raises(ValueError, match="'20 elephants' is no size"):
        parse_bytes("20 elephants")
