"""Jobs on other hosts as sources: of one host, reconnected when it is lost, or of several.

``SshSource`` follows a job on one host; ``HostsSource`` merges a job that several hosts run.
"""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from boltmesh.errors import BoltMeshError, ConfigError, TelemetryError
from boltmesh.telemetry.reader.cause import is_consequence
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.telemetry.sanitize import clean
from boltmesh.telemetry.snapshot import Event, JobSnapshot, JobState, RankSnapshot
from boltmesh.tui.sources.frames import (
    FrameDecoder,
    Hello,
    RemoteError,
    decode_hello,
    decode_jobs,
)
from boltmesh.tui.sources.live import InterruptionError, Observation, Source
from boltmesh.tui.sources.ssh.remote import ANSWER_S, Connection, Remote, SshError

if TYPE_CHECKING:
    from boltmesh.tui.devices import DeviceReading

MAX_EVENTS: Final = 256
LIST_AGAIN_S: Final = 10.0
"""A list of jobs is a connection of its own."""

_WORST_FIRST: Final[tuple[JobState, ...]] = ("crashed", "failed", "running", "finished")

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Between two attempts to connect; each is twice the one before."""
SILENCE_S: Final = 10.0
"""A connection without a frame for so long counts as lost, even without an error."""


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


class SshSource:
    """Follows one job of another host.

    A thread reads whatever comes and keeps the newest observation only, so that a screen that is
    slow or held never makes the job's host wait.

    Args:
        remote: The host.
        job: As ``boltmesh top`` takes it; once connected, it stays with the one that was found.
        first_pause_s: Before the first attempt to connect again.
        answer_s: How long the host may take to its first frame.
    """

    def __init__(
        self,
        remote: Remote,
        job: str | None = None,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.remote = remote
        self.hello: Hello | None = None
        """The first frame of the other side; None before it came."""
        self._job = job
        self._first_pause_s = first_pause_s
        self._answer_s = answer_s
        self._changed = threading.Condition()
        self._newest: Observation | None = None
        self._received = time.monotonic()
        self._trouble: BoltMeshError | None = None
        self._is_final = False
        self._is_closed = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="boltmesh-ssh", daemon=True)
        self._thread.start()

    def read(self) -> Observation:
        """Return the newest observation; waits for the first one.

        Raises:
            InterruptionError: The connection is lost, and tried again.
            BoltMeshError: There is none, and trying again would not help.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._newest is not None or self._is_final or self._is_closed
            )
            if self._is_closed:
                raise TelemetryError(f"the connection to {self.remote.host} is closed.")
            if self._trouble is not None and self._is_final:
                raise self._trouble
            silence_s = time.monotonic() - self._received
            if self._trouble is not None:
                raise InterruptionError(
                    f"disconnected {silence_s:.0f} s, trying again: {self._trouble}"
                )
            if silence_s > SILENCE_S + self.remote.interval_s:
                raise InterruptionError(f"no word from {self.remote.host} for {silence_s:.0f} s.")
            assert self._newest is not None
            return self._newest

    def close(self) -> None:
        """End the connection; the job does not notice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.end()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while not self._is_closed:
            received = self._received
            trouble = self._follow()
            if self._received > received:  # it worked, so the next one is likely to
                pause_s = self._first_pause_s
            with self._changed:
                self._trouble = trouble
                is_final = not isinstance(trouble, SshError) or trouble.is_final
                # A job that was seen once can come back, unless the user has to do something first.
                self._is_final = self._newest is None or is_final
                self._changed.notify_all()
                if self._is_final:
                    return
                self._changed.wait_for(lambda: self._is_closed, timeout=pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _follow(self) -> BoltMeshError:
        """Connect and receive until it ends; return why it did."""
        host = self.remote.host
        python = self.hello.python if self.hello is not None else None
        line = self.remote.ssh_line(job=self._job, python=python)
        try:
            with Connection(host, line, answer_s=self._answer_s) as connection:
                with self._changed:
                    if self._is_closed:
                        return SshError("closed", is_final=True)
                    self._connection = connection
                try:
                    self._receive(connection)
                finally:
                    with self._changed:
                        self._connection = None
        except RemoteError as error:
            return SshError(f"{host}: {error}", is_final=False)
        except BoltMeshError as error:
            return error
        raise AssertionError("a connection ends with a reason")

    def _receive(self, connection: Connection) -> None:
        decoder = FrameDecoder()
        payloads = connection.payloads()
        self.hello = decode_hello(next(payloads))
        self._job = self.hello.job
        for payload in payloads:
            seen = decoder.decode(payload)
            with self._changed:
                self._newest = seen
                self._received = time.monotonic()
                self._trouble = None
                self._changed.notify_all()


def list_remote_jobs(remote: Remote) -> list[JobSummary]:
    """Return the user's jobs on another host, newest first.

    Raises:
        BoltMeshError: They cannot be had; why.
    """
    line = remote.ssh_line(wants_list=True)
    with Connection(remote.host, line) as connection:
        try:
            return decode_jobs(next(connection.payloads()))
        except RemoteError as error:
            raise TelemetryError(f"{remote.host}: {error}") from error


class HostView(NamedTuple):
    """Newest observation of one host."""

    seen: Observation
    lost: str | None = None
    """Why it is not of now."""


class Hosts:
    """The hosts of ``--ssh`` or ``--slurm``: the list of their jobs, and a source of one job.

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
        started=max(job.started for job in jobs),  # stays when the first host is lost
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
