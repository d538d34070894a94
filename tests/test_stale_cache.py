"""An edit to any kernel file reaches the compiled kernel: numba's own disk cache would keep the old policy.

A copy of the kernel is compiled in a process of its own, its eviction rule is changed, and a new process must decide differently. Each
run compiles for half a minute, so these tests belong to the long ones; `drop_stale_cache` itself is tested in test_cache.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moecache

PACKAGE = Path(moecache.__file__).parent
RECENT = "if eviction == LRU:\n        score = np.float64(now + 1)"
LEAST_RECENT = RECENT.replace("now + 1", "1e6 - now")
DECIDE = """
import sys
import numpy as np
import moecache as mc
from moecache.kernel import replay
from moecache.one_token import OneToken
from moecache.one_token.compiled import advance
assert mc.__file__.startswith(sys.argv[1]), mc.__file__
cache = mc.ExpertCache(mc.ModelShape(1, 4, 1), mc.FETCH_EVERY_MISS, 2)
log = cache.decide(np.array([0, 1, 2]).reshape(3, 1, 1), np.ones((3, 1, 1), np.float32))
door, evicted = OneToken(mc.ExpertCache(mc.ModelShape(1, 4, 1), mc.FETCH_EVERY_MISS, 2)), []
for expert in (0, 1, 2):
    door.take([expert], [1.0])
    door.decide(0)
    evicted += door.log().evicted_ids.ravel().tolist()
assert evicted == log.evicted_ids.ravel().tolist(), (evicted, "the door for one token was compiled from another kernel")
print(evicted, *(sum(function.stats.cache_hits.values()) for function in (replay, advance)))
"""


def run(folder, environment):
    """Evictions of the copy in `folder`, and how often the compiled forms of both doors came from the disk."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")} | environment
    command = [sys.executable, "-c", DECIDE, str(folder)]
    done = subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    evicted, general, one_token = done.stdout.strip().rsplit(" ", 2)
    return evicted, int(general), int(one_token)


@pytest.mark.long
@pytest.mark.parametrize("has_own_cache_folder", [False, True])
def test_edited_kernel_is_compiled_anew(tmp_path, has_own_cache_folder):
    copy = tmp_path / "moecache"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "reference", "book"))
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "numba")} if has_own_cache_folder else {}
    assert run(tmp_path, environment) == ("[-1, -1, 0]", 0, 0)
    assert run(tmp_path, environment) == ("[-1, -1, 0]", 1, 1)
    source = copy / "kernel" / "eviction.py"
    text = source.read_text()
    assert RECENT in text
    source.write_text(text.replace(RECENT, LEAST_RECENT))
    assert run(tmp_path, environment) == ("[-1, -1, 1]", 0, 0)
    assert run(tmp_path, environment) == ("[-1, -1, 1]", 1, 1)
