"""What the shell has to know of a table: its rows and titles, and where they are on the screen."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from boltmesh.tui.render.browse import column_at
from boltmesh.tui.render.line import Line
from boltmesh.tui.state import State
from boltmesh.tui.view import TableView


class Table(msgspec.Struct, frozen=True):
    """One table of a page; a panel of the same name shows it."""

    name: str
    columns: tuple[str, ...]
    """Titles that it can be sorted by."""
    draw: Callable[..., list[Line]]
    rows: Callable[[State, TableView], Sequence[Any]]
    """Filtered and sorted, as ``TableView.selected`` counts them."""
    rank_of: Callable[[Any], int | None] = lambda _: None
    """The rank that a row is about."""

    def selected_rank(self, state: State, view: TableView) -> int | None:
        """Return the rank of the selected row."""
        rows = self.rows(state, view)
        if view.selected is None or not rows:
            return None
        return self.rank_of(rows[min(view.selected, len(rows) - 1)])


def next_column(table: Table, view: TableView) -> str | None:
    """Return the column after the one that sorts; None: the table's own order."""
    places: list[str | None] = [None, *table.columns]
    place = places.index(view.sort) if view.sort in places else 0
    return places[(place + 1) % len(places)]


def header_line(lines: Sequence[str], columns: Sequence[str]) -> int | None:
    """Return which line of a drawn table has its titles: the first with most of them."""
    counts = [sum(title in line for title in columns if title) for line in lines]
    most = max(counts, default=0)
    return counts.index(most) if most else None


def title_at(lines: Sequence[str], columns: Sequence[str], x: int, y: int) -> str | None:
    """Return the title at a cell, or nearest to it, where that is in the line of titles."""
    if header_line(lines, columns) != y:
        return None
    return column_at(Line(lines[y]), x, columns)


DrawView = Callable[[TableView], Sequence[Line]]
"""Draws a table at its place, looked at in some way."""

# [Note: A table is asked] Only a table knows what it puts above and below its rows, and how many of
# them fit. So it is asked: a row is selected, and the line of its mark tells where that row is.


def hold_window(draw: DrawView, view: TableView) -> TableView:
    """Return the view with ``first`` as it is on the screen, so that a choice scrolls no further.

    See [Note: A table is asked].
    """
    if view.selected is None:
        return view
    top = _marked_line(draw(msgspec.structs.replace(view, first=0, selected=0)))
    marked = _marked_line(draw(view))
    if top is None or marked is None:
        return view
    return msgspec.structs.replace(view, first=max(0, view.selected - (marked - top)))


def row_at(draw: DrawView, view: TableView, total: int, y: int) -> int | None:
    """Return the row that is drawn on line ``y``; None: there is none.

    ``view.first`` is as on the screen. See [Note: A table is asked].
    """
    guess = min(max(view.first, view.selected or 0), total - 1)
    for _ in range(3):
        if not 0 <= guess < total:
            return None
        marked = _marked_line(draw(msgspec.structs.replace(view, selected=guess)))
        if marked is None:
            return None
        if marked == y:
            return guess
        guess += y - marked
    return None


def _marked_line(lines: Sequence[Line]) -> int | None:
    for y, line in enumerate(lines):
        if any(role == "selected" for _, role in line.spans):
            return y
    return None
