"""Deletes the remains of killed runs: ``boltmesh prune``, and a run's own folder at its start.

Keeps runs that a process writes, and the newest whole checkpoint of every run.

``ModelCheckpoint`` deletes an old checkpoint after it has saved the new one. If it is killed in
between, or resumes from the old one, it never deletes that: its state no longer names it. So a
checkpoint is stale if ``ModelCheckpoint`` has named it, by its pattern, and its state does not
name it. Checkpoints with other names are the user's, and stay.
"""

import contextlib
import io
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from boltmesh.errors import BoltMeshError, CheckpointError, ConfigError
from boltmesh.run_folder import CHECKPOINTS, CONFIG_FILE, newest_verified_checkpoint
from boltmesh.run_lock import LOCK, RunLock, is_held
from boltmesh.strategies.checkpoint.atomic_replace import (
    PARTIAL,
    REMOVED,
    is_abandoned,
    remove,
)
from boltmesh.strategies.checkpoint.host_memory import ID_FILE, copies_of, forgotten_folders
from boltmesh.strategies.checkpoint.manifest import REST, files_of, read_checked
from boltmesh.strategies.checkpoint.storage.folder import folder_at
from boltmesh.telemetry.pruning import ended_jobs, remove_job
from boltmesh.tui import units

DEFAULT_PATTERN = "{epoch}-{step}"
"""Lightning's pattern, used if ``run.checkpoint.filename`` is null."""
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_VALUE = re.compile(r"[{}]|:.*")
"""The parts of ``{val_loss:.2f}`` around the name."""


def stale_checkpoints(
    folder: Path, kept: Iterable[str], pattern: str, start: Path | None = None
) -> list[Path]:
    """Return the checkpoints in a folder that ``ModelCheckpoint`` has saved and lost track of.

    Args:
        folder: ``checkpoints`` of a run.
        kept: File names that its state has.
        pattern: ``run.checkpoint.filename``, or ``DEFAULT_PATTERN``.
        start: The checkpoint from which the run resumes. Newer ones were skipped, and are kept:
            they could not be read, for example.
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
    """Return unfinished saves and removals of killed processes in a folder of checkpoints."""
    return sorted(
        path
        for path in (*folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{REMOVED}"))
        if path.name.endswith(REMOVED) or is_abandoned(path)
    )


def empty_runs(folder: Path, *, only_killed: bool) -> Iterator[Path]:
    """Yield the folders of runs of one name that have neither saved nor logged anything.

    Args:
        folder: Folder of all runs of a name.
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
    """Whether a run writes the file before its first step."""
    return file.name in {CONFIG_FILE, "hparams.yaml", ID_FILE} or file.name.startswith(
        (LOCK, f".{LOCK}")
    )


def remove_empty_run(run: Path) -> None:
    """Delete the folder of a run without a result."""
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


_DAY_S = 24 * 3600


class Found(NamedTuple):
    """A path that can be deleted, or that is kept for a reason."""

    path: Path
    what: str
    num_bytes: int
    remove: Callable[[], object] | None
    """Deletes it; None: it is kept."""

    @override
    def __str__(self) -> str:
        return f"{self.path} ({self.what}, {units.traffic(self.num_bytes)})"


def find(runs: Path, *, telemetry_days: float) -> Iterator[Found]:
    """Yield the paths that can be deleted; deletes nothing itself.

    Args:
        runs: A folder of runs, as ``run.dir``.
        telemetry_days: Telemetry of jobs that ended before so many days is not needed.
    """
    configs = sorted(runs.glob(f"*/*/{CONFIG_FILE}"))
    for name in sorted({each.parents[1] for each in configs}):
        for run in empty_runs(name, only_killed=False):
            act = partial(remove_empty_run, run)
            yield Found(run, "run without a step", size_of(run), act)
    for config in configs:
        if (config.parent / CHECKPOINTS).is_dir():
            yield from _find_in_run(config.parent)
    for job in ended_jobs():
        if time.time() - job.changed > telemetry_days * _DAY_S:
            yield Found(job.path, "telemetry", job.num_bytes, partial(remove_job, job))
    for copies, owner in forgotten_folders():
        if owner is None or not owner.is_dir() or not is_held(owner):
            yield Found(copies, "copies in memory", size_of(copies), partial(rmtree, copies))


def _find_in_run(run: Path) -> Iterator[Found]:
    if is_held(run):
        yield Found(run, "in use", 0, None)
        return
    try:
        lock = RunLock.take(run, stale_s=0.1)  # no run begins in it meanwhile
    except ConfigError as error:  # it is of another user, say
        yield Found(run, str(error), 0, None)
        return
    try:
        folder = run / CHECKPOINTS
        for path in killed_saves(folder):
            yield Found(path, "unfinished save", size_of(path), partial(remove, path))
        try:
            stale = _stale(run)
        except (BoltMeshError, OSError, OmegaConfBaseException) as error:
            yield Found(folder, f"its checkpoints stay: {error}", 0, None)
            return
        for path in stale:
            yield Found(path, "stale checkpoint", size_of(path), partial(remove, path))
    finally:
        lock.release()


def _stale(run: Path) -> list[Path]:
    newest = newest_verified_checkpoint(run.parent, "resume", run=run.name, renames=False)
    if newest is None:
        return []
    keep: Any = OmegaConf.select(OmegaConf.load(run / CONFIG_FILE), "run.checkpoint")
    kept = names_in_states(_callbacks(newest), newest.parent)
    if not kept or (keep and keep.get("save_top_k", 1) == -1):
        return []
    pattern = (keep and keep.get("filename")) or DEFAULT_PATTERN
    return stale_checkpoints(run / CHECKPOINTS, kept, pattern, newest)


def _callbacks(checkpoint: Path) -> dict[str, Any]:
    from boltmesh.strategies.checkpoint.safe_load import safe_load

    if checkpoint.is_file():
        content = safe_load(checkpoint, checkpoint, is_mapped=True)
    else:
        folder = folder_at(checkpoint)
        inside, _ = files_of(folder)
        content = safe_load(io.BytesIO(read_checked(folder, REST)), f"{inside}/{REST}")
    callbacks = content.get("callbacks") if isinstance(content, dict) else None
    if not isinstance(callbacks, dict):
        raise CheckpointError(f"{checkpoint} does not tell which checkpoints its run keeps.")
    return callbacks
