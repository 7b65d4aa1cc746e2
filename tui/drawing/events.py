"""The newest events in short, the last at the bottom; ``event_table.py`` has all of them."""

from boltmesh.tui.drawing.event_table import KIND_ROLES, clock, who
from boltmesh.tui.drawing.line import Line, fit
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.figures.events import EventRow, timeline
from boltmesh.tui.state import State


def draw_events(state: State, width: int, height: int, look: Look) -> list[Line]:
    """As many of the newest events as fit."""
    lines = [heading("events", width, look)] if look.has_headings else []
    room = max(0, height - len(lines))
    rows = timeline(state)
    if not rows:
        return [*lines, Line("no events yet", "muted").crop(width)][:height]
    shown = rows[-room:] if room else ()
    return [*lines, *(event_line(row, state, width, look) for row in shown)][:height]


def event_line(row: EventRow, state: State, width: int, look: Look) -> Line:
    """Time, ranks, kind and message of one event."""
    line = Line(clock(row.time, state.time), "muted").add("  ")
    line.add(who(row.ranks, state.job.world_size).ljust(9), "muted")
    line.add("  ").add(row.kind.ljust(10), KIND_ROLES.get(row.kind, "muted")).add("  ")
    room = max(0, width - line.width)
    return line.add(fit(row.message, room, ellipsis=look.glyphs.ellipsis)).crop(width)
