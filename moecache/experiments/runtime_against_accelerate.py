"""Fetching every miss against accelerate's disk offload: the same weights, tokens and cap of memory.

Each engine runs in a process of its own (`stock_engines`) under a memory cgroup, on a cold cache of files, in turns: ours, theirs, ours,
theirs. accelerate is given what is best for it: all experts of a layer in one tensor, so that it maps the checkpoint in place, and the
same products without oneDNN, which are faster for one row. Neither changes what is computed, so logits are compared.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from moecache.experiments.memory_cap import CappedRun, run_capped, why_no_cap
from moecache.experiments.runtime_checkpoint import TimedCheckpoint
from moecache.experiments.stock_engines.protocol import Measured
from moecache.policy import FETCH_EVERY_MISS

CAP_BYTES = 2_600_000_000
PYTHON_VARIABLE = "MOECACHE_STOCK_PYTHON"
OURS, THEIRS = "ours", "accelerate"
PROGRAMS = "moecache.experiments.stock_engines"
KEPT_LINES = 12  # of what a failed engine wrote


def stock_python() -> str:
    """The interpreter that has accelerate: this one, or the one that MOECACHE_STOCK_PYTHON names."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def why_not() -> str | None:
    """One sentence that says why this machine cannot make the comparison; None where it can."""
    if reason := why_no_cap():
        return reason
    python = stock_python()
    if python == sys.executable and importlib.util.find_spec("accelerate"):
        return None
    if subprocess.run([python, "-c", "import accelerate"], capture_output=True).returncode:
        return (
            f"{python} cannot import accelerate: `pip install accelerate==1.15.0`, or name an interpreter that has it in {PYTHON_VARIABLE}"
        )
    return None


def timed_under_cap(
    checkpoint: TimedCheckpoint,
    text: np.ndarray,
    *,
    cap_bytes: int | None = CAP_BYTES,
    num_slots: int = 128,
    warm_tokens: int = 100,
    measured_tokens: int = 60,
    threads: Sequence[int] = (1, 1),
    engines: Sequence[str] = (OURS, THEIRS),
    timeout_seconds: float = 300.0,
    progress: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Run the engines in turns, once for each entry of `threads`.

    Parameters
    ----------
    text : at least `warm_tokens + measured_tokens` token ids.
    cap_bytes : of each process, pages of files included; None = none.
    num_slots : of our runtime, a layer.
    threads : that compute in accelerate's process, one entry a round; ours always computes with one.
    engines : in this order each round.
    timeout_seconds : after them a run is ended.
    progress : show a bar.

    Returns
    -------
    runs : DataFrame
        One row a run: round, engine, threads, cap_bytes, outcome ("ran", "killed by the cap", "timed out" or "failed"), num_tokens,
        seconds_per_token (mean over the measured tokens), median_seconds, load_seconds, peak_bytes (the cgroup's), peak_rss_bytes
        (VmHWM), read_bytes_per_token (by the system's account), detail (how a failed one ended). MEASURED; NaN where it did not run.
    agreement : DataFrame, one row, empty where one engine gave no logits: num_tokens, largest_logit, largest_difference,
        same_argmax_share, mean_kl_nats (of accelerate's distribution from ours).
    """
    needed = warm_tokens + measured_tokens
    if len(text) < needed:
        raise ValueError(f"the text has {len(text)} tokens, {needed} are read; give a longer one")
    rows, logits = [], {}
    turns = [(number, num_threads, engine) for number, num_threads in enumerate(threads) for engine in engines]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        np.save(tokens, np.asarray(text[:needed], np.int64))
        for number, num_threads, engine in tqdm(turns, desc="engines under a cap", disable=not progress):
            out = Path(folder) / f"{engine}.npy"
            used = num_threads if engine == THEIRS else 1
            command = [*_command(engine, checkpoint, tokens, num_slots), "--warm-tokens", str(warm_tokens)]
            command += ["--measured-tokens", str(measured_tokens), "--threads", str(used), "--logits", str(out)]
            run = run_capped(command, cap_bytes, timeout_seconds, _environment())
            rows.append({"round": number, "engine": engine, "threads": used, "cap_bytes": cap_bytes, **_row(run)})
            if out.is_file():
                logits[engine] = np.load(out)
    return pd.DataFrame(rows), _agreement(logits)


def _command(engine: str, checkpoint: TimedCheckpoint, tokens: Path, num_slots: int) -> list[str]:
    if engine == OURS:
        options = ["--policy", FETCH_EVERY_MISS.label, "--slots", str(num_slots)]
        return [sys.executable, "-m", f"{PROGRAMS}.ours", str(checkpoint.packed), str(tokens), *options]
    if engine == THEIRS:
        return [stock_python(), "-m", f"{PROGRAMS}.accelerate_offload", str(checkpoint.fused), str(tokens)]
    raise ValueError(f"engine={engine!r} is unknown; choose {OURS!r} or {THEIRS!r}")


def _environment() -> dict[str, str]:
    """Threads that wait rest, from the start."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


def _row(run: CappedRun) -> dict[str, float | int | str | None]:
    ending = "killed by the cap" if run.was_killed_by_cap else "timed out" if run.is_timed_out else "failed"
    row: dict[str, float | int | str | None] = {"peak_bytes": run.peak_bytes, "peak_rss_bytes": run.peak_rss_bytes}
    if run.returncode:
        row |= dict.fromkeys(("num_tokens", "seconds_per_token", "median_seconds", "load_seconds", "read_bytes_per_token"), np.nan)
        return {"outcome": ending, **row, "detail": "\n".join(run.stderr.strip().splitlines()[-KEPT_LINES:])}
    told = Measured.from_output(run.stdout)
    seconds = np.array(told.seconds)
    return {
        "outcome": "ran",
        "num_tokens": seconds.size,
        "seconds_per_token": seconds.mean(),
        "median_seconds": float(np.median(seconds)),
        "load_seconds": told.load_seconds,
        **row,
        "read_bytes_per_token": told.read_bytes / seconds.size,
        "detail": "",
    }


def _agreement(logits: dict[str, np.ndarray]) -> pd.DataFrame:
    if set(logits) != {OURS, THEIRS}:
        return pd.DataFrame()
    ours, theirs = (logits[engine].astype(np.float64) for engine in (OURS, THEIRS))
    from scipy.special import log_softmax

    mine, other = log_softmax(ours, axis=1), log_softmax(theirs, axis=1)
    return pd.DataFrame(
        [
            {
                "num_tokens": len(ours),
                "largest_logit": np.abs(theirs).max(),
                "largest_difference": np.abs(ours - theirs).max(),
                "same_argmax_share": (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean(),
                "mean_kl_nats": (np.exp(other) * (other - mine)).sum(axis=1).mean(),
            }
        ]
    )


def against(runs: pd.DataFrame) -> pd.DataFrame:
    """How many times as long accelerate's token takes, round by round.

    Returns
    -------
    DataFrame : round, threads (accelerate's), ratio (of mean seconds), ratio_median, ratio_to_best = the round's over the best of all of
        ours and theirs (one value, repeated).
    """
    ran = runs[runs["outcome"] == "ran"]
    ours, theirs = (ran[ran["engine"] == engine].set_index("round") for engine in (OURS, THEIRS))
    both = theirs.join(ours.add_suffix("_ours"), how="inner").reset_index()
    table = pd.DataFrame({"round": both["round"], "threads": both["threads"]})
    table["ratio"] = both["seconds_per_token"] / both["seconds_per_token_ours"]
    table["ratio_median"] = both["median_seconds"] / both["median_seconds_ours"]
    table["ratio_to_best"] = theirs["seconds_per_token"].min() / ours["seconds_per_token"].min() if len(both) else np.nan
    return table
