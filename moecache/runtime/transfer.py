"""`Transfer`: threads that bring experts into blocks, some because a step waits for them, others ahead of time.

Two lanes read from one store.

- *Demand reads*: a step asks for all its fetches at once and computes its hits while they fly. A few threads serve them.
- *Background copies*: one thread, 1 MiB at a time, and between two units it rests while a demand read is out. So a demand read is held up
  by one unit at most, never by a whole expert.

A step that needs an expert whose background copy is still under way waits for that copy. It must first be *promoted*: a copy not begun goes
to the demand lane, one under way no longer rests. (Waiting without promoting can wait for ever: the copy rests until the demand reads are
served, and they may never be.) Whoever wants a block that is still being filled must first *settle* its copy: tell it to stop, and wait
until it has.

A failure in a thread is kept with its copy and raised where somebody waits for it. Experts, slots and policies are only numbers here; which
copy is worth making is not known.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moecache.stores.blocks import Store, round_up

UNIT_BYTES = 2**20
NUM_READERS = 4


class FetchError(OSError):
    """An expert that could not be brought; the cause is chained to it."""


class Ticket:
    """One copy of an expert into a block: asked for, perhaps under way, perhaps done.

    `num_bytes` have arrived; `error` is why the rest did not.
    """

    __slots__ = (
        "_gate",
        "block",
        "error",
        "expert",
        "is_background",
        "is_cancelled",
        "is_promoted",
        "is_taken",
        "layer",
        "mark",
        "num_bytes",
    )

    def __init__(self, layer: int, expert: int, block: Tensor, is_background: bool) -> None:
        self.layer, self.expert, self.block, self.is_background = layer, expert, block, is_background
        self.is_promoted = self.is_cancelled = False
        self.is_taken = not is_background  # by a thread, or by the queue of the demand lane
        self.num_bytes = 0
        self.error: BaseException | None = None
        self.mark: object = None  # what the device must have finished before the block may be overwritten
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def is_done(self) -> bool:
        """True once nobody writes to the block any more."""
        return not self._gate.locked()

    def finish(self) -> None:
        """Open the gate for whoever waits; called once."""
        self._gate.release()

    def join(self) -> None:
        """Wait until the ticket is finished. Can be interrupted."""
        with self._gate:
            pass


class Transfer:
    """Copies from a store into blocks of main memory.

    Parameters
    ----------
    store : where experts come from.
    num_readers : threads for demand reads.
    unit_bytes : of a background copy, a multiple of 4096.
    """

    def __init__(self, store: Store, num_readers: int = NUM_READERS, unit_bytes: int = UNIT_BYTES) -> None:
        if num_readers < 1 or unit_bytes < 1:
            raise ValueError(f"num_readers={num_readers} and unit_bytes={unit_bytes} must be at least 1")
        self.store = store
        self._block_bytes = store.layout.block_bytes
        self._unit_bytes = round_up(unit_bytes, 4096)
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._num_out = 0  # demand reads asked for and not done
        self._demands: deque[Ticket] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # wakes one reader each; False = go home
        self._is_called = False  # a reader has been woken and has not looked yet
        self._copies: SimpleQueue[Ticket | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._serve_demands, daemon=True, name=f"moecache read {i}") for i in range(num_readers)]
        self._threads.append(threading.Thread(target=self._serve_copies, daemon=True, name="moecache background"))
        self.is_closed = False
        for thread in self._threads:
            thread.start()

    def fetch(self, layer: int, expert: int, block: Tensor) -> Ticket:
        """Ask for an expert that a step waits for; returns at once."""
        ticket = self._ticket(layer, expert, block, is_background=False)
        with self._lock:
            self._demand(ticket)
        return ticket

    def copy(self, layer: int, expert: int, block: Tensor) -> Ticket:
        """Ask for an expert that nobody waits for yet; returns at once."""
        ticket = self._ticket(layer, expert, block, is_background=True)
        self._copies.put(ticket)
        return ticket

    def promote(self, ticket: Ticket) -> None:
        """Let a background copy go on as if a step waited for it."""
        with self._turn:
            if not ticket.is_taken:
                ticket.is_taken = True
                self._demand(ticket)
            ticket.is_promoted = True
            self._turn.notify_all()

    def wait(self, ticket: Ticket) -> None:
        """Wait until the expert is in its block.

        Raises
        ------
        FetchError : it could not be read.
        """
        if not ticket.is_done:
            if ticket.is_background:
                self.promote(ticket)
            ticket.join()
        if ticket.error is not None:
            raise FetchError(f"expert {ticket.expert} of layer {ticket.layer} could not be read: {ticket.error}") from ticket.error

    def settle(self, ticket: Ticket) -> None:
        """Stop a copy that nobody wants any more, and wait until nobody writes to its block."""
        with self._turn:
            ticket.is_cancelled = True
            if not ticket.is_taken:  # the lane will pass it over
                ticket.is_taken = True
                ticket.finish()
            self._turn.notify_all()
        ticket.join()

    def close(self) -> None:
        """Stop the threads; what is under way ends at the next unit. Blocks are nobody's afterwards."""
        if self.is_closed:
            return
        self.is_closed = True
        with self._turn:
            self._turn.notify_all()
        self._copies.put(None)
        for _ in self._threads[:-1]:
            self._calls.put(False)
        for thread in self._threads:
            thread.join()

    def _ticket(self, layer: int, expert: int, block: Tensor, is_background: bool) -> Ticket:
        if self.is_closed:
            raise ValueError("this transfer is closed; open the model again with moecache.offload")
        ticket = Ticket(layer, expert, block, is_background)
        ticket.mark = self._mark()
        return ticket

    def _demand(self, ticket: Ticket) -> None:
        """Queue a demand read; the lock is held."""
        self._num_out += 1
        self._demands.append(ticket)
        self._call_reader()

    def _call_reader(self) -> None:
        """Wake a reader unless one is on its way: it will call the next. So the thread that computes wakes one for all reads of a step."""
        if self._demands and not self._is_called:
            self._is_called = True
            self._calls.put(True)

    def _serve_demands(self) -> None:
        is_open = True
        while is_open:
            is_open = self._calls.get()
            while (ticket := self._next_demand()) is not None:
                self._serve(ticket)
                ticket = None  # a resting thread must not keep a block alive

    def _next_demand(self) -> Ticket | None:
        with self._lock:
            self._is_called = False
            ticket = self._demands.popleft() if self._demands else None
            self._call_reader()
        return ticket

    def _serve(self, ticket: Ticket) -> None:
        try:
            if not (ticket.is_cancelled or self.is_closed):
                self._move(ticket, 0, self._block_bytes)
        except BaseException as error:
            ticket.error = error
        with self._lock:
            self._num_out -= 1
            if self._num_out == 0:
                self._turn.notify_all()
        ticket.finish()

    def _serve_copies(self) -> None:
        while (ticket := self._copies.get()) is not None:
            with self._turn:
                is_mine, ticket.is_taken = not ticket.is_taken, True
            if is_mine:
                try:
                    self._copy_in_units(ticket)
                except BaseException as error:
                    ticket.error = error
                ticket.finish()
            ticket = None

    def _copy_in_units(self, ticket: Ticket) -> None:
        for first in range(0, self._block_bytes, self._unit_bytes):
            with self._turn:
                while self._num_out > 0 and not (ticket.is_promoted or ticket.is_cancelled or self.is_closed):
                    self._turn.wait()
            if ticket.is_cancelled or self.is_closed:
                return
            self._move(ticket, first, min(self._unit_bytes, self._block_bytes - first))

    def _move(self, ticket: Ticket, first_byte: int, num_bytes: int) -> None:
        """Bring a part of the expert; runs in a thread."""
        self.store.read(ticket.layer, ticket.expert, self._target(ticket), first_byte, num_bytes)
        ticket.num_bytes += num_bytes

    def _target(self, ticket: Ticket) -> NDArray[np.uint8]:
        return ticket.block.numpy()

    def _mark(self) -> object:
        """What the device is doing now, for back ends where that goes on by itself."""
        return None
