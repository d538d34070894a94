"""Capped memory: what the kernel killed is told from what failed, peaks are right, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moecache.experiments import memory_cap
from moecache.experiments.memory_cap import MemoryCapError, run_capped, why_no_cap

MB = 10**6
needs_cap = pytest.mark.skipif(why_no_cap() is not None, reason=str(why_no_cap()))


def allocating(num_bytes: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"data = bytearray({num_bytes}); data[::4096] = b'x' * len(data[::4096]); print('done')"]


def groups() -> list[Path]:
    return [path for root in memory_cap.ROOTS.values() for path in root.glob(f"moecache-{os.getpid()}-*")]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert groups() == []


@needs_cap
def test_a_command_above_its_cap_is_reported_as_killed_by_it():
    run = run_capped(allocating(300 * MB), 150 * MB, 60)
    assert run.was_killed_by_cap
    assert run.returncode == -signal.SIGKILL
    assert not run.is_timed_out
    assert "done" not in run.stdout
    assert run.peak_bytes is not None
    assert run.peak_bytes <= 150 * MB + 2**20


@needs_cap
def test_a_command_below_its_cap_has_its_own_peaks():
    ballast = bytearray(400 * MB)  # of this process: its own peak must not be taken for the command's
    ballast[::4096] = b"x" * len(ballast[::4096])
    run = run_capped(allocating(100 * MB), 300 * MB, 60)
    assert run.returncode == 0
    assert run.stdout == "done\n"
    assert run.stderr == ""
    assert not run.was_killed_by_cap
    assert run.peak_bytes is not None
    assert 100 * MB < run.peak_bytes < 160 * MB
    assert 100 * MB < run.peak_rss_bytes < 160 * MB
    del ballast


@needs_cap
def test_without_a_limit_the_peak_is_still_told():
    run = run_capped(allocating(300 * MB), None, 60)
    assert run.returncode == 0
    assert run.peak_bytes is not None
    assert 300 * MB < run.peak_bytes < 360 * MB


@needs_cap
def test_pages_of_files_count_although_they_were_read_before(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(60 * MB))
    path.read_bytes()
    run = run_capped([sys.executable, "-S", "-c", f"file = open({str(path)!r}, 'rb')\nwhile file.read(2**20): pass"], None, 60)
    assert run.peak_bytes is not None
    assert run.peak_bytes > 60 * MB
    assert run.peak_rss_bytes < 60 * MB


@needs_cap
def test_a_failure_of_its_own_is_not_blamed_on_the_cap():
    run = run_capped([sys.executable, "-S", "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"], 150 * MB, 60)
    assert (run.returncode, run.was_killed_by_cap, run.stderr) == (3, False, "why\n")
    run = run_capped([sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"], 150 * MB, 60)
    assert (run.returncode, run.was_killed_by_cap) == (-signal.SIGKILL, False)


@pytest.mark.parametrize("has_group", [pytest.param(True, marks=needs_cap), False])
def test_a_timeout_ends_the_command_and_what_it_started(has_group, monkeypatch, tmp_path):
    if not has_group:
        monkeypatch.setattr(memory_cap, "why_no_cap", lambda: "because")
    pids = tmp_path / "pids"
    program = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600'], start_new_session={has_group})\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('begun', flush=True); time.sleep(600)\n"
    )
    run = run_capped([sys.executable, "-S", "-c", program], None, 3)
    assert run.is_timed_out
    assert run.returncode == -signal.SIGKILL
    assert not run.was_killed_by_cap
    assert run.stdout == "begun\n"
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


@needs_cap
def test_what_a_command_leaves_running_is_ended(tmp_path):
    pids = tmp_path / "pids"
    program = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))\n"
    )
    assert run_capped([sys.executable, "-S", "-c", program], 150 * MB, 60).returncode == 0
    assert not is_alive(int(pids.read_text()))


@needs_cap
def test_a_group_whose_maker_was_killed_is_removed_by_the_next():
    program = "from moecache.experiments.memory_cap import run_capped; run_capped(['sleep', '600'], None, 600)"
    maker = subprocess.Popen([sys.executable, "-c", program])
    root = next(root for version, root in memory_cap.ROOTS.items() if version == memory_cap._version())
    while not (made := list(root.glob(f"moecache-{maker.pid}-*/cgroup.procs"))) or not made[0].read_text().split():
        assert maker.poll() is None
        time.sleep(0.05)
    maker.kill()
    maker.wait()
    pids = made[0].read_text().split()
    assert run_capped(["true"], None, 60).returncode == 0
    assert not made[0].exists()
    assert not any(is_alive(int(pid)) for pid in pids)


def test_a_machine_that_cannot_cap_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_cap, "ROOTS", {1: tmp_path / "none", 2: tmp_path / "neither"})
    monkeypatch.setattr(memory_cap, "DROP_CACHES", tmp_path)
    assert "memory controller" in (why_no_cap() or "")
    with pytest.raises(MemoryCapError, match="memory controller"):
        run_capped(["true"], 150 * MB, 5)
    run = run_capped(["echo", "free"], None, 5)
    assert (run.returncode, run.stdout, run.peak_bytes) == (0, "free\n", None)
    assert run.peak_rss_bytes > 0
    monkeypatch.setattr(memory_cap, "DROP_CACHES", tmp_path / "absent")
    assert "root" in (why_no_cap() or "")


def test_files_of_the_second_version_are_understood(tmp_path):
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    group = memory_cap._Group(tmp_path, 2)
    assert group.num_kills() == 2
    assert group.peak_bytes() is None
    (tmp_path / "memory.peak").write_text("4096\n")
    (tmp_path / "memory.swap.max").write_text("max\n")
    group.limit(12345)
    assert group.peak_bytes() == 4096
    assert [(tmp_path / name).read_text() for name in ("memory.max", "memory.swap.max")] == ["12345", "0"]


@pytest.mark.parametrize(("command", "limit", "words"), [([], None, "empty"), (["true"], 1000, "1000")])
def test_bad_input_is_named(command, limit, words):
    with pytest.raises(ValueError, match=words):
        run_capped(command, limit, 5)


def test_a_command_that_does_not_exist_is_said():
    run = run_capped(["/no/such/program"], None, 5)
    assert run.returncode == 127
    assert "/no/such/program could not be started" in run.stderr


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
