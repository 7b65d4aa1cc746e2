"""The line that speaks only when something is to be said."""

from boltmesh.tui.drawing.line import Line, fit
from boltmesh.tui.drawing.look import Look
from boltmesh.tui.figures.status import Status, status
from boltmesh.tui.state import State

MAX_LINES = 3


def draw_status(state: State, width: int, height: int, look: Look) -> list[Line]:
    """The status in words, wrapped, with a sign before it; no line where all is well."""
    found = status(state)
    return [] if found is None else _wrap(found, width, look)[:height]


def _wrap(found: Status, width: int, look: Look) -> list[Line]:
    glyphs = look.glyphs
    sign = {
        "muted": glyphs.absent,
        "good": glyphs.finished,
        "warn": "!",
        "bad": glyphs.failed,
    }[found.level]
    room = max(1, width - 2)
    rows = [""]
    for word in Line(found.text).plain.split():
        joined = f"{rows[-1]} {word}".strip()
        if Line(joined).width <= room:
            rows[-1] = joined
        else:
            rows.append(word)
    rows = [row for row in rows if row]
    if len(rows) > MAX_LINES:
        # The mark needs a cell of its own at the end of the last line that is kept.
        rows = [*rows[: MAX_LINES - 1], f"{rows[MAX_LINES - 1]} {rows[MAX_LINES]}"]
    lines = []
    for place, row in enumerate(rows):
        mark = look.sign(sign if place == 0 else " ")
        text = fit(row, room, ellipsis=glyphs.ellipsis)
        lines.append(Line(mark + text, found.level).crop(width))
    return lines
