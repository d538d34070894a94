"""From a training run to the files that are committed: bf16 weights, configuration, tokenizer, log.

Weights are stored in bfloat16, so loading them in float32 gives exactly what was stored. What the model can do is
measured and written down by `card`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from moecache.reference.checkpoint import run_folder
from moecache.reference.loading import model_folder, tokenizer_file
from moecache.reference.network import make_network


def export(run: str, name: str | None = None, directory: Path | str | None = None) -> Path:
    """Write a run's weights, configuration, tokenizer and log into a model folder.

    Parameters
    ----------
    run : name of the training run (a decayed branch: `reference-512-decay-<step>`).
    name, directory : the model folder, default `data/models/<name>` with the name that the run was trained under.

    Raises
    ------
    ValueError : the run has no checkpoint.
    """
    source = run_folder(run)
    if not (source / "checkpoint.pt").exists():
        raise ValueError(f"no checkpoint in {source}; run `python -m moecache.reference train` first")
    state = torch.load(source / "checkpoint.pt", weights_only=True)
    settings = json.loads(state["settings"])
    target = model_folder(name or settings["name"], directory)
    tokenizer = tokenizer_file(settings["name"])
    model = make_network(settings["geometry"], settings["seed"])
    model.load_state_dict(state["model"])
    target.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "model.safetensors").chmod(0o644)
    shutil.copy2(source / "log.jsonl", target / "log.jsonl")
    if tokenizer.resolve() != (target / "tokenizer.json").resolve():
        shutil.copy2(tokenizer, target / "tokenizer.json")
    return target
