"""Aligned columns that give way one after the other as the terminal narrows."""

from collections.abc import Sequence

import msgspec

from boltmesh.tui.render.line import Line, Role, fit

GAP = 2


class Column(msgspec.Struct, frozen=True):
    """One column of a table."""

    title: str
    is_number: bool = False
    """Numbers stand at the right edge of their column, under a title that does too."""
    rank: int = 0
    """The columns of the highest rank go first when there is no room; rank 0 never goes."""
    steady_width: int = 0
    """The least width, for text that changes all the time: columns should not jump about."""
    shrinks_to: int | None = None
    """The width down to which text may be cut before any column goes."""


Cell = Line | str
"""Text alone has the role ``text``."""


def draw_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    ellipsis: str,
    header_role: Role = "muted",
) -> list[Line]:
    """Return a header line and one line for each row, none wider than ``width``."""
    lines = [[cell if isinstance(cell, Line) else Line(cell) for cell in row] for row in rows]
    widths = [
        max([len(column.title), column.steady_width, *(line[place].width for line in lines)])
        for place, column in enumerate(columns)
    ]
    kept = _shrink(columns, widths, width)
    header = [Line(column.title, header_role) for column in columns]
    return [_draw_row(columns, row, widths, kept, ellipsis).crop(width) for row in (header, *lines)]


def _shrink(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Narrow ``widths`` in place, then drop columns; return the places of those that stay."""
    kept = list(range(len(columns)))

    def overflow() -> int:
        return sum(widths[place] for place in kept) + GAP * (len(kept) - 1) - width

    # The last columns give way first: they explain what the first ones name.
    for place, column in reversed(list(enumerate(columns))):
        if column.shrinks_to is not None and overflow() > 0:
            least = max(column.shrinks_to, len(column.title))
            widths[place] = max(min(widths[place], least), widths[place] - overflow())
    for rank in sorted({column.rank for column in columns} - {0}, reverse=True):
        for place in reversed(kept.copy()):
            if columns[place].rank == rank and overflow() > 0:
                kept.remove(place)
    return kept


def _draw_row(
    columns: Sequence[Column],
    row: Sequence[Line],
    widths: Sequence[int],
    kept: Sequence[int],
    ellipsis: str,
) -> Line:
    line = Line()
    for place in kept:
        cell, size = row[place], widths[place]
        if line.width or place != kept[0]:
            line.add(" " * GAP)
        if cell.width > size:
            cell = Line(fit(cell.plain, size, ellipsis=ellipsis), cell.spans[0].role)
        start = line.width
        if columns[place].is_number:
            line.add(" " * (size - cell.width))
        line.join(cell)
        if place != kept[-1]:
            line.pad_to(start + size)
    return line
