"""Packing: a folder with one aligned block for every expert, made from a checkpoint as downloaded.

The new folder is a checkpoint of its own: the experts in `experts.moecache` (`packed_file`), everything else in one `model.safetensors`,
and the configuration and tokenizer as they were. It can be loaded without the old one.

Everything is written into a folder of a temporary name, which is renamed once it is whole, so that nothing half-written can be mistaken
for a model. Room for all experts is taken at the start: a disk that is too full is found before an hour of work, not after it. An expert
counts as written once the disk has confirmed it; after an interruption, however hard, the same command goes on from there. A lock keeps a
second process out. Memory holds one expert at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from moecache import hf_checkpoints
from moecache.stores.aligned_read import AlignedFile
from moecache.stores.blocks import ITEM_BYTES, StoreError, aligned_bytes
from moecache.stores.checkpoint import Checkpoint, read_checkpoint
from moecache.stores.checkpoint_store import CheckpointStore
from moecache.stores.low_bit_blocks import low_bit_layout, round_block
from moecache.stores.packed_file import FILE_NAME, PackedHeader, checksums, part_of, read_packed_header
from moecache.stores.product_blocks import check_products, product_layout, round_for_products
from moecache.stores.shard_writer import ShardWriter

ORDERS = ("plain", "products")
CONFIRMED_BYTES = 256 * 2**20  # written between two confirmations by the disk
_CHUNK_BYTES = 16 * 2**20
_LARGEST_SIDE_FILE = 64 * 2**20


def pack(source: str | Path, target: str | Path, bits: int = 16, progress: bool = True, order: str = "plain") -> Path:
    """Pack a checkpoint.

    Parameters
    ----------
    source : a checkpoint's folder.
    target : the folder to make; where it is there already and was packed from the same files, nothing is done.
    bits : 16 = experts as they are; 8 or 4 = rounded.
    progress : show a progress bar.
    order : {"plain", "products"}
        Of experts in 8 or 4 bits. "plain" is for every processor, and slots hold written-out experts (`low_bit_blocks`); "products" is for
        processors of this one's kind, whose slots hold the few bits (`product_blocks`).

    Returns
    -------
    Path : the new folder.

    Raises
    ------
    ValueError : another number of bits or order, matrices that this processor cannot multiply with in so few bits, a target that holds
        something else, or one that another process is packing.
    StoreError : a source that is not whole, or a disk without the room.
    """
    source, target = Path(source), Path(target)
    store = CheckpointStore(read_checkpoint(source))
    try:
        header = _header(store, bits, order)
        if target.exists():
            return _already_packed(target, header)
        temporary = part_of(target)
        with _locked(temporary, target):
            if target.exists():  # another process was done with it since the first look
                shutil.rmtree(temporary, ignore_errors=True)
                return _already_packed(target, header)
            _write_experts(store, header, temporary / FILE_NAME, progress)
            _copy_dense(store.checkpoint, temporary / "model.safetensors")
            _copy_side_files(source, temporary)
            (temporary / _LOCK).unlink()
            os.rename(temporary, target)
    finally:
        store.close()
    return target


def _header(store: CheckpointStore, bits: int, order: str) -> PackedHeader:
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; choose {' or '.join(map(repr, ORDERS))}")
    files = sorted({tensor.path for tensor in store.checkpoint.tensors.values()})
    source = {
        "model_type": str(store.checkpoint.config.model_type),
        "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
    }
    if bits == 16:
        if order != ORDERS[0]:
            raise ValueError(f"order={order!r} is for experts in few bits; choose bits=8 or bits=4 with it")
        return PackedHeader(store.layout, store.num_layers, store.num_experts, source=source)
    is_transposed = hf_checkpoints.are_experts_transposed(store.checkpoint.config)
    plain = PackedHeader(
        low_bit_layout(store.layout, bits, is_transposed), store.num_layers, store.num_experts, bits, store.layout, is_transposed, source
    )
    if order == ORDERS[0]:
        return plain
    name = check_products(store.layout, bits, is_transposed)
    return replace(plain, layout=product_layout(store.layout, bits, is_transposed), order=name)


def _already_packed(target: Path, header: PackedHeader) -> Path:
    if (target / FILE_NAME).is_file() and read_packed_header(target / FILE_NAME)[0] == header:
        return target
    raise ValueError(f"{target} is there already and was not packed from these files with these bits; remove it or name another folder")


_LOCK = ".lock"


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Make the folder and hold it for this process alone; the system lets go of it when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = (folder / _LOCK).open("w")
    except FileNotFoundError as fault:  # the folder got its own name between the two lines
        raise ValueError(f"another process has just packed {target}; the same command will find it") from fault
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            raise ValueError(f"another process is packing {target}; wait for it or name another folder") from fault
        yield


def _write_experts(store: CheckpointStore, header: PackedHeader, path: Path, progress: bool) -> None:
    """Write every block that is not there yet."""
    is_done = _prepare(path, header)
    descriptor = os.open(path, os.O_RDWR)
    try:
        waiting: list[tuple[int, list[int]]] = []
        with tqdm(total=is_done.size, initial=int(is_done.sum()), desc="packing experts", disable=not progress) as bar:
            try:
                for row in np.flatnonzero(~is_done):
                    waiting.append((int(row), _write_block(store, header, descriptor, int(row))))
                    bar.update()
                    if len(waiting) * header.layout.block_bytes >= CONFIRMED_BYTES:
                        _confirm(descriptor, header, waiting)
            finally:
                _confirm(descriptor, header, waiting)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prepare(path: Path, header: PackedHeader) -> NDArray[np.bool_]:
    """[L x E], which blocks an earlier run has written; a file of another kind is begun anew."""
    if path.is_file():
        try:
            found, table = read_packed_header(path)
            if found == header:
                return table[:, 0] == 1
        except StoreError:
            pass
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, header.file_bytes)
        os.pwrite(descriptor, header.encode(), 0)
    except OSError as fault:
        path.unlink()
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(path.parent).free
        raise StoreError(f"{path}: {header.file_bytes} bytes are needed, {free} are free; make room or name a folder elsewhere") from fault
    finally:
        os.close(descriptor)
    return np.zeros(header.num_layers * header.num_experts, bool)


@torch.no_grad()
def _write_block(store: CheckpointStore, header: PackedHeader, descriptor: int, row: int) -> list[int]:
    """Write one block and return its checksums."""
    layer, expert = divmod(row, header.num_experts)
    block = aligned_bytes(store.layout.block_bytes)
    block[:] = 0
    store.read(layer, expert, block)
    if header.bits is not None:
        full, block = block, np.zeros(header.layout.block_bytes, np.uint8)
        views = store.layout.views(torch.from_numpy(full)), header.layout.views(torch.from_numpy(block))
        fill = round_block if header.order is None else round_for_products
        fill(*views, header.bits, header.is_transposed)
    _write_all(descriptor, block, header.offset(layer, expert))
    return checksums(block)


def _write_all(descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, memoryview(data[done:]), offset + done)  # type: ignore[arg-type]


def _confirm(descriptor: int, header: PackedHeader, waiting: list[tuple[int, list[int]]]) -> None:
    """Have the disk confirm the blocks, and only then say in the table that they are there."""
    os.fdatasync(descriptor)
    width = 4 * (1 + header.num_units)
    for row, sums in waiting:
        _write_all(descriptor, np.array([1, *sums], np.uint32).view(np.uint8), header.table_offset + row * width)
    waiting.clear()
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _copy_dense(checkpoint: Checkpoint, path: Path) -> None:
    """Copy every tensor of the model outside its experts into one file."""
    dense = {key: checkpoint.tensors[key] for key in checkpoint.targets if key not in checkpoint.expert_keys}
    keys = sorted(dense, key=lambda key: (-ITEM_BYTES.get(dense[key].dtype, 0), key))
    files = {tensor.path: AlignedFile(tensor.path) for tensor in dense.values()}
    buffer = aligned_bytes(_CHUNK_BYTES)
    try:
        with ShardWriter(path, {key: (dense[key].dtype, dense[key].shape) for key in keys}) as writer:
            for key in keys:
                for start in range(0, dense[key].num_bytes, _CHUNK_BYTES):
                    part = buffer[: min(_CHUNK_BYTES, dense[key].num_bytes - start)]
                    files[dense[key].path].read(dense[key].offset + start, part)
                    writer.write(key, part)
    finally:
        for file in files.values():
            file.close()


def _copy_side_files(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer and texts; weights are elsewhere."""
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".moecache") or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and not path.name.startswith(".") and path.stat().st_size <= _LARGEST_SIDE_FILE:
            shutil.copyfile(path, target / path.name)
