"""Does a program that a model wrote pass its test? It runs in a process of its own, under limits.

Nothing that a model wrote is ever executed in this process. The other process gets a copy of Python that reads neither the user's
packages nor the environment, an empty folder to work in that is removed afterwards, and limits on processor time, memory, file size, open
files and new processes; it is ended, with all that it started, when its time is up. The limits are set before the program is read and
cannot be raised by it. This keeps an accident small. It is no prison: the program could still read files of this user and reach the
network, so programs of a model that is not trusted belong on a machine that has neither.

A program passes only if it runs to its end. It cannot pass by leaving early: after the last line it must print a word that was drawn for
this run. What a right program is stands in the test that the caller appends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

OUTPUT_BYTES = 1 << 20
_LIMITED = """\
import resource as _resource
for _name, _value in {limits!r}:
    _resource.setrlimit(getattr(_resource, _name), (_value, _value))
with open({path!r}) as _file:
    _program = _file.read()
exec(compile(_program, "answer", "exec"), {{"__name__": "__main__"}})
print()
print({word!r}, flush=True)
"""


def passes(program: str, limit_seconds: float = 5.0, limit_mebibytes: int = 512) -> bool:
    """Whether a program runs to its end without an error, in a process of its own.

    Parameters
    ----------
    program : str
        Python source: what was written, and the test of it.
    limit_seconds : float
        Of waiting, and (rounded up) of processor time; above 0.
    limit_mebibytes : int
        Of memory; at least 64, which Python itself needs.

    Raises
    ------
    ValueError : limits that are out of range.
    OSError : a system on which such limits cannot be set.
    """
    if not limit_seconds > 0.0 or limit_mebibytes < 64:
        raise ValueError(f"limit_seconds={limit_seconds}, limit_mebibytes={limit_mebibytes}: give more than 0 seconds and at least 64 MiB")
    if os.name != "posix":
        raise OSError("generated programs run only where their time and memory can be limited: use Linux or macOS")
    with tempfile.TemporaryDirectory(prefix="answer_", ignore_cleanup_errors=True) as folder:
        path, word = Path(folder) / "answer.py", secrets.token_hex(16)
        path.write_text(program)
        starter = _LIMITED.format(limits=_limits(limit_seconds, limit_mebibytes), path=str(path), word=word)
        output = Path(folder) / "output"
        is_complete = _run(starter, folder, output, limit_seconds)
        return is_complete and output.read_bytes()[-len(word) - 2 :].split() == [word.encode()]


def _limits(limit_seconds: float, limit_mebibytes: int) -> list[tuple[str, int]]:
    seconds = int(limit_seconds) + 1
    limits = [
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_FSIZE", OUTPUT_BYTES),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", 0),
    ]
    # macOS refuses to limit address space below what a process has mapped already.
    return limits + ([("RLIMIT_AS", limit_mebibytes << 20)] if sys.platform.startswith("linux") else [])


def _run(starter: str, folder: str, output: Path, limit_seconds: float) -> bool:
    """Run until the end or the limit; True when the process ended well by itself."""
    with output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", starter],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(limit_seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
