"""Keeps what a job's telemetry shows while the job runs, for its files hold the newest only."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.reading.reader import Job, open_job
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, RankSnapshot, StepRecord

ChunkKey = tuple[int, int, int, str]


class Watch:
    """One job, looked at again and again.

    Args:
        job_id: Of the job, which may not have begun.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._job: Job | None = None
        self.newest: JobSnapshot | None = None
        self.steps: dict[int, dict[int, StepRecord]] = {}
        """By rank and number of the batch."""
        self.chunks: dict[int, dict[ChunkKey, Chunk]] = {}
        """By rank, and step, stage, microbatch and kind."""
        self.memory: dict[int, dict[tuple[str, str], int]] = {}
        """By rank, and kind and place: the most bytes that were seen."""
        self.host_bytes: dict[int, int] = {}
        """Resident, by rank: the most that was seen."""
        self.device_bytes: dict[int, int] = {}
        """By rank: the peak that torch's allocator tells."""

    @contextmanager
    def opened(self) -> Iterator["Watch"]:
        """Let go of the job's files at the end."""
        try:
            yield self
        finally:
            if self._job is not None:
                self._job.close()

    def look(self) -> None:
        """Take in what there is now; nothing, where the job has not begun."""
        with contextlib.suppress(TelemetryError, OSError):
            if self._job is None:
                self._job = open_job(self._job_id)
            self.newest = self._job.snapshot()
            for rank in self.newest.ranks:
                self._take(rank)

    def _take(self, rank: RankSnapshot) -> None:
        self.steps.setdefault(rank.rank, {}).update({each.index: each for each in rank.steps})
        self.chunks.setdefault(rank.rank, {}).update(
            {(each.step, each.stage, each.microbatch, each.kind): each for each in rank.chunks}
        )
        most = self.memory.setdefault(rank.rank, {})
        for each in rank.memory_kinds:
            if each.measured_bytes is not None:
                key = each.kind, each.place
                most[key] = max(most.get(key, 0), each.measured_bytes)
        for kept, value in (
            (self.host_bytes, rank.memory.host_rss_bytes),
            (self.device_bytes, rank.memory.device_peak_bytes),
        ):
            if value is not None:
                kept[rank.rank] = max(kept.get(rank.rank, 0), value)
