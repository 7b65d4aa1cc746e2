"""Finds the jobs of this user on this host and reads them, while they run and afterwards.

No torch and no Lightning: the dashboard is on the screen before either would be imported. A job
is only read; nothing that happens here can be noticed by it.
"""

import contextlib
import difflib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.cause import Failure, describe_death, job_state
from boltmesh.telemetry.cleaning import clean, clean_mapping
from boltmesh.telemetry.job import JOB_FILE, JobInfo, RankEnd, rank_file, read_end, read_job
from boltmesh.telemetry.job import run_dir as default_run_dir
from boltmesh.telemetry.rank_reader import RankReader, Status
from boltmesh.telemetry.rank_view import RankView
from boltmesh.telemetry.snapshot import (
    SCHEMA_VERSION,
    Event,
    JobSnapshot,
    JobState,
    RankSnapshot,
)
from boltmesh.telemetry.traffic import ExpectedTraffic

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_EVENTS = 256
MAX_RANKS = 65_536
STARTING_S = 120.0
"""How long the ranks of a job may take until one of them has opened its file."""


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


class Job:
    """One job's folder, open for reading.

    Args:
        path: The job's folder.

    Raises:
        TelemetryError: It is not the folder of a job of this user.
    """

    def __init__(self, path: Path) -> None:
        _check_folder(path)
        self.path = path
        self.info = read_job(path)
        self._ranks: dict[int, RankView] = {}

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the job's files; the job does not notice."""
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    def snapshot(self) -> JobSnapshot:
        """Return what the job's files say now.

        A rank whose file is absent or cannot be trusted is shown as missing, with the reason.

        Raises:
            TelemetryError: The job's own description can no longer be read.
        """
        with contextlib.suppress(TelemetryError):  # a cleaner took it: what was read stays true
            self.info = read_job(self.path)
        info = self.info
        end = read_end(self.path)
        if end is not None and end.time < info.started:
            end = None  # of an earlier run under the same id
        views = [self._view(rank) for rank in range(min(max(info.world_size, 0), MAX_RANKS))]
        ranks = tuple(_with_death(view.look(), end) for view in views)
        failures = [
            Failure(rank, view.error_time, rank.error or "")
            for rank, view in zip(ranks, views, strict=True)
            if rank.state == "failed"
        ]
        state, cause = job_state(ranks, failures, end)
        present = [rank for rank in ranks if rank.state != "missing"]
        if not present and state == "running" and time.time() - info.started > STARTING_S:
            state, cause = "crashed", "no rank of it has left telemetry that can be read."
        first = next((view for view in views if view.is_present), None)
        return JobSnapshot(
            schema=SCHEMA_VERSION,
            id=clean(info.id, 64),
            name=clean(info.name, 100),
            state=state,
            user=clean(info.user, 100),
            command=tuple(clean(word) for word in info.command[:200]),
            folder=clean(info.folder),
            started=info.started,
            updated=max((rank.last_seen for rank in present), default=info.started),
            strategy=clean(info.strategy, 100),
            mesh=_clean_mesh(info),
            world_size=info.world_size,
            versions=clean_mapping(info.versions),
            hyperparameters=clean_mapping(info.hyperparameters),
            max_steps=info.max_steps,
            epoch=max((rank.epoch for rank in present), default=0),
            global_step=max((rank.global_step for rank in present), default=0),
            metrics=first.metrics() if first else {},
            history=first.history() if first else (),
            samples_per_second=_whole(present, info, "samples_per_second"),
            tokens_per_second=_whole(present, info, "tokens_per_second"),
            ranks=ranks,
            expected=_expected(first),
            communication_note=next(
                (view.communication_note for view in views if view.communication_note), None
            ),
            events=_newest_events(views),
            cause=clean(cause, 600) if cause else None,
            checkpoint=_newest_checkpoint(views),
        )

    def peek(self) -> tuple[list[Status], JobState]:
        """Return where the ranks are and the job's state, without reading what they recorded.

        Only a job that did not end well is read whole, for its state depends on who went first.
        """
        statuses = []
        is_running = False
        for rank in range(min(max(self.info.world_size, 0), MAX_RANKS)):
            with contextlib.suppress(TelemetryError, OSError):
                reader = self._view(rank).reader
                reader.peek()
                if reader.status is not None:
                    statuses.append(reader.status)
                    if reader.status.state in {"starting", "running"}:
                        is_running = True
                        if not reader.is_alive:
                            return statuses, self.snapshot().state
        if any(status.state == "failed" for status in statuses) or not statuses:
            return statuses, self.snapshot().state
        return statuses, "running" if is_running else "finished"

    def _view(self, rank: int) -> RankView:
        if rank not in self._ranks:
            self._ranks[rank] = RankView(rank, RankReader(rank_file(self.path, rank)))
        return self._ranks[rank]


def list_jobs(run_dir: Path | None = None) -> list[JobSummary]:
    """Return the jobs of this user on this host, the newest first.

    Folders that are not those of a job, or not this user's, are passed over.

    Raises:
        TelemetryError: The run directory belongs to somebody else.
    """
    folder = run_dir or default_run_dir()
    if not os.path.lexists(folder):
        return []
    _check_folder(folder)
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
        which: Its id, the beginning of its id when no other begins so, or the path of its folder.
            None: the newest that runs, else the newest.
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
        newest = next((job for job in jobs if job.state == "running"), jobs[0])
        return Job(Path(newest.path))
    exact = [job for job in jobs if job.id == which]
    found = exact or [job for job in jobs if job.id.startswith(which)]
    if len(found) == 1:
        return Job(Path(found[0].path))
    if found:
        ids = ", ".join(job.id for job in found[:5])
        raise TelemetryError(f"'{which}' begins the ids of {len(found)} jobs: {ids}.")
    near = difflib.get_close_matches(which, [job.id for job in jobs], n=1, cutoff=0.0)
    raise TelemetryError(
        f"there is no job '{which}' in {folder}. Did you mean '{(near or [jobs[0].id])[0]}'?"
    )


def _check_folder(path: Path) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise TelemetryError(f"{path} cannot be read: {error.strerror}.") from error
    if stat.S_ISLNK(found.st_mode):
        raise TelemetryError(f"{path} is a link. Name the folder that it leads to.")
    if not stat.S_ISDIR(found.st_mode):
        raise TelemetryError(f"{path} is not the folder of a job.")
    if found.st_uid != os.geteuid():
        raise TelemetryError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}. "
            f"Read it as its owner."
        )


def _summarise(job: Job) -> JobSummary:
    info = job.info
    statuses, state = job.peek()
    return JobSummary(
        id=clean(info.id, 64),
        name=clean(info.name, 100),
        state=state,
        user=clean(info.user, 100),
        strategy=clean(info.strategy, 100),
        mesh=_clean_mesh(info),
        world_size=info.world_size,
        global_step=max((status.global_step for status in statuses), default=0),
        epoch=max((status.epoch for status in statuses), default=0),
        started=info.started,
        updated=max((status.wall_s for status in statuses), default=info.started),
        path=str(job.path),
    )


def _with_death(rank: RankSnapshot, end: RankEnd | None) -> RankSnapshot:
    if end is None or end.rank != rank.rank or rank.state != "dead":
        return rank
    return msgspec.structs.replace(rank, error=clean(describe_death(end)))


def _clean_mesh(info: JobInfo) -> dict[str, int]:
    return {clean(axis, 40): size for axis, size in list(info.mesh.items())[:8]}


def _whole(ranks: Sequence[RankSnapshot], info: JobInfo, name: str) -> float | None:
    """Sum a rate over the data axis, counting ranks that share their data once.

    Ranks of the data axis that another host holds are taken to be like those seen here: they
    step together, with batches of the same size.
    """
    shares: dict[int, list[float]] = {}
    for rank in ranks:
        value: float | None = getattr(rank, name)
        if value is None:
            return None
        shares.setdefault(rank.coordinates.get("data", 0), []).append(value)
    if not shares:
        return None
    mean = sum(sum(values) / len(values) for values in shares.values()) / len(shares)
    return mean * max(info.mesh.get("data", 1), len(shares))


def _expected(view: RankView | None) -> tuple[ExpectedTraffic, ...]:
    if view is None:
        return ()
    try:
        found = msgspec.convert(view.expected, tuple[ExpectedTraffic, ...])
    except msgspec.ValidationError:
        return ()
    return tuple(
        msgspec.structs.replace(
            each,
            axis=clean(each.axis, 40),
            operator=clean(each.operator, 60),
            why=clean(each.why, 200),
        )
        for each in found[:200]
    )


def _newest_events(views: Sequence[RankView]) -> tuple[Event, ...]:
    events = [event for view in views for event in view.events()]
    return tuple(sorted(events, key=lambda event: event.time)[-MAX_EVENTS:])


def _newest_checkpoint(views: Sequence[RankView]) -> str | None:
    return next((view.checkpoint for view in views if view.checkpoint), None)
