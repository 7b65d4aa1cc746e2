"""Tables: aligned columns, dropped by rank as the terminal narrows; sorting, selection, scrolling.

Only the rows in the window are drawn, so a table of a thousand rows costs no more than its lines.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from boltmesh.tui.render.line import SELECTED, TITLES, Line, fit
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.view import TableView, first_shown

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
) -> list[Line]:
    """Return a header line and one line for each row, none wider than ``width``."""
    lines = [[cell if isinstance(cell, Line) else Line(cell) for cell in row] for row in rows]
    widths = [
        max([len(column.title), column.steady_width, *(line[place].width for line in lines)])
        for place, column in enumerate(columns)
    ]
    kept = _shrink(columns, widths, width)
    header = [Line(column.title, "muted") for column in columns]
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
    # A wide column that went may have left room for a narrow one.
    dropped = [place for place in range(len(columns)) if place not in kept]
    for place in sorted(dropped, key=lambda place: columns[place].rank):
        if widths[place] + GAP + overflow() <= 0:
            kept = sorted([*kept, place])
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


Row = TypeVar("Row")

AS_IT_COMES: Final = TableView()
"""Nothing was chosen."""

_TITLE = re.compile(r"\S+(?: \S+)*")
_ARROW = re.compile(rf" [{re.escape(''.join((g.up + g.down) for g in (UNICODE, ASCII)))}]$")


class Browsed(NamedTuple):
    """The visible part of a table."""

    header: Line
    lines: list[Line]
    hidden: Line
    """How many rows are out of sight, on which side; empty if there are none."""


def browse(
    columns: Sequence[Column],
    rows: Sequence[Row],
    draw: Callable[[Row], list[Cell]],
    width: int,
    room: int,
    look: Style,
    table: TableView,
    *,
    totals: Sequence[list[Cell]] = (),
) -> Browsed:
    """Return the header and ``room`` of the rows, which are filtered and sorted already.

    A line says so where the filter leaves no row.

    ``totals`` are rows of sums under the others, which neither scroll nor can be selected; they
    count in ``room``.
    """
    room = max(0, room - len(totals))
    first = first_shown(table, len(rows), room)
    shown = rows[first : first + room]
    marked = [_mark(column, table, look) for column in columns]
    cells = [*map(draw, shown), *totals]
    header, *lines = draw_table(marked, cells, width, ellipsis=look.glyphs.ellipsis)
    header.row = TITLES
    for row, line in zip(range(first, first + len(shown)), lines, strict=False):
        line.row = row
    if table.selected is not None and rows:
        at = min(max(0, table.selected), len(rows) - 1) - first
        if 0 <= at < len(shown):
            lines[at] = _selected(lines[at], width)
    if not rows and table.filter.strip() and room:
        lines.insert(
            0, Line(f"nothing fits the filter: {table.filter.strip()}", "muted").crop(width)
        )
    return Browsed(header, lines, _hidden(len(rows), len(shown), first, look))


def _selected(line: Line, width: int) -> Line:
    """Mark a row; what is good or bad in it, and shades of a map, keep their colour."""
    marked = Line()
    marked.row = line.row
    for text, role in line.spans:
        marked.add(text, SELECTED.get(role, "selected"))
    return marked.pad_to(width, role="selected")


def selected_row(rows: Sequence[Row], table: TableView) -> Row | None:
    """Return the row that is selected, if one is."""
    if table.selected is None or not rows:
        return None
    return rows[min(max(0, table.selected), len(rows) - 1)]


def column_at(header: Line, x: int, titles: Sequence[str]) -> str | None:
    """Return the title at cell ``x`` of a drawn header, or the one nearest to it."""
    found: list[tuple[int, str]] = []
    for match in _TITLE.finditer(header.plain):
        text = _ARROW.sub("", match[0])
        # The last title may be cut at the edge of the terminal.
        title = text if text in titles else next((t for t in titles if t.startswith(text)), None)
        if title is not None:
            found.append((max(match.start() - x, x - match.end() + 1, 0), title))
    return min(found, key=lambda item: item[0])[1] if found else None


def _mark(column: Column, table: TableView, look: Style) -> Column:
    if not column.title or column.title != table.sort:
        return column
    arrow = look.glyphs.down if table.is_descending else look.glyphs.up
    return msgspec.structs.replace(column, title=f"{column.title} {arrow}")


def _hidden(total: int, num_shown: int, first: int, look: Style) -> Line:
    below = total - first - num_shown
    parts = [f"{look.glyphs.up} {first} more"] if first else []
    parts += [f"{look.glyphs.down} {below} more"] if below > 0 else []
    return Line("  ".join(parts), "muted")
