"""What speed is measured on: a checkpoint of real size with real routes, packed, and a held-out text.

The trained model is widened exactly (`moecache.widen`): real bytes, the small model's routes. Its first layers are enough for timing. Both
folders are made once, in the user's cache folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

from moecache.experiments.inputs import reference_inputs
from moecache.reference import held_out_documents
from moecache.reference.loading import model_folder
from moecache.stores.pack import pack
from moecache.widen import widen

MADE_FROM = "made_from.json"


@dataclass(frozen=True)
class Geometry:
    """A widened model, named by what it is made from; sizes in numbers of entries. Padding is noise, so that no disk treats it apart."""

    model_name: str = "reference-512"
    num_layers: int = 2
    hidden_size: int = 2048
    expert_width: int = 512
    padding: str = "noise"

    @property
    def folder_name(self) -> str:
        """Of the widened checkpoint; real sizes are not spelt out."""
        name = f"{self.model_name}-{self.num_layers}-layers"
        return name if (self.hidden_size, self.expert_width) == (2048, 512) else f"{name}-{self.hidden_size}-{self.expert_width}"


REAL = Geometry()
QUICK = Geometry(hidden_size=512, expert_width=64)


@dataclass(frozen=True)
class TimedCheckpoint:
    """Folders of one widened checkpoint: `fused` as other engines read it, `packed` as ours does."""

    geometry: Geometry
    fused: Path
    packed: Path


def timed_checkpoint(geometry: Geometry = REAL, folder: Path | None = None, progress: bool = True) -> TimedCheckpoint:
    """The widened checkpoint and its packed form, made where they are missing.

    Parameters
    ----------
    geometry : of the checkpoint.
    folder : where it is kept, by default in the user's cache folder.
    progress : show bars while it is made.

    Raises
    ------
    ValueError : one that was made from other weights lies there.
    """
    kept = user_cache_path("moecache") / "widened" if folder is None else Path(folder)
    fused, packed = kept / geometry.folder_name, kept / f"{geometry.folder_name}-packed"
    made_from = asdict(geometry) | {"weights": reference_inputs(geometry.model_name)["model"]}
    if not fused.exists():
        kept.mkdir(parents=True, exist_ok=True)
        options = {name: value for name, value in asdict(geometry).items() if name != "model_name"}
        widen(model_folder(geometry.model_name), fused, **options, progress=progress)
        (fused / MADE_FROM).write_text(json.dumps(made_from, indent=1))
    note = fused / MADE_FROM
    if note.is_file() and json.loads(note.read_text()) != made_from:
        raise ValueError(f"{fused} was made from other weights; remove it and {packed}, then they are made again")
    if not packed.exists():
        pack(fused, packed, progress=progress)
    return TimedCheckpoint(geometry, fused, packed)


def timed_text(num_tokens: int, model_name: str = "reference-512") -> np.ndarray:
    """[num_tokens] int64 token ids: held-out documents of several domains, one after the other.

    Raises
    ------
    ValueError : more tokens than the first documents have.
    """
    size = 500
    documents = held_out_documents(-(-num_tokens // size), size, name=model_name)
    return np.concatenate([document.tokens for document in documents])[:num_tokens].astype(np.int64)
