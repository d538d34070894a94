"""Run a command in memory of a given size, and let the operating system say how much it used.

A process group of the kernel (cgroup) has its own account of memory: what its processes allocate and the pages of files that they touch
first, and a limit. Above the limit the kernel takes back pages of files, and where that is not enough it kills. So a program that keeps a
large file mapped fits into any limit, but pays for it in reads; a program that allocates more than the limit is killed. Two things must be
seen to:

- a page of a file counts for the group that touched it first. Pages that another program has read would be free, so they are dropped from
  the cache before every run;
- the kernel kills without a word. Whether it did is read from the group's own count of such kills.

Two figures say how much was used: the account's peak, files' pages included (a program that reads files reaches the limit sooner or later),
and the most that the command's process had resident (VmHWM). Both versions of cgroups are understood. Experts, models and speeds are not
known here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import moecache.experiments.capped_child as child_program

ROOTS = {1: Path("/sys/fs/cgroup/memory"), 2: Path("/sys/fs/cgroup")}
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SMALLEST_CAP = 16 * 2**20  # bytes; below it not even an interpreter starts
FILES = {
    1: {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes", "kills": "memory.oom_control"},
    2: {"limit": "memory.max", "peak": "memory.peak", "kills": "memory.events"},
}
NO_SWAP = {1: ("memory.swappiness", "0"), 2: ("memory.swap.max", "0")}


class MemoryCapError(ValueError):
    """A cap cannot be set on this machine; the message says why."""


@dataclass(frozen=True)
class CappedRun:
    """How a command ended.

    Attributes
    ----------
    returncode : the command's; minus the number of the signal that ended it.
    was_killed_by_cap : whether the kernel killed a process of it for want of memory, and it failed.
    peak_bytes : the most that its group held, pages of files included; None where there was no group, or it keeps no peak.
    peak_rss_bytes : the most that the command's process had resident (VmHWM), mapped pages included.
    stdout, stderr : what it wrote.
    seconds : wall time.
    is_timed_out : whether it was ended because its time was up.
    """

    returncode: int
    was_killed_by_cap: bool
    peak_bytes: int | None
    peak_rss_bytes: int
    stdout: str
    stderr: str
    seconds: float
    is_timed_out: bool = False


@dataclass(frozen=True)
class _Group:
    """One memory cgroup: its folder and the version of its files."""

    folder: Path
    version: int

    @property
    def procs(self) -> Path:
        """The file that lists its processes, and takes new ones."""
        return self.folder / "cgroup.procs"

    def limit(self, limit_bytes: int) -> None:
        (self.folder / FILES[self.version]["limit"]).write_text(str(limit_bytes))
        name, value = NO_SWAP[self.version]
        if (self.folder / name).exists():  # absent where the system has no swap
            (self.folder / name).write_text(value)

    def peak_bytes(self) -> int | None:
        path = self.folder / FILES[self.version]["peak"]
        return int(path.read_text()) if path.exists() else None  # version 2 keeps it since Linux 5.19

    def num_kills(self) -> int:
        rows = (line.split() for line in (self.folder / FILES[self.version]["kills"]).read_text().splitlines())
        return sum(int(count) for name, count in rows if name == "oom_kill")

    def kill(self, patience_seconds: float = 10.0) -> None:
        """End every process in it, also those that left the command's session."""
        until = monotonic() + patience_seconds
        while (pids := self.procs.read_text().split()) and monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            sleep(0.01)

    def remove(self, patience_seconds: float = 10.0) -> None:
        until = monotonic() + patience_seconds
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:  # the last process is gone, its account is closed a moment later
                if monotonic() > until:
                    raise
                sleep(0.01)


def why_no_cap() -> str | None:
    """One sentence that says why this machine cannot cap a command's memory; None where it can."""
    if not os.access(DROP_CACHES, os.W_OK):
        return f"{DROP_CACHES} cannot be written, so pages of files read earlier would be free: run as root on Linux"
    if _version() is None:
        looked = " and ".join(str(root) for root in ROOTS.values())
        return f"no memory controller of cgroups that can be written was found (looked at {looked}): run as root, outside a container"
    return None


def run_capped(command: Sequence[str], limit_bytes: int | None, timeout_seconds: float, env: Mapping[str, str] | None = None) -> CappedRun:
    """Run a command under a memory cgroup of its own, on a cold cache of files.

    Parameters
    ----------
    command : program and arguments.
    limit_bytes : of memory, pages of files included; None = as much as there is, and then also where no cgroup can be made.
    timeout_seconds : after them every process of it is killed.
    env : the command's environment; by default this process's.

    Returns
    -------
    CappedRun : also where it failed, was killed or took too long.

    Raises
    ------
    MemoryCapError : the machine cannot do it (`why_no_cap`).
    ValueError : an empty command, or a cap below 16 MiB.
    """
    if not command:
        raise ValueError("command is empty; give a program and its arguments")
    if limit_bytes is not None and limit_bytes < SMALLEST_CAP:
        raise ValueError(f"limit_bytes={limit_bytes} is below {SMALLEST_CAP}, in which not even an interpreter starts")
    reason = why_no_cap()
    if reason is not None and limit_bytes is not None:
        raise MemoryCapError(f"memory cannot be capped: {reason}")
    if reason is not None:
        return _run(command, None, timeout_seconds, env)
    _drop_cached_files()
    with _new_group() as group:
        if limit_bytes is not None:
            group.limit(limit_bytes)
        return _run(command, group, timeout_seconds, env)


def _run(command: Sequence[str], group: _Group | None, timeout_seconds: float, env: Mapping[str, str] | None) -> CappedRun:
    reading, writing = os.pipe()
    procs = "" if group is None else str(group.procs)
    launcher = [sys.executable, "-I", "-S", child_program.__file__, str(writing), procs, *command]
    started = monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, os.fdopen(reading, "rb") as report:
        try:
            process = subprocess.Popen(
                launcher, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, pass_fds=(writing,), start_new_session=True
            )
        finally:
            os.close(writing)
        is_timed_out = _wait(process, group, timeout_seconds)
        seconds = monotonic() - started
        written = report.read().split() if process.returncode == 0 else []
        texts = [_text(file) for file in (out, err)]
    status, peak_rss = (int(written[0]), int(written[1])) if written else (signal.SIGKILL, 0)
    returncode = os.waitstatus_to_exitcode(status)
    was_killed = group is not None and returncode != 0 and not is_timed_out and group.num_kills() > 0
    peak = None if group is None else group.peak_bytes()
    return CappedRun(returncode, was_killed, peak, peak_rss, texts[0], texts[1], seconds, is_timed_out)


def _wait(process: subprocess.Popen[bytes], group: _Group | None, timeout_seconds: float) -> bool:
    """Wait for the command's end, or end it; nothing of it is left. True where its time was up."""
    is_timed_out = False
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        is_timed_out = True
        if group is not None:
            group.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)  # the launcher reports the peak
    finally:
        if group is not None:
            group.kill()
        _end_session(process)
    return is_timed_out


def _end_session(process: subprocess.Popen[bytes], patience_seconds: float = 2.0) -> None:
    """End the launcher and what shares its session, and wait until they are gone."""
    until = monotonic() + patience_seconds
    with contextlib.suppress(ProcessLookupError):
        while monotonic() < until:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            sleep(0.01)


def _text(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return file.read().decode(errors="replace")  # type: ignore[attr-defined]


def _drop_cached_files() -> None:
    os.sync()
    DROP_CACHES.write_text("1")


def _version() -> int | None:
    """Of the memory controller that can be written; where both are mounted, the one that has the controller."""
    if os.access(ROOTS[1] / FILES[1]["limit"], os.F_OK) and os.access(ROOTS[1], os.W_OK):
        return 1
    controllers = ROOTS[2] / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split() and os.access(ROOTS[2] / "cgroup.subtree_control", os.W_OK):
        return 2
    return None


@contextlib.contextmanager
def _new_group() -> Iterator[_Group]:
    """A cgroup that is gone afterwards, whatever happens."""
    version = _version()
    if version is None:
        raise MemoryCapError(f"memory cannot be capped: {why_no_cap()}")
    if version == 2:
        try:
            (ROOTS[2] / "cgroup.subtree_control").write_text("+memory")
        except OSError as fault:
            raise MemoryCapError(f"{ROOTS[2]} hands no memory controller to new groups ({fault}); run outside a container") from fault
    _remove_left_over(version)
    group = _Group(Path(tempfile.mkdtemp(prefix=f"moecache-{os.getpid()}-", dir=ROOTS[version])), version)
    try:
        yield group
    finally:
        group.kill()
        group.remove()


def _remove_left_over(version: int) -> None:
    """End and remove groups whose maker was killed before it could."""
    for folder in ROOTS[version].glob("moecache-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            group = _Group(folder, version)
            group.kill()
            group.remove()
