"""Checkpoints and the log of a training run: written whole or not at all, compared with the settings on loading.

A run is a folder: `checkpoint.pt` (weights, optimizer, step, random state, settings) and `log.jsonl` (a line for every
few steps). The data position needs no storage of its own: the order of the rows is a function of the step (`corpus`).
A run that began from published weights also keeps the step at which its optimizer began (`restart_step`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from moecache.reference.packages import cache_folder
from moecache.reference.settings import TrainSettings


def run_folder(name: str) -> Path:
    """Where a training run keeps its checkpoint and log."""
    return cache_folder() / "training" / name


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, settings: TrainSettings, restart_step: int = 0
) -> None:
    """Write the checkpoint under a temporary name and rename it, so that a cut never leaves half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"checkpoint.{os.getpid()}.tmp"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "random": torch.get_rng_state(),
        "settings": json.dumps(asdict(settings), sort_keys=True),
        "restart_step": restart_step,
    }
    torch.save(state, temporary)
    os.replace(temporary, folder / "checkpoint.pt")


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainSettings) -> tuple[int, int]:
    """Restore a run in place and return (finished steps, step at which the optimizer began); zeros where there is no checkpoint.

    Raises
    ------
    ValueError : the checkpoint was made with other settings; names the ones that differ.
    """
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0, 0
    state = torch.load(path, weights_only=True)
    stored, asked = json.loads(state["settings"]), json.loads(json.dumps(asdict(settings)))
    different = {key: (stored.get(key), asked[key]) for key in asked if stored.get(key) != asked[key]}
    if different:
        raise ValueError(
            f"{path} was made with other settings (stored, asked): {different}; "
            f"train under another name or remove the folder to start again"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["step"]), int(state.get("restart_step", 0))


def read_log(folder: Path) -> list[dict]:
    """All log entries of a run, in order."""
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cut_log(folder: Path, step: int) -> None:
    """Drop log entries after a step: a resumed run writes them again."""
    kept = [entry for entry in read_log(folder) if entry["step"] <= step]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "log.tmp"
    temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    os.replace(temporary, folder / "log.jsonl")


def append_log(folder: Path, entry: dict) -> None:
    """Add one line to the log."""
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
