"""Writing one safetensors file tensor by tensor, so that memory holds one of them and never a shard.

Names, dtypes and shapes are given first, because the header comes first in the file; then the bytes of each tensor in the same order. The
file has a temporary name until it is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moecache.stores.blocks import ITEM_BYTES, round_up

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", "int8": "I8", "uint8": "U8"}


class ShardWriter:
    """One safetensors file; use it in a ``with`` block, at whose end the file is whole or gone.

    Parameters
    ----------
    path : the file.
    tensors : dtype (``"bfloat16"``) and shape of every tensor, in the order in which they will be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._waiting = {key: prod(shape) * ITEM_BYTES[dtype] for key, (dtype, shape) in tensors.items()}
        self._open: tuple[str, int] | None = None
        self._file = self._temporary.open("wb")
        self._file.write(_header(tensors))

    def __enter__(self) -> ShardWriter:
        return self

    def write(self, key: str, part: NDArray[np.uint8]) -> None:
        """Append bytes of a tensor; it may come in several parts, and tensors come in the order in which they were announced.

        Raises
        ------
        ValueError : another tensor is next, or there are more bytes than its shape has.
        """
        following, left = self._open if self._open else next(iter(self._waiting.items()), ("nothing", 0))
        if key != following or part.nbytes > left:
            raise ValueError(f"{self.path}: {part.nbytes} bytes of {key!r} were written, but {following!r} is next with {left} bytes left")
        self._file.write(memoryview(part).cast("B"))  # type: ignore[arg-type]
        self._open = (key, left - part.nbytes)
        if left == part.nbytes:
            del self._waiting[key]
            self._open = None

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._waiting:
                raise ValueError(f"{self.path}: {len(self._waiting)} tensors were announced and not written: {list(self._waiting)[:3]}")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                os.replace(self._temporary, self.path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def _header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    rows, end = {}, 0
    for key, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        rows[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    text = text.ljust(round_up(len(text) + 8, 64) - 8)
    return len(text).to_bytes(8, "little") + text
