"""Figures in one line: a bar, a stacked bar, a sparkline."""

import math
from collections.abc import Sequence

from boltmesh.telemetry.snapshot import PhaseTime
from boltmesh.tui.drawing.glyphs import Glyphs
from boltmesh.tui.drawing.line import Line, Role


def bar(fraction: float, width: int, glyphs: Glyphs, *, role: Role = "accent") -> Line:
    """A share of ``width``, in steps of half a cell."""
    share = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 0.0
    halves = round(share * width * 2)
    full, half = divmod(halves, 2)
    line = Line(glyphs.bar_full * full + glyphs.bar_half * half, role)
    return line.pad_to(width, glyphs.bar_rest, "faint")


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> Line:
    """The newest ``width`` values as columns from zero to their maximum, at the right edge."""
    values = values[-width:] if width > 0 else ()
    top = max(values, default=0.0)
    last = len(glyphs.levels) - 1
    columns = "".join(
        glyphs.levels[round(max(0.0, value) / top * last) if top > 0 else 0] for value in values
    )
    return Line(" " * (width - len(columns))).add(columns, "faint")


def stacked_bar(phases: Sequence[PhaseTime], width: int, glyphs: Glyphs) -> Line:
    """Phases side by side, in cells by the largest remainder, so that they fill ``width``.

    A phase that takes time but less than a cell is left to the legend.
    """
    total = sum(phase.seconds for phase in phases)
    line = Line()
    if total <= 0 or width <= 0:
        return line
    exact = [phase.seconds / total * width for phase in phases]
    cells = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: cells[place] - exact[place])
    for place in by_remainder[: width - sum(cells)]:
        cells[place] += 1
    for phase, size in zip(phases, cells, strict=True):
        line.add(glyphs.phases[phase.name] * size, phase_role(phase.name))
    return line


def phase_role(name: str) -> Role:
    """Return the role that colours a phase; roles carry the names of the phases."""
    roles: dict[str, Role] = {
        "data": "data",
        "transfer": "transfer",
        "forward": "forward",
        "backward": "backward",
        "communication": "communication",
        "optimizer": "optimizer",
        "validation": "validation",
        "checkpoint": "checkpoint",
    }
    return roles.get(name, "other")
