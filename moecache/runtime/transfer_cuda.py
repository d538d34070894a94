"""`CudaTransfer`: the same threads and lanes, ending on a GPU. UNVERIFIED until `pytest -m gpu` has run on one.

A thread reads into page-locked memory of its own and copies from there on a stream of its own, so neither disturbs the stream that
computes. Two orders must be kept. The copy must not overwrite a block that earlier products still read: it waits for an event that was
recorded on the computing stream when the copy was asked for. And nobody may compute from a block that is not complete: the thread waits for
its own copy before it says that it is done, which also frees its page-locked memory for the next. The thread that computes never
waits for the device.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from moecache.runtime.transfer import NUM_READERS, UNIT_BYTES, Ticket, Transfer
from moecache.stores.blocks import Store, aligned_bytes


class CudaTransfer(Transfer):
    """Copies from a store into blocks of GPU memory.

    Parameters
    ----------
    store : where experts come from.
    device : of the blocks.
    num_readers : threads for demand reads; each has one page-locked block, as has the background lane.
    unit_bytes : of a background copy.
    """

    def __init__(self, store: Store, device: torch.device, num_readers: int = NUM_READERS, unit_bytes: int = UNIT_BYTES) -> None:
        self.device = device
        self._own = threading.local()
        super().__init__(store, num_readers, unit_bytes)

    def _move(self, ticket: Ticket, first_byte: int, num_bytes: int) -> None:
        stream, host = self._stream_and_host()
        self.store.read(ticket.layer, ticket.expert, host.numpy(), first_byte, num_bytes)
        part = slice(first_byte, first_byte + num_bytes)
        with torch.cuda.stream(stream):
            if isinstance(ticket.mark, torch.cuda.Event):
                stream.wait_event(ticket.mark)
            ticket.block[part].copy_(host[part], non_blocking=True)
        stream.synchronize()
        ticket.num_bytes += num_bytes

    def _stream_and_host(self) -> tuple[torch.cuda.Stream, Tensor]:
        """This thread's stream and page-locked block, made at its first read."""
        if not hasattr(self._own, "pair"):
            torch.cuda.set_device(self.device)
            host = torch.from_numpy(aligned_bytes(self.store.layout.block_bytes, is_pinned=True))
            self._own.pair = (torch.cuda.Stream(self.device), host)
        return self._own.pair

    def _mark(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event
