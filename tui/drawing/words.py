"""Sentences in as many lines as they need."""

from boltmesh.tui.drawing.line import Line, Role, fit
from boltmesh.tui.drawing.look import Look


def sentence(
    text: str, width: int, look: Look, *, mark: str = "", role: Role = "text", max_lines: int = 3
) -> list[Line]:
    """Wrap ``text`` at its blanks; the lines after the first stand in from the mark.

    What does not fit into ``max_lines`` is cut off, and the end shows that.
    """
    if width < 1 or max_lines < 1:
        return []
    indent = Line(mark).width
    room = max(1, width - indent)
    rows = [""]
    for word in Line(text).plain.split():
        joined = f"{rows[-1]} {word}" if rows[-1] else word
        # What is left over for the last line is cut there.
        if Line(joined).width <= room or len(rows) == max_lines:
            rows[-1] = joined
        else:
            rows.append(word)
    lines = []
    for place, row in enumerate(rows):
        line = Line(mark if place == 0 else " " * indent, role)
        lines.append(line.add(fit(row, room, ellipsis=look.glyphs.ellipsis), role).crop(width))
    return lines
