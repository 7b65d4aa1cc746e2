"""How much of a pipeline's time is idle, and for which reason, beside the schedule's ideal.

How long the ranks of a pipeline stand idle, and why: the schedule, uneven stages, or the rest.

A bubble is measured over the common window of a pipeline, from the first start to the last end on
any of its ranks: 1 - busy / window. A rank's own window would flatter the late stages. It is made
of what the schedule costs with equal stages (structural), what the stages' unequal times add
(imbalance), and what is left (excess: communication, the host). The three add up to the measured.
"""

import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from typing_extensions import override

from boltmesh.schedule_sim import (
    NOMINAL,
    Action,
    DeadlockError,
    Order,
    actions,
    idle_shares,
    of_ideal,
    peaks_by_stage,
    simulate,
)
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan
from boltmesh.tui import units
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import PipelineStep, slowest_whole_step
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.pipeline import fit_rows, nothing_to_show, row_names, step_text
from boltmesh.tui.render.style import Style, heading, labelled, wrap_facts
from boltmesh.tui.render.table import Cell, Column, draw_table
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


_ROLES: dict[str, Role] = {
    "structural": "bubble",
    "imbalance": "warn",
    "excess": "communication",
}
_MEANINGS = {
    "structural": "the schedule's own",
    "imbalance": "uneven stages",
    "excess": "communication, host",
}
_IN_FLIGHT_TITLE = "in flight"
_DEFINITION = "idle = 1 - busy / window, from the first start to the last end on any rank"
_IN_FLIGHT = "in flight: microbatches that a stage keeps for their backward, at most"
MIN_BAR_WIDTH = 10
MAX_BAR_WIDTH = 60
BARS_FROM_WIDTH = 70


def draw_bubble(state: State, width: int, height: int, look: Style) -> list[Line]:
    """A summary, a row for each rank of the pipeline, their mean, and what the signs mean."""
    found = bubble(state)
    if found is None:
        return nothing_to_show(state, "bubble", width, height, look)
    lines: list[Line] = []
    if look.has_headings and height >= 2:
        step = step_text(found.step, found.batch, found.place, found.num_pipelines)
        lines.append(heading(f"bubble: {step}", width, look, right=_share(found.mean.measured)))
    room = max(0, height - len(lines))
    table = _table(found, width, look)
    cells = width - table[0].width - 2
    if width >= BARS_FROM_WIDTH and cells < MIN_BAR_WIDTH:
        # The bars say more than how many microbatches are kept.
        table = _table(found, width, look, has_kept=False)
        cells = width - table[0].width - 2
    cells = min(MAX_BAR_WIDTH, cells)
    has_bars = width >= BARS_FROM_WIDTH and cells >= MIN_BAR_WIDTH
    if has_bars:
        bars = _bars(found, cells, look)
        table = [line.add("  ").join(bar) for line, bar in zip(table, bars, strict=True)]
    # The rows go before the second line of the summary, and before both the legend of their bars.
    summary = _summary(found, width)
    summary = summary[: max(1, room - len(table))]
    room -= len(summary)
    legend = _legend(found, width, look) if has_bars else []
    definitions = [_DEFINITION]
    definitions += [_IN_FLIGHT] if _IN_FLIGHT_TITLE in table[0].plain else []
    legend += [Line(each, "muted") for each in definitions if len(each) <= width]
    legend = legend[: max(0, room - len(table))]
    room -= len(legend)
    if room >= 2:
        summary += [table[0], *fit_rows(table[1:], room - 1, width)]
    return [line.crop(width) for line in [*lines, *summary, *legend][: max(0, height)]]


def _summary(found: Bubble, width: int) -> list[Line]:
    mean = found.mean
    whole = labelled("of total (idle/all)", _percent(mean.measured), "strong")
    busy = labelled("of ideal (idle/busy)", _percent(of_ideal(mean.measured)))
    if mean.ideal is not None:
        whole.add("  ideal ", "muted").add(_percent(mean.ideal))
        busy.add("  ideal ", "muted").add(_percent(of_ideal(mean.ideal)))
    return wrap_facts([whole, Line(_schedule(found), "muted"), busy], width)


def _schedule(found: Bubble) -> str:
    plan = found.plan
    if plan is None:
        return "schedule unknown: the order as it ran"
    return f"{plan.schedule}, {plan.num_stages} stages, {plan.num_microbatches} microbatches"


def _table(found: Bubble, width: int, look: Style, *, has_kept: bool = True) -> list[Line]:
    names = row_names([(row.rank, row.stages) for row in found.rows], width)
    # The mean stands first, for it is what stays where there are more ranks than lines.
    rows = [("mean", found.mean), *zip(names, (row.parts for row in found.rows), strict=True)]
    columns = [
        Column(""),
        Column("idle", is_number=True),
        Column("ideal", is_number=True, rank=1),
        Column("structural", is_number=True, rank=3),
        Column("imbalance", is_number=True, rank=2),
        Column("excess", is_number=True, rank=2),
    ]
    has_kept = has_kept and any(row.kept for row in found.rows)
    if has_kept:
        columns.append(Column(_IN_FLIGHT_TITLE, is_number=True, rank=4))
    kept = [Line(""), *map(_kept, found.rows)]
    cells: list[list[Cell]] = [
        [
            Line(name.rstrip(), "strong" if parts is found.mean else "muted"),
            Line(_percent(parts.measured), "strong"),
            _percent(parts.ideal),
            _percent(parts.structural),
            _signed(parts.imbalance),
            _signed(parts.excess),
            *([flight] if has_kept else []),
        ]
        for (name, parts), flight in zip(rows, kept, strict=True)
    ]
    return draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)


def _kept(row: BubbleRow) -> Line:
    """What each stage has kept at once; and what the schedule plans, where that differs."""
    text = "+".join(map(str, row.kept))
    if not row.planned or row.kept == row.planned:
        return Line(text, "muted")
    return Line(f"{text} of {'+'.join(map(str, row.planned))}", "warn")


def _bars(found: Bubble, cells: int, look: Style) -> list[Line]:
    """The scale, and a bar for the mean and for each rank."""
    rows = [found.mean, *(row.parts for row in found.rows)]
    scale = _scale(rows)
    end = _percent(scale, digits=0)
    header = Line("0", "muted").pad_to(cells - len(end)).add(end, "muted")
    return [header, *(_bar(parts, scale, cells, look) for parts in rows)]


def _scale(parts: Sequence[Parts]) -> float:
    """Return the share at the right end of the bars: the largest of all, rounded up."""
    top = max((max(each.measured, each.ideal or 0.0) for each in parts), default=0.0)
    step = 0.05 if top <= 0.3 else 0.1
    return min(1.0, max(step, math.ceil(top / step - 1e-9) * step))


def _bar(parts: Parts, scale: float, cells: int, look: Style) -> Line:
    """The parts one after the other, and a mark where the ideal schedule would end.

    Parts may be negative: a slow stage is idle less than the schedule alone would have it. The bar
    ends at what was measured, and each part has what the ones before have left of that.
    """
    glyphs = look.glyphs
    signs: list[tuple[str, Role]] = []
    reached = 0.0
    for name, level in _levels(parts):
        reached = min(parts.measured, max(reached, level))
        pattern = glyphs.bubble.get(name, glyphs.bar_full)
        fill = (pattern, _ROLES.get(name, "bubble"))
        signs += [fill] * (_cells(reached, scale, cells) - len(signs))
    signs += [(" ", "text")] * (cells - len(signs))
    if parts.ideal is not None:
        signs[min(cells - 1, _cells(parts.ideal, scale, cells))] = (glyphs.mark, "strong")
    line = Line()
    for (sign, role), run in itertools.groupby(signs):
        line.add(sign * len(list(run)), role)
    return line


def _levels(parts: Parts) -> list[tuple[str, float]]:
    """Return where each part ends."""
    if parts.structural is None or parts.imbalance is None:
        return [("idle", parts.measured)]
    simulated = parts.structural + parts.imbalance
    return [
        ("structural", min(parts.structural, simulated)),
        ("imbalance", simulated),
        ("excess", parts.measured),
    ]


def _cells(share: float, scale: float, cells: int) -> int:
    return max(0, min(cells, round(share / scale * cells)))


def _legend(found: Bubble, width: int, look: Style) -> list[Line]:
    if found.mean.structural is None:
        return []
    signs = look.glyphs.bubble
    parts = [
        Line(signs[name] * 2, role).add(f" {name}: {_MEANINGS[name]}", "muted")
        for name, role in _ROLES.items()
    ]
    parts.append(Line(look.glyphs.mark, "strong").add(" ideal", "muted"))
    return wrap_facts(parts, width)


def _share(share: float) -> Line:
    return Line(_percent(share), "strong").add(" of total", "muted")


def _percent(share: float | None, *, digits: int = 1) -> str:
    if share is None or not math.isfinite(share):
        return units.UNKNOWN
    return f"{100 * share:.{digits}f}%"


def _signed(share: float | None) -> str:
    """A part that may be negative; what rounds to nothing has no sign."""
    if share is None:
        return units.UNKNOWN
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}%" if rounded else "0.0%"
