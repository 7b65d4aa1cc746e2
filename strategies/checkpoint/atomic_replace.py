"""Putting a finished file or directory under its name, so that a kill leaves the old or the new.

``rename`` does not replace a directory that holds something. Where the system can exchange two
names in one step (Linux on a local disk) that is done; elsewhere the old one steps aside first,
and whoever looks for it finds it there until the new one has its name.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

PARTIAL = ".partial"
"""Ends the name of what is being written; nobody resumes from one."""

ASIDE = ".replaced"
"""Ends the name of an old checkpoint while a new one takes its name."""

REMOVED = ".removed"
"""Ends the name of a checkpoint that is being deleted."""

_REQUEUED = "hpc_ckpt_"
"""Begins the names of what Lightning saves when SLURM is about to take the job away."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def partial_path(target: Path) -> Path:
    """Return where something is written before it has its name.

    Lightning goes on from the highest number behind ``hpc_ckpt_`` anywhere in a name. What a kill
    has left half-written must not be counted, so it has no such name; and the next save, which then
    has the same number, takes its place.
    """
    name = target.name
    if name.startswith(_REQUEUED):
        name = name.replace("_", "-")
    return target.with_name(name + PARTIAL)


def replace(partial: Path, target: Path) -> None:
    """Give ``partial`` the name ``target``; what had that name is gone afterwards.

    Everything inside ``partial`` has to be on its medium already.
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
    """Put back what a killed ``replace`` had set aside, when nothing has taken its name."""
    aside = target.with_name(target.name + ASIDE)
    if not _is_there(target) and _is_there(aside):
        # Another process may do the same at the same moment.
        with contextlib.suppress(FileNotFoundError):
            aside.rename(target)


def remove(path: Path) -> None:
    """Delete a file, a link or a directory, of which no half is ever seen under its name."""
    if _is_directory(path):
        going = path if path.name.endswith((PARTIAL, REMOVED)) else _renamed(path)
        shutil.rmtree(going)
    else:
        path.unlink(missing_ok=True)


def _try_to_remove(path: Path) -> None:
    """Delete what has been replaced; the next one of its name removes what is left here."""
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
    """Let two paths swap their names in one step. False where the system cannot."""
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
