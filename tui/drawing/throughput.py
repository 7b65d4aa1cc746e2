"""Samples and tokens a second, now and over the recent past."""

from boltmesh.tui import units
from boltmesh.tui.drawing.bars import sparkline
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading, spread
from boltmesh.tui.figures.throughput import Unit, throughput, throughput_over_time
from boltmesh.tui.state import State

_UNITS: tuple[Unit, ...] = ("samples", "tokens")
_FIGURE_WIDTH = 10


def draw_throughput(state: State, width: int, height: int, look: Look) -> list[Line]:
    """A line for each unit that the job counts; both share one line where there is only one."""
    known = [unit for unit in _UNITS if throughput(state.job, unit) is not None] or ["samples"]
    if height == 1 and len(known) > 1:
        cells = width // len(known)
        left, right = (_draw(state, unit, cells - 1, look) for unit in _UNITS)
        return [spread(left, right, width)]
    lines = [_draw(state, unit, width, look) for unit in known]
    if look.has_headings and height > len(lines):
        lines.insert(0, heading("throughput", width, look))
    return lines[:height]


def _draw(state: State, unit: str, width: int, look: Look) -> Line:
    known: Unit = "tokens" if unit == "tokens" else "samples"
    line = Line(f"{known}/s".ljust(9), "muted")
    figure = units.rate(throughput(state.job, known))
    line.add(figure.rjust(_FIGURE_WIDTH), "strong")
    room = width - line.width - 2
    if room >= 8:
        values = throughput_over_time(state.job, known, buckets=room)
        line.add("  ").join(sparkline(values, room, look.glyphs))
    return line.crop(width)
