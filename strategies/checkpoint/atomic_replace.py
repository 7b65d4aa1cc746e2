"""Renames a complete file or directory to its final name; a kill leaves the old or the new one.

``rename`` does not replace a directory that is not empty. If the system can exchange two names in
one step (Linux on a local disk), it does; otherwise the old directory is renamed first, and is
found under that name until the new one has the final name.

Each save uses its own temporary name, so that two never write to one file.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import time
from pathlib import Path
from uuid import uuid4

from boltmesh.process import ProcessId

PARTIAL = ".partial"
"""Suffix of a file that is being written; never resumed from."""

ASIDE = ".replaced"
"""Suffix of an old checkpoint while a new one takes its name."""

REMOVED = ".removed"
"""Suffix of a checkpoint that is being deleted."""

REQUEUED = "hpc_ckpt_"
"""Prefix of checkpoints that Lightning saves before SLURM requeues the job."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_WRITER = re.compile(r"(?:\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8})?" + re.escape(PARTIAL) + "$")
"""Suffix of a checkpoint that is being written: its process and a random number of the save."""
_ABANDONED_S = 24 * 3600
"""Seconds without a write after which a save of another machine counts as killed."""


def partial_path(target: Path) -> Path:
    """Return a new path under which one save writes ``target`` before it is renamed."""
    own = ProcessId.own()
    return target.with_name(
        f"{_stem(target)}.{own.machine}-{own.pid}-{own.started}-{uuid4().hex[:8]}{PARTIAL}"
    )


def remove_killed_saves(target: Path) -> None:
    """Delete the temporary files of saves of ``target`` whose process was killed.

    The file or folder of a save that still runs is kept. Whether a process of another machine
    runs is unknown: its files are deleted a day after they were written.
    """
    stem = _stem(target)
    for each in target.parent.iterdir():
        writer = _WRITER.fullmatch(each.name.removeprefix(stem))
        if writer is None or not each.name.startswith(stem):
            continue
        if _is_abandoned(each, writer):
            with contextlib.suppress(OSError):  # another save deletes it as well
                remove(each)


def is_abandoned(path: Path) -> bool:
    """Whether a ``PARTIAL`` path belongs to a killed process; see ``remove_killed_saves``."""
    writer = _WRITER.search(path.name)
    return writer is not None and _is_abandoned(path, writer)


def _is_abandoned(path: Path, found: "re.Match[str]") -> bool:
    machine, pid, started = found.groups()
    if machine is None:  # as earlier versions named it
        return True
    has_ended = ProcessId(machine, int(pid), int(started)).has_ended()
    return bool(has_ended) or (has_ended is None and _unchanged_s(path) > _ABANDONED_S)


def _stem(target: Path) -> str:
    """Return the beginning of the temporary names of ``target``.

    Lightning resumes from the highest number after ``hpc_ckpt_`` anywhere in a name. A file that a
    kill left incomplete must not be counted, so it has no such name; and the next save, which then
    has the same number, removes it.
    """
    name = target.name
    return name.replace("_", "-") if name.startswith(REQUEUED) else name


def _unchanged_s(path: Path) -> float:
    """Return the seconds since a file, or a file in a folder, was written."""
    times = [0.0]
    for each in (path, *path.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(each.lstat().st_mtime)
    return time.time() - max(times)


def replace(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``, replacing it.

    Everything inside ``partial`` has to be flushed to its medium already.
    """
    if _is_there(target) and (partial.is_dir() or _is_directory(target)):
        if _exchange(partial, target):
            flush_folder(target.parent)
            _try_to_remove(partial)
        else:
            aside = target.with_name(target.name + ASIDE)
            remove(aside)
            target.rename(aside)
            partial.rename(target)
            flush_folder(target.parent)
            _try_to_remove(aside)
    else:
        partial.replace(target)
    flush_folder(target.parent)


def restore_aside(target: Path) -> None:
    """Restore the directory that a killed ``replace`` had renamed, unless its name is taken."""
    aside = target.with_name(target.name + ASIDE)
    if not _is_there(target) and _is_there(aside):
        # Another process may do the same concurrently.
        with contextlib.suppress(FileNotFoundError):
            aside.rename(target)


def remove(path: Path) -> None:
    """Delete a file, a link or a directory; a directory is renamed before it is deleted."""
    if _is_directory(path):
        going = path if path.name.endswith((PARTIAL, REMOVED)) else _renamed(path)
        shutil.rmtree(going)
    else:
        path.unlink(missing_ok=True)


def _try_to_remove(path: Path) -> None:
    """Delete a replaced checkpoint; after an error, the next save under its name deletes it."""
    with contextlib.suppress(OSError):
        remove(path)


def flush_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _renamed(path: Path) -> Path:
    going = path.with_name(path.name + REMOVED)
    if _is_there(going):
        remove(going)
    return path.rename(going)


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths in one step. False if the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
        return False
    raise OSError(number, os.strerror(number), str(other))
