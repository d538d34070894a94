"""Generated programs: right and wrong ones, and those that would do harm in this process."""

from __future__ import annotations

import os
import time

import pytest

from moecache.experiments.code_answers import passes

RIGHT = "def double(x):\n    return 2 * x\n"
TEST = "\nassert double(4) == 8\n"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (RIGHT + TEST, True),
        (RIGHT.replace("2", "3") + TEST, False),
        ("def double(x:\n", False),
        ("import sys; sys.exit(0)" + TEST, False),  # leaves well, but before the test
        ("import os; os._exit(0)" + TEST, False),
        ("print('a line without an end', end='')\n" + RIGHT + TEST, True),
        ("block = bytearray(2 << 30)" + TEST, False),
        ("open('big', 'wb').write(bytes(4 << 20))\n" + RIGHT + TEST, False),
    ],
    ids=["right", "wrong", "no_syntax", "exit", "hard_exit", "prints", "memory", "file"],
)
def test_a_program_passes_only_if_it_runs_to_its_end_within_its_limits(program, expected):
    assert passes(program, 20.0) is expected


def test_an_endless_program_is_ended():
    start = time.monotonic()
    assert not passes("while True:\n    pass\n", 1.0)
    assert time.monotonic() - start < 30.0


def test_the_program_sees_neither_this_folder_nor_this_environment(monkeypatch):
    monkeypatch.setenv("MOECACHE_SECRET", "word")
    assert passes("import os, sys\nassert 'MOECACHE_SECRET' not in os.environ\nassert os.listdir('.')\nassert '' not in sys.path\n", 20.0)
    assert not os.path.exists("answer.py")


def test_limits_out_of_range_are_refused():
    for limits in ((0.0, 512), (5.0, 1)):
        with pytest.raises(ValueError, match="limit_seconds"):
            passes(RIGHT, *limits)
