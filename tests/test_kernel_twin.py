"""The kernel and its plain twin decide alike, on random streams and policies, compiled and interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import assert_same_decisions, policies, random_stream

import moecache as mc
from moecache.kernel import replay

FEW = int(os.environ.get("MOECACHE_TWIN_EXAMPLES", "250"))


@st.composite
def cases(draw):
    num_experts = draw(st.integers(2, 24))
    top_k = draw(st.integers(1, min(6, num_experts)))
    num_layers = draw(st.integers(1, 3))
    slots = st.integers(top_k, num_experts)
    num_slots = draw(st.one_of(slots, st.lists(slots, min_size=num_layers, max_size=num_layers)))
    num_tokens = draw(st.integers(3, 60))
    stream = random_stream(draw(st.integers(0, 10_000)), num_tokens, num_layers, num_experts, top_k)
    is_exact = np.arange(num_tokens) < draw(st.sampled_from([0, 0, 4]))
    reset_at = draw(st.sampled_from([(), (), (num_tokens // 2,)]))
    cold_start, seed = draw(st.sampled_from(["first", "random", "empty"])), draw(st.integers(0, 99))
    return stream, draw(policies(top_k, num_experts)), num_slots, cold_start, is_exact, reset_at, seed


@settings(max_examples=FEW, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_kernel_equals_twin(case):
    assert_same_decisions(*case)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_kernel_equals_twin_on_many_streams(case):
    assert_same_decisions(*case)


@pytest.mark.parametrize("half_life", [1, 1.943, 7.3])
def test_decayed_count_survives_its_rescales(half_life):
    stream = random_stream(1, 1500, 1, 12, 3)
    policy = mc.Policy(eviction="decayed_count", half_life=half_life)
    assert_same_decisions(stream, policy, 5)


def run_again(**environment):
    """The hypothesis comparison in a new process with other settings of numba."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "test_kernel_equals_twin and not many"]
    merged = {**os.environ, "MOECACHE_TWIN_EXAMPLES": "60", **environment}
    result = subprocess.run(command, env=merged, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_interpreted_kernel_equals_twin():
    run_again(NUMBA_DISABLE_JIT="1")


@pytest.mark.long
def test_kernel_stays_inside_its_arrays(tmp_path):
    run_again(NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))


@pytest.mark.long
def test_compiled_kernel_counts_no_references(tmp_path):
    """Freshly compiled (a kernel loaded from numba's cache carries no LLVM code to look at)."""
    code = (
        "import numpy as np, moecache as mc; from moecache.kernel import replay; from moecache.cache import ExpertCache;"
        "cache = ExpertCache(mc.ModelShape(1, 4, 2), mc.Policy(), 2);"
        "cache.decide(np.array([[[0, 1]]]), np.array([[[.6, .4]]]));"
        "text = ''.join(replay.inspect_llvm().values()); assert len(text) > 1000; assert 'NRT_incref' not in text"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, check=True)


@pytest.mark.skipif(not hasattr(replay, "stats"), reason="nothing is compiled in this process")
def test_a_new_process_compiles_nothing():
    """The compiled kernel of this process, or of an earlier one, is found on the disk."""
    assert_same_decisions(random_stream(5, 20, 2, 8, 2), mc.Policy(), 4)
    code = (
        "import moecache as mc; from moecache.kernel import replay;"
        "trace = mc.RouterTrace.from_arrays([[[0, 1]]], [[[0.6, 0.4]]], num_experts=4); mc.simulate(trace, mc.Policy(), 2);"
        "print(sum(replay.stats.cache_hits.values()), sum(replay.stats.cache_misses.values()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]


@pytest.mark.skipif(not hasattr(replay, "signatures"), reason="nothing is compiled in this process")
def test_kernel_has_one_signature():
    for policy in (*mc.PRESETS, mc.Policy(gate_threshold=np.float32(0.5), eviction="decayed_count", half_life=3)):
        assert_same_decisions(random_stream(5, 20, 2, 8, 2), policy, 4)
    assert len(replay.signatures) == 1
