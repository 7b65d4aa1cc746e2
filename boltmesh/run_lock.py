"""A run's folder is written by one run at a time.

The lock is a file in the folder that says who holds it. ``link`` creates it, which succeeds in one
process only, on NFS as well; a file system without links gets it by an exclusive ``open``, which
NFS has since version 3. The holder touches the file every ten seconds.

A lock outlives its holder if that was killed. On the same machine the next run sees that the
process has ended, and takes the lock. Processes of other machines, and of other containers, cannot
be seen: the next run waits whether the file is touched, for two minutes, which is longer than NFS
keeps times of files in its cache. A SLURM job that was queued again takes the lock of its earlier
start at once.

A holder that was stopped for so long that another run has taken the lock finds that out before its
next save, which is refused.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from typing_extensions import override

from boltmesh.errors import CheckpointError, ConfigError
from boltmesh.process import ProcessId, write_stderr

LOCK = "run.lock"
BEAT_S = 10.0
"""Seconds between two touches of the file."""
STALE_S = 120.0
"""Seconds without a touch after which a holder on another machine counts as ended."""
_UNSEEN_S = 3600.0
_POLL_S = 1.0
_RENAME_S = 5.0
"""Seconds after which a process that was about to rename a file was killed."""
_WITHOUT_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class LockHolder(msgspec.Struct, frozen=True):
    """The content of the file."""

    id: str
    """Random, of this one lock."""
    host: str
    machine: str
    pid: int
    started: int
    since: str
    slurm_job: str = ""
    slurm_restarts: int = 0

    @classmethod
    def own(cls) -> "LockHolder":
        """Return this process as a holder from now on."""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            uuid4().hex,
            socket.gethostname(),
            *ProcessId.own(),
            datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
            os.environ.get("SLURM_JOB_ID", ""),
            int(restarts) if restarts.isdigit() else 0,
        )

    def has_ended(self, other: "LockHolder") -> bool | None:
        """Whether it has ended, as ``other`` sees it; None if that cannot be seen."""
        ended = ProcessId(self.machine, self.pid, self.started).has_ended()
        is_same_job = self.slurm_job and self.slurm_job == other.slurm_job
        if ended is None and is_same_job and self.slurm_restarts < other.slurm_restarts:
            return True
        return ended

    @override
    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """The lock of a folder, held by this process. See ``take``."""

    def __init__(self, path: Path, holder: LockHolder) -> None:
        self._path = path
        self._holder = holder
        self._is_over = threading.Event()
        threading.Thread(target=self._touch, name="boltmesh-run-lock", daemon=True).start()

    @classmethod
    def take(cls, folder: Path, *, stale_s: float = STALE_S) -> "RunLock":
        """Take the lock of a folder.

        Args:
            folder: An existing one.
            stale_s: Seconds to wait for a touch of a holder that cannot be seen.

        Raises:
            ConfigError: Another run holds it, or the folder cannot be written.
        """
        path, own = folder / LOCK, LockHolder.own()
        try:
            while not _create(path, own):
                seen = _read(path)
                if seen is None:
                    continue
                if seen[0] == own:
                    break
                ended = None if seen[0] is None else seen[0].has_ended(own)
                if ended is False or (ended is None and not _is_untouched(path, seen, stale_s)):
                    raise ConfigError(_refusal(path, seen[0], is_visible=ended is False))
                _take_over(path, seen[0], own)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be locked for this run: {error.strerror or error}. Set run.dir "
                f"to a folder of yours, for example run.dir=/tmp/runs."
            ) from error
        return cls(path, own)

    def check(self) -> None:
        """Check that this process still holds the lock.

        Raises:
            CheckpointError: Another run has taken it.
        """
        with contextlib.suppress(OSError):  # a save would fail by itself
            seen = _read(self._path)
            if seen is not None and seen[0] is not None and seen[0].id != self._holder.id:
                raise CheckpointError(
                    f"{self._path.parent} has been taken over by {seen[0]}, because this run did "
                    f"not write to it for {STALE_S:.0f} seconds. It saves no more checkpoints "
                    f"there; stop one of the two runs."
                )

    def release(self) -> None:
        """Release the lock if this process still holds it."""
        self._is_over.set()
        with contextlib.suppress(OSError):
            seen = _read(self._path)
            if seen is not None and seen[0] == self._holder:
                self._path.unlink()

    def _touch(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with contextlib.suppress(OSError):
                seen = _read(self._path)
                if seen is not None and seen[0] == self._holder:
                    os.utime(self._path)


def refuse_held(folder: Path) -> None:
    """Refuse a folder that a live process of this machine holds, before any rank is started.

    Raises:
        ConfigError: Naming the process.
    """
    with contextlib.suppress(OSError):  # ``take`` says what is wrong with the folder
        seen = _read(folder / LOCK)
        holder = None if seen is None else seen[0]
        if holder is not None and holder.has_ended(LockHolder.own()) is False:
            raise ConfigError(_refusal(folder / LOCK, holder, is_visible=True))


def is_held(folder: Path) -> bool:
    """Return whether a run may still write there, without waiting.

    Whether a process of another machine lives cannot be seen: it counts for an hour after its last
    sign.
    """
    try:
        seen = _read(folder / LOCK)
    except OSError:
        return True
    if seen is None:
        return False
    holder, touched_ns = seen
    ended = None if holder is None else holder.has_ended(LockHolder.own())
    return time.time() - touched_ns / 1e9 < _UNSEEN_S if ended is None else not ended


_Seen = tuple[LockHolder | None, int]
"""Its holder, None if the content cannot be read, and when it was touched."""


def _create(path: Path, own: LockHolder) -> bool:
    """Create the file with its content; False if there is one."""
    content = msgspec.json.encode(own)
    draft = path.with_name(f".{LOCK}-{own.id}")
    try:
        draft.write_bytes(content)
        os.link(draft, path)
    except FileExistsError:
        # NFS may have done it and lost the answer.
        return draft.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _read(path: Path) -> _Seen | None:
    try:
        with path.open("rb") as file:  # NFS reads attributes at each open
            touched = os.fstat(file.fileno()).st_mtime_ns
            content: Any = file.read(10_000)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=LockHolder), touched
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, touched


def _is_untouched(path: Path, seen: _Seen, stale_s: float) -> bool:
    """Wait for a touch of the file by its holder."""
    who = seen[0] or "a process that it does not name"
    write_stderr(
        f"boltmesh: {path.parent} is locked by {who}, which cannot be seen from here; waiting up "
        f"to {stale_s:.0f} s for a sign of it\n"
    )
    until = time.monotonic() + stale_s
    while time.monotonic() < until:
        time.sleep(min(_POLL_S, stale_s / 10))
        if _read(path) != seen:
            return False
    return True


def _take_over(path: Path, stale: LockHolder | None, own: LockHolder) -> None:
    """Try to replace a stale lock by an own one; ``path`` then says whether it succeeded.

    Among several processes the one that creates the successor of this lock may rename it.
    """
    successor = path.with_name(f".{LOCK}-after-{stale.id if stale else 'unknown'}")
    if _create(successor, own):
        seen = _read(path)
        if seen is not None and seen[0] == stale:
            with contextlib.suppress(FileNotFoundError):
                successor.rename(path)
        else:  # another one has renamed it meanwhile
            successor.unlink(missing_ok=True)
        return
    until = time.monotonic() + _RENAME_S
    while successor.exists() and time.monotonic() < until:
        time.sleep(0.02)
    if time.monotonic() >= until:
        successor.unlink(missing_ok=True)


def _refusal(path: Path, holder: LockHolder | None, *, is_visible: bool) -> str:
    who = "another run," if holder is None else f"{holder}, since {holder.since},"
    gone = "" if is_visible else f" If that run is gone, delete {path}."
    return (
        f"{path.parent} is being written by {who} and two runs in one folder would mix their "
        f"checkpoints. Wait for its end, or set run.name to another name.{gone}"
    )
