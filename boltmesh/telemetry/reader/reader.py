"""Finds the jobs of this user on this host and reads them, while they run and afterwards.

No torch and no Lightning: the dashboard is on the screen before either would be imported. A job
is only read; nothing that happens here can be noticed by it.
"""

import contextlib
import difflib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import JOB_FILE
from boltmesh.telemetry.job import run_dir as default_run_dir
from boltmesh.telemetry.reader.job_reader import JobReader as Job
from boltmesh.telemetry.reader.job_reader import check_folder
from boltmesh.telemetry.reader.job_view import clean_mesh, num_ranks, started_at
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import JobState


class JobSummary(msgspec.Struct, frozen=True):
    """One line of ``boltmesh jobs``."""

    id: str
    name: str
    state: JobState
    user: str
    strategy: str
    mesh: dict[str, int]
    world_size: int
    global_step: int
    epoch: int
    started: float
    updated: float
    path: str
    recipe: str | None = None
    """The config that ``boltmesh fit`` was given; None for a script."""
    stalled_s: float | None = None
    """Seconds without progress; None if the job is not stalled."""
    stopped: bool = False
    """A signal or a time limit ended it before its last step."""
    host: str = ""
    """Host of its first rank."""
    max_steps: int | None = None
    samples_per_second: float | None = None
    """Recent rate of the whole job; None if it does not run or is stalled."""


def list_jobs(run_dir: Path | None = None) -> list[JobSummary]:
    """Return the jobs of this user on this host, the newest first.

    Folders that are not those of a job, or not this user's, are passed over.

    Raises:
        TelemetryError: The run directory belongs to another user.
    """
    folder = run_dir or default_run_dir()
    if not os.path.lexists(folder):
        return []
    check_folder(folder)
    summaries = []
    for path in folder.iterdir():
        if path.name.startswith(".") or not os.path.lexists(path / JOB_FILE):
            continue
        with contextlib.suppress(TelemetryError, OSError), Job(path) as job:
            summaries.append(_summarise(job))
    return sorted(summaries, key=lambda job: job.started, reverse=True)


def open_job(which: str | Path | None = None, run_dir: Path | None = None) -> Job:
    """Open a job.

    Args:
        which: Its id, its name, a unique prefix of either, or the path of its folder. If
            several have this name, the newest that runs, else the newest. None: that of all jobs.
        run_dir: Where jobs are looked for.

    Raises:
        TelemetryError: There is no such job; the text names the nearest.
    """
    folder = run_dir or default_run_dir()
    if which is not None and (isinstance(which, Path) or os.sep in which):
        path = Path(which)
        return Job(path.parent if path.name == JOB_FILE else path)
    jobs = list_jobs(folder)
    if not jobs:
        raise TelemetryError(
            f"there is no job in {folder}. Start one with a boltmesh strategy, or set "
            f"BOLTMESH_RUN_DIR to where its telemetry is."
        )
    if which is None:
        return Job(Path(_newest(jobs).path))
    for named in ([job for job in jobs if job.id == which], [j for j in jobs if j.name == which]):
        if named:
            return Job(Path(_newest(named).path))
    found = [job for job in jobs if job.id.startswith(which) or job.name.startswith(which)]
    if len(found) == 1:
        return Job(Path(found[0].path))
    if found:
        listed = ", ".join(f"{job.id} ({job.name})" for job in found[:5])
        raise TelemetryError(f"'{which}' begins the id or the name of {len(found)} jobs: {listed}.")
    words = [word for job in jobs for word in (job.name, job.id)]
    near = difflib.get_close_matches(which, words, n=1, cutoff=0.6)
    advice = f"Did you mean '{near[0]}'?" if near else "'boltmesh jobs' lists them."
    raise TelemetryError(f"there is no job '{which}' in {folder}. {advice}")


def _newest(jobs: Sequence[JobSummary]) -> JobSummary:
    return next((job for job in jobs if job.state == "running"), jobs[0])


def _summarise(job: Job) -> JobSummary:
    info = job.info
    found = job.peek()
    statuses = found.statuses
    return JobSummary(
        id=clean(info.id, 64),
        name=clean(info.name, 100),
        state=found.state,
        user=clean(info.user, 100),
        strategy=clean(info.strategy, 100),
        mesh=clean_mesh(info),
        world_size=num_ranks(info),
        global_step=max((status.global_step for status in statuses), default=0),
        epoch=max((status.epoch for status in statuses), default=0),
        started=started_at(info),
        updated=max((status.wall_s for status in statuses), default=started_at(info)),
        path=str(job.path),
        recipe=None if info.recipe is None else clean(info.recipe, 100),
        stalled_s=found.stalled_s,
        stopped=found.stop_reason is not None,
        host=clean(info.host, 100),
        max_steps=info.max_steps,
        samples_per_second=(
            job.throughput() if found.state == "running" and found.stalled_s is None else None
        ),
    )
