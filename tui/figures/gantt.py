"""Who in a pipeline did what and when, in one step."""

from typing import Literal

import msgspec

from boltmesh.telemetry.snapshot import Chunk
from boltmesh.tui.figures.pipelines import PipelineStep, newest_step, slowest_whole_step
from boltmesh.tui.state import State

STUCK_AT_LEAST_S = 15.0
STUCK_IN_WINDOWS = 10.0
"""A step that is begun and goes on no more, for so long, is the one that somebody wants to see."""


class Bar(msgspec.Struct, frozen=True):
    """One chunk; times count from the start of the window that all ranks share."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class GanttRow(msgspec.Struct, frozen=True):
    """One rank of the pipeline."""

    rank: int
    stages: tuple[int, ...]
    bars: tuple[Bar, ...]


class Gantt(msgspec.Struct, frozen=True):
    """One step of one pipeline."""

    step: int
    batch: int
    """Of the optimizer step, from 0."""
    place: dict[str, int]
    """Where this pipeline stands on the other axes."""
    num_pipelines: int
    is_whole: bool
    """False: the step was begun, and its pipeline stands still."""
    window_s: float
    rows: tuple[GanttRow, ...]


def gantt(state: State) -> Gantt | None:
    """Return the newest whole step of the slowest pipeline, or the one in which it got stuck."""
    whole = slowest_whole_step(state.job)
    begun = newest_step(state.job)
    if begun is not None and not begun.is_whole and _is_stuck(state, begun, whole):
        return _draw(begun)
    return None if whole is None else _draw(whole)


def _is_stuck(state: State, begun: PipelineStep, whole: PipelineStep | None) -> bool:
    if whole is not None and (begun.step, begun.batch) <= (whole.step, whole.batch):
        return False
    if state.job.state in {"failed", "crashed"}:
        return True
    patience_s = STUCK_IN_WINDOWS * (whole.window_s if whole is not None else 0.0)
    return state.time - begun.end > max(STUCK_AT_LEAST_S, patience_s)


def _draw(step: PipelineStep) -> Gantt:
    start = step.start
    return Gantt(
        step=step.step,
        batch=step.batch,
        place=step.place,
        num_pipelines=step.num_pipelines,
        is_whole=step.is_whole,
        window_s=step.window_s,
        rows=tuple(
            GanttRow(
                rank=rank,
                stages=tuple(sorted({chunk.stage for chunk in row})),
                bars=tuple(_bar(chunk, start) for chunk in row),
            )
            for rank, row in zip(step.ranks, step.chunks, strict=True)
        ),
    )


def _bar(chunk: Chunk, start: float) -> Bar:
    return Bar(
        kind=chunk.kind,
        stage=chunk.stage,
        microbatch=chunk.microbatch,
        start_s=chunk.start - start,
        end_s=max(chunk.start, chunk.end) - start,
    )
