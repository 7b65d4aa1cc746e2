"""The newest events, the last at the bottom."""

import time

from boltmesh.tui.drawing.line import Line, Role, fit
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.figures.events import EventRow, event_rows
from boltmesh.tui.state import State

_ROLES: dict[str, Role] = {"warning": "warn", "error": "bad", "end": "strong"}


def draw_events(state: State, width: int, height: int, look: Look) -> list[Line]:
    """As many of the newest events as fit."""
    lines = [heading("events", width, look)] if look.has_headings else []
    room = max(0, height - len(lines))
    rows = event_rows(state.job.events)
    if not rows:
        return [*lines, Line("no events yet", "muted").crop(width)][:height]
    shown = rows[-room:] if room else []
    return [*lines, *(event_line(row, state.job.world_size, width, look) for row in shown)]


def event_line(row: EventRow, world_size: int, width: int, look: Look) -> Line:
    """Time, ranks, kind and message of one event."""
    clock = time.strftime("%H:%M:%S", time.localtime(row.time))
    line = Line(clock, "muted").add("  ").add(_who(row.ranks, world_size).ljust(9), "muted")
    line.add("  ").add(row.kind.ljust(10), _ROLES.get(row.kind, "muted")).add("  ")
    room = max(0, width - line.width)
    return line.add(fit(row.message, room, ellipsis=look.glyphs.ellipsis)).crop(width)


def _who(ranks: tuple[int, ...], world_size: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "all ranks" if len(ranks) == world_size else f"{len(ranks)} ranks"
