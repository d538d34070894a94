"""`SlotPool`: the memory that experts visit, taken once at the start.

A pool is a row of *blocks*, each as long as one expert and each at a multiple of 4096 bytes, so that a disk can be read straight into it.
The tensors of a block are views made once: when other bytes arrive in the block, the same views are another expert. Nothing is allocated
after the start, so the memory of a long generation is known before its first token.

Which expert lies in which block, and why, is not known here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moecache.expert_sum import Weights
from moecache.packed_products import with_products
from moecache.stores.blocks import ALIGNMENT, BlockLayout, aligned_bytes

GIB = 2**30


class PoolTooLarge(ValueError):
    """Blocks that do not fit the memory of the device; the message names the bytes wanted and those that are free."""


class SlotPool:
    """Blocks of memory on one device.

    Parameters
    ----------
    layout : how an expert lies in a block.
    num_blocks : blocks to hold.
    device : where.

    Attributes
    ----------
    blocks : list of tensors [block_bytes] uint8.
    views : for each block its tensors by name, and its matrices in few bits that products compute with; the same memory.

    Raises
    ------
    PoolTooLarge : the memory is not there.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout, self.device = layout, torch.device(device)
        self.num_bytes = num_blocks * layout.block_bytes
        raw = _allocate(self.num_bytes, self.device)
        self.blocks: list[Tensor] = list(raw.view(num_blocks, layout.block_bytes))
        self.views: list[Weights] = [with_products(layout.views(block)) for block in self.blocks]

    def __len__(self) -> int:
        return len(self.blocks)

    def close(self) -> None:
        """Give the memory back as soon as nobody else holds a view of it."""
        self.blocks, self.views = [], []


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Aligned memory that has been touched, so that it is there and not only promised.

    On a processor NumPy takes it, which asks the system for huge pages and torch does not: a read past the page cache pins every page that
    it lands in, and small pages cost fetches up to half their rate.
    """
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise PoolTooLarge(_too_large(num_bytes, device, free))
    try:
        if device.type == "cpu":
            return torch.from_numpy(aligned_bytes(num_bytes)).fill_(0)
        raw = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + num_bytes]
    except (RuntimeError, MemoryError) as error:
        raise PoolTooLarge(_too_large(num_bytes, device, free)) from error


def _too_large(num_bytes: int, device: torch.device, free: int | None) -> str:
    known = "" if free is None else f", of which {free / GIB:.2f} GiB are free"
    return f"slots need {num_bytes / GIB:.2f} GiB of {device} memory{known}; ask for fewer slots a layer or a smaller memory"


def free_bytes(device: torch.device | str) -> int | None:
    """Bytes that can be taken on a device now, None where the system does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return None
    available = rows.get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024
