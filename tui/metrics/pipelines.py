"""The pipelines of a job, and the steps that all ranks of one have recorded whole.

An optimizer step may be made of several batches, each of which passes through the pipeline by
itself: what is called a step here is one batch of one.
"""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from typing_extensions import override

from boltmesh.schedule_sim import (
    NOMINAL,
    Action,
    DeadlockError,
    Order,
    actions,
    idle_shares,
    peaks_by_stage,
    simulate,
)
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan, RankSnapshot
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.state import State

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


class Parts(msgspec.Struct, frozen=True):
    """Idle time over the whole window ("of total"); None where the schedule is not known."""

    measured: float
    ideal: float | None = None
    """Of the schedule, all stages equal and a backward twice as long as a forward."""
    structural: float | None = None
    """Of the schedule, all stages equal, with the measured mean time of each kind of chunk."""
    imbalance: float | None = None
    """Simulated with the stages' own times, minus structural. A slow stage has less than none of
    it, for the others wait."""
    excess: float | None = None
    """Measured minus simulated."""


class BubbleRow(msgspec.Struct, frozen=True):
    """One rank of the pipeline."""

    rank: int
    stages: tuple[int, ...]
    parts: Parts
    kept: tuple[int, ...] = ()
    """By stage, how many microbatches it has kept at once at most for their backward; empty where
    nobody has counted."""
    planned: tuple[int, ...] = ()
    """The same of the schedule; empty where that is not known."""


class Bubble(msgspec.Struct, frozen=True):
    """The newest whole step of the pipeline that took longest for it."""

    step: int
    batch: int
    """Of the optimizer step, from 0."""
    plan: PipelinePlan | None
    place: dict[str, int]
    """Where this pipeline stands on the other axes."""
    num_pipelines: int
    window_s: float
    rows: tuple[BubbleRow, ...]
    """In the order of the pipeline."""
    mean: Parts
    """Over the ranks."""


def bubble(state: State) -> Bubble | None:
    """Return the bubble of a step that all ranks of a pipeline have recorded, or None."""
    return _bubble(state.job)


def measure(step: PipelineStep, plan: PipelinePlan | None) -> Bubble:
    """Return the bubble of one step."""
    window_s = step.window_s
    measured = [1 - _busy_s(row) / window_s for row in step.chunks]
    simulated = _simulate(step, plan)
    parts = [
        Parts(share) if simulated is None else _split(share, *(each[at] for each in simulated))
        for at, share in enumerate(measured)
    ]
    mean = Parts(statistics.fmean(measured))
    if simulated is not None:
        mean = _split(mean.measured, *map(statistics.fmean, simulated))
    return Bubble(
        step=step.step,
        batch=step.batch,
        plan=plan,
        place=step.place,
        num_pipelines=step.num_pipelines,
        window_s=window_s,
        rows=tuple(
            BubbleRow(rank, tuple(sorted({chunk.stage for chunk in row})), each)
            for rank, row, each in zip(step.ranks, step.chunks, parts, strict=True)
        ),
        mean=mean,
    )


@remember_last
def _bubble(job: JobSnapshot) -> Bubble | None:
    step = slowest_whole_step(job)
    return None if step is None else _with_kept(_measure_once(_NamedStep(job, step)), job)


def _with_kept(found: Bubble, job: JobSnapshot) -> Bubble:
    """Add how many microbatches each stage has kept, which no chunk tells."""
    counted = {
        rank.rank: {each.stage: each.most for each in rank.live_microbatches}
        for rank in job.ranks
        if rank.live_microbatches
    }
    if not counted:
        return found
    planned = {} if job.pipeline is None else peaks_by_stage(job.pipeline.order)
    rows = tuple(
        msgspec.structs.replace(
            row,
            kept=tuple(counted.get(row.rank, {}).get(stage, 0) for stage in row.stages),
            planned=tuple(planned[stage] for stage in row.stages if stage in planned),
        )
        for row in found.rows
    )
    return msgspec.structs.replace(found, rows=rows)


class _NamedStep:
    """A step as a key: the same one of the same job is equal, without a look at all its chunks."""

    def __init__(self, job: JobSnapshot, step: PipelineStep) -> None:
        self.step = step
        self.plan = job.pipeline
        shape = None if self.plan is None else (self.plan.schedule, self.plan.num_microbatches)
        self._name = (
            job.id,
            job.started,
            shape,
            step.step,
            step.batch,
            step.ranks,
            step.start,
            step.end,
        )

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NamedStep) and other._name == self._name

    @override
    def __hash__(self) -> int:
        return hash(self._name)


@functools.lru_cache(maxsize=4)
def _measure_once(named: _NamedStep) -> Bubble:
    """Simulating a large pipeline takes tenths of a second, and a step outlasts many looks."""
    return measure(named.step, named.plan)


def _busy_s(row: Sequence[Chunk]) -> float:
    return sum(max(0.0, chunk.end - chunk.start) for chunk in row)


def _split(measured: float, ideal: float, structural: float, simulated: float) -> Parts:
    return Parts(
        measured=measured,
        ideal=ideal,
        structural=structural,
        imbalance=simulated - structural,
        excess=measured - simulated,
    )


def _simulate(step: PipelineStep, plan: PipelinePlan | None) -> list[list[float]] | None:
    """Return each rank's ideal, structural and simulated share, or None where none can be had.

    Files of a job may hold anything, so also an order that no one can work off.
    """
    order = order_of(step, plan)
    medians = _medians(step.chunks)
    uniform = _means(medians)
    try:
        return [
            _ideal(order),
            idle_shares(simulate(order, lambda action: uniform[action.kind])),
            idle_shares(simulate(order, lambda action: medians[action.stage, action.kind])),
        ]
    except DeadlockError:
        return None


def order_of(step: PipelineStep, plan: PipelinePlan | None) -> Order:
    """Return the planned order where the step did what it says, and else the order as it ran.

    Torch 2.13 tells of microbatches in its 1F1B that it does not run: ``3F8`` of 8, never ``3F0``.
    """
    ran = tuple(
        tuple(f"{chunk.stage}{chunk.kind}{chunk.microbatch}" for chunk in row)
        for row in step.chunks
    )
    if plan is None or len(plan.order) != len(ran):
        return ran
    is_same = all(
        sorted(todo) == sorted(Action(chunk.stage, chunk.kind, chunk.microbatch) for chunk in row)
        for todo, row in zip(actions(plan.order), step.chunks, strict=True)
    )
    return plan.order if is_same else ran


@functools.lru_cache(maxsize=16)
def _ideal(order: Order) -> list[float]:
    return idle_shares(simulate(order, NOMINAL.seconds))


def _medians(rows: Sequence[Sequence[Chunk]]) -> Mapping[tuple[int, str], float]:
    """Return the median time of each kind of chunk in each stage."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        for chunk in row:
            seconds[chunk.stage, chunk.kind].append(max(0.0, chunk.end - chunk.start))
    return {key: statistics.median(values) for key, values in seconds.items()}


def _means(medians: Mapping[tuple[int, str], float]) -> Mapping[str, float]:
    """Return the time of each kind of chunk, were all stages alike."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for (_, kind), seconds in medians.items():
        by_kind[kind].append(seconds)
    return {kind: statistics.fmean(values) for kind, values in by_kind.items()}
