"""A machine that runs no engine: it answers every command by the engine's program, and notes what was asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moecache import results
from moecache.experiments import stock_runs
from moecache.experiments.memory_cap import CappedRun
from moecache.experiments.stock_engines.protocol import Measured
from moecache.experiments.stock_files import Files
from moecache.experiments.stock_runs import Text
from moecache.trace import ModelShape

TEXT = Text("reference-64", 512, 128, 4, 8, 100, 60)
LLAMA, ACCELERATE, MAPPED, FETCHING, RULE, QUALITY = (
    "llama.cpp", "accelerate, disk offload", "transformers, mapped files", "moecache, fetch every miss", "moecache, 0.15 rule",
    "moecache, quality-first",
)  # fmt: skip
SHAPE = ModelShape(num_layers=2, num_experts=64, top_k=8)
GIB = 2**30


class FakeMachine:
    """Stands for processes and the disk."""

    def __init__(self, folder: Path) -> None:
        self.commands: list[list[str]] = []
        self.limits: list[int | None] = []
        self.rate = {"llama_cpp": 4.0, "accelerate_offload": 3.0, "transformers_mmap": 2.0, "ours": 40.0}
        self.best_threads = 4
        self.killed: set[str] = set()
        self.stops_after = 10**9
        self.files = Files(folder, folder, SHAPE, 10 * 2**20, {16: 2**20, 4: 2**18})

    def run(self, command, limit_bytes, timeout_seconds, env=None):
        if len(self.commands) >= self.stops_after:
            raise KeyboardInterrupt
        self.commands.append(list(command))
        self.limits.append(limit_bytes)
        program = command[2].rpartition(".")[2]
        if program in self.killed:
            return CappedRun(-9, True, limit_bytes, 0, "", "", 1.0)
        threads = int(command[command.index("--threads") + 1])
        rate = self.rate[program] * (1.0 if program != "llama_cpp" else 1 / (1 + abs(threads - self.best_threads)))
        warm, measured = (int(command[command.index(name) + 1]) for name in ("--warm-tokens", "--measured-tokens"))
        assert np.load(command[4]).shape == (warm + measured,)
        answer = {"engine": program, "model": "m", "versions": {}, "settings": {"mmap": True}, "threads": threads, "load_seconds": 1.0,
                  "warm_seconds": [9.0] * warm, "seconds": [1 / rate] * measured, "stats": {"hit": 6, "fetched": 2},
                  "peak_resident_bytes": GIB, "private_bytes": GIB // 2, "major_faults": 80, "read_bytes": 8 * 2**20,
                  "gpu_peak_bytes": GIB // 4 if "--device" in command else None}  # fmt: skip
        assert Measured(**answer)
        return CappedRun(0, False, limit_bytes, GIB, f"some words\n{json.dumps(answer)}\n", "", 5.0)

    def programs(self) -> list[str]:
        return [command[2].rpartition(".")[2] for command in self.commands]

    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeMachine:
        """Put it in the place of the real one, with results of its own."""
        monkeypatch.setenv("MOECACHE_OWN_RESULTS", str(folder / "own"))
        monkeypatch.setenv("MOECACHE_RESULTS", "own")
        monkeypatch.setattr(results, "_used", [])
        monkeypatch.setattr(stock_runs, "run_capped", self.run)
        monkeypatch.setattr(stock_runs, "why_no_cap", lambda: None)
        monkeypatch.setattr(stock_runs, "files_of", lambda *_: self.files)
        monkeypatch.setattr(stock_runs, "tokens_of", lambda n, document: np.full(n, document, np.int32))
        monkeypatch.setattr(stock_runs, "check_installed", lambda _: None)
        monkeypatch.setattr(stock_runs, "compile_ahead", lambda *_: None)
        return self
