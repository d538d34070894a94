"""The read-ahead of the disk under a file: how much the kernel reads besides a page that a program asked for.

A program that maps a file gets its pages by faults, and each fault reads this much. Large values help a program that goes through its
file in order and make one that jumps read bytes that it does not want, so engines that map their weights are compared at the better of
two. Setting it needs root; where it cannot be set it stays as it is, and what it is gets reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEVICES = Path("/sys/dev/block")
UNKNOWN = -1


def setting_of(path: Path) -> Path | None:
    """The file that holds the read-ahead, in KiB, of the disk under `path`; None where the system has no such file."""
    device = os.stat(path).st_dev
    folder = DEVICES / f"{os.major(device)}:{os.minor(device)}"
    # A partition has no queue of its own: the disk is the folder around it.
    found = [place for place in (folder / "queue", folder / ".." / "queue") if (place / "read_ahead_kb").is_file()]
    return found[0] / "read_ahead_kb" if found else None


@contextmanager
def read_ahead(path: Path, kibibytes: int | None) -> Iterator[int]:
    """Set the read-ahead of the disk under a path for a while; gives the one that holds, in KiB (-1 where it is unknown).

    Parameters
    ----------
    path : a file or folder on the disk.
    kibibytes : wanted; None leaves it as it is.
    """
    setting = setting_of(path)
    if setting is None:
        yield UNKNOWN
        return
    before = int(setting.read_text())
    if kibibytes is None or kibibytes == before or not os.access(setting, os.W_OK):
        yield before
        return
    setting.write_text(str(kibibytes))
    try:
        yield int(setting.read_text())
    finally:
        setting.write_text(str(before))
