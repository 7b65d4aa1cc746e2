"""How drawings look in one terminal, and the parts that all of them share."""

from collections.abc import Iterable

import msgspec

from boltmesh.tui.drawing.glyphs import Glyphs
from boltmesh.tui.drawing.line import Line, Role, fit


class Look(msgspec.Struct, frozen=True):
    """What a drawing must know besides its figures and its size."""

    glyphs: Glyphs
    has_headings: bool = True
    """False where lines are scarce: tables then begin with their column titles."""
    has_signs: bool = True
    """False where words alone are wanted, as for a screen reader."""

    def sign(self, glyph: str) -> str:
        """Return what stands before a word that has a sign."""
        return f"{glyph} " if self.has_signs else ""


def heading(title: str, width: int, look: Look, *, right: Line | None = None) -> Line:
    """A thin rule with the panel's name in it, and the panel's main figure at its right end."""
    rule = look.glyphs.rule
    title = fit(title, max(0, width - 6), ellipsis=look.glyphs.ellipsis)
    line = Line(rule + " ", "faint").add(title, "strong").add(" ")
    room = width - line.width
    if right is not None and right.width and right.width + 4 <= room:
        line.pad_to(width - right.width - 3, rule, "faint")
        line.add(" ").join(right).add(" " + rule, "faint")
    return line.pad_to(width, rule, "faint").crop(width)


def facts(parts: Iterable[Line], width: int) -> Line:
    """Parts side by side, as many of the first as fit whole."""
    known = [part for part in parts if part.width]
    gap = 3 if sum(part.width + 3 for part in known) - 3 <= width else 2
    line = Line()
    for part in known:
        if line.width + (gap if line.width else 0) + part.width > width:
            break
        line.add(" " * gap if line.width else "").join(part)
    return line


def wrap_facts(parts: Iterable[Line], width: int, *, gap: int = 3) -> list[Line]:
    """Parts side by side, in as many lines as they need."""
    lines: list[Line] = []
    for part in parts:
        if lines and lines[-1].width + gap + part.width <= width:
            lines[-1].add(" " * gap).join(part)
        else:
            lines.append(Line().join(part.crop(width)))
    return lines


def labelled(label: str, value: str, role: Role = "text") -> Line:
    """``epoch 2``: a quiet word and its figure."""
    return Line(f"{label} ", "muted").add(value, role)


def spread(left: Line, right: Line, width: int) -> Line:
    """One part at each end of the line; the left one is cut where they would meet."""
    if right.width >= width:
        return right.crop(width)
    left.crop(max(0, width - right.width - 1))
    return left.pad_to(width - right.width).join(right)
