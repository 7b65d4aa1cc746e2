"""Threads that move blocks between memory and a file, and tickets for waiting on transfers.

``preadv`` and ``pwritev`` release the interpreter's lock, so a few threads keep a disk busy at 7 to
8 ms of CPU time per GB. There is one pool per direction: in a common one, writes queue behind reads
and the pipelined step is 10 % slower.

``TransferWaiter`` is shared by both stores: a condition, and the first error, which every later
call raises.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import PriorityQueue

import torch
from torch import Tensor

from boltmesh.strategies.offload.streams import use_device

CPU = torch.device("cpu")

BLOCK_BYTES = 4 << 20
"""Bytes that one thread moves at a time; 16 MiB is equally fast, 1 MiB costs 5 %."""


class Ticket:
    """One transfer of several blocks. It references the memory until the last block is done."""

    def __init__(
        self, memory: Tensor, num_blocks: int, on_done: Callable[["Ticket"], None]
    ) -> None:
        self.memory = memory
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._on_done = on_done
        self._blocks_left = num_blocks
        self._began_s: float | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether all blocks have ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return once all blocks are done.

        Raises:
            OffloadError: The first error of any block.
        """
        self._done.wait()
        if self.error is not None:
            raise self.error

    def begin_block(self) -> None:
        """Note the time of the first block. Called by a thread before each block."""
        with self._lock:
            if self._began_s is None:
                self._began_s = time.monotonic()

    def end_block(self, error: BaseException | None = None) -> None:
        """Count a block as done. Called by a thread after each block."""
        with self._lock:
            self._blocks_left -= 1
            self.error = self.error or error
            is_last = self._blocks_left == 0
        if is_last:
            if self._began_s is not None:
                self.seconds = time.monotonic() - self._began_s
            try:
                # Before the waiters wake, so that they see the callback's changes.
                self._on_done(self)
            except BaseException as caught:  # noqa: BLE001 - also raised by ``wait``
                self.error = self.error or caught
            finally:
                self._done.set()


STACK_BYTES = 1 << 20
"""Stack of a thread: blocks call little, and the default of 8 MiB counts against memory limits."""

Block = Callable[[], None]
"""Moves one block, or raises."""


_stack_size_lock = threading.Lock()


@contextmanager
def stacks_of(num_bytes: int) -> Iterator[None]:
    """Within the context, threads start with stacks of this size; one caller at a time.

    That includes threads that other code starts meanwhile: Python only has a global setting.
    """
    with _stack_size_lock:
        before = threading.stack_size(num_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)


class TransferPool:
    """Threads that run blocks in order, urgent ones first."""

    def __init__(self, num_threads: int, name: str, device: torch.device = CPU) -> None:
        self._device = device
        self._queue: PriorityQueue[tuple[int, int, Ticket | None, Block | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {n}", daemon=True)
            for n in range(num_threads)
        ]
        self._started = threading.Barrier(num_threads + 1)
        # Read before they start: a thread that never read it takes the value set last anywhere.
        num_torch_threads = torch.get_num_threads()
        with stacks_of(STACK_BYTES):
            for thread in self._threads:
                thread.start()
        self._started.wait()
        # A thread's own setting also becomes the default of threads that begin later: restore it.
        torch.set_num_threads(num_torch_threads)

    def submit(self, ticket: Ticket, blocks: Sequence[Block], *, is_urgent: bool = False) -> None:
        """Queue the blocks of one ticket; urgent if the training thread waits for them."""
        for block in blocks:
            self._queue.put((0 if is_urgent else 1, next(self._numbers), ticket, block))

    def close(self) -> None:
        """Finish the queued blocks and end the threads."""
        for _ in self._threads:
            self._queue.put((2, next(self._numbers), None, None))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []

    def _run(self) -> None:
        # These threads compute little, and more of torch's would take cores from training.
        torch.set_num_threads(1)
        use_device(self._device)  # the thread that has read a block copies it to the device
        self._started.wait()
        while True:
            _, _, ticket, block = self._queue.get()
            if ticket is None or block is None:
                return
            ticket.begin_block()
            error = None
            try:
                block()
            except BaseException as caught:  # noqa: BLE001 - raised by the ticket's ``wait``
                error = caught
            ticket.end_block(error)
            del ticket, block, error  # an idle thread must not keep memory alive


class TransferWaiter:
    """Base of a store whose transfers end on other threads than those that use it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held while state is read or written; notified when a transfer ends."""
        self.error: BaseException | None = None
        self._is_closed = False

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait, with the lock held, until other threads make the condition true or fail."""
        self.raise_error()
        while not is_so():
            self.changed.wait()
            self.raise_error()

    def raise_error(self) -> None:
        """Raise the first error of a transfer, if any."""
        if self.error is not None:
            raise self.error

    def finish_transfer(self, finish: Callable[[], None], ticket: Ticket) -> None:
        """Finish a transfer, on a thread of the pool."""
        with self.changed:
            self.error = self.error or ticket.error
            try:
                finish()
            except BaseException as error:  # noqa: BLE001 - the training thread raises it
                self.error = self.error or error
            self.changed.notify_all()
