"""Deletes the telemetry of jobs that have ended, so that its folder does not grow without bound."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import END_FILE, JOB_FILE, make_private_folder, rank_file, run_dir
from boltmesh.telemetry.reader.rank_reader import is_written

MOST_BYTES = 1 << 30
"""Bound for all jobs that have ended; one rank's telemetry takes 2.6 MiB."""
STARTING_S = 600.0
"""Seconds after its last change in which a job may be about to start again."""


class EndedJob(NamedTuple):
    """The telemetry of a job that no process writes."""

    path: Path
    num_bytes: int
    changed: float
    """When something in it was written, in seconds since 1970."""


def ended_jobs(folder: Path | None = None) -> list[EndedJob]:
    """Return the jobs of a folder that have ended, the newest first.

    Args:
        folder: Where jobs are; by default that of this user.

    Raises:
        TelemetryError: The folder belongs to another user.
    """
    folder = folder or run_dir()
    if not os.path.lexists(folder):
        return []
    make_private_folder(folder)
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            job = _ended_job(path)
            if job is not None and time.time() - job.changed > STARTING_S:
                found.append(job)
    return sorted(found, key=lambda job: job.changed, reverse=True)


def _ended_job(path: Path) -> EndedJob | None:
    """Return the job of a folder; None if the folder is not a job's, or its ranks live."""
    if path.is_symlink() or not path.is_dir():
        return None
    if not any((path / name).exists() for name in (JOB_FILE, END_FILE, rank_file(path, 0).name)):
        return None
    files = [each.lstat() for each in path.iterdir()]
    if any(is_written(each) for each in path.glob("rank-*.bin")):
        return None
    # A mapped file has the time of its last page that reached the disk.
    changed = max([path.stat().st_mtime, *(each.st_mtime for each in files)])
    return EndedJob(path, sum(each.st_blocks * 512 for each in files), changed)


def remove_old_jobs(folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Delete the oldest of the jobs that have ended, until the others take less than this.

    Never raises: a job that starts calls it.
    """
    with contextlib.suppress(OSError, TelemetryError):
        for job in beyond(ended_jobs(folder), most_bytes):
            remove_job(job)


def beyond(jobs: list[EndedJob], most_bytes: int) -> Iterator[EndedJob]:
    """Yield the jobs that do not fit into ``most_bytes`` after the newer ones."""
    total = 0
    for job in jobs:
        total += job.num_bytes
        if total > most_bytes:
            yield job


def remove_job(job: EndedJob) -> None:
    """Delete its folder; of what another process deletes at the same time, the rest."""
    shutil.rmtree(job.path, ignore_errors=True)
