"""`LowBitExperts`: every expert once more in few bits, always in place, for misses that are computed in low precision.

The copies take memory of their own beside the slots: all experts of all layers, at a quarter or half of their bytes. On a CPU a call is
computed from its copy as it is (`packed_products`). Where that cannot be done for every matrix, the copy is written out in full into one
block that is used again for the next: this spares a transfer, not the products. Which calls are computed so is not known here.
"""

from __future__ import annotations

import numpy as np
import torch

from moecache.expert_sum import Weights
from moecache.low_bit import group_size
from moecache.packed_products import PackedMatrix, is_right
from moecache.runtime.slots import SlotPool
from moecache.stores.blocks import BlockLayout, Store, TensorSpec, aligned_bytes
from moecache.stores.low_bit_blocks import low_bit_layout, low_bit_of, outputs_and_inputs, round_block, unround_block
from moecache.stores.packed_file import PackedHeader


class LowBitExperts:
    """Copies of all experts of a model in few bits.

    Parameters
    ----------
    num_layers, num_experts : L and E.
    low, full : how a copy and how an expert lies in a block.
    bits : 8 or 4.
    is_transposed : whether matrices are stored as [inputs, outputs].
    device : where the copies lie and are computed with.

    Attributes
    ----------
    is_packed : whether products are made from the copies as they are.
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
        self._layout = full
        self.is_packed = torch.device(device).type == "cpu" and all(self._is_right(spec) for spec in full.tensors)
        self._packed: list[Weights] = []
        self._copies = SlotPool(low, 1 if self.is_packed else num_layers * num_experts, device)
        self._full = SlotPool(full, 0 if self.is_packed else 1, device)

    def _is_right(self, spec: TensorSpec) -> bool:
        if len(spec.shape) != 2:
            return True
        outputs, inputs = outputs_and_inputs(spec, self._is_transposed)
        return is_right(outputs, inputs, self.bits, group_size(inputs, self.bits), getattr(torch, spec.dtype))

    def _place(self, index: int) -> int:
        """The block that an expert's copy is written to."""
        return 0 if self.is_packed else index

    def _keep(self) -> None:
        """Make products of the copy that has just been written to the only block."""
        if self.is_packed:
            copy, weights = self._copies.views[0], {}
            for spec in self._layout.tensors:
                if len(spec.shape) == 2:
                    inputs = outputs_and_inputs(spec, self._is_transposed)[1]
                    weights[spec.name] = PackedMatrix.of(low_bit_of(copy, spec.name, inputs, self.bits), getattr(torch, spec.dtype))
                else:
                    weights[spec.name] = copy[spec.name].clone()
            self._packed.append(weights)

    @classmethod
    def rounded(cls, store: Store, bits: int, is_transposed: bool, device: torch.device | str = "cpu") -> LowBitExperts:
        """Round every expert of a store; reads all of it once."""
        low = low_bit_layout(store.layout, bits, is_transposed)
        made = cls(store.num_layers, store.num_experts, low, store.layout, bits, is_transposed, device)
        block = aligned_bytes(store.layout.block_bytes)
        views = store.layout.views(torch.from_numpy(block))
        with torch.no_grad():
            for index in range(store.num_layers * store.num_experts):
                store.read(*divmod(index, store.num_experts), block)
                round_block(views, made._copies.views[made._place(index)], bits, is_transposed)
                made._keep()
        return made

    @classmethod
    def packed(cls, store: Store, header: PackedHeader, device: torch.device | str = "cpu") -> LowBitExperts:
        """Read every copy of a packed file of 8 or 4 bits.

        Raises
        ------
        ValueError : a file of full experts, or one in the order of products.
        """
        if header.bits is None or header.full_layout is None:
            raise ValueError("this packed file holds full experts; pack one with --bits 8 or --bits 4 for low precision")
        if header.order is not None:
            raise ValueError("this packed file is in the order of products; copies for low precision are made from the plain order")
        made = cls(store.num_layers, store.num_experts, store.layout, header.full_layout, header.bits, header.is_transposed, device)
        block: np.ndarray = aligned_bytes(store.layout.block_bytes)
        for index in range(store.num_layers * store.num_experts):
            store.read(*divmod(index, store.num_experts), block)
            made._copies.blocks[made._place(index)].copy_(torch.from_numpy(block))
            made._keep()
        return made

    @property
    def num_bytes(self) -> int:
        """Memory of the copies, and of the blocks that they are made or written out in."""
        packed = sum(_num_bytes(matrix) for weights in self._packed for matrix in weights.values())
        return packed + self._copies.num_bytes + self._full.num_bytes

    def weights(self, layer: int, expert: int) -> Weights:
        """The matrices of a copy; those written out are good until the next are asked for."""
        if self.is_packed:
            return self._packed[layer * self.num_experts + expert]
        unround_block(self._copies.views[layer * self.num_experts + expert], self._full.views[0], self.bits, self._is_transposed)
        return self._full.views[0]


def _num_bytes(matrix: torch.Tensor | PackedMatrix) -> int:
    return matrix.num_bytes if isinstance(matrix, PackedMatrix) else matrix.numel() * matrix.element_size()
