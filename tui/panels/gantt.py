"""A step of the pipeline over time: a row for each rank, a block for each microbatch.

Where ranks have several stages and blocks are too short to name them, each stage has a row of its
own, if there is room for so many. A block that is too short for its number has it in the line
below, if there is room for such lines.

Blocks are slots of :mod:`boltmesh.schedule_sim`; ``boltmesh schedule`` draws simulated ones.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from boltmesh.schedule_sim import Action, Slot
from boltmesh.telemetry.snapshot import Chunk
from boltmesh.telemetry.stall import STALL_AT_LEAST_S
from boltmesh.tui import units
from boltmesh.tui.metrics.pipelines import PipelineStep, newest_step, slowest_whole_step
from boltmesh.tui.render.line import Line, Role
from boltmesh.tui.render.ranks import fit_rows, nothing_to_show, row_names, step_text
from boltmesh.tui.render.style import Style, heading, wrap_facts
from boltmesh.tui.state import State

STUCK_IN_WINDOWS = 10.0
"""An unfinished step is shown once it has been idle for so long, and for STALL_AT_LEAST_S."""


class GanttRow(msgspec.Struct, frozen=True):
    """One rank of the pipeline."""

    rank: int
    stages: tuple[int, ...]
    slots: tuple[Slot, ...]
    """Times count from the start of the window that all ranks share."""


class Gantt(msgspec.Struct, frozen=True):
    """One step of one pipeline."""

    step: int
    batch: int
    """Number of the batch within the optimizer step, from 0."""
    place: dict[str, int]
    """Place of this pipeline on the other axes."""
    num_pipelines: int
    is_whole: bool
    """False: the step was begun, and its pipeline makes no progress."""
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
    if state.job.state == "finished":  # an asynchronous schedule ends with a part of a step
        return False
    if state.job.state in {"failed", "crashed"}:
        return True
    patience_s = STUCK_IN_WINDOWS * (whole.window_s if whole is not None else 0.0)
    return state.time - begun.end > max(STALL_AT_LEAST_S, patience_s)


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
                slots=tuple(_slot(chunk, start) for chunk in row),
            )
            for rank, row in zip(step.ranks, step.chunks, strict=True)
        ),
    )


def _slot(chunk: Chunk, start: float) -> Slot:
    action = Action(chunk.stage, chunk.kind, chunk.microbatch)
    return Slot(action, chunk.start - start, max(chunk.start, chunk.end) - start)


_ROLES: dict[str, Role] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "optimizer",
}
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
Placed = tuple[Slot, int, int]
"""A slot, its first cell, and how many it has."""
Texts = Callable[[Action], str]
LINES_WITH_AXIS = 3
LINES_WITH_LEGEND = 5


def draw_gantt(state: State, width: int, height: int, look: Style) -> list[Line]:
    """The rows and, if there is room, a time axis and the key of the signs."""
    found = gantt(state)
    if found is None:
        return nothing_to_show(state, "last step", width, height, look)
    lines = [heading(_title(found), width, look)] if look.has_headings and height >= 2 else []
    room = max(0, height - len(lines))
    axis, legend = int(room >= LINES_WITH_AXIS), int(room >= LINES_WITH_LEGEND)
    room -= axis + legend
    rows = found.rows
    num_stages = sum(len(row.stages) for row in rows)
    if len(rows) < num_stages <= room and not _names_stages(rows, found.window_s, width):
        rows = tuple(part for row in rows for part in _by_stage(row))
    names = row_names([(row.rank, row.stages) for row in rows], width)
    cells = width - len(names[0])
    has_room = 2 * len(rows) <= room
    drawn = draw_rows(rows, names, found.window_s, cells, width, look, has_room=has_room)
    lines += fit_rows(drawn.rows, room, width)
    if axis:
        lines.append(_axis(found.window_s, len(names[0]), width))
    if legend:
        lines += drawn.legend[:1]
    return [line.crop(width) for line in lines[:height]]


def _names_stages(rows: Sequence[GanttRow], window_s: float, width: int) -> bool:
    """Whether each block of a row has room for the name of its stage."""
    names = row_names([(row.rank, row.stages) for row in rows], width)
    placed = [_place(row.slots, window_s, width - len(names[0])) for row in rows]
    return _texts(rows, placed) is _stage_and_microbatch


class GanttRows(NamedTuple):
    """Rows of blocks, and the key of their signs."""

    rows: list[Line]
    legend: list[Line]


def draw_rows(
    rows: Sequence[GanttRow],
    names: Sequence[str],
    window_s: float,
    cells: int,
    width: int,
    look: Style,
    *,
    has_room: bool = False,
) -> GanttRows:
    """The blocks of each rank behind its name, within a number of cells; later ones are left out.

    Args:
        rows: One for each rank, or for each of its stages.
        names: Labels of the rows, all equally long.
        window_s: Seconds that the cells stand for.
        cells: Number of cells of a row.
        width: Columns of the legend.
        look: How to draw.
        has_room: Each row may have a second line.
    """
    placed = [_place(row.slots, window_s, cells) for row in rows]
    texts = _texts(rows, placed)
    drawn: list[Line] = []
    for row, name, blocks in zip(rows, names, placed, strict=True):
        drawn.append(Line(name, "muted").join(_row(row, blocks, cells, texts, look)))
        below = _below(row, blocks, texts) if has_room else ""
        if below:
            drawn.append(Line(" " * len(name)).add(below, "muted"))
    return GanttRows(drawn, _legend(rows, width, look, texts))


def _by_stage(row: GanttRow) -> list[GanttRow]:
    """Return a row for each stage, which still has the slots of the others."""
    return [msgspec.structs.replace(row, stages=(stage,)) for stage in row.stages]


def _title(found: Gantt) -> str:
    word = "last step" if found.is_whole else "the step in which it stopped"
    return f"{word}: {step_text(found.step, found.batch, found.place, found.num_pipelines)}"


def _row(row: GanttRow, placed: Sequence[Placed], cells: int, texts: Texts, look: Style) -> Line:
    line = Line()
    drawn = 0
    for (action, _, _), first, size in placed:
        line.add(look.glyphs.idle * (first - drawn), "faint")
        drawn = first + size
        if action.stage not in row.stages:  # the rank is busy, in the row of another stage
            line.add(" " * size)
            continue
        text = texts(action) if _has_text_inside(action, size, texts) else ""
        kind = action.kind
        line.add(text + look.glyphs.chunks[kind] * (size - len(text)), _ROLES[kind])
    return line.add(look.glyphs.idle * (cells - drawn), "faint")


def _has_text_inside(action: Action, size: int, texts: Texts) -> bool:
    # One cell at least keeps the pattern, which distinguishes a forward from a backward.
    return len(texts(action)) < size


def _below(row: GanttRow, placed: Sequence[Placed], texts: Texts) -> str:
    """Return the names of blocks that are too short for them, each under its block."""
    text = ""
    gap = int(any(len(texts(slot.action)) > 1 for slot, _, _ in placed))
    for (action, _, _), first, size in placed:
        if action.stage not in row.stages or _has_text_inside(action, size, texts):
            continue
        if first >= len(text) + (gap if text else 0):
            text = text.ljust(first) + texts(action)
    return text


def _microbatch(action: Action) -> str:
    return str(action.microbatch)


def _stage_and_microbatch(action: Action) -> str:
    return f"{action.stage}.{action.microbatch}"


def _texts(rows: Sequence[GanttRow], placed: Sequence[Sequence[Placed]]) -> Texts:
    """Name the stage too where ranks have several, if each of the blocks has room for that."""
    if all(len(row.stages) <= 1 for row in rows):
        return _microbatch
    fits = all(
        _has_text_inside(slot.action, size, _stage_and_microbatch)
        for row in placed
        for slot, _, size in row
    )
    return _stage_and_microbatch if fits else _microbatch


def _place(slots: Sequence[Slot], window_s: float, cells: int) -> list[Placed]:
    """Return the slots that have a cell, with their first cell and their number of cells.

    Every edge is rounded by itself, so rounding errors do not add up along a row.
    """
    if window_s <= 0 or cells < 1:
        return []
    placed = []
    free = 0
    for slot in slots:
        first = max(free, round(slot.start / window_s * cells))
        last = min(cells, round(slot.end / window_s * cells))
        if last > first:
            placed.append((slot, first, last - first))
            free = last
    return placed


def _axis(window_s: float, indent: int, width: int) -> Line:
    """The start, the end, and as many times between as have room."""
    cells = width - indent
    end = units.seconds(window_s)
    line = Line(" " * indent)
    parts = max(1, min(4, cells // (3 * len(end))))
    for part in range(parts):
        text = "0" if part == 0 else units.seconds(window_s * part / parts)
        line.pad_to(indent + cells * part // parts).add(text, "muted")
    return line.pad_to(width - len(end)).add(end, "muted")


def _legend(rows: Sequence[GanttRow], width: int, look: Style, texts: Texts) -> list[Line]:
    kinds = {slot.action.kind for row in rows for slot in row.slots}
    digits = "digits: stage.microbatch" if texts is _stage_and_microbatch else "digits: microbatch"
    parts = [
        Line(look.glyphs.chunks[kind] * 2, _ROLES[kind]).add(f" {_WORDS[kind]}", "muted")
        for kind in "FBIW"
        if kind in kinds
    ]
    parts.append(Line(look.glyphs.idle * 2, "faint").add(" idle", "muted"))
    return wrap_facts([*parts, Line(digits, "muted")], width)
