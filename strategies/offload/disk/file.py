"""One rank's swap file: without a name, private, and with all of its space taken at once.

It is swap, not a checkpoint. Its name is removed as soon as it is open, so whatever ends the
process leaves nothing behind, and nobody can take a half-written file for a state to resume from.

The calls to the system that a swap file needs, in one object that a test can replace.

What went wrong with a swap file, said so that somebody can mend it.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from boltmesh.errors import ConfigError, OffloadError
from boltmesh.strategies.offload.disk.transfer import BLOCK_BYTES
from boltmesh.strategies.offload.host_memory import PAGE_BYTES, describe_bytes, round_up


class FileCalls:
    """Each method is one call to the operating system, with its arguments and its errors."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from the file; returns how many bytes came."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write ``data``; returns how many bytes went."""
        return os.pwritev(fd, [data], offset)

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Take the space of a range of the file for good."""
        os.posix_fallocate(fd, offset, num_bytes)

    def free_bytes(self, fd: int) -> int:
        """What the file system of the file has left for this user."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def sync(self, fd: int) -> None:
        """Return once the data is on the disk, or raise what went wrong on the way."""
        os.fdatasync(fd)

    def make_direct(self, fd: int) -> bool:
        """Ask for transfers around the page cache. Returns whether the file system agrees."""
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
    errno.EIO: f"The disk reports a fault; the kernel's log (dmesg) tells which. {OTHER}",
    errno.EACCES: "Set strategy.offload_path to a folder that this user may write to",
    errno.ENOMEM: "Leave more memory to the system, or set a smaller strategy.offload_fraction",
}
"""What to do, by the kind of error."""


class ShortTransferError(OSError):
    """Fewer bytes were moved than asked for, and the system gave no reason."""

    def __init__(self, at: int, size: int) -> None:
        super().__init__(errno.EIO, f"the transfer ended at byte {at} of a file of {size}")


class DamagedBlockError(OSError):
    """A block came back other than it was written."""

    def __init__(self, at: int, num_bytes: int) -> None:
        super().__init__(
            errno.EIO,
            f"the {num_bytes} bytes from byte {at} on are not those that were written there",
        )


def explain(
    error: BaseException, doing: str, *, path: Path, rank: int, free_bytes: int | None
) -> OffloadError:
    """The error that ends the run: what failed, on which file, why, and what to set.

    Args:
        error: What was caught.
        doing: The action and its object, such as ``"write chunk 3 of the optimizer state to"``.
        path: The file, by the name that it was created under.
        rank: Whose file it is.
        free_bytes: What its file system has left, where that is known.
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
    """A range of the file that belongs to one thing."""

    name: str
    """What it holds, for messages: ``"chunk 3 of the optimizer state"``."""
    offset: int
    num_bytes: int
    sums: list[int | None] = field(repr=False)
    """The checksum of each block as it was last written; None before that."""


class SwapFile:
    """An open file and who has which range of it.

    Args:
        folder: Where to make the file; it has to exist.
        num_bytes: Space to take now. More is taken when more is asked for.
        rank: Whose file it is, for its name and for messages.
        calls: The system's calls; a test brings its own.

    Raises:
        ConfigError: When there is no such folder.
        OffloadError: When the file cannot be made or the space is not there.
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
            # After the space is taken: where the C library takes it by writing single bytes, it
            # could not do so on a direct file.
            self.is_direct = calls.make_direct(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many bytes of the disk the file takes."""
        return self._size

    def free_bytes(self) -> int:
        """What the file system has left for others."""
        return self.calls.free_bytes(self._fd)

    def allocate(self, name: str, num_bytes: int) -> Extent:
        """Give a range of the file to one thing, for as long as the file is open."""
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
        """Find out about writes that the page cache has taken and the disk has not."""
        if not self.is_direct:
            try:
                self.calls.sync(self._fd)
            except OSError as error:
                raise self.explain(error, "sync") from error

    def explain(self, error: BaseException, doing: str) -> OSError:
        """What failed, with this file's name and what its disk has left."""
        try:
            free = self.calls.free_bytes(self._fd)
        except OSError:
            free = None
        return explain(error, doing, path=self.path, rank=self.rank, free_bytes=free)

    def close(self) -> None:
        """Give the space back. The file has no name, so this removes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _extend(self, size: int) -> None:
        more = size - self._size
        if more <= 0:
            return
        doing = f"take {describe_bytes(more)} for"
        if self.calls.free_bytes(self._fd) < more:
            # Asking for it would take all that is left from everybody, for a moment.
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
            # Only whole pages can be continued from; the rest of a page is moved again.
            whole = moved if done + moved == len(view) else moved // PAGE_BYTES * PAGE_BYTES
            if whole <= 0:
                raise ShortTransferError(offset + done + max(moved, 0), self._size)
            done += whole
