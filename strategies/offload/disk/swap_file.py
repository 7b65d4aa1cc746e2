"""A swap file with threads to each direction and a checksum to each block.

Sums that tell whether a block read from disk is the block that was written there.
"""

import functools
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from boltmesh.strategies.offload.disk.file import DamagedBlockError, Extent, FileCalls, SwapFile
from boltmesh.strategies.offload.disk.transfer import BLOCK_BYTES, CPU, Block, Ticket, TransferPool
from boltmesh.strategies.offload.host_memory import PAGE_BYTES, as_bytes
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder

WORD_BYTES = 8


def block_sum(block: Tensor) -> int:
    """The 64-bit wrap-around sum of each 4 KiB page, times an odd weight for each page.

    Finds flipped bits, lost, zeroed, torn, stale and swapped pages, at a fifth of CRC-32's time:
    it runs at the speed of the memory. An odd weight has an inverse modulo 2^64, so no single
    damaged page can cancel out. It is no protection against intent.

    In NumPy, whose two calls take the interpreter's lock less often than torch's six: beside
    threads that transfer blocks, waiting for that lock takes longer than summing.

    Args:
        block: ``uint8``, contiguous, a multiple of 4096 bytes long.
    """
    words = block.numpy().view(np.uint64).reshape(-1, PAGE_BYTES // WORD_BYTES)
    pages = np.add.reduce(words, axis=1)
    return int(np.dot(pages, _weights(pages.size)))


@functools.lru_cache(maxsize=64)
def _weights(num_pages: int) -> Any:
    return np.arange(1, 2 * num_pages, 2, dtype=np.uint64)


NUM_THREADS = 8
"""For each direction. Four keep a disk busy while all of them transfer; a thread that sums a shard
of parameters does not."""


class Swap:
    """What the stores of one rank read from and write to. The last store to close closes it.

    So does whoever drops the last reference to it, for a run that has ended need not end the
    process: its threads do not hold it while they wait.

    Args:
        folder: Where to make the file.
        num_bytes: Space to take at once: a full disk is then known before the first step.
        rank: Whose file it is, for messages.
        calls: The system's calls; a test brings its own.
        recorder: Is told of each transfer.
        num_threads: For each direction.
        device: What the stores copy to.
    """

    def __init__(
        self,
        folder: Path | str,
        num_bytes: int = 0,
        *,
        rank: int = 0,
        calls: FileCalls | None = None,
        recorder: Recorder | NullRecorder | None = None,
        num_threads: int = NUM_THREADS,
        device: torch.device = CPU,
    ) -> None:
        self.folder = Path(folder)
        self.recorder = recorder or NullRecorder()
        self.file = SwapFile(self.folder, num_bytes, rank=rank, calls=calls or FileCalls())
        self._reads = TransferPool(num_threads, "boltmesh disk read", device)
        self._writes = TransferPool(num_threads, "boltmesh disk write", device)
        self._num_users = 0
        self._finalizer = weakref.finalize(self, _close, self._reads, self._writes, self.file)

    def allocate(self, name: str, num_bytes: int) -> Extent:
        """Take a range of the file, in whole pages."""
        return self.file.allocate(name, num_bytes)

    def read(
        self,
        extent: Extent,
        into: Tensor,
        *,
        is_urgent: bool = False,
        is_verified: bool = True,
        on_done: Callable[[Ticket], None] = lambda _: None,
    ) -> Ticket:
        """Begin to read a range and to compare it with what was written.

        Args:
            extent: The range.
            into: ``uint8``, as long as the range, page-aligned.
            is_urgent: Goes before what is not.
            is_verified: False: not compared here. Whoever uses the data calls ``verify`` first.
            on_done: Called by the thread that moved the last block, also after an error.
        """
        move = self._read_verified if is_verified else self._read_block
        return self._submit("read", move, extent, into, on_done, is_urgent=is_urgent)

    def verify(self, extent: Extent, data: Tensor) -> None:
        """Compare what was read from a range with what was written there, on this thread.

        Raises:
            OffloadError: It is something else.
        """
        try:
            for number in range(len(extent.sums)):
                self._compare(extent, data, number)
        except DamagedBlockError as error:
            raise self.file.explain(error, _doing("read", extent)) from error

    def write(
        self,
        extent: Extent,
        data: Tensor,
        *,
        is_sealed: bool = False,
        on_done: Callable[[Ticket], None] = lambda _: None,
    ) -> Ticket:
        """Begin to write a range; ``data`` may not change until the ticket is done.

        Args:
            extent: The range.
            data: ``uint8``, as long as the range, page-aligned.
            is_sealed: Whether ``seal`` was called with the same data.
            on_done: Called by the thread that moved the last block, also after an error.
        """
        move = self._write_block if is_sealed else self._seal_and_write
        return self._submit("write", move, extent, data, on_done, is_urgent=False)

    def seal(self, extent: Extent, data: Tensor) -> None:
        """Take the checksums of what is about to be written to a range, on this thread."""
        for number in range(len(extent.sums)):
            self._sum(extent, data, number)

    def sync(self) -> None:
        """Find out about writes that have only reached the page cache."""
        self.file.sync()

    def share(self) -> None:
        """One store more uses this."""
        self._num_users += 1

    def unshare(self) -> None:
        """One store less; the last one closes."""
        self._num_users -= 1
        if self._num_users == 0:
            self.close()

    def close(self) -> None:
        """End the threads and give the space back."""
        self._finalizer()

    def _submit(
        self,
        direction: Literal["read", "write"],
        move: Callable[[Extent, Tensor, int], None],
        extent: Extent,
        memory: Tensor,
        on_done: Callable[[Ticket], None],
        *,
        is_urgent: bool,
    ) -> Ticket:
        assert memory.numel() == extent.num_bytes

        def finish(ticket: Ticket) -> None:
            if ticket.error is not None:
                cause = ticket.error
                ticket.error = self.file.explain(cause, _doing(direction, extent))
                ticket.error.__cause__ = cause
            else:
                self.recorder.offload("disk", direction, extent.num_bytes, ticket.seconds)
            on_done(ticket)

        ticket = Ticket(memory, len(extent.sums), finish)
        blocks: list[Block] = [partial(move, extent, memory, n) for n in range(len(extent.sums))]
        pool = self._reads if direction == "read" else self._writes
        pool.submit(ticket, blocks, is_urgent=is_urgent)
        return ticket

    def _read_block(self, extent: Extent, memory: Tensor, number: int) -> None:
        block, offset = _cut(extent, memory, number)
        self.file.read(as_bytes(block), offset)

    def _read_verified(self, extent: Extent, memory: Tensor, number: int) -> None:
        self._read_block(extent, memory, number)
        self._compare(extent, memory, number)

    def _compare(self, extent: Extent, memory: Tensor, number: int) -> None:
        block, offset = _cut(extent, memory, number)
        if block_sum(block) != extent.sums[number]:
            raise DamagedBlockError(offset, block.numel())

    def _sum(self, extent: Extent, memory: Tensor, number: int) -> None:
        block, _ = _cut(extent, memory, number)
        extent.sums[number] = block_sum(block)

    def _write_block(self, extent: Extent, memory: Tensor, number: int) -> None:
        block, offset = _cut(extent, memory, number)
        total = extent.sums[number]
        extent.sums[number] = None  # half of a block is no block
        self.file.write(as_bytes(block), offset)
        extent.sums[number] = total

    def _seal_and_write(self, extent: Extent, memory: Tensor, number: int) -> None:
        self._sum(extent, memory, number)
        self._write_block(extent, memory, number)


def _close(reads: TransferPool, writes: TransferPool, file: SwapFile) -> None:
    reads.close()
    writes.close()
    file.close()


def _cut(extent: Extent, memory: Tensor, number: int) -> tuple[Tensor, int]:
    """One block of the memory, and where it lies in the file."""
    start = number * BLOCK_BYTES
    return memory[start : start + BLOCK_BYTES], extent.offset + start


def _doing(direction: Literal["read", "write"], extent: Extent) -> str:
    return f"{direction} {extent.name} {'from' if direction == 'read' else 'to'}"
