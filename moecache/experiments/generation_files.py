"""The chapter on generation with a file of GSM8K or HumanEval, and with any checkpoint of an understood family.

The model is loaded whole, every expert in memory (on a GPU where there is one): the emulator restricts the choice of experts, not the
memory. A reference model can be asked too; it solves none of these problems, which shows that the way works and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moecache import results
from moecache.experiments import inputs
from moecache.experiments.generation import Decode, Encode, all_policies, measure
from moecache.experiments.generation_problems import read_problems
from moecache.families import model_shape
from moecache.reference.loading import quiet_library
from moecache.reference.settings import MODELS_FOLDER

EXPERIMENT = "12_file"


def file_rows(
    problems_path: str, checkpoint: str, resident_fraction: float, num_problems: int, num_warmup_problems: int, max_new_tokens: int
) -> pd.DataFrame:
    """Rows of a checkpoint's answers to a file of problems; measured where they are not stored.

    Parameters
    ----------
    problems_path : a GSM8K or HumanEval file of JSON lines.
    checkpoint : a folder with a checkpoint and its `tokenizer.json`.
    resident_fraction : share of a layer's experts that is resident.
    num_problems, num_warmup_problems : the first ones of the file warm the cache and are not scored.
    max_new_tokens : most tokens of an answer.

    Returns
    -------
    DataFrame
        As `generation.measure`, with `model` (the folder's name) and `regime`.

    Raises
    ------
    ValueError
        For files that are not there or of another form, or a family that is not understood.
    """
    problems = read_problems(problems_path, num_warmup_problems + num_problems)
    parameters = {
        "resident_fraction": resident_fraction,
        "num_problems": num_problems,
        "num_warmup_problems": num_warmup_problems,
        "max_new_tokens": max_new_tokens,
        "policies": "those of the chapter, scaled to the model's calls",
    }

    def run() -> pd.DataFrame:
        model, encode, decode = open_checkpoint(checkpoint)
        shape = model_shape(model)
        slots = max(math.ceil(resident_fraction * shape.num_experts), shape.top_k)
        settings: dict[str, Any] = {
            "num_warmup_problems": num_warmup_problems,
            "max_new_tokens": max_new_tokens,
            "end_ids": _end_ids(model),
        }
        found = measure(model, encode, decode, problems, all_policies(shape.top_k), slots, **settings)
        return found.assign(model=Path(checkpoint).resolve().name, regime="stays_out")

    hashes = {"problems": inputs.file_hash(problems_path), "checkpoint": _checkpoint_hash(checkpoint)}
    return results.load_or_run(EXPERIMENT, parameters, run, inputs=hashes).frame


def open_checkpoint(folder: str | Path) -> tuple[Any, Encode, Decode]:
    """A model from a folder, in evaluation mode, in the dtype of its files, on a GPU where there is one, with its tokenizer.

    Raises
    ------
    ValueError
        If the folder lacks `config.json` or `tokenizer.json`.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = _checked(folder)
    with quiet_library():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = [0] if folder.parent == MODELS_FOLDER.resolve() else []  # the reference models' mark of a document

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids))

    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return model, lambda text: [*start, *tokenizer.encode(text).ids], decode


def _end_ids(model: Any) -> list[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if found is None else list(found) if isinstance(found, list) else [int(found)]


def _checked(folder: str | Path) -> Path:
    folder = Path(folder).resolve()
    absent = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder} holds no {' and no '.join(absent)}: give the folder of a checkpoint as it was downloaded")
    return folder


def _checkpoint_hash(folder: str | Path) -> str:
    """A hash of the small files, and of the names and sizes of the large ones, which would take minutes to read."""
    digest = hashlib.sha256()
    for path in sorted(_checked(folder).glob("*")):
        if path.suffix == ".json":
            digest.update(f"{path.name} {inputs.file_hash(path)}\n".encode())
        elif path.suffix in (".safetensors", ".bin"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()
