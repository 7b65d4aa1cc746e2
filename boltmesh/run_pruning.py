"""Finds and deletes files in the folder of a run whose process was killed before it deleted them.

``ModelCheckpoint`` deletes an old checkpoint after it has saved the new one. If it is killed in
between, or resumes from the old one, it never deletes that: its state no longer names it. So a
checkpoint is stale that ``ModelCheckpoint`` has named, by its pattern, and that its state does not
name. Checkpoints with other names are the user's, and stay.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from boltmesh.run_folder import CHECKPOINTS, CONFIG_FILE
from boltmesh.run_lock import LOCK, is_held
from boltmesh.strategies.checkpoint.atomic_replace import (
    PARTIAL,
    REMOVED,
    is_abandoned,
    remove,
)
from boltmesh.strategies.checkpoint.host_memory import ID_FILE, copies_of

DEFAULT_PATTERN = "{epoch}-{step}"
"""Lightning's, where ``run.checkpoint.filename`` is null."""
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_VALUE = re.compile(r"[{}]|:.*")
"""All but the name in ``{val_loss:.2f}``."""


def stale_checkpoints(
    folder: Path, kept: Iterable[str], pattern: str, start: Path | None = None
) -> list[Path]:
    """Return the checkpoints in a folder that ``ModelCheckpoint`` has saved and lost track of.

    Args:
        folder: ``checkpoints`` of a run.
        kept: File names that its state has.
        pattern: ``run.checkpoint.filename``, or ``DEFAULT_PATTERN``.
        start: The checkpoint from which the run goes on. Newer ones were passed over, and stay:
            they could not be read, say.
    """
    parts = re.split(r"(\{.*?\})", pattern)
    # Lightning puts the name before each value: {step} becomes step=10.
    form = "".join(
        re.escape(_VALUE.sub("", each)) + "=.*?" if each.startswith("{") else re.escape(each)
        for each in parts
    )
    named = re.compile(rf"({form}|last|interrupted-step=\d+)(-v\d+)?\.ckpt")
    names, newest_ns = set(kept), math.inf
    if start is not None:
        names.add(start.name)
        newest_ns = start.stat().st_mtime_ns
    return sorted(
        path
        for path in folder.glob("*.ckpt")
        if path.name not in names
        and named.fullmatch(path.name)
        and not path.is_symlink()
        and path.stat().st_mtime_ns <= newest_ns
    )


def names_in_states(callbacks: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the file names that the ``ModelCheckpoint`` of a folder knows.

    Args:
        callbacks: The states of all callbacks, as a checkpoint has them.
        folder: The folder; states of another one, or of one that was moved, are passed over.
    """
    names: set[str] = set()
    for key, state in callbacks.items():
        is_there = key.startswith("ModelCheckpoint") and isinstance(state, Mapping)
        if not is_there or Path(str(state.get("dirpath"))).resolve() != folder.resolve():
            continue
        single = (state.get(each) for each in _PATHS)
        paths = [*single, *(state.get("best_k_models") or {})]
        names |= {Path(str(each)).name for each in paths if each}
    return names


def killed_saves(folder: Path) -> list[Path]:
    """Return what killed processes have left in a folder of checkpoints that they were writing."""
    return sorted(
        path
        for path in (*folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{REMOVED}"))
        if path.name.endswith(REMOVED) or is_abandoned(path)
    )


def empty_runs(folder: Path, *, only_killed: bool) -> Iterator[Path]:
    """Yield the folders of runs of one name that have neither saved nor logged anything.

    Args:
        folder: That of all runs of a name.
        only_killed: Leave out runs that have ended by themselves, which have returned their lock.
    """
    for run in sorted(folder.glob("*")):
        if not run.name.isdigit() or not (run / CONFIG_FILE).is_file() or is_held(run):
            continue
        if only_killed and not (run / LOCK).exists():
            continue
        if any(copies_of(run)):
            continue
        files = [Path(where, name) for where, _, names in os.walk(run) for name in names]
        if all(_is_of_start(each.relative_to(run)) for each in files):
            yield run


def _is_of_start(file: Path) -> bool:
    """Whether a run writes it before its first step."""
    return file.name in {CONFIG_FILE, "hparams.yaml", ID_FILE} or file.name.startswith(
        (LOCK, f".{LOCK}")
    )


def remove_empty_run(run: Path) -> None:
    """Delete the folder of a run that has come to nothing."""
    with contextlib.suppress(OSError):  # another run begins in it
        for where, folders, files in os.walk(run, topdown=False):
            here = Path(where)
            for name in files:
                (here / name).unlink()
            for name in folders:
                (here / name).rmdir()
        run.rmdir()


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for where, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(where, name).lstat().st_size
    return total


def remove_left_by_kills(
    run: Path, names: Iterable[str], pattern: str, start: Path | None = None
) -> None:
    """Delete what earlier starts of this run have left, and runs of its name without a step.

    For the process that holds the run's lock, after it has loaded a checkpoint.

    Args:
        run: The run's folder.
        names: See ``stale_checkpoints``; empty if all are kept.
        pattern: See ``stale_checkpoints``.
        start: See ``stale_checkpoints``.
    """
    folder, kept = run / CHECKPOINTS, set(names)
    stale = stale_checkpoints(folder, kept, pattern, start) if kept else []
    for path in (*killed_saves(folder), *stale):
        with contextlib.suppress(OSError):
            remove(path)
    for other in empty_runs(run.parent, only_killed=True):
        if other != run:
            remove_empty_run(other)
