"""How a schedule reads: a row of blocks for each rank, and its costs below."""

import math
from typing import NamedTuple

from boltmesh.strategies.pipeline.bubble import Ideal, StageTimes
from boltmesh.strategies.pipeline.kinds import KINDS
from boltmesh.tui.drawing.gantt import draw_rows
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.drawing.pipeline import row_names
from boltmesh.tui.drawing.words import sentence
from boltmesh.tui.figures.gantt import Bar, GanttRow

MOST_CELLS = 12
"""Of the shortest block: more would be no clearer."""
LEAST_CELLS_OF_TICK = 6


class _Scale(NamedTuple):
    """How much of a step is shown, and how large."""

    cells_per_time: float
    shown: float
    """Up to this time."""
    needed_width: int
    """Of a terminal that shows all."""


def draw_schedule(
    ideal: Ideal, times: StageTimes, advice: str, width: int, look: Look
) -> list[str]:
    """The lines, none longer than ``width``."""
    rows = _rows(ideal)
    names, scale = _names_and_scale(ideal, rows, width)
    cells = round(scale.shown * scale.cells_per_time)
    drawn = draw_rows(rows, names, scale.shown, cells, width, look)
    lines = [*sentence(_title(ideal, times), width, look), Line(), *drawn.rows]
    lines.append(_axis(scale, len(names[0]), width))
    lines += drawn.legend
    if scale.shown < ideal.window:
        cut = (
            f"Cut at {scale.shown:g} of {ideal.window:g}: the whole needs "
            f"{scale.needed_width} columns."
        )
        lines += sentence(cut, width, look)
    lines.append(Line())
    for label, text in _facts(ideal, advice):
        lines += sentence(text, width, look, mark=label.ljust(13), max_lines=8)
    return [line.crop(width).plain.rstrip() for line in lines]


def _rows(ideal: Ideal) -> list[GanttRow]:
    return [
        GanttRow(
            rank=rank,
            stages=ideal.table.stages_of(rank),
            bars=tuple(
                Bar(
                    kind=slot.action.kind,  # type: ignore[arg-type]
                    stage=slot.action.stage,
                    microbatch=slot.action.microbatch,
                    start_s=slot.start,
                    end_s=slot.end,
                )
                for slot in row
            ),
        )
        for rank, row in enumerate(ideal.timetable)
    ]


def _names_and_scale(ideal: Ideal, rows: list[GanttRow], width: int) -> tuple[list[str], _Scale]:
    """Name the rows by number alone where that leaves room for the whole."""
    ranks = [(row.rank, row.stages) for row in rows]
    names = row_names(ranks, width)
    scale = _scale(ideal, len(names[0]), width)
    if scale.shown < ideal.window:
        short = row_names(ranks, 0)
        closer = _scale(ideal, len(short[0]), width)
        if closer.shown == ideal.window:
            return short, closer
    return names, scale


def _scale(ideal: Ideal, indent: int, width: int) -> _Scale:
    """As large as fits whole; where numbers would not fit into the blocks, the first part."""
    shortest = min(slot.end - slot.start for row in ideal.timetable for slot in row)
    # A number, and one cell at least of the pattern that says what the block is.
    least = len(str(ideal.table.num_microbatches - 1)) + 1
    room = max(least, width - indent)
    fitting = math.floor(room * shortest / ideal.window)
    cells = min(MOST_CELLS, max(least, fitting))
    whole = math.ceil(ideal.window * cells / shortest)
    if whole <= room:
        return _Scale(cells / shortest, ideal.window, indent + whole)
    shortest_name = len(f"r{ideal.table.num_ranks - 1} ")
    needed = shortest_name + math.ceil(ideal.window * least / shortest)
    return _Scale(cells / shortest, room // cells * shortest, needed)


def _axis(scale: _Scale, indent: int, width: int) -> Line:
    """Times, at round numbers."""
    least = LEAST_CELLS_OF_TICK / scale.cells_per_time
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= least)
    line = Line()
    for tick in range(math.floor(scale.shown / step + 1e-9) + 1):
        text = f"{tick * step:g}"
        at = indent + round(tick * step * scale.cells_per_time)
        if at + len(text) <= width:
            line.pad_to(at).add(text, "muted")
    return line


def _title(ideal: Ideal, times: StageTimes) -> str:
    table = ideal.table
    stages = f"{table.num_stages} stage{'s' if table.num_stages != 1 else ''}"
    ranks = f"{table.num_ranks} rank{'s' if table.num_ranks != 1 else ''}"
    count = f"{table.num_microbatches} microbatch{'es' if table.num_microbatches != 1 else ''}"
    return (
        f"{table.name}: {stages} on {ranks}, {count}; through a stage, forward "
        f"{times.forward:g} and backward {times.backward:g}"
    )


def _facts(ideal: Ideal, advice: str) -> list[tuple[str, str]]:
    table = ideal.table
    peaks = ", ".join(map(str, ideal.peak_live_activations))
    first = ""
    if table.stages_per_rank > 1:
        first = f"; rank 0 has {', '.join(map(str, table.stages_of(0)))}"
    facts = [
        (
            "bubble",
            f"{ideal.bubble:.1%} of total, {ideal.bubble_of_ideal:.1%} of ideal (idle/busy)",
        ),
        ("peak live", f"{peaks} activations by rank, each of a microbatch in a stage"),
        ("stages", f"{table.num_stages}, {table.stages_per_rank} on each rank{first}"),
    ]
    note = KINDS[table.name].note
    if note:
        facts.append(("note", f"{note}."))
    facts.append(("next", advice))
    return facts
