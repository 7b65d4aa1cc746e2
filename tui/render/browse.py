"""A table that is scrolled, sorted and selected from: the window of it that is on the screen.

Only the rows in the window are drawn, so a table of a thousand rows costs no more than its lines.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.view import TableView, first_shown

Row = TypeVar("Row")

AS_IT_COMES: Final = TableView()
"""Nothing was chosen."""

_TITLE = re.compile(r"\S+(?: \S+)*")
_ARROW = re.compile(rf" [{re.escape(''.join((g.up + g.down) for g in (UNICODE, ASCII)))}]$")


class Browsed(NamedTuple):
    """What is seen of a table."""

    header: Line
    lines: list[Line]
    hidden: Line
    """How many rows are out of sight, on which side; empty where there are none."""


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

    ``totals`` are rows of sums under the others, which neither scroll nor can be selected; they
    count in ``room``.
    """
    room = max(0, room - len(totals))
    first = first_shown(table, len(rows), room)
    shown = rows[first : first + room]
    marked = [_mark(column, table, look) for column in columns]
    cells = [*map(draw, shown), *totals]
    header, *lines = draw_table(marked, cells, width, ellipsis=look.glyphs.ellipsis)
    if table.selected is not None and rows:
        at = min(max(0, table.selected), len(rows) - 1) - first
        if 0 <= at < len(shown):
            lines[at] = Line(lines[at].plain, "selected").pad_to(width, role="selected")
    return Browsed(header, lines, _hidden(len(rows), len(shown), first, look))


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
