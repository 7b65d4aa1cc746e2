"""A disk that fails as a test says, and damage to a swap file that is really there."""

import errno
import os
from collections.abc import Callable
from typing import Any

from boltmesh.strategies.offload.disk.swap_file import FileCalls, Swap

Call = Callable[[int, memoryview, int], "int | None"]


class FaultyCalls(FileCalls):
    """The system's calls, with a say before each: raise, return a number of bytes, or None."""

    def __init__(self) -> None:
        self.before_read: Call | None = None
        self.before_write: Call | None = None
        self.allocate_error: int | None = None
        self.sync_error: int | None = None
        self.refuses_direct = False
        self.free: int | None = None
        self.reads: list[int] = []
        self.writes: list[int] = []
        """Offsets, in the order in which the calls were made."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.reads.append(offset)
        said = self.before_read and self.before_read(fd, into, offset)
        return super().read(fd, into, offset) if said is None else said

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.writes.append(offset)
        said = self.before_write and self.before_write(fd, data, offset)
        return super().write(fd, data, offset) if said is None else said

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        if self.allocate_error is not None:
            raise fault(self.allocate_error)
        super().allocate(fd, offset, num_bytes)

    def free_bytes(self, fd: int) -> int:
        return super().free_bytes(fd) if self.free is None else self.free

    def sync(self, fd: int) -> None:
        if self.sync_error is not None:
            raise fault(self.sync_error)
        super().sync(fd)

    def make_direct(self, fd: int) -> bool:
        return not self.refuses_direct and super().make_direct(fd)


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def failing(number: int, *, after: int = 0) -> Call:
    """A call that fails from its ``after``-th time on."""
    calls = iter(range(1 << 30))

    def fail(*_: Any) -> None:
        if next(calls) >= after:
            raise fault(number)

    return fail


def torn(fd: int, data: memoryview, offset: int) -> int:
    """A disk that loses the second half of a write and says that all is well."""
    os.pwrite(fd, data[: len(data) // 2 // 4096 * 4096], offset)
    return len(data)


def lost(fd: int, data: memoryview, offset: int) -> int:
    """A disk that loses a write and says that all is well."""
    return len(data)


def file_name(swap: Swap) -> str:
    """A way to a swap file, which has no name."""
    return f"/proc/self/fd/{swap.file._fd}"


def flip_bit(swap: Swap, offset: int) -> None:
    """Change one bit on the disk."""
    with open(file_name(swap), "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


def cut_file(swap: Swap, num_bytes: int) -> None:
    """Shorten the file."""
    os.truncate(file_name(swap), num_bytes)


EIO, ENOSPC = errno.EIO, errno.ENOSPC
