"""One run of one engine: its command, the cap around it, and the row that comes of it.

An engine is a program of `stock_engines` that reads a text token by token and prints what each took as JSON. Here it is started in a
process of its own, under a memory cgroup where the machine allows one, on a cold page cache and with the disk's read-ahead as asked. How
it ended is told in words, because being killed by the cap is an answer. Which engines are compared, and in which order, is not known
here.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moecache.cache import CapacityError
from moecache.experiments.memory_cap import CappedRun, run_capped, why_no_cap
from moecache.experiments.read_ahead import UNKNOWN, read_ahead
from moecache.experiments.stock_engines.protocol import Measured
from moecache.experiments.stock_figures import DEFAULT, MEBIBYTE, figures
from moecache.experiments.stock_files import PYTHON_VARIABLE, Files, StockError, files_of, python, tokens_of
from moecache.experiments.stock_places import PROCESSOR, Place, place_options
from moecache.kernel import Admission
from moecache.policy import PRESETS, Policy
from moecache.runtime.budget import slots_within

PRESET_TOP_K = 10  # calls a token for which the presets' thresholds are meant
MAX_IN_FLIGHT = 2  # background copies under way in a layer: without a bound they would take more memory than the smallest cap leaves
RAN, KILLED, TOO_SMALL = "ran", "killed by the cap", "does not fit"
PROGRAMS = "moecache.experiments.stock_engines"
COLUMNS = (
    "model", "bits", "resident_fraction", "cell", "is_fitting", "engine", "repeat", "outcome", "tokens_per_second", "median_ms",
    "load_seconds", "experts_mebibytes", "cap_mebibytes", "is_capped", "peak_mebibytes", "rss_mebibytes", "private_mebibytes",
    "read_mebibytes_per_token",
    "faults_per_token", "hit_rate", "asked_threads", "threads", "asked_read_ahead_kib", "read_ahead_kib", "flags", "versions",
)  # fmt: skip
GPU_COLUMNS = ("device", "gpu_budget_mebibytes", "gpu_peak_mebibytes")  # further ones of a run on a GPU


class Engine(NamedTuple):
    """What is compared: a program of `stock_engines` and how it is asked to run."""

    name: str
    module: str
    package: str = ""  # what it needs beyond this package's own dependencies
    policy: str = ""  # of this project's runtime
    bits: tuple[int, ...] = (16,)
    maps_files: bool = False
    has_threads: bool = False  # whether more threads than cores may help it
    has_gpu_form: bool = True  # whether it is run on a GPU


class Cell(NamedTuple):
    """A precision and a cap."""

    bits: int
    resident_fraction: float  # share of the experts' bytes that the cap has room for

    @property
    def words(self) -> str:
        """As a page says it."""
        return f"{self.bits} bits, {self.resident_fraction:.0%} of the experts".replace("%", " %")


class Choice(NamedTuple):
    """What a sweep chooses; `DEFAULT` leaves it as it is."""

    threads: int = DEFAULT
    read_ahead_kib: int = DEFAULT


class Text(NamedTuple):
    """What every run shares: the checkpoint, how much is read, the allowance, and the place."""

    model_name: str
    hidden_size: int
    expert_width: int
    warm_tokens: int  # read first, not timed
    measured_tokens: int
    process_mebibytes: int  # of the cap, for interpreter, libraries and activations
    timeout_seconds: int  # of one run
    place: Place = PROCESSOR

    def asked(self) -> dict[str, Any]:
        """What a result's key says of it."""
        fields = self._asdict()
        place = fields.pop("place")
        return fields | place.asked()


def check_installed(engines: Iterable[Engine]) -> None:
    """See that the packages of the engines can be imported.

    Raises
    ------
    StockError : names what is missing and how to get it.
    """
    packages = sorted({engine.package for engine in engines} - {""})
    missing = [name for name in packages if subprocess.run([python(), "-c", f"import {name}"], capture_output=True).returncode]
    if missing:
        raise StockError(
            f"{', '.join(missing)} cannot be imported by {python()}: install them with `pip install 'moecache[stock]'`, or name an "
            f"interpreter that has them in {PYTHON_VARIABLE}"
        )


def compile_ahead(text: Text, engines: Iterable[Engine]) -> None:
    """Decode two tokens with this project's runtime without a cap: what it compiles is on disk before memory is counted.

    Raises
    ------
    StockError : it failed.
    """
    ours = next((engine for engine in engines if engine.policy), None)
    if ours is None:
        return
    files = files_of(text.model_name, text.hidden_size, text.expert_width, 16, ours.module)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        np.save(tokens, tokens_of(2, 0))
        command = [python(), "-m", f"{PROGRAMS}.{ours.module}", str(files.model), str(tokens)]
        command += ["--measured-tokens", "2", "--slots", str(files.shape.top_k)]
        outcome_of(run_capped(command, None, text.timeout_seconds, env=dict(os.environ)), ours)


def cap_bytes(files: Files, text: Text, cell: Cell) -> int:
    """The cap of main memory: a cell's weights and the process's allowance; beside a GPU, which holds the weights, as the place says."""
    if text.place.is_gpu:
        return text.place.host_mebibytes * MEBIBYTE
    return weight_bytes(files, cell) + text.process_mebibytes * MEBIBYTE


def weight_bytes(files: Files, cell: Cell) -> int:
    """What a cell leaves for weights: the dense ones, and a share of the experts."""
    return files.dense_bytes + round(cell.resident_fraction * files.expert_bytes(cell.bits))


def expert_layers_within(files: Files, cell: Cell) -> int:
    """Whole layers whose experts fit into a cell's share."""
    room = weight_bytes(files, cell) - files.dense_bytes
    return min(room // (files.shape.num_experts * files.block_bytes[cell.bits]), files.shape.num_layers)


def policy_of(engine: Engine, top_k: int) -> Policy:
    """The policy of this project's runtime: its threshold at the same multiple of the uniform weight as at ten calls, its copies bounded.

    Raises
    ------
    ValueError : a label that no preset has.
    """
    found = [preset for preset in PRESETS if preset.label == engine.policy]
    if not found:
        raise ValueError(f"no policy {engine.policy!r}; there are {', '.join(preset.label for preset in PRESETS)}")
    changed: dict[str, Any] = {}
    if found[0].gate_threshold is not None:
        changed["gate_threshold"] = found[0].gate_threshold * PRESET_TOP_K / top_k
    if found[0].admission == Admission.BACKGROUND:
        changed["max_in_flight"] = MAX_IN_FLIGHT
    return found[0].replace(**changed, label=engine.policy)


def run_once(text: Text, engine: Engine, cell: Cell, choice: Choice, repeat: int) -> dict[str, Any]:
    """Run one engine once.

    Parameters
    ----------
    repeat : which document is read.

    Returns
    -------
    dict : one value for each of `COLUMNS`, and on a GPU of `GPU_COLUMNS`; NaN where there is none.

    Raises
    ------
    StockError : the engine failed, and not for want of memory.
    """
    files = files_of(text.model_name, text.hidden_size, text.expert_width, cell.bits, engine.module)
    asked = {
        "model": text.model_name,
        **cell._asdict(),
        "cell": cell.words,
        "is_fitting": cell.resident_fraction >= 1,
        "engine": engine.name,
        "repeat": repeat,
        "experts_mebibytes": files.expert_bytes(cell.bits) / MEBIBYTE,
        "cap_mebibytes": cap_bytes(files, text, cell) / MEBIBYTE,
        "asked_threads": choice.threads,
        "asked_read_ahead_kib": choice.read_ahead_kib,
        "device": text.place.device,
        "gpu_budget_mebibytes": weight_bytes(files, cell) / MEBIBYTE,
    }
    try:
        options = [*own_options(files, engine, cell), *_place_options(text, files, engine, cell)]
    except CapacityError:
        found = {"outcome": TOO_SMALL, "is_capped": why_no_cap() is None, "read_ahead_kib": UNKNOWN, **figures(None, None)}
    else:
        found = _run(text, files, engine, cell, choice, repeat, options)
    return {name: (asked | found)[name] for name in (*COLUMNS, *(GPU_COLUMNS if text.place.is_gpu else ()))}


def _run(text: Text, files: Files, engine: Engine, cell: Cell, choice: Choice, repeat: int, options: list[str]) -> dict[str, Any]:
    run, answer, kibibytes = decode(text, files, engine, cell, choice, repeat, options)
    outcome = outcome_of(run, engine)
    return {"outcome": outcome, "is_capped": why_no_cap() is None, "read_ahead_kib": kibibytes, **figures(run, answer)}


def decode(
    text: Text, files: Files, engine: Engine, cell: Cell, choice: Choice, repeat: int, options: list[str]
) -> tuple[CappedRun, Measured | None, int]:
    """Let an engine read a text under a cell's cap.

    Returns
    -------
    CappedRun : how the process ended.
    Measured : the engine's answer, None where it gave none.
    int : the read-ahead that the disk had meanwhile, KiB.

    Raises
    ------
    StockError : it failed, and not for want of memory.
    """
    is_capped = why_no_cap() is None
    limit = cap_bytes(files, text, cell) if is_capped else None
    with tempfile.TemporaryDirectory() as folder, read_ahead(files.model, choice.read_ahead_kib or None) as kibibytes:
        tokens = Path(folder) / "tokens.npy"
        np.save(tokens, tokens_of(text.warm_tokens + text.measured_tokens, repeat))
        command = [python(), "-m", f"{PROGRAMS}.{engine.module}", str(files.model), str(tokens), "--warm-tokens", str(text.warm_tokens),
                   "--measured-tokens", str(text.measured_tokens), "--threads", str(num_threads(engine, choice)), *options]  # fmt: skip
        run = run_capped(command, limit, text.timeout_seconds, env=dict(os.environ))
    return run, Measured.from_output(run.stdout) if outcome_of(run, engine) == RAN else None, kibibytes


def num_threads(engine: Engine, choice: Choice) -> int:
    """Threads that compute: as chosen; otherwise every core, but one for reading in this project's runtime."""
    cores = os.cpu_count() or 1
    return choice.threads or (max(1, cores - 1) if engine.policy else cores)


def own_options(files: Files, engine: Engine, cell: Cell, changed: Policy | None = None, spare_bytes: int = 0) -> list[str]:
    """Options of this project's runtime; none for the others.

    Parameters
    ----------
    changed : another policy than the comparison's, with the label of a preset.
    spare_bytes : of the process's allowance, given to slots.

    Raises
    ------
    CapacityError : the cell has no room for the slots of one token's calls.
    """
    if not engine.policy:
        return []
    policy = changed or policy_of(engine, files.shape.top_k)
    room = weight_bytes(files, cell) + spare_bytes
    slots = slots_within(room, files.dense_bytes, files.block_bytes[cell.bits], policy, files.shape)
    options = ["--policy", policy.label, "--slots", str(int(slots[0]))]
    if changed is not None:
        return [*options, "--fields", json.dumps(changed.to_dict())]
    if policy.gate_threshold is not None and 0 < policy.gate_threshold < float("inf"):
        options += ["--gate-threshold", repr(policy.gate_threshold)]
    return options if policy.max_in_flight is None else [*options, "--max-in-flight", str(policy.max_in_flight)]


def _place_options(text: Text, files: Files, engine: Engine, cell: Cell) -> list[str]:
    tier = text.place.host_mebibytes - text.process_mebibytes
    return place_options(engine.module, text.place, files.shape.num_layers, expert_layers_within(files, cell), tier)


def outcome_of(run: CappedRun, engine: Engine) -> str:
    """How a run ended, in words.

    Raises
    ------
    StockError : it failed for another reason than memory or time; its last lines are told.
    """
    if run.was_killed_by_cap:
        return KILLED
    if run.is_timed_out:
        return f"stopped after {run.seconds:.0f} s"
    if run.returncode == 0:
        return RAN
    if "MemoryError" in run.stderr or "not enough memory" in run.stderr.lower():
        return TOO_SMALL
    lines = "\n".join(run.stderr.strip().splitlines()[-8:])
    raise StockError(f"{engine.name} ended with status {run.returncode}:\n{lines}")
