"""The pipelines of a job, and the steps that all ranks of one have recorded whole.

An optimizer step may be made of several batches, each of which passes through the pipeline by
itself: what is called a step here is one batch of one.
"""

import math
from collections.abc import Iterable

import msgspec

from boltmesh.schedule_sim import actions
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan, RankSnapshot

Rows = tuple[tuple[Chunk, ...], ...]
"""Of each rank, in the order in which they ran."""

RECENT_STEPS = 6
"""Steps of a ring that are looked at: the running one, and those that may be whole. Ranks are read
one after the other, and a viewer without a core for itself reads the last one steps later."""


class PipelineStep(msgspec.Struct, frozen=True):
    """One step of one pipeline."""

    step: int
    batch: int
    """Of the optimizer step, from 0: more than 0 only where gradients are accumulated."""
    place: dict[str, int]
    """Where the pipeline stands on the other axes."""
    ranks: tuple[int, ...]
    """Global ranks in the order of the pipeline."""
    chunks: tuple[tuple[Chunk, ...], ...]
    """Of each of these ranks, in the order in which they ran."""
    is_whole: bool
    num_pipelines: int
    """Of the job."""

    @property
    def start(self) -> float:
        """Of the window that all ranks share."""
        return min(row[0].start for row in self.chunks if row)

    @property
    def end(self) -> float:
        """Of the window that all ranks share."""
        return max(row[-1].end for row in self.chunks if row)

    @property
    def window_s(self) -> float:
        """From the first start to the last end."""
        return self.end - self.start


def slowest_whole_step(job: JobSnapshot) -> PipelineStep | None:
    """Return the newest step that is whole, of the pipeline that took longest for it."""
    whole = [
        step
        for place, ranks in _pipelines(job)
        for step in _steps(place, ranks, job)
        if step.is_whole and step.window_s > 0
    ]
    newest = max(map(_number, whole), default=None)
    candidates = [step for step in whole if _number(step) == newest]
    return max(candidates, key=lambda step: step.window_s, default=None)


def newest_whole_steps(job: JobSnapshot) -> list[PipelineStep]:
    """Return of each pipeline the newest step that is whole, where there is one."""
    found = []
    for place, ranks in _pipelines(job):
        whole = [step for step in _steps(place, ranks, job) if step.is_whole and step.window_s > 0]
        if whole:
            found.append(max(whole, key=_number))
    return found


def newest_step(job: JobSnapshot) -> PipelineStep | None:
    """Return the step that was begun last, whole or not, of the pipeline that is least far."""
    begun = [step for place, ranks in _pipelines(job) for step in _steps(place, ranks, job)]
    newest = max(map(_number, begun), default=None)
    candidates = [step for step in begun if _number(step) == newest]
    return min(candidates, key=lambda step: sum(map(len, step.chunks)), default=None)


def _number(step: PipelineStep) -> tuple[int, int]:
    return step.step, step.batch


def _pipelines(job: JobSnapshot) -> Iterable[tuple[dict[str, int], list[RankSnapshot]]]:
    """Return the ranks that differ on the pipeline axis only, where all of them record chunks."""
    groups: dict[tuple[tuple[str, int], ...], dict[int, RankSnapshot]] = {}
    for rank in job.ranks:
        if not rank.chunks:
            continue
        others = tuple((axis, at) for axis, at in rank.coordinates.items() if axis != "pipeline")
        groups.setdefault(others, {})[rank.coordinates.get("pipeline", 0)] = rank
    size = job.mesh.get("pipeline", 1)
    for place, members in groups.items():
        if len(members) == size and all(at in members for at in range(size)):
            yield dict(place), [members[at] for at in range(size)]


def _steps(
    place: dict[str, int], ranks: list[RankSnapshot], job: JobSnapshot
) -> Iterable[PipelineStep]:
    by_rank = [_by_step(rank.chunks) for rank in ranks]
    others = math.prod(size for axis, size in job.mesh.items() if axis != "pipeline")
    planned = _num_planned(job.pipeline, len(ranks))
    for number in sorted(set().union(*by_rank)):
        rows = tuple(tuple(steps.get(number, ())) for steps in by_rank)
        for batch, part in enumerate(_batches(rows, planned)):
            yield PipelineStep(
                step=number,
                batch=batch,
                place=place,
                ranks=tuple(rank.rank for rank in ranks),
                chunks=part,
                is_whole=_is_whole(number, part, by_rank, planned),
                num_pipelines=others,
            )


def _num_planned(plan: PipelinePlan | None, num_ranks: int) -> tuple[int, ...] | None:
    """Return how many chunks each rank has in a batch; None where the schedule is not known."""
    if plan is None or len(plan.order) != num_ranks:
        return None
    return tuple(map(len, actions(plan.order)))


def _batches(rows: Rows, planned: tuple[int, ...] | None) -> list[Rows]:
    """Part an optimizer step's chunks into those of its batches."""
    if planned is None or not all(planned):
        return [rows]
    count = max(-(-len(row) // size) for row, size in zip(rows, planned, strict=True))
    return [
        tuple(row[at * size : (at + 1) * size] for row, size in zip(rows, planned, strict=True))
        for at in range(count)
    ]


def _by_step(chunks: tuple[Chunk, ...]) -> dict[int, list[Chunk]]:
    """Return the chunks of the newest steps; a ring may hold many more."""
    found: dict[int, list[Chunk]] = {}
    for chunk in reversed(chunks):
        row = found.get(chunk.step)
        if row is None:
            if len(found) == RECENT_STEPS:
                break
            row = found[chunk.step] = []
        row.append(chunk)
    for row in found.values():
        row.reverse()
    return found


def _is_whole(
    number: int,
    rows: Rows,
    by_rank: list[dict[int, list[Chunk]]],
    planned: tuple[int, ...] | None,
) -> bool:
    if planned is not None:
        return all(len(row) == size for row, size in zip(rows, planned, strict=True))
    # Without the schedule: each rank has gone on to the next step, and the ring has not yet bitten
    # into this one.
    return all(rows) and all(min(steps) < number < max(steps) for steps in by_rank)
