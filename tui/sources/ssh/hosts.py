"""One job that several hosts run, put together from what each of them shows."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.telemetry.reader.cause import is_consequence
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import Event, JobSnapshot, JobState, RankSnapshot
from boltmesh.tui.sources.live import InterruptionError, Observation, Source
from boltmesh.tui.sources.ssh.remote import Remote
from boltmesh.tui.sources.ssh.source import SshSource, list_remote_jobs

if TYPE_CHECKING:
    from boltmesh.tui.devices import DeviceReading

MAX_EVENTS: Final = 256
LIST_AGAIN_S: Final = 10.0
"""A list of jobs is a connection of its own."""

_WORST_FIRST: Final[tuple[JobState, ...]] = ("crashed", "failed", "running", "finished")


def slurm_hosts(job: str | None = None) -> tuple[str, ...]:
    """Return the hosts of a running SLURM job; without ``job`` those of all jobs of the user.

    Raises:
        ConfigError: SLURM does not answer, or has no such job.
    """
    which = ("--me",) if job is None else ("--jobs", job)
    nodes = _slurm("squeue", *which, "--states=RUNNING", "--noheader", "--format=%N").split()
    if not nodes:
        name = "a running job of yours" if job is None else f"a running job {job}"
        raise ConfigError(f"SLURM does not list {name}. See squeue, or name the hosts with --ssh.")
    names = _slurm("scontrol", "show", "hostnames", ",".join(nodes)).split()
    return tuple(dict.fromkeys(names))


def _slurm(*words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - no shell
            words, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--slurm runs {words[0]}: {error}. Name the hosts with --ssh instead."
        ) from error
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"{words[0]}: {clean(why[0], 200)}. Name the hosts with --ssh instead.")
    return done.stdout


class HostView(NamedTuple):
    """What one host showed last."""

    seen: Observation
    lost: str | None = None
    """Why it is not of now."""


class Hosts:
    """The hosts that a viewer was told of: which jobs they have, and a source for one of them.

    Args:
        remotes: The first one lists the jobs.
        clock: Seconds that only go forward.
    """

    def __init__(
        self, remotes: Sequence[Remote], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.remotes = tuple(remotes)
        self._clock = clock
        self._jobs: list[JobSummary] | None = None
        self._listed = 0.0

    @property
    def name(self) -> str:
        """The hosts as the user wrote them."""
        return ", ".join(remote.host for remote in self.remotes)

    def list_jobs(self) -> list[JobSummary]:
        """Return the jobs of the first host, which is not asked again each second.

        Raises:
            BoltMeshError: It cannot be asked, and never could.
        """
        if self._jobs is None or self._clock() - self._listed >= LIST_AGAIN_S:
            try:
                self._jobs = list_remote_jobs(self.remotes[0])
            except TelemetryError:
                if self._jobs is None:
                    raise
            self._listed = self._clock()
        return self._jobs

    def open(self, job: str | None = None) -> Source:
        """Return a source of a job; it connects when it is read."""
        if len(self.remotes) == 1:
            return SshSource(self.remotes[0], job)
        return HostsSource(self.remotes, job)


class HostsSource:
    """Reads one job from several hosts; one that is lost for a while does not end it.

    Args:
        remotes: The hosts.
        job: As ``boltmesh top`` takes it; without a name the first host decides which it is.
    """

    def __init__(self, remotes: Sequence[Remote], job: str | None = None) -> None:
        self._remotes = remotes
        self._first = SshSource(remotes[0], job)
        self._others: list[SshSource] = []
        self._looks: list[HostView] = []

    def read(self) -> Observation:
        """Return the job with the ranks of all hosts.

        Raises:
            BoltMeshError: No host can be read, or one of them could not be to begin with.
        """
        if not self._looks:
            seen = self._first.read()
            if not self._others:
                job_id = seen.job.id
                self._others = [SshSource(remote, job_id) for remote in self._remotes[1:]]
            self._looks = [HostView(seen), *(HostView(source.read()) for source in self._others)]
        else:
            self._looks = [
                self._look(source, last)
                for source, last in zip((self._first, *self._others), self._looks, strict=True)
            ]
        if all(look.lost is not None for look in self._looks):
            raise InterruptionError(self._looks[0].lost or "")
        return merge(self._looks)

    def close(self) -> None:
        """End all connections."""
        with contextlib.ExitStack() as stack:
            for source in (self._first, *self._others):
                stack.callback(source.close)

    def _look(self, source: Source, last: HostView) -> HostView:
        try:
            return HostView(source.read())
        except BoltMeshError as error:
            return last._replace(lost=str(error))


def merge(looks: Sequence[HostView]) -> Observation:
    """Return one observation of a job from one of each host.

    A rank is shown as its own host has it; where that is lost, as another one's summary has it.
    What is about the whole job is taken from the host that has the lowest rank.
    """
    base = min(looks, key=_lowest_rank).seen
    jobs = [look.seen.job for look in looks]
    state = min((job.state for job in jobs), key=_WORST_FIRST.index)
    causes = [job.cause for job in jobs if job.cause is not None]
    events: set[Event] = {event for job in jobs for event in job.events}
    devices: list[DeviceReading] = [
        device for look in looks if look.lost is None for device in look.seen.devices
    ]
    merged = msgspec.structs.replace(
        base.job,
        state=state,
        ranks=_merge_ranks(looks),
        updated=max(job.updated for job in jobs),
        epoch=max(job.epoch for job in jobs),
        global_step=max(job.global_step for job in jobs),
        communication_note=_first(job.communication_note for job in jobs),
        checkpoint=_first((base.job.checkpoint, *(job.checkpoint for job in jobs))),
        cause=min(causes, key=is_consequence, default=None) if state != "running" else None,
        events=tuple(sorted(events, key=lambda event: event.time)[-MAX_EVENTS:]),
    )
    return Observation(time=base.time, job=merged, devices=tuple(devices))


def _merge_ranks(looks: Sequence[HostView]) -> tuple[RankSnapshot, ...]:
    found: dict[int, tuple[tuple[bool, bool, bool, float], RankSnapshot]] = {}
    for look in looks:
        for rank in look.seen.job.ranks:
            worth = (
                rank.state != "missing",
                look.lost is None,
                not rank.is_summary,
                rank.last_seen,
            )
            if rank.rank not in found or worth > found[rank.rank][0]:
                shown = rank
                if look.lost is not None and rank.error is None:
                    shown = msgspec.structs.replace(rank, error=look.lost)
                found[rank.rank] = (worth, shown)
    return tuple(found[number][1] for number in sorted(found))


def _lowest_rank(look: HostView) -> tuple[bool, int]:
    job: JobSnapshot = look.seen.job
    own = [rank.rank for rank in job.ranks if rank.state != "missing" and not rank.is_summary]
    return look.lost is not None, min(own, default=job.world_size)


def _first(values: Iterable[str | None]) -> str | None:
    return next((each for each in values if each is not None), None)
