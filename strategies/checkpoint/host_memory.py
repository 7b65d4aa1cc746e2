"""Where copies of a run's state lie in the memory of this host, and which of them are complete.

::

    /dev/shm/boltmesh-UID/         or BOLTMESH_MEMORY_DIR/boltmesh-UID/
        ID-LAYOUT/                 one run in one layout; ID is in the run's folder
            run                    path of that folder
            part-0/step=12.ckpt    state of the ranks of host 0 after step 12; complete or absent
            part-1/step=12.ckpt    the same of host 1, in another host's memory as well

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
"""In the folder of a run whose state may be in memory."""
RUN_FILE = "run"
FORGOTTEN_S = 3600.0
"""Seconds after the last change after which copies count as left by a run that has ended."""
_LOOKS = 3
"""Times that the files of a run are listed, if a copy is renamed or deleted meanwhile."""
_STEP = re.compile(r"step=(\d+)\.ckpt")
_PART = re.compile(r"part-(\d+)")


def memory_dir() -> Path:
    """The file system that is in memory."""
    return Path(os.environ.get(DIR_VARIABLE) or DEFAULT_DIR)


def user_folder() -> Path:
    """The folder of this user in it."""
    return memory_dir() / f"boltmesh-{os.geteuid()}"


def make_user_folder() -> Path:
    """Create the folder of this user, writable by this user alone.

    Raises:
        ConfigError: There is no such file system, or another user has taken the name.
    """
    folder = user_folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"checkpoint_in_memory_every keeps files in {memory_dir()}, which cannot be written "
            f"({error.strerror}). Set {DIR_VARIABLE} to a folder of a tmpfs."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder} is not a folder that this user alone can write. Remove it, or set "
            f"{DIR_VARIABLE} to another folder of a tmpfs."
        )
    return folder


def run_id(run: Path) -> str | None:
    """The id under which the copies of a run are kept; None if it keeps none."""
    try:
        text = (run / ID_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[0-9a-f]{32}", text) else None


def make_run_id(run: Path) -> str:
    """Return the id of a run, a new one if it has none."""
    found = run_id(run)
    if found is None:
        found = token_hex(16)
        (run / ID_FILE).write_text(found, encoding="ascii")
    return found


def steps_in(folder: Path) -> dict[int, dict[int, Path]]:
    """The complete copies in a run's folder in memory: by step, by part; not read for damage."""
    found: dict[int, dict[int, Path]] = {}
    for path in folder.glob("part-*/step=*.ckpt"):
        part, step = _PART.fullmatch(path.parent.name), _STEP.fullmatch(path.name)
        if part and step and (path.is_file() or find_fault(path) is None):
            found.setdefault(int(step[1]), {})[int(part[1])] = path
    return found


def newest_step_in_memory(run: Path) -> tuple[Path, int] | None:
    """The newest complete copy of a run whose ranks are all on this host, and its step."""
    found = [
        (step, parts[0])
        for folder in copies_of(run)
        for step, parts in steps_in(folder).items()
        if parts.keys() == {0}
    ]
    if not found:
        return None
    step, path = max(found)
    return path, step


def copies_of(run: Path) -> Iterator[Path]:
    """Yield the folders in memory of a run, one of each layout."""
    name = run_id(run)
    if name is not None:
        yield from user_folder().glob(f"{name}-*")


def forget_run(run: Path) -> None:
    """Free the memory of a run that will not go on from it."""
    for folder in copies_of(run):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        (run / ID_FILE).unlink(missing_ok=True)


def forgotten_folders() -> Iterator[tuple[Path, Path | None]]:
    """Yield what ended runs of this user may have left, each with the run's folder."""
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
    """Bytes that the files of a run take, those of copies that are being written as well."""
    found = 0
    for _ in range(_LOOKS):
        gone: list[OSError] = []
        files = [
            Path(root, name)
            for root, _, names in os.walk(folder, onerror=gone.append)
            for name in names
        ]
        sizes = [_allocated_bytes(file) for file in files]
        found = sum(size for size in sizes if size is not None)
        if not gone and None not in sizes:
            break
    return found


def _allocated_bytes(path: Path) -> int | None:
    """Bytes that a file takes, or None if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_blocks * 512 * stat.S_ISREG(status.st_mode)


def free_bytes() -> int:
    """Bytes that can still be written there."""
    found = os.statvfs(memory_dir())
    return found.f_bavail * found.f_frsize


def refuse_small(needed: int) -> None:
    """Refuse to begin with less memory than the copies need.

    Raises:
        ConfigError: Naming both.
    """
    free = free_bytes()
    if free < needed:
        raise ConfigError(
            f"checkpoint_in_memory_every needs {needed / 1e9:.3f} GB on this host, and "
            f"{memory_dir()} has {free / 1e9:.3f} GB left. Make it larger (mount -o "
            f"remount,size=), set {DIR_VARIABLE} to another tmpfs, or leave "
            f"checkpoint_in_memory_every out."
        )
