"""Samples and tokens a second, now and over the recent past."""

from collections.abc import Sequence

from boltmesh.tui import units
from boltmesh.tui.drawing.bars import sparkline
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, facts, heading, labelled
from boltmesh.tui.figures.throughput import Unit, throughput, throughput_over_time
from boltmesh.tui.state import State

_UNITS: tuple[Unit, ...] = ("samples", "tokens")
_FIGURE_WIDTH = 10
_SPARKLINE_FROM_WIDTH = 8


def draw_throughput(state: State, width: int, height: int, look: Look) -> list[Line]:
    """A line for each unit that the job counts, or all of them in the only line there is."""
    known: list[Unit] = [unit for unit in _UNITS if throughput(state.job, unit) is not None] or [
        "samples"
    ]
    if height == 1 and len(known) > 1:
        return [_draw_side_by_side(state, known, width, look)]
    lines = [_draw(state, unit, width, look) for unit in known]
    if look.has_headings and height > len(lines):
        lines.insert(0, heading("throughput", width, look))
    return lines[:height]


def _draw_side_by_side(state: State, known: Sequence[Unit], width: int, look: Look) -> Line:
    cells = (width - 2) // len(known)
    parts = [_draw(state, unit, cells, look) for unit in known]
    if all(part.width == cells for part in parts):
        return facts(parts, width)
    return facts(
        [
            labelled(f"{unit}/s", units.rate(throughput(state.job, unit)), "strong")
            for unit in known
        ],
        width,
    )


def _draw(state: State, unit: Unit, width: int, look: Look) -> Line:
    """Label and figure, and a sparkline where it fits; figures are never cut."""
    line = Line(f"{unit}/s".ljust(9), "muted")
    line.add(units.rate(throughput(state.job, unit)).rjust(_FIGURE_WIDTH), "strong")
    room = width - line.width - 2
    if room >= _SPARKLINE_FROM_WIDTH:
        values = throughput_over_time(state.job, unit, buckets=room)
        line.add("  ").join(sparkline(values, room, look.glyphs))
    return line
