"""Samples and tokens a second, now and in the recent past, and how much of the devices is used."""

from collections.abc import Sequence

from boltmesh.tui import units
from boltmesh.tui.drawing.bars import bar, sparkline
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, facts, heading, labelled
from boltmesh.tui.figures.flops import Flops, job_flops
from boltmesh.tui.figures.throughput import Unit, throughput, throughput_over_time
from boltmesh.tui.state import State

_UNITS: tuple[Unit, ...] = ("samples", "tokens")
_LABEL_WIDTH = 9
_FIGURE_WIDTH = 10
_SPARKLINE_FROM_WIDTH = 8


def draw_throughput(state: State, width: int, height: int, look: Look) -> list[Line]:
    """A line for each unit that the job counts, or all of them in the only line there is."""
    known: list[Unit] = [unit for unit in _UNITS if throughput(state.job, unit) is not None] or [
        "samples"
    ]
    flops = job_flops(state.job)
    if height == 1 and len(known) + (flops is not None) > 1:
        return [_draw_side_by_side(state, known, flops, width, look)]
    lines = [_draw(state, unit, width, look) for unit in known]
    if flops is not None:
        lines.append(_draw_flops(flops, width, look))
    if look.has_headings and height > len(lines):
        lines.insert(0, heading("throughput", width, look))
    return lines[: max(0, height)]


def flops_words(flops: Flops) -> tuple[str, str]:
    """Return what is counted and its figure: the share of the peak where that is known."""
    if flops.utilization is None:
        return "compute", units.flops(flops.per_second)
    return "MFU", f"{flops.utilization:.1%}"


def _draw_side_by_side(
    state: State, known: Sequence[Unit], flops: Flops | None, width: int, look: Look
) -> Line:
    cells = (width - 2) // len(known)
    parts = [_draw(state, unit, cells, look) for unit in known]
    if flops is None and all(part.width == cells for part in parts):
        return facts(parts, width)
    parts = [
        labelled(f"{unit}/s", units.rate(throughput(state.job, unit)), "strong") for unit in known
    ]
    if flops is not None:
        parts.append(labelled(*flops_words(flops), "strong"))
    return facts(parts, width)


def _draw_flops(flops: Flops, width: int, look: Look) -> Line:
    """Label and figure, a bar of the share, and the rate that it stands for."""
    label, figure = flops_words(flops)
    line = Line(label.ljust(_LABEL_WIDTH), "muted")
    line.add(figure.rjust(_FIGURE_WIDTH), "strong")
    if flops.utilization is None:
        return line.crop(width)
    rate = Line(units.flops(flops.per_second), "muted")
    room = width - line.width - rate.width - 4
    if room >= _SPARKLINE_FROM_WIDTH:
        line.add("  ").join(bar(flops.utilization, room, look.glyphs))
    if line.width + 2 + rate.width <= width:
        line.add("  ").join(rate)
    return line.crop(width)


def _draw(state: State, unit: Unit, width: int, look: Look) -> Line:
    """Label and figure, and a sparkline where it fits; figures are never cut."""
    line = Line(f"{unit}/s".ljust(_LABEL_WIDTH), "muted")
    line.add(units.rate(throughput(state.job, unit)).rjust(_FIGURE_WIDTH), "strong")
    room = width - line.width - 2
    if room >= _SPARKLINE_FROM_WIDTH:
        values = throughput_over_time(state.job, unit, buckets=room)
        line.add("  ").join(sparkline(values, room, look.glyphs))
    return line.crop(width)
