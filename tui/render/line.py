"""A line of text in spans, each with a role instead of a colour.

Every drawing is made of these, and :meth:`Line.add` is the only way to put text into one. So text
that came from a job is cleaned on every path to a terminal, and the theme alone decides on colours.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from rich.cells import cell_len, set_cell_size
from typing_extensions import Self

from boltmesh.tui.sanitize import clean

Role = Literal[
    "text",
    "strong",
    "muted",
    "faint",
    "accent",
    "good",
    "warn",
    "bad",
    "chart",
    "selected",
    "selected good",
    "selected warn",
    "selected bad",
    "selected heat1",
    "selected heat2",
    "selected heat3",
    "selected heat4",
    "selected heat5",
    "data",
    "transfer",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "validation",
    "checkpoint",
    "other",
    "bubble",
    "heat1",
    "heat2",
    "heat3",
    "heat4",
    "heat5",
]
"""Meaning of a span. The names of phases stand for the colour of that phase, the heats from the
least to the most for the shades of a map."""

SELECTED: Final[Mapping[Role, Role]] = {
    "good": "selected good",
    "warn": "selected warn",
    "bad": "selected bad",
    "heat1": "selected heat1",
    "heat2": "selected heat2",
    "heat3": "selected heat3",
    "heat4": "selected heat4",
    "heat5": "selected heat5",
}
"""Roles that keep their colour where a row is selected."""


class Span(NamedTuple):
    """Text of one role."""

    text: str
    role: Role


TITLES: Final = -1
"""The row of the line of titles."""


class Line:
    """Spans from left to right; ``width`` counts terminal cells, not characters."""

    __slots__ = ("row", "spans", "width")

    def __init__(self, text: str = "", role: Role = "text") -> None:
        self.spans: list[Span] = []
        self.width = 0
        self.row: int | None = None
        """The row of a table that it shows, counted as ``TableView.selected`` counts, or TITLES."""
        self.add(text, role)

    def add(self, text: str, role: Role = "text") -> Self:
        """Append cleaned text."""
        text = clean(text)
        if text:
            self.spans.append(Span(text, role))
            self.width += cell_len(text)
        return self

    def join(self, other: "Line") -> Self:
        """Append the spans of another line."""
        self.spans += other.spans
        self.width += other.width
        return self

    def pad_to(self, column: int, fill: str = " ", role: Role = "text") -> Self:
        """Fill up to ``column``; nothing happens where the line is that long already."""
        if column > self.width:
            self.add(fill * (column - self.width), role)
        return self

    def crop(self, width: int) -> Self:
        """Cut off what lies beyond ``width`` cells."""
        if self.width <= width:
            return self
        kept: list[Span] = []
        room = max(0, width)
        for text, role in self.spans:
            size = cell_len(text)
            if size > room:
                # A wide character that does not fit whole is replaced by a blank.
                kept.append(Span(set_cell_size(text, room), role))
                break
            kept.append(Span(text, role))
            room -= size
        self.spans = [span for span in kept if span.text]
        self.width = min(self.width, max(0, width))
        return self

    @property
    def plain(self) -> str:
        """The text alone."""
        return "".join(text for text, _ in self.spans)


def fit(text: str, width: int, *, ellipsis: str) -> str:
    """Return ``text`` cleaned and in at most ``width`` cells, with a mark where it was cut."""
    text = clean(text)
    if cell_len(text) <= width:
        return text
    room = width - cell_len(ellipsis)
    if room <= 0:
        return set_cell_size(text, max(0, width)).rstrip()
    return set_cell_size(text, room).rstrip() + ellipsis


def fit_end(text: str, width: int, *, ellipsis: str) -> str:
    """Return ``text`` as ``fit`` does, but cut at its beginning: of a long name the end counts."""
    text = clean(text)
    if cell_len(text) <= width:
        return text
    room = width - cell_len(ellipsis)
    if room <= 0:
        return fit(text, width, ellipsis=ellipsis)
    while cell_len(text) > room:
        text = text[1:]
    return ellipsis + text


def to_ascii(text: str) -> str:
    """Return ``text`` with a ``?`` for every cell that ASCII cannot show, so columns stay put."""
    if text.isascii():
        return text
    return "".join(
        character if character.isascii() else "?" * cell_len(character) for character in text
    )
