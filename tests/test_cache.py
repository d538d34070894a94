"""The door to the kernel: capacities, cold starts, rank order, and inputs of any layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import random_stream

import moecache as mc
from moecache.cache import rank_order, slots_per_layer
from moecache.kernel.codes import BOOKED
from moecache.kernel.jit import drop_stale_cache, source_digest

SHAPE = mc.ModelShape(2, 8, 2)
STREAM = random_stream(2, 60, 2, 8, 2)


def residents(cache):
    return [sorted(int(expert) for expert in row if expert >= 0) for row in cache.state.expert_in_slot]


def test_slots_per_layer():
    assert slots_per_layer(SHAPE, 3).tolist() == [3, 3]
    assert slots_per_layer(SHAPE, [3, 8]).tolist() == [3, 8]
    assert slots_per_layer(SHAPE, np.array([2, 4], np.int16)).tolist() == [2, 4]
    assert slots_per_layer(SHAPE, np.int32(5)).dtype == np.int64


def test_cold_starts():
    assert residents(mc.ExpertCache(SHAPE, mc.Policy(), [3, 5])) == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert residents(mc.ExpertCache(SHAPE, mc.Policy(), 3, "empty")) == [[], []]
    profile = [[7, 1, 4, 0], [3, 2, 1, 5]]
    assert residents(mc.ExpertCache(SHAPE, mc.Policy(), [3, 2], profile)) == [[1, 4, 7], [2, 3]]
    drawn = residents(mc.ExpertCache(SHAPE, mc.Policy(), 4, "random", seed=1))
    assert [len(row) for row in drawn] == [4, 4]


BAD_COLD_STARTS = [
    ("warm", r"cold_start='warm' is unknown; choose one of first, random, empty, or give a profile"),
    ([0, 1, 2], r"must be integers \[2, at least 3\], got int64 \(3,\)"),
    ([[0, 1], [0, 1]], r"must be integers \[2, at least 3\], got int64 \(2, 2\)"),
    ([[0.0, 1.0, 2.0]] * 2, r"must be integers .*float64"),
    ([[0, 1, 8], [0, 1, 2]], r"different experts in 0\.\.7"),
    ([[0, 1, -1], [0, 1, 2]], r"different experts in 0\.\.7"),
    ([[0, 1, 2], [0, 1, 1]], r"different experts in 0\.\.7"),
]


@pytest.mark.parametrize(("cold_start", "message"), BAD_COLD_STARTS)
def test_impossible_cold_starts_are_named(cold_start, message):
    with pytest.raises(ValueError, match=message):
        mc.ExpertCache(SHAPE, mc.Policy(), 3, cold_start)


def test_a_rank_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"names rank 2, but top-2 has ranks 0\.\.1"):
        mc.ExpertCache(SHAPE, mc.first_j(3), 4)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0.1, 0.2, 0.3])), min_size=1, max_size=8, unique_by=lambda call: call[0]))
def test_rank_order(calls):
    ids, weights = (np.array(column) for column in zip(*calls, strict=True))
    order = rank_order(weights, ids)
    assert [calls[i] for i in order] == sorted(calls, key=lambda call: (-call[1], call[0]))


def test_who_needs_scores():
    assert mc.GATE_015.needs_scores
    assert not mc.FETCH_EVERY_MISS.needs_scores
    assert not mc.GATE_015.replace(fallback="drop").needs_scores
    assert not mc.GATE_015.replace(fallback="random_resident").needs_scores


def test_layout_of_the_input_does_not_matter():
    ids, weights, scores = STREAM
    plain = mc.ExpertCache(SHAPE, mc.QUALITY_FIRST, 4).decide(ids, weights, scores)
    spread = np.zeros((60, 2, 16), np.float16)[..., ::2]
    spread[:] = scores
    other = mc.ExpertCache(SHAPE, mc.QUALITY_FIRST, 4).decide(np.asfortranarray(ids.astype(np.uint8)), weights.astype(np.float64), spread)
    assert other.is_equal(plain)


def test_the_input_is_not_changed():
    arrays = [array.copy() for array in STREAM]
    mc.ExpertCache(SHAPE, mc.SPEED_FIRST, 2).decide(*arrays)
    assert all(np.array_equal(mine, given_) for mine, given_ in zip(arrays, STREAM, strict=True))
    assert all(array.flags.writeable for array in arrays)


finite_bits = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7C00 != 0x7C00 and bits != 0x8000)


@settings(max_examples=200)
@given(st.lists(finite_bits, min_size=8, max_size=8))
def test_stand_ins_in_order_of_any_float16_score(bits):
    scores = np.array(bits, np.uint16).view(np.float16)
    cache = mc.ExpertCache(mc.ModelShape(1, 8, 4), mc.SUBSTITUTE_EVERY_MISS, 4)
    log = cache.decide(np.array([[[4, 5, 6, 7]]]), np.full((1, 1, 4), 0.25, np.float32), scores.reshape(1, 1, 8))
    assert log.computed_ids.ravel().tolist() == sorted(range(4), key=lambda expert: (-float(scores[expert]), expert))


def test_most_experts_possible():
    """Ids up to 32,766 survive their 16 bits in ties, scores and slots."""
    shape = mc.ModelShape(1, 32767, 1)
    cache = mc.ExpertCache(shape, mc.SUBSTITUTE_EVERY_MISS.admitted_anyway(), 32766)
    ids, weights, scores = np.full((3, 1, 1), 32766), np.ones((3, 1, 1), np.float32), np.zeros((3, 1, 32767), np.float16)
    scores[..., [30000, 32765]] = 2, 3
    log = cache.decide(ids, weights, scores)
    assert log.computed_ids.ravel().tolist() == [32765, 32766, 32766]
    assert log.arrivals.tolist() == [[0, 1, 0, 32766, 0, 0, 0]]


def test_reset_cancels_what_is_under_way():
    policy = mc.FIRST_CHOICE.replace(admission="background", mass_threshold=0, admission_delay=50)
    cache = mc.ExpertCache(SHAPE, policy, 2)
    log = cache.decide(*STREAM)
    num_under_way = int(cache.counts[:, BOOKED].sum()) - len(log.arrivals)
    rows = cache.reset()
    assert len(rows) == num_under_way > 0
    assert (rows[:, 0] > 60 - 1 - 50).all()
    assert set(map(tuple, rows[:, [1, 4, 5, 6]])) == {(59, -2, 0, mc.Landing.CANCELLED)}
    assert not cache.state.mass_account.any()
    assert cache.reset().shape == (0, 7)


def test_stale_compiled_files_are_dropped(tmp_path):
    sources, compiled = tmp_path / "sources", tmp_path / "compiled"
    sources.mkdir()
    compiled.mkdir()
    (sources / "step.py").write_text("one = 1")
    (sources / "eviction.py").write_text("two = 2")
    mine, foreign = compiled / "step.replay-1.py311.nbi", compiled / "other.f-1.py311.nbi"
    mine.touch()
    foreign.touch()
    assert drop_stale_cache(compiled, sources)
    assert not mine.exists()
    assert foreign.exists()
    mine.touch()
    assert not drop_stale_cache(compiled, sources)
    assert mine.exists()
    before = source_digest(sources)
    (sources / "eviction.py").write_text("two = 3")
    assert source_digest(sources) != before
    assert drop_stale_cache(compiled, sources)
    assert not mine.exists()
    assert not drop_stale_cache(tmp_path / "absent", sources)
