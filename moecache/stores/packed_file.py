"""A packed file: every expert is one aligned block, so that it is had by one read, with checksums that tell whether it is the right one.

    8 bytes "moecache", 8 bytes length of the header, 4 bytes its CRC-32, then the header (JSON)
    a table, uint32 [L x E, 1 + units]: 1 once the block is written, then the CRC-32 of each MiB of it (the last is shorter)
    blocks in the order of layers and experts

Header, table and blocks each start at a multiple of 4096 bytes. The table fills up while the file is being written, under another name
(`pack`): a file under its own name is whole.

Checksums cost the processor as much as a fast disk takes to read, so each MiB is checked the first time it is read (`check="first"`), every
time or never. A file that changed since it was opened is an error in any case. The file may be open in several processes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache.stores.aligned_read import AlignedFile
from moecache.stores.blocks import ALIGNMENT, BlockLayout, StoreCounters, StoreError, checked_range, round_up

FILE_NAME = "experts.moecache"
MAGIC = b"moecache"
UNIT_BYTES = 2**20
FORMAT = 1
CHECKS = ("first", "always", "never")


@dataclass(frozen=True)
class PackedHeader:
    """What a packed file says of itself.

    `bits` is None for experts as they were; else `full_layout` is how they looked before they were rounded, and `is_transposed` whether
    matrices were [inputs, outputs]. `order` is None for the plain order of codes (`low_bit_blocks`), else it names the kind of processor
    that multiplies with them as they are (`product_blocks`). `source` tells what was packed.
    """

    layout: BlockLayout
    num_layers: int
    num_experts: int
    bits: int | None = None
    full_layout: BlockLayout | None = None
    is_transposed: bool = False
    source: Mapping[str, Any] = field(default_factory=dict)
    order: str | None = None

    @property
    def num_units(self) -> int:
        """Checksums a block."""
        return -(-self.layout.block_bytes // UNIT_BYTES)

    @property
    def table_offset(self) -> int:
        """Where the table starts, in bytes."""
        return round_up(len(self.encode()), ALIGNMENT)

    @property
    def data_offset(self) -> int:
        """Where the first block starts, in bytes."""
        return self.table_offset + round_up(4 * self.num_layers * self.num_experts * (1 + self.num_units), ALIGNMENT)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.data_offset + self.num_layers * self.num_experts * self.layout.block_bytes

    def offset(self, layer: int, expert: int) -> int:
        """Where a block starts, in bytes."""
        return self.data_offset + (layer * self.num_experts + expert) * self.layout.block_bytes

    def encode(self) -> bytes:
        """The file's first bytes."""
        fields = {**vars(self), "layout": self.layout.to_dict(), "format": FORMAT}
        if self.full_layout is not None:
            fields["full_layout"] = self.full_layout.to_dict()
        text = json.dumps(fields, sort_keys=True).encode()
        return MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little") + text


def read_packed_header(path: Path) -> tuple[PackedHeader, NDArray[np.uint32]]:
    """Header and table [L x E, 1 + units] of a file that may not be whole yet.

    Raises
    ------
    StoreError : it is no packed file, of another version, damaged, or has another length than its header says.
    """
    with path.open("rb") as file:
        start = file.read(20)
        text = file.read(min(int.from_bytes(start[8:16], "little"), 2**26))
        if start[:8] != MAGIC or zlib.crc32(text) != int.from_bytes(start[16:20], "little"):
            raise StoreError(f"{path} is no packed file, or its header is damaged; pack it again")
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise StoreError(f"{path} was packed by another version of moecache; pack it again")
        for name in ("layout", "full_layout"):
            fields[name] = fields[name] and BlockLayout.from_dict(fields[name])
        header = PackedHeader(**fields)
        found = path.stat().st_size
        if found != header.file_bytes:
            raise StoreError(f"{path}: expected {header.file_bytes} bytes, got {found}; it is truncated or damaged: pack it again")
        file.seek(header.table_offset)
        table = np.fromfile(file, np.uint32, header.num_layers * header.num_experts * (1 + header.num_units))
    return header, table.reshape(-1, 1 + header.num_units)


def checksums(block: NDArray[np.uint8]) -> list[int]:
    """CRC-32 of each MiB of a block."""
    return [zlib.crc32(block[start : start + UNIT_BYTES]) for start in range(0, block.size, UNIT_BYTES)]  # type: ignore[arg-type]


def part_of(target: Path) -> Path:
    """The folder in which a target is packed until it is whole."""
    return target.with_name(f"{target.name}.part")


class PackedStore:
    """The experts of a packed file; see `Store`.

    Parameters
    ----------
    path : the file, or the folder it is in.
    check : {"first", "always", "never"}
        When checksums are compared.
    is_direct : whether to read past the system's cache; by default where the file system allows it.
    """

    def __init__(self, path: str | Path, check: str = "first", is_direct: bool | None = None) -> None:
        if check not in CHECKS:
            raise ValueError(f"check={check!r} is unknown; choose one of {', '.join(CHECKS)}")
        path = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise StoreError(f"there is no file {path}; make it with `moecache pack`")
        self.header, self._table = read_packed_header(path)
        if missing := int((self._table[:, 0] != 1).sum()):
            raise StoreError(
                f"{path} lacks {missing} of {len(self._table)} experts: it is being packed, or that was interrupted; pack it again"
            )
        self.layout = self.header.layout
        self.num_layers, self.num_experts = self.header.num_layers, self.header.num_experts
        self.alignment = ALIGNMENT
        self.counters = StoreCounters()
        self._check = check
        self._is_unchecked = np.full(self._table[:, 1:].shape, check != "never")
        self._file = AlignedFile(path, is_direct)

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the system's cache."""
        return self._file.is_direct

    def read(self, layer: int, expert: int, out: NDArray[np.uint8], first_byte: int = 0, num_bytes: int | None = None) -> None:
        """Read a block or a part of it straight into `out`; see `Store.read`."""
        first, end = checked_range(self, layer, expert, out, first_byte, num_bytes)
        self._file.read(self.header.offset(layer, expert) + first, out[first:end])
        self._compare(layer, expert, out, first, end)
        self.counters.add(end - first)

    def _compare(self, layer: int, expert: int, out: NDArray[np.uint8], first: int, end: int) -> None:
        """Compare the checksums of every unit that lies wholly in the part just read."""
        row = layer * self.num_experts + expert
        for unit in range(-(-first // UNIT_BYTES), self.header.num_units):
            start, stop = unit * UNIT_BYTES, min((unit + 1) * UNIT_BYTES, self.layout.block_bytes)
            if stop > end:
                return
            if self._is_unchecked[row, unit]:
                found, expected = zlib.crc32(out[start:stop]), int(self._table[row, 1 + unit])  # type: ignore[arg-type]
                if found != expected:
                    raise StoreError(
                        f"{self._file.path}: layer {layer}, expert {expert}: the {stop - start} bytes at "
                        f"{self.header.offset(layer, expert) + start} have checksum {found:08x}, expected {expected:08x}; pack it again"
                    )
                self._is_unchecked[row, unit] = self._check == "always"

    def close(self) -> None:
        """Close the file."""
        self._file.close()
