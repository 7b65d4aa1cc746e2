"""Times, memory and traffic of a strategy, computed from the telemetry of its job.

``JobWatch`` keeps what a job's telemetry shows while the job runs, for its files hold the newest
only.
"""

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, RankSnapshot, StepRecord

if TYPE_CHECKING:
    from boltmesh.telemetry.reader.job_reader import JobReader

ChunkKey = tuple[int, int, int, str]


class JobWatch:
    """One job, looked at again and again.

    Args:
        job_id: Id of the job, which may not have begun.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._job: JobReader | None = None
        self.newest: JobSnapshot | None = None
        self.steps: dict[int, dict[int, StepRecord]] = {}
        """Batches by rank and number."""
        self.chunks: dict[int, dict[ChunkKey, Chunk]] = {}
        """Chunks by rank, and step, stage, microbatch and kind."""
        self.memory: dict[int, dict[tuple[str, str], int]] = {}
        """Most bytes seen, by rank, and kind and place."""
        self.host_bytes: dict[int, int] = {}
        """Resident, by rank: the most that was seen."""
        self.device_bytes: dict[int, int] = {}
        """Peak of torch's allocator, by rank."""

    @contextmanager
    def opened(self) -> Iterator["JobWatch"]:
        """Let go of the job's files at the end."""
        try:
            yield self
        finally:
            if self._job is not None:
                self._job.close()

    def look(self) -> None:
        """Read the job's telemetry; nothing if the job has not begun."""
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


@dataclass(frozen=True)
class BenchRun:
    """Measurements of one job."""

    mesh: dict[str, int]
    step_s: tuple[float, ...]
    """Time of each optimizer step that counts, on the rank that took longest for it."""
    samples: float | None
    """Samples of one optimizer step, over the whole job; None if telemetry does not know."""
    tokens: float | None
    loss: float | None
    """Loss of the last step, the mean over the data axis."""
    last_step: int
    bubble: tuple[float, ...]
    """Share of each step that counts in which the ranks of a pipeline are idle."""
    memory: dict[tuple[str, str], int]
    """Bytes by kind and place, on the rank that has most of it."""
    host_bytes: int | None
    device_bytes: int | None
    axis_bytes: dict[str, float]
    """Moved by one rank in one optimizer step, by axis, on the rank that moves most."""
    versions: dict[str, str] = field(default_factory=dict)


def measure(watch: JobWatch, *, warmup: int) -> BenchRun | None:
    """Compute the figures of a job that has ended; None when it recorded no step that counts.

    Args:
        watch: Observations of the job.
        warmup: Optimizer steps at the beginning that do not count.
    """
    job = watch.newest
    if job is None:
        return None
    ranks = {rank: _optimizer_steps(each.values()) for rank, each in watch.steps.items()}
    shared = set.intersection(*(set(each) for each in ranks.values())) if ranks else set()
    counted = sorted(step for step in shared if step > warmup)
    if not counted:
        return None
    seconds = [max(_seconds(each[step]) for each in ranks.values()) for step in counted]
    ends = _ends_of_data_axis(job.ranks)
    last = counted[-1]
    losses = [
        statistics.fmean(known)
        for rank in ends
        if rank in ranks
        and (known := [each.loss for each in ranks[rank][last] if each.loss is not None])
    ]
    return BenchRun(
        mesh=dict(job.mesh),
        step_s=tuple(seconds),
        samples=_items(ranks, ends, counted, "samples"),
        tokens=_items(ranks, ends, counted, "tokens"),
        loss=statistics.fmean(losses) if losses else None,
        last_step=last,
        bubble=_bubbles(watch, job.ranks, counted),
        memory=_most(watch.memory.values()),
        host_bytes=max(watch.host_bytes.values(), default=None),
        device_bytes=max(watch.device_bytes.values(), default=None),
        axis_bytes=_axis_bytes(job.ranks),
        versions=dict(job.versions),
    )


def _optimizer_steps(batches: Iterable[StepRecord]) -> dict[int, list[StepRecord]]:
    """The batches of each optimizer step, by its number from 1.

    Lightning counts a step when it is done: batches that only accumulate have the number before.
    """
    steps: dict[int, list[StepRecord]] = {}
    open_batches: list[StepRecord] = []
    before = 0
    for each in sorted(batches, key=lambda record: record.index):
        open_batches.append(each)
        if each.global_step > before:
            steps[each.global_step] = open_batches
            open_batches, before = [], each.global_step
    return steps


def _seconds(batches: Sequence[StepRecord]) -> float:
    return sum(each.seconds for each in batches)


def _ends_of_data_axis(ranks: Sequence[RankSnapshot]) -> list[int]:
    """One rank for each share of the data: the last of its pipeline, which has the loss."""
    chosen: dict[int, tuple[int, int]] = {}
    for each in ranks:
        share = each.coordinates.get("data", 0)
        place = each.coordinates.get("pipeline", 0), each.rank
        chosen[share] = max(chosen.get(share, place), place)
    return [rank for _, rank in chosen.values()]


def _items(
    ranks: Mapping[int, Mapping[int, Sequence[StepRecord]]],
    ends: Sequence[int],
    steps: Sequence[int],
    what: str,
) -> float | None:
    counts = []
    for step in steps:
        values = [
            getattr(each, what) for rank in ends if rank in ranks for each in ranks[rank][step]
        ]
        if any(value is None for value in values):
            return None
        counts.append(sum(values))
    return statistics.fmean(counts) if counts else None


def _bubbles(
    watch: JobWatch, ranks: Sequence[RankSnapshot], steps: Sequence[int]
) -> tuple[float, ...]:
    """Idle shares by step: 1 - busy / window over the window that the ranks have in common.

    The mean over several pipelines; ranks side by side in a tensor group are one place each.
    """
    pipelines: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for each in ranks:
        others = {axis: at for axis, at in each.coordinates.items() if axis != "pipeline"}
        pipelines[tuple(sorted(others.items()))].append(each.rank)
    by_rank: dict[int, dict[int, list[Chunk]]] = {}
    for rank, chunks in watch.chunks.items():
        of_step: dict[int, list[Chunk]] = defaultdict(list)
        for chunk in chunks.values():
            of_step[chunk.step].append(chunk)
        by_rank[rank] = of_step
    found = []
    for step in steps:
        shares = []
        for members in pipelines.values():
            rows = [by_rank.get(rank, {}).get(step, []) for rank in members]
            if all(rows):
                start = min(each.start for row in rows for each in row)
                window = max(each.end for row in rows for each in row) - start
                busy = sum(each.end - each.start for row in rows for each in row)
                if window > 0:
                    shares.append(1 - busy / (window * len(rows)))
        if shares:
            found.append(statistics.fmean(shares))
    return tuple(found)


def _most(ranks: Iterable[Mapping[tuple[str, str], int]]) -> dict[tuple[str, str], int]:
    most: dict[tuple[str, str], int] = {}
    for each in ranks:
        for key, value in each.items():
            most[key] = max(most.get(key, 0), value)
    return most


def _axis_bytes(ranks: Sequence[RankSnapshot]) -> dict[str, float]:
    most: dict[str, float] = {}
    for rank in ranks:
        sums: dict[str, float] = defaultdict(float)
        for each in rank.collectives:
            if each.bytes_per_step is not None:
                sums[each.axis] += each.bytes_per_step
        for axis, value in sums.items():
            most[axis] = max(most.get(axis, 0.0), value)
    return most
