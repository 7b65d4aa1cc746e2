"""One rank's swap file: unnamed, private, and with all of its space allocated at once.

It is swap, not a checkpoint. Its name is removed as soon as it is open, so nothing is left behind
however the process ends, and a half-written file is never mistaken for a state to resume from.

``FileCalls`` holds the system calls that a ``SwapFile`` needs, in one object that a test can
replace; ``explain`` describes a failure and its remedy. ``Swap`` adds threads for each direction,
and checksums, which show whether a block that was read is the one that was written.
"""

import errno
import fcntl
import functools
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from boltmesh.errors import ConfigError, OffloadError
from boltmesh.strategies.offload.disk.transfer import BLOCK_BYTES, CPU, Block, Ticket, TransferPool
from boltmesh.strategies.offload.host_memory import PAGE_BYTES, as_bytes, describe_bytes, round_up
from boltmesh.telemetry.writer.null_recorder import NullRecorder
from boltmesh.telemetry.writer.recorder import Recorder


class FileCalls:
    """System calls: each method is one call, with its arguments and its errors."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from the file; returns the number of bytes read."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write ``data``; returns the number of bytes written."""
        return os.pwritev(fd, [data], offset)

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Allocate the space of a range of the file."""
        os.posix_fallocate(fd, offset, num_bytes)

    def free_bytes(self, fd: int) -> int:
        """Return the bytes that the file system has left for this user."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def sync(self, fd: int) -> None:
        """Return once the data is on the disk, or raise the error of an earlier write."""
        os.fdatasync(fd)

    def make_direct(self, fd: int) -> bool:
        """Request transfers around the page cache; returns whether the file system allows it."""
        direct = getattr(os, "O_DIRECT", 0)
        if not direct:
            return False
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True


LARGER = "Free space there, or set strategy.offload_path to a folder on a larger disk"
OTHER = "Set strategy.offload_path to a folder on another disk"
RESUME = "; then resume from the last checkpoint, which this does not touch."

ADVICE = {
    errno.ENOSPC: LARGER,
    errno.EDQUOT: f"The quota of this user is used up. {LARGER}",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f unlimited)",
    errno.EIO: f"The disk reports a fault; see the kernel's log (dmesg). {OTHER}",
    errno.EACCES: "Set strategy.offload_path to a folder that this user may write to",
    errno.ENOMEM: "Leave more memory to the system, or set a smaller strategy.offload_fraction",
}
"""Remedies by error number; parts of messages."""


class ShortTransferError(OSError):
    """Fewer bytes were moved than requested, and the system gave no reason."""

    def __init__(self, at: int, size: int) -> None:
        super().__init__(errno.EIO, f"the transfer ended at byte {at} of a file of {size}")


class DamagedBlockError(OSError):
    """A block that was read differs from the block that was written."""

    def __init__(self, at: int, num_bytes: int) -> None:
        super().__init__(
            errno.EIO,
            f"the {num_bytes} bytes from byte {at} on are not those that were written there",
        )


def explain(
    error: BaseException, doing: str, *, path: Path, rank: int, free_bytes: int | None
) -> OffloadError:
    """Build the error that ends the run: what failed, on which file, why, and what to set.

    Args:
        error: The caught error.
        doing: The action and its object, such as ``"write chunk 3 of the optimizer state to"``.
        path: The file, by the name that it was created under.
        rank: Owner of the file.
        free_bytes: Free space of its file system; None if unknown.
    """
    number = error.errno if isinstance(error, OSError) else None
    free = "" if free_bytes is None else f" ({describe_bytes(free_bytes)} free there)"
    explained = OffloadError(
        f"rank {rank} could not {doing} {path}{free}: {_reason(error)}. {_advice(error)}{RESUME}"
    )
    explained.errno = number
    return explained


def _reason(error: BaseException) -> str:
    if isinstance(error, ShortTransferError | DamagedBlockError):
        return str(error.strerror)
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{os.strerror(error.errno)} ({name})"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _advice(error: BaseException) -> str:
    if isinstance(error, ShortTransferError):
        return f"Something shortened the file, or the disk is full or failing. {LARGER}"
    if isinstance(error, DamagedBlockError):
        return f"The disk, its controller or the memory is failing. {OTHER}"
    number = error.errno if isinstance(error, OSError) else None
    return ADVICE.get(number, OTHER) if number is not None else OTHER


@dataclass(frozen=True)
class Extent:
    """A range of the file, allocated for one object."""

    name: str
    """Name of its content in messages: ``"chunk 3 of the optimizer state"``."""
    offset: int
    num_bytes: int
    sums: list[int | None] = field(repr=False)
    """Checksum of each block as last written; None before that."""


class SwapFile:
    """An open file and the allocation of its ranges.

    ``num_bytes`` are allocated now, and ``allocate`` extends the file if needed.

    Raises:
        ConfigError: When there is no such folder.
        OffloadError: When the file cannot be created or extended.
    """

    def __init__(self, folder: Path, num_bytes: int, *, rank: int, calls: FileCalls) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"strategy.offload_path={folder} is no folder. Make it on a local disk "
                f"(mkdir -p {folder}), or set strategy.offload_path to one that exists."
            )
        self.path = folder / f"boltmesh-rank{rank}-{secrets.token_hex(4)}.swap"
        self.rank = rank
        self.calls = calls
        self._size = 0
        self._used = 0
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise explain(error, "create", path=self.path, rank=rank, free_bytes=None) from error
        try:
            self.path.unlink()
            self._extend(round_up(num_bytes))
            # After the allocation: where the C library allocates by writing single bytes, it cannot
            # do so on a direct file.
            self.is_direct = calls.make_direct(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the disk that the file occupies."""
        return self._size

    def free_bytes(self) -> int:
        """Return the bytes that the file system has left."""
        return self.calls.free_bytes(self._fd)

    def allocate(self, name: str, num_bytes: int) -> Extent:
        """Allocate a range of the file, until the file is closed."""
        length = max(PAGE_BYTES, round_up(num_bytes))  # a transfer is at least one block
        if self._used + length > self._size:
            self._extend(self._used + length)
        extent = Extent(name, self._used, length, [None] * -(-length // BLOCK_BYTES))
        self._used += length
        return extent

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from the file, or raise."""
        self._move(self.calls.read, into, offset)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, or raise."""
        self._move(self.calls.write, data, offset)

    def sync(self) -> None:
        """Raise the errors of writes that have only reached the page cache."""
        if not self.is_direct:
            try:
                self.calls.sync(self._fd)
            except OSError as error:
                raise self.explain(error, "sync") from error

    def explain(self, error: BaseException, doing: str) -> OSError:
        """Describe a failure, with this file's name and the free space of its disk."""
        try:
            free = self.calls.free_bytes(self._fd)
        except OSError:
            free = None
        return explain(error, doing, path=self.path, rank=self.rank, free_bytes=free)

    def close(self) -> None:
        """Free the space. The file has no name, so this removes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _extend(self, size: int) -> None:
        more = size - self._size
        if more <= 0:
            return
        doing = f"take {describe_bytes(more)} for"
        if self.calls.free_bytes(self._fd) < more:
            # Allocating would take all remaining space from all processes, for a moment.
            raise self.explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), doing)
        try:
            self.calls.allocate(self._fd, self._size, more)
        except OSError as error:
            raise self.explain(error, doing) from error
        self._size = size

    def _move(
        self, call: Callable[[int, memoryview, int], int], view: memoryview, offset: int
    ) -> None:
        done = 0
        while done < len(view):
            moved = call(self._fd, view[done:], offset + done)
            # Only whole pages can be continued from; a partial page is moved again.
            whole = moved if done + moved == len(view) else moved // PAGE_BYTES * PAGE_BYTES
            if whole <= 0:
                raise ShortTransferError(offset + done + max(moved, 0), self._size)
            done += whole


WORD_BYTES = 8


def block_sum(block: Tensor) -> int:
    """Return the sum of the 64-bit words of each 4 KiB page times an odd weight by page, mod 2^64.

    Finds flipped bits, lost, zeroed, torn, stale and swapped pages, at a fifth of CRC-32's time:
    it runs at the speed of the memory. An odd weight has an inverse modulo 2^64, so no single
    damaged page can cancel out. It is no protection against intent.

    In NumPy, whose two calls take the interpreter's lock less often than torch's six: beside
    threads that transfer blocks, waiting for that lock takes longer than summing.

    Args:
        block: ``uint8`` ``(N,)``, contiguous, N a multiple of 4096.
    """
    words = block.numpy().view(np.uint64).reshape(-1, PAGE_BYTES // WORD_BYTES)
    pages = np.add.reduce(words, axis=1)
    return int(np.dot(pages, _weights(pages.size)))


@functools.lru_cache(maxsize=64)
def _weights(num_pages: int) -> Any:
    return np.arange(1, 2 * num_pages, 2, dtype=np.uint64)


NUM_THREADS = 8
"""Per direction. Four keep a disk busy while all of them transfer; a thread that computes the
checksum of a shard does not."""


class Swap:
    """Swap file of the stores of one rank.

    The last store to close closes it, and so does dropping the last reference to it, since a run
    that has ended need not end the process: its threads do not reference it while they wait.

    Args:
        folder: Folder for the file.
        num_bytes: Space to allocate now, so that a full disk is known before the first step.
        rank: Owner of the file, for messages.
        calls: System calls, which a test may replace.
        recorder: Receives each transfer.
        num_threads: Threads per direction.
        device: Device that the stores copy to.
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
        """Allocate a range of the file, in whole pages."""
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
        """Begin to read a range and to compare it with the checksums of what was written.

        Args:
            extent: The range.
            into: ``uint8``, ``(extent.num_bytes,)``, page-aligned.
            is_urgent: Runs before transfers that are not urgent.
            is_verified: False skips the comparison; call ``verify`` before using the data.
            on_done: Called by the thread that moved the last block, also after an error.
        """
        move = self._read_verified if is_verified else self._read_block
        return self._submit("read", move, extent, into, on_done, is_urgent=is_urgent)

    def verify(self, extent: Extent, data: Tensor) -> None:
        """Compare data that was read from a range with the checksums, on this thread.

        Args:
            extent: The range.
            data: ``uint8``, ``(extent.num_bytes,)``.

        Raises:
            OffloadError: When they differ.
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
        """Begin to write a range; ``data`` must not change until the ticket is done.

        Args:
            extent: The range.
            data: ``uint8``, ``(extent.num_bytes,)``, page-aligned.
            is_sealed: Whether ``seal`` was called with the same data.
            on_done: Called by the thread that moved the last block, also after an error.
        """
        move = self._write_block if is_sealed else self._seal_and_write
        return self._submit("write", move, extent, data, on_done, is_urgent=False)

    def seal(self, extent: Extent, data: Tensor) -> None:
        """Compute the checksums of data for a range, ``uint8`` ``(num_bytes,)``, on this thread."""
        for number in range(len(extent.sums)):
            self._sum(extent, data, number)

    def sync(self) -> None:
        """Raise the errors of writes that have only reached the page cache."""
        self.file.sync()

    def share(self) -> None:
        """Count one more store that uses this."""
        self._num_users += 1

    def unshare(self) -> None:
        """Count one store less; the last one closes."""
        self._num_users -= 1
        if self._num_users == 0:
            self.close()

    def close(self) -> None:
        """End the threads and free the space."""
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
        extent.sums[number] = None  # invalid while it is written
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
    """Return one block of the memory and its offset in the file."""
    start = number * BLOCK_BYTES
    return memory[start : start + BLOCK_BYTES], extent.offset + start


def _doing(direction: Literal["read", "write"], extent: Extent) -> str:
    return f"{direction} {extent.name} {'from' if direction == 'read' else 'to'}"
