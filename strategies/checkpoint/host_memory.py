"""Paths of the copies of a run's state in this host's memory, and which of them are complete.

::

    /dev/shm/boltmesh-UID/         or BOLTMESH_MEMORY_DIR/boltmesh-UID/
        ID-LAYOUT/                 one run in one layout; ID is in the run's folder
            run                    path of that folder
            part-0/step=12.ckpt    state of the ranks of host 0 after step 12; complete or absent
            part-1/step=12.ckpt    that of host 1, which another host's memory also holds

The files are in memory and outlive the ranks. Imports no torch: a launcher deletes them.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from boltmesh.errors import ConfigError
from boltmesh.strategies.checkpoint.manifest import find_fault

DIR_VARIABLE = "BOLTMESH_MEMORY_DIR"
DEFAULT_DIR = "/dev/shm"  # noqa: S108 - the folder below it is checked to be this user's
ID_FILE = "memory.id"
"""Name of a file in the folder of a run; it has the id of the run's copies in memory."""
RUN_FILE = "run"
FORGOTTEN_S = 3600.0
"""Seconds without a change after which copies count as left over from an ended run."""
_LOOKS = 3
"""How often the files of a run are listed, if a copy is renamed or deleted meanwhile."""
_STEP = re.compile(r"step=(\d+)\.ckpt")
_PART = re.compile(r"part-(\d+)")


def memory_dir() -> Path:
    """Return the folder of a file system in memory."""
    return Path(os.environ.get(DIR_VARIABLE) or DEFAULT_DIR)


def user_folder() -> Path:
    """Return this user's folder in memory."""
    return memory_dir() / f"boltmesh-{os.geteuid()}"


def make_user_folder() -> Path:
    """Create this user's folder, which only this user can write.

    Raises:
        ConfigError: If there is no such file system, or another user has taken the name.
    """
    folder = user_folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"checkpoint_in_memory_every keeps files in {memory_dir()}, which cannot be written "
            f"({error.strerror}). Set {DIR_VARIABLE} to a folder of a tmpfs."
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder} is not a folder that this user alone can write. Remove it, or set "
            f"{DIR_VARIABLE} to another folder of a tmpfs."
        )
    return folder


def run_id(run: Path) -> str | None:
    """Return the id under which the copies of a run are kept; None if it has no copies."""
    try:
        text = (run / ID_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[0-9a-f]{32}", text) else None


def make_run_id(run: Path) -> str:
    """Return the id of a run, a new one if it has none."""
    known = run_id(run)
    if known is None:
        known = token_hex(16)
        (run / ID_FILE).write_text(known, encoding="ascii")
    return known


def steps_in(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the complete copies in a run's folder, by step and part, without checking values."""
    by_step: dict[int, dict[int, Path]] = {}
    for path in folder.glob("part-*/step=*.ckpt"):
        part, step = _PART.fullmatch(path.parent.name), _STEP.fullmatch(path.name)
        if part and step and (path.is_file() or find_fault(path) is None):
            by_step.setdefault(int(step[1]), {})[int(part[1])] = path
    return by_step


def newest_step_in_memory(run: Path) -> tuple[Path, int] | None:
    """Return the newest complete copy of a run whose ranks are all on this host, and its step."""
    of_one_host = [
        (step, parts[0])
        for folder in copies_of(run)
        for step, parts in steps_in(folder).items()
        if parts.keys() == {0}
    ]
    if not of_one_host:
        return None
    step, path = max(of_one_host)
    return path, step


def copies_of(run: Path) -> Iterator[Path]:
    """Yield the folders of a run in memory, one for each layout."""
    name = run_id(run)
    if name is not None:
        yield from user_folder().glob(f"{name}-*")


def forget_run(run: Path) -> None:
    """Delete the copies of a run that will not resume from them."""
    for folder in copies_of(run):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        (run / ID_FILE).unlink(missing_ok=True)


def forgotten_folders() -> Iterator[tuple[Path, Path | None]]:
    """Yield the folders in memory of this user's ended runs, each with the run's own folder."""
    for folder in sorted(user_folder().glob("*-*")):
        with contextlib.suppress(OSError):
            newest = max(each.lstat().st_mtime for each in (folder, *folder.glob("part-*")))
            if time.time() - newest < FORGOTTEN_S:
                continue
            try:
                run = Path((folder / RUN_FILE).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                run = None
            yield folder, run


def stored_bytes(folder: Path) -> int:
    """Return the bytes of all files of a run, including copies that are being written."""
    num_bytes = 0
    for _ in range(_LOOKS):
        gone: list[OSError] = []
        files = [
            Path(root, name)
            for root, _, names in os.walk(folder, onerror=gone.append)
            for name in names
        ]
        sizes = [_allocated_bytes(file) for file in files]
        num_bytes = sum(size for size in sizes if size is not None)
        if not gone and None not in sizes:
            break
    return num_bytes


def _allocated_bytes(path: Path) -> int | None:
    """Return the bytes that a file occupies; None if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_blocks * 512 * stat.S_ISREG(status.st_mode)


def free_bytes() -> int:
    """Return the bytes that can still be written to the file system in memory."""
    status = os.statvfs(memory_dir())
    return status.f_bavail * status.f_frsize


def refuse_small(needed: int) -> None:
    """Refuse a run if there is less free memory than its copies need.

    Raises:
        ConfigError: Naming both sizes.
    """
    free = free_bytes()
    if free < needed:
        raise ConfigError(
            f"checkpoint_in_memory_every needs {needed / 1e9:.3f} GB on this host, and "
            f"{memory_dir()} has {free / 1e9:.3f} GB left. Make it larger (mount -o "
            f"remount,size=), set {DIR_VARIABLE} to another tmpfs, or leave "
            f"checkpoint_in_memory_every out."
        )
