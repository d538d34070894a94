"""`LowBitExperts`: every expert once more in few bits, always in place, for misses that are computed in low precision.

The copies take memory of their own beside the slots: all experts of all layers, at a quarter or half of their bytes. To compute a call, its
copy is written out in full into one block that is used again for the next: this spares a transfer, not the products. Which calls are
computed so is not known here.
"""

from __future__ import annotations

import numpy as np
import torch

from moecache.blocks import BlockLayout, Store, aligned_bytes
from moecache.expert_sum import Weights
from moecache.low_bit_blocks import low_bit_layout, round_block, unround_block
from moecache.packed_file import PackedHeader
from moecache.slots import SlotPool


class LowBitExperts:
    """Copies of all experts of a model in few bits.

    Parameters
    ----------
    num_layers, num_experts : L and E.
    low, full : how a copy and how an expert lies in a block.
    bits : 8 or 4.
    is_transposed : whether matrices are stored as [inputs, outputs].
    device : where the copies lie and are computed with.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        low: BlockLayout,
        full: BlockLayout,
        bits: int,
        is_transposed: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers, self.num_experts, self.bits, self._is_transposed = num_layers, num_experts, bits, is_transposed
        self._copies = SlotPool(low, num_layers * num_experts, device)
        self._full = SlotPool(full, 1, device)

    @classmethod
    def rounded(cls, store: Store, bits: int, is_transposed: bool, device: torch.device | str = "cpu") -> LowBitExperts:
        """Round every expert of a store; reads all of it once."""
        low = low_bit_layout(store.layout, bits, is_transposed)
        made = cls(store.num_layers, store.num_experts, low, store.layout, bits, is_transposed, device)
        block = aligned_bytes(store.layout.block_bytes)
        views = store.layout.views(torch.from_numpy(block))
        with torch.no_grad():
            for index, copy in enumerate(made._copies.views):
                store.read(*divmod(index, store.num_experts), block)
                round_block(views, copy, bits, is_transposed)
        return made

    @classmethod
    def packed(cls, store: Store, header: PackedHeader, device: torch.device | str = "cpu") -> LowBitExperts:
        """Read every copy of a packed file of 8 or 4 bits.

        Raises
        ------
        ValueError : a file of full experts.
        """
        if header.bits is None or header.full_layout is None:
            raise ValueError("this packed file holds full experts; pack one with --bits 8 or --bits 4 for low precision")
        made = cls(store.num_layers, store.num_experts, store.layout, header.full_layout, header.bits, header.is_transposed, device)
        block: np.ndarray = aligned_bytes(store.layout.block_bytes)
        for index, copy in enumerate(made._copies.blocks):
            store.read(*divmod(index, store.num_experts), block)
            copy.copy_(torch.from_numpy(block))
        return made

    @property
    def num_bytes(self) -> int:
        """Memory of the copies, and of the block that they are written out into."""
        return self._copies.num_bytes + self._full.num_bytes

    def weights(self, layer: int, expert: int) -> Weights:
        """The tensors that a copy stands for; good until the next are asked for."""
        unround_block(self._copies.views[layer * self.num_experts + expert], self._full.views[0], self.bits, self._is_transposed)
        return self._full.views[0]
