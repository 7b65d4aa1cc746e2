"""How long the ranks of a pipeline stand idle, and why: the schedule, uneven stages, or the rest.

A bubble is measured over the common window of a pipeline, from the first start to the last end on
any of its ranks: 1 - busy / window. A rank's own window would flatter the late stages. It is made
of what the schedule costs with equal stages (structural), what the stages' unequal times add
(imbalance), and what is left (excess: communication, the host). The three add up to the measured.
"""

import functools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from typing_extensions import override

from boltmesh.telemetry.schedule import (
    NOMINAL,
    Action,
    DeadlockError,
    Order,
    actions,
    idle_shares,
    peaks_by_stage,
    simulate,
)
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.pipelines import PipelineStep, slowest_whole_step
from boltmesh.tui.state import State


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
    return idle_shares(simulate(order, lambda action: NOMINAL[action.kind]))


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
