"""Renames a finished file or directory to its final name; a kill leaves the old or the new one.

``rename`` does not replace a directory that is not empty. If the system can exchange two names in
one step (Linux on a local disk), it does; otherwise the old directory is renamed first, and is
found under that name until the new one has the final name.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a file that is being written; never resumed from."""

ASIDE = ".replaced"
"""Suffix of an old checkpoint while a new one takes its name."""

REMOVED = ".removed"
"""Suffix of a checkpoint that is being deleted."""

_REQUEUED = "hpc_ckpt_"
"""Prefix of checkpoints that Lightning saves before SLURM requeues the job."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def partial_path(target: Path) -> Path:
    """Return the path under which ``target`` is written before it is renamed.

    Lightning resumes from the highest number after ``hpc_ckpt_`` anywhere in a name. A file that a
    kill left incomplete must not be counted, so it has no such name; and the next save, which then
    has the same number, replaces it.
    """
    name = target.name
    if name.startswith(_REQUEUED):
        name = name.replace("_", "-")
    return target.with_name(name + PARTIAL)


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
    """Delete a file, a link or a directory; no part of it remains under its name meanwhile."""
    if _is_directory(path):
        going = path if path.name.endswith((PARTIAL, REMOVED)) else _renamed(path)
        shutil.rmtree(going)
    else:
        path.unlink(missing_ok=True)


def _try_to_remove(path: Path) -> None:
    """Delete a replaced checkpoint; the next one of its name removes the remains."""
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
