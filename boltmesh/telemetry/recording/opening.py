"""Makes the file that a rank writes, or continues it, and locks it for as long as the rank lives.

The blocks are allocated when the file is made, because a mapped file on a full disk does not
raise: it kills the process.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from boltmesh.errors import TelemetryError
from boltmesh.telemetry import layout
from boltmesh.telemetry.job import open_private
from boltmesh.telemetry.layout import Header

_LOCK_ATTEMPTS: Final = 20
_LOCK_PAUSE_S: Final = 0.005


class OpenFile(NamedTuple):
    """A rank's file, locked and mapped."""

    descriptor: int
    mapping: mmap.mmap
    header: Header
    is_new: bool
    """Made just now; else this very process has written into it before."""


def open_rank_file(path: Path, ours: tuple[int, int, int], rank: int, world_size: int) -> OpenFile:
    """Continue this process's own file, or make a new one in the place of a dead process's.

    Args:
        path: Where it is.
        ours: Pid, start time and pid namespace of this process, as in the header.
        rank: Global rank.
        world_size: Ranks of the job.

    Raises:
        TelemetryError: Another process writes it, or there is no room for it.
        OSError: As the system says it.
    """
    if os.path.lexists(path):
        earlier = _open_earlier(path, ours)
        if earlier is not None:
            return earlier
    descriptor = _create(path)
    try:
        mapping = mmap.mmap(descriptor, layout.FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    header = Header(*ours, rank, world_size, *_clocks())
    mapping[: layout.PAGE] = header.pack()
    return OpenFile(descriptor, mapping, header, is_new=True)


def _clocks() -> tuple[float, int]:
    """Return the wall clock and the monotonic clock of one moment.

    A process that had to wait between the two would show all it does that much earlier or later
    than other ranks show theirs. Of several tries the shortest is right to its length.
    """
    tries = []
    for _ in range(5):
        before_ns = time.monotonic_ns()
        wall_s = time.time()
        after_ns = time.monotonic_ns()
        tries.append((after_ns - before_ns, wall_s, (before_ns + after_ns) // 2))
    _, wall_s, monotonic_ns = min(tries)
    return wall_s, monotonic_ns


def _open_earlier(path: Path, ours: tuple[int, int, int]) -> OpenFile | None:
    os.close(open_private(path))  # refuses links and files of others before it is opened to write
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _lock(descriptor, f"{path} is being written by another process. Give each job its own id.")
        try:
            header = layout.parse_header(os.pread(descriptor, layout.PAGE, 0))
            is_ours = (header.pid, header.start_ticks, header.pid_namespace) == ours
            if is_ours and os.fstat(descriptor).st_size == layout.FILE_BYTES:
                mapping = mmap.mmap(descriptor, layout.FILE_BYTES)
                return OpenFile(descriptor, mapping, header, is_new=False)
        except TelemetryError:
            pass  # of another version or damaged: replaced like any file of a dead process
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _create(path: Path) -> int:
    """Make the file under another name, allocated and locked, then give it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    free = os.statvfs(path.parent)
    if free.f_bavail * free.f_frsize < 2 * layout.FILE_BYTES:
        raise TelemetryError(
            f"{path.parent} has {free.f_bavail * free.f_frsize / 2**20:.1f} MiB free, and a rank's "
            f"telemetry takes {layout.FILE_BYTES / 2**20:.1f} MiB. Set BOLTMESH_RUN_DIR to another "
            f"local disk."
        )
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        _allocate(descriptor)
        _lock(descriptor, f"{temporary} cannot be locked. Set BOLTMESH_RUN_DIR to a local disk.")
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _allocate(descriptor: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, layout.FILE_BYTES)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
        else:
            return
    os.pwrite(descriptor, bytes(layout.FILE_BYTES), 0)


def _lock(descriptor: int, problem: str) -> None:
    """Lock the file for good. A reader that asks whether it is locked holds it for a moment."""
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_PAUSE_S)
    raise TelemetryError(problem)
