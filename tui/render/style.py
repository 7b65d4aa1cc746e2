"""How drawings look in one terminal, and the parts that all of them share.

``Glyphs`` are the characters of drawings: blocks and dots, or plain ASCII. Everything that has a
colour also has a shape or a word, in both sets. ``sentence`` writes text in as many lines as it
needs.
"""

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Final

import msgspec
from rich.cells import cell_len

from boltmesh.telemetry.snapshot import MEMORY_KINDS, PHASES
from boltmesh.tui.render.line import Line, Role, fit

CHUNK_KINDS: Final = ("F", "B", "I", "W")
BUBBLE_PARTS: Final = ("structural", "imbalance", "excess")


class Glyphs(msgspec.Struct, frozen=True):
    """One set of characters, each one cell wide."""

    is_ascii: bool
    rule: str
    ellipsis: str
    times: str
    dot: str
    """Between two facts on one line."""
    bar_full: str
    bar_half: str
    bar_rest: str
    levels: str
    """A sparkline's columns, lowest first."""
    shades: str
    """A heat map's cells, lowest first."""
    phases: MappingProxyType[str, str]
    """The pattern of each phase in the stacked bar, and of a pipeline's bubble."""
    kinds: MappingProxyType[str, str]
    """The pattern of each kind of memory in the stacked bar."""
    chunks: MappingProxyType[str, str]
    """The pattern of each kind of pipeline chunk: forward, backward, for input, for weights."""
    idle: str
    bubble: MappingProxyType[str, str]
    """The pattern of each part of a bubble."""
    mark: str
    """A place on a bar."""
    running: str
    finished: str
    failed: str
    absent: str
    equal: str
    differs: str
    up: str
    down: str
    cursor: str


def _patterns(names: tuple[str, ...], characters: str) -> MappingProxyType[str, str]:
    return MappingProxyType(dict(zip(names, characters, strict=True)))


UNICODE: Final = Glyphs(
    is_ascii=False,
    rule="─",
    ellipsis="…",
    times="×",  # noqa: RUF001 (the sign is meant)
    dot="·",
    bar_full="━",
    bar_half="╸",
    bar_rest="─",
    levels="▁▂▃▄▅▆▇█",
    shades="·░▒▓█",
    phases=_patterns((*PHASES, "bubble"), "░:█▓▒▚=#-·"),
    kinds=_patterns(MEMORY_KINDS, "█▓▒=░+:▚"),
    chunks=_patterns(CHUNK_KINDS, "░█▓▚"),
    idle="·",
    bubble=_patterns(BUBBLE_PARTS, "█▒░"),
    mark="┃",
    running="●",
    finished="✓",
    failed="✗",
    absent="○",
    equal="✓",
    differs="≠",
    up="↑",
    down="↓",
    cursor="▸",
)

ASCII: Final = Glyphs(
    is_ascii=True,
    rule="-",
    ellipsis="~",
    times="x",
    dot="|",
    bar_full="#",
    bar_half="+",
    bar_rest=".",
    levels="_.-=*#",
    shades="0123456789",
    phases=_patterns((*PHASES, "bubble"), "dtFBcoVk-."),
    kinds=_patterns(MEMORY_KINDS, "PGObaCc-"),
    chunks=_patterns(CHUNK_KINDS, "-=+#"),
    idle=".",
    bubble=_patterns(BUBBLE_PARTS, "#=-"),
    mark="|",
    running="*",
    finished="v",
    failed="X",
    absent="o",
    equal="=",
    differs="!",
    up="^",
    down="v",
    cursor=">",
)


_HEAT_ROLES: tuple[Role, ...] = ("heat1", "heat2", "heat3", "heat4", "heat5")


class Style(msgspec.Struct, frozen=True):
    """Options of a drawing besides its data and its size."""

    glyphs: Glyphs
    has_headings: bool = True
    """False where lines are scarce: tables then begin with their column titles."""
    has_signs: bool = True
    """False where words alone are wanted, as for a screen reader."""

    def shade(self, level: float, *, is_bad_high: bool = True) -> tuple[str, Role]:
        """Return the sign and the role of a place on a scale from 0 to 1; its bad end is warm."""
        shades = self.glyphs.shades
        sign = shades[min(len(shades) - 1, int(level * len(shades)))]
        place = min(len(_HEAT_ROLES) - 1, int(level * len(_HEAT_ROLES)))
        return sign, _HEAT_ROLES[place if is_bad_high else -1 - place]

    def sign(self, glyph: str) -> str:
        """Return the prefix of a word that has a sign."""
        return f"{glyph} " if self.has_signs else ""


def heading(title: Line | str, width: int, look: Style, *, right: Line | None = None) -> Line:
    """A thin rule with the panel's name in it, and the panel's main figure at its right end."""
    rule = look.glyphs.rule
    room = max(0, width - 6)
    if not isinstance(title, Line) or title.width > room:
        text = title.plain if isinstance(title, Line) else title
        title = Line(fit(text, room, ellipsis=look.glyphs.ellipsis), "strong")
    line = Line(rule + " ", "faint").join(title).add(" ")
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


def in_pieces(words: Iterable[str], width: int) -> Iterator[str]:
    """Yield the words, those that are wider than a line in parts: a path must not be cut."""
    for word in words:
        rest = word
        while cell_len(rest) > width:
            piece = Line(rest).crop(width).plain.rstrip() or rest[0]
            yield piece
            rest = rest[len(piece) :]
        if rest:
            yield rest


def sentence(
    text: str,
    width: int,
    look: Style,
    *,
    mark: str = "",
    role: Role = "text",
    max_lines: int | None = 3,
) -> list[Line]:
    """Wrap ``text`` at its blanks; the lines after the first stand in from the mark.

    What does not fit into ``max_lines`` is cut off, and the end shows that. None: nothing is cut.
    """
    if width < 1 or (max_lines is not None and max_lines < 1):
        return []
    indent = Line(mark).width
    room = max(1, width - indent)
    rows = [""]
    words = Line(text).plain.split()
    for word in in_pieces(words, room) if max_lines is None else words:
        joined = f"{rows[-1]} {word}" if rows[-1] else word
        # Text that does not fit into the last line is cut there.
        if Line(joined).width <= room or len(rows) == max_lines:
            rows[-1] = joined
        else:
            rows.append(word)
    lines = []
    for place, row in enumerate(rows):
        line = Line(mark if place == 0 else " " * indent, role)
        lines.append(line.add(fit(row, room, ellipsis=look.glyphs.ellipsis), role).crop(width))
    return lines
