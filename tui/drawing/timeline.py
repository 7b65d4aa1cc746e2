"""Where a replay is in its recording."""

from boltmesh.tui import units
from boltmesh.tui.drawing.bars import bar
from boltmesh.tui.drawing.event_table import clock
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, facts, labelled


def draw_timeline(
    span: tuple[float, float],
    now: float,
    width: int,
    look: Look,
    *,
    is_playing: bool,
    speed: float,
) -> Line:
    """Clock, position and length as words, and what is left of the line as a bar."""
    first, last = span
    position, length = max(0.0, now - first), max(0.0, last - first)
    how = f"replay {speed:g}x" if is_playing else "replay held"
    line = facts(
        [
            Line(how, "accent" if is_playing else "warn"),
            Line(clock(now, now), "strong"),
            labelled("at", f"{units.duration(position)} of {units.duration(length)}"),
        ],
        width,
    )
    room = width - line.width - 3
    if room >= 8:
        line.add("   ").join(bar(position / length if length else 1.0, room, look.glyphs))
    return line.crop(width)
