"""What all tests share: settled threads, hypothesis without a clock, and recorded traces that lie outside the clone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

# Before any library starts its own: the tests themselves run in two processes.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("MPLBACKEND", "agg")

ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("moecache", deadline=None, derandomize=True)
hypothesis.settings.load_profile("moecache")


@pytest.fixture(scope="session", autouse=True)
def kernel_is_compiled_for_one_flavour():
    """Whatever the tests hand over, the door to the kernel makes one kind of argument of it: another compilation takes half a minute."""
    yield
    replay = getattr(sys.modules.get("moecache.kernel.step"), "replay", None)
    assert len(getattr(replay, "signatures", [])) <= 1


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the clone."""
    return ROOT


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of real traces and configurations that are not part of the clone.

    ``MOECACHE_TEST_DATA`` names it; by default it lies beside the clone, in ``shared/data``. Only its absence skips a
    test, and not even that where ``MOECACHE_REQUIRE_TEST_DATA`` is set.
    """
    folder = Path(os.environ.get("MOECACHE_TEST_DATA") or ROOT.parent / "shared" / "data")
    if folder.is_dir():
        return folder
    told = f"no folder {folder}: set MOECACHE_TEST_DATA to the folder that holds the recorded traces"
    if os.environ.get("MOECACHE_REQUIRE_TEST_DATA"):
        pytest.fail(told)
    pytest.skip(told)
