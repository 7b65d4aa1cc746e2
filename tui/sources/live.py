"""Where the dashboard gets a job from: one protocol, and the source that reads a live job.

A source is read from a worker thread, once a second. It is the only part that does I/O.
"""

import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.devices import DeviceReader, DeviceReading

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.job_reader import JobReader


class Observation(msgspec.Struct, frozen=True):
    """Result of one look at a job."""

    time: float
    """Wall clock of the look, seconds since 1970."""
    job: JobSnapshot
    devices: tuple[DeviceReading, ...] = ()
    is_rewound: bool = False
    """It is from before the last look of the same source: what was folded since is not yet true."""


class InterruptionError(TelemetryError):
    """The job cannot be read for now, and the source is at work to change that."""


class Source(Protocol):
    """Anything that can be looked at again and again."""

    def read(self) -> Observation:
        """Return the present observation.

        Raises:
            InterruptionError: It is not known for now.
            TelemetryError: The job can no longer be read.
        """

    def close(self) -> None:
        """Let go of files and libraries; reading again is not allowed."""


class LiveSource:
    """A job of this user on this host, running or ended."""

    def __init__(self, job: "JobReader") -> None:
        self._job = job
        self._devices = DeviceReader(job.path.parent)

    def read(self) -> Observation:
        """Return the job and, for ranks that live on this host, their devices."""
        job = self._job.snapshot()
        return Observation(time=time.time(), job=job, devices=self._devices.read(job))

    def close(self) -> None:
        """Unmap the job's files; the job does not notice."""
        self._devices.close()
        self._job.close()
