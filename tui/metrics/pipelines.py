"""The pipelines of a job, and the steps that all ranks of one have recorded whole.

An optimizer step may be made of several batches, each of which passes through the pipeline by
itself: what is called a step here is one batch of one.
"""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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
"""Chunks of each rank, in the order in which they ran."""

RECENT_STEPS = 6
"""Steps of a ring that are looked at, at least: the running one, and those that may be whole. Ranks
are read one after the other, and a viewer without a core for itself reads the last one steps
later."""

MAX_CHUNKS = 65_536
"""Chunks of all ranks together that are looked at: all that the rings of 16 ranks hold."""


class PipelineStep(msgspec.Struct, frozen=True):
    """One step of one pipeline."""

    step: int
    batch: int
    """Number of the batch within the optimizer step, from 0; above 0 only with accumulation."""
    place: dict[str, int]
    """Place of the pipeline on the other axes."""
    ranks: tuple[int, ...]
    """Global ranks in the order of the pipeline."""
    chunks: tuple[tuple[Chunk, ...], ...]
    """Chunks of each of these ranks, in the order in which they ran."""
    is_whole: bool
    num_pipelines: int
    """Those of the job."""

    @property
    def start(self) -> float:
        """Start of the window that all ranks share."""
        return min(row[0].start for row in self.chunks if row)

    @property
    def end(self) -> float:
        """End of the window that all ranks share."""
        return max(row[-1].end for row in self.chunks if row)

    @property
    def window_s(self) -> float:
        """Time from the first start to the last end."""
        return self.end - self.start


class BatchTimes(NamedTuple):
    """One whole step of a pipeline in seconds."""

    window_s: float
    rows: tuple[dict[str, float], ...]
    """Time of each rank's chunks by kind, in the order of the pipeline."""


class Pipeline(msgspec.Struct, frozen=True):
    """The steps of one pipeline that the rings of its ranks hold."""

    place: dict[str, int]
    """Coordinates on the other axes."""
    ranks: tuple[int, ...]
    """Global ranks in the order of the pipeline."""
    steps: tuple[PipelineStep, ...]
    """Oldest first; the newest may be incomplete."""
    whole: tuple[PipelineStep, ...]
    """Those of them that all ranks have recorded whole."""
    times: tuple[BatchTimes, ...]
    """One for each whole step."""


@remember_last
def pipelines(job: JobSnapshot) -> tuple[Pipeline, ...]:
    """Return the pipelines in which all ranks record chunks."""
    found = []
    for place, ranks in _pipelines(job):
        steps = tuple(_steps(place, ranks, job))
        whole = tuple(step for step in steps if step.is_whole and 0 < step.window_s < math.inf)
        numbers = tuple(rank.rank for rank in ranks)
        found.append(Pipeline(place, numbers, steps, whole, tuple(map(_times, whole))))
    return tuple(found)


def _times(step: PipelineStep) -> BatchTimes:
    rows = []
    for row in step.chunks:
        seconds: dict[str, float] = {}
        for chunk in row:
            seconds[chunk.kind] = seconds.get(chunk.kind, 0.0) + max(0.0, chunk.end - chunk.start)
        rows.append(seconds)
    return BatchTimes(step.window_s, tuple(rows))


def idle_share(seconds: Mapping[str, float], window_s: float) -> float:
    """Return the share of a window in which a rank computes no chunk."""
    return min(1.0, max(0.0, 1 - sum(seconds.values()) / window_s))


def mean_idle_shares(pipeline: Pipeline) -> list[float]:
    """Return the idle share of each rank: the mean over the whole steps."""
    return [
        statistics.fmean(idle_share(batch.rows[at], batch.window_s) for batch in pipeline.times)
        for at in range(len(pipeline.ranks))
    ]


def mean_seconds(pipeline: Pipeline, at: int) -> dict[str, float]:
    """Return the mean time of each kind of chunk in a whole step, of one rank of a pipeline."""
    rows = [batch.rows[at] for batch in pipeline.times]
    kinds = dict.fromkeys(kind for row in rows for kind in row)
    return {kind: sum(row.get(kind, 0.0) for row in rows) / len(rows) for kind in kinds}


@remember_last
def bubble_ratio(job: JobSnapshot) -> float | None:
    """Return the bubble ratio of the job, the one that every screen and export shows.

    The idle share of a rank is 1 - busy / window: busy is the time of its chunks, the window
    reaches from the first start to the last end of a chunk on any rank of the pipeline. The ratio
    is the mean over the ranks, over the whole steps that the rings hold, and over the pipelines.
    """
    shares = [mean_idle_shares(each) for each in pipelines(job) if each.whole]
    return statistics.fmean(map(statistics.fmean, shares)) if shares else None


def slowest_whole_step(job: JobSnapshot) -> PipelineStep | None:
    """Return the newest step that is whole, of the pipeline that took longest for it."""
    whole = newest_whole_steps(job)
    newest = max(map(_number, whole), default=None)
    candidates = [step for step in whole if _number(step) == newest]
    return max(candidates, key=lambda step: step.window_s, default=None)


def newest_whole_steps(job: JobSnapshot) -> list[PipelineStep]:
    """Return of each pipeline the newest step that is whole, where there is one."""
    return [each.whole[-1] for each in pipelines(job) if each.whole]


def newest_step(job: JobSnapshot) -> PipelineStep | None:
    """Return the step that was begun last, whole or not, of the pipeline that is least far."""
    begun = [each.steps[-1] for each in pipelines(job) if each.steps]
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
    least = MAX_CHUNKS // max(1, len(job.ranks))
    by_rank = [_by_step(rank.chunks, least) for rank in ranks]
    # The ring may hold only the last chunks of a rank's oldest step.
    oldest = max((min(steps) for steps in by_rank if steps), default=0)
    others = math.prod(size for axis, size in job.mesh.items() if axis != "pipeline")
    planned = _num_planned(job.pipeline, len(ranks))
    for number in sorted(set().union(*by_rank)):
        rows = tuple(tuple(steps.get(number, ())) for steps in by_rank)
        is_cut = number <= oldest and _is_cut(number, by_rank)
        for batch, part in enumerate(_batches(rows, planned)):
            yield PipelineStep(
                step=number,
                batch=batch,
                place=place,
                ranks=tuple(rank.rank for rank in ranks),
                chunks=part,
                is_whole=not is_cut and _is_whole(number, part, by_rank, planned),
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


def _is_cut(number: int, by_rank: list[dict[int, list[Chunk]]]) -> bool:
    """Say whether the first chunks of a step are missing: a step begins as the newest one does."""
    return any(
        _name(steps[number][0]) != _name(steps[max(steps)][0])
        for steps in by_rank
        if number in steps
    )


def _name(chunk: Chunk) -> tuple[int, str, int]:
    return chunk.stage, chunk.kind, chunk.microbatch


def _by_step(chunks: tuple[Chunk, ...], least: int) -> dict[int, list[Chunk]]:
    """Return the newest chunks by step: RECENT_STEPS steps, or more until there are ``least``."""
    found: dict[int, list[Chunk]] = {}
    for number, chunk in enumerate(reversed(chunks)):
        row = found.get(chunk.step)
        if row is None:
            if len(found) >= RECENT_STEPS and number >= least:
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
    """Bubble of the schedule with equal stages and a backward twice as long as a forward."""
    structural: float | None = None
    """Bubble of the schedule with equal stages and the measured mean time of each kind of chunk."""
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
    seconds: Mapping[str, float] = {}
    """Mean time of each kind of chunk in a batch."""
    kept: tuple[int, ...] = ()
    """By stage, how many microbatches it has kept at once at most for their backward; empty if that
    was not counted."""
    planned: tuple[int, ...] = ()
    """The same of the schedule; empty where that is not known."""


class Bubble(msgspec.Struct, frozen=True):
    """The pipeline that takes longest for a step: means over the whole steps in the rings."""

    num_steps: int
    step: int
    """The newest."""
    ratio: float
    """Bubble ratio of the job, see ``bubble_ratio``."""
    plan: PipelinePlan | None
    place: dict[str, int]
    """Place of this pipeline on the other axes."""
    num_pipelines: int
    window_s: float
    rows: tuple[BubbleRow, ...]
    """Ranks in the order of the pipeline."""
    mean: Parts
    """Over the ranks."""


def bubble(state: State) -> Bubble | None:
    """Return the bubble over the steps that all ranks of a pipeline have recorded, or None."""
    return _bubble(state.job)


@remember_last
def _bubble(job: JobSnapshot) -> Bubble | None:
    ratio = bubble_ratio(job)
    known = [each for each in pipelines(job) if each.whole]
    if ratio is None:
        return None
    shown = max(known, key=lambda each: statistics.fmean(batch.window_s for batch in each.times))
    measured = mean_idle_shares(shown)
    simulated = _simulate_once(_NamedSteps(job, shown.whole))
    parts = [
        Parts(share) if simulated is None else _split(share, *(each[at] for each in simulated))
        for at, share in enumerate(measured)
    ]
    mean = Parts(statistics.fmean(measured))
    if simulated is not None:
        mean = _split(mean.measured, *map(statistics.fmean, simulated))
    newest = shown.whole[-1]
    found = Bubble(
        num_steps=len(shown.whole),
        step=newest.step,
        ratio=ratio,
        plan=job.pipeline,
        place=shown.place,
        num_pipelines=newest.num_pipelines,
        window_s=statistics.fmean(batch.window_s for batch in shown.times),
        rows=tuple(
            BubbleRow(
                rank, tuple(sorted({chunk.stage for chunk in row})), each, mean_seconds(shown, at)
            )
            for at, (rank, row, each) in enumerate(
                zip(shown.ranks, newest.chunks, parts, strict=True)
            )
        ),
        mean=mean,
    )
    return _with_kept(found, job)


def _with_kept(found: Bubble, job: JobSnapshot) -> Bubble:
    """Add how many microbatches each stage has kept, which no chunk records."""
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


class _NamedSteps:
    """Steps as a key: the same ones of the same job are equal, without a look at their chunks."""

    def __init__(self, job: JobSnapshot, steps: Sequence[PipelineStep]) -> None:
        self.steps = steps
        self.plan = job.pipeline
        shape = None if self.plan is None else (self.plan.schedule, self.plan.num_microbatches)
        newest = steps[-1]
        self._name = (
            job.id,
            job.started,
            shape,
            len(steps),
            newest.step,
            newest.batch,
            newest.ranks,
            newest.start,
            newest.end,
        )

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NamedSteps) and other._name == self._name

    @override
    def __hash__(self) -> int:
        return hash(self._name)


@functools.lru_cache(maxsize=4)
def _simulate_once(named: _NamedSteps) -> list[list[float]] | None:
    """Simulating a large pipeline takes tenths of a second, and a step outlasts many looks."""
    return _simulate(named.steps, named.plan)


def _split(measured: float, ideal: float, structural: float, simulated: float) -> Parts:
    return Parts(
        measured=measured,
        ideal=ideal,
        structural=structural,
        imbalance=simulated - structural,
        excess=measured - simulated,
    )


def _simulate(steps: Sequence[PipelineStep], plan: PipelinePlan | None) -> list[list[float]] | None:
    """Return each rank's ideal, structural and simulated share, or None where none can be had.

    The times are medians over all of these steps, the order is that of the newest.

    Files of a job may hold anything, so also an order that cannot be run.
    """
    order = order_of(steps[-1], plan)
    medians = _medians([row for step in steps for row in step.chunks])
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
    """Return the planned order where the step followed it, and else the order as it ran.

    1F1B of torch 2.13 lists microbatches that it does not run: ``3F8`` of 8, never ``3F0``.
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
    """Return the time of each kind of chunk, if all stages were equal."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for (_, kind), seconds in medians.items():
        by_kind[kind].append(seconds)
    return {kind: statistics.fmean(values) for kind, values in by_kind.items()}
