"""Loading a reference model and its tokenizer from the files in the repository.

This module knows file names. It imports torch and transformers only when a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moecache.reference.settings import MODELS_FOLDER

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel


class MissingModelError(ValueError):
    """A model's file is not where it should be; the message names the path and the command that makes it."""


def model_folder(name: str = "reference-512", directory: Path | str | None = None) -> Path:
    """Where a reference model's files lie: `directory`, or `data/models/<name>` in the repository."""
    return Path(directory) if directory is not None else MODELS_FOLDER / name


def _require(path: Path, command: str) -> Path:
    if not path.exists():
        raise MissingModelError(
            f"no file {path}. In a clone of the repository it is committed (is this a clone, and is the name right?); "
            f"to make it again: `{command}`. Or name another folder with directory=..."
        )
    return path


def load_model(name: str = "reference-512", directory: Path | str | None = None) -> PreTrainedModel:
    """Load a reference model for evaluation: float32, on the CPU, the library's grouped experts product.

    Parameters
    ----------
    name : folder name under `data/models`.
    directory : another folder with `config.json` and `model.safetensors`.

    Returns
    -------
    transformers.PreTrainedModel : in evaluation mode.

    Raises
    ------
    MissingModelError : a file is missing; says how to make it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = model_folder(name, directory)
    for file in ("config.json", "model.safetensors"):
        _require(folder / file, "python -m moecache.reference train, then export")
    with quiet_library():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.set_experts_implementation("grouped_mm")
    return model.eval()


@contextmanager
def quiet_library() -> Iterator[None]:
    """No progress bar while a small model is loaded, and no advice about GPU kernels afterwards.

    The library's plain implementation of linear attention is the one that is meant: the same on every machine.
    """
    from transformers.utils import logging as library

    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    was_shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            library.enable_progress_bar()


def load_tokenizer(name: str = "reference-512", directory: Path | str | None = None) -> Tokenizer:
    """Load a reference model's tokenizer (`encode(text).ids`, `decode(ids)`).

    Parameters
    ----------
    name, directory : as for `load_model`.

    Returns
    -------
    tokenizers.Tokenizer

    Raises
    ------
    MissingModelError : the file is missing; says how to make it.
    """
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_file(name, directory)))


def tokenizer_file(name: str = "reference-512", directory: Path | str | None = None) -> Path:
    """The file of a model's tokenizer.

    Raises
    ------
    MissingModelError : the file is missing; says how to make it.
    """
    return _require(model_folder(name, directory) / "tokenizer.json", "python -m moecache.reference tokenizer")
