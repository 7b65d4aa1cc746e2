"""Deletes checkpoints, runs and telemetry that killed runs have left: ``boltmesh prune``.

Nothing of a run that a process writes, and never its newest whole checkpoint.
"""

import io
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from boltmesh.errors import BoltMeshError, CheckpointError
from boltmesh.run_folder import CHECKPOINTS, CONFIG_FILE, newest_verified_checkpoint
from boltmesh.run_lock import RunLock, is_held
from boltmesh.run_pruning import (
    DEFAULT_PATTERN,
    empty_runs,
    killed_saves,
    names_in_states,
    remove_empty_run,
    size_of,
    stale_checkpoints,
)
from boltmesh.strategies.checkpoint.atomic_replace import remove
from boltmesh.strategies.checkpoint.host_memory import forgotten_folders
from boltmesh.strategies.checkpoint.manifest import REST, files_of, read_checked
from boltmesh.strategies.checkpoint.storage.folder import folder_at
from boltmesh.telemetry.pruning import ended_jobs, remove_job

_DAY_S = 24 * 3600


class Found(NamedTuple):
    """A path that can be deleted, or that stays for a reason."""

    path: Path
    what: str
    num_bytes: int
    remove: Callable[[], object] | None
    """Deletes it; None: it stays."""

    @override
    def __str__(self) -> str:
        return f"{self.path} ({self.what}, {describe_bytes(self.num_bytes)})"


def find(runs: Path, *, telemetry_days: float) -> Iterator[Found]:
    """Yield what can be deleted, and deletes nothing by itself.

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
    lock = RunLock.take(run, stale_s=0.1)  # no run begins in it meanwhile
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


def describe_bytes(count: int) -> str:
    """Return ``1.5 MB``."""
    if count < 1000:
        return f"{count} bytes"
    power = min(int(math.log10(count) / 3), 4)
    return f"{count / 1000**power:.1f} {' KMGT'[power]}B"
