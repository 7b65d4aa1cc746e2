"""Choices of the user: shared by all screens, and separate from the observed state.

A table is filtered, then sorted, then scrolled; each of its drawings does so with the functions
here, so that one rule holds everywhere.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

Cells = Mapping[str, str | float | None]
"""A row by the titles of its columns; None is not known."""

Row = TypeVar("Row")

_TEST = re.compile(r"(?P<column>[^=<>!]+)(?P<sign><=|>=|!=|=|<|>)(?P<value>.+)")
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class TableView(msgspec.Struct, frozen=True):
    """How one table is looked at."""

    first: int = 0
    """Rows scrolled out above."""
    selected: int | None = None
    """Index of the selected row among the filtered, sorted rows."""
    sort: str | None = None
    """Title of the column; None: the table's own order."""
    is_descending: bool = False
    filter: str = ""
    """Words; a row stays when it has each of them. See :func:`filter_rows`."""


class View(msgspec.Struct, frozen=True):
    """Everything that was chosen while one job is watched."""

    metric: str | None = None
    """Metric of the chart; None: the first."""
    heat_figure: str | None = None
    """Figure of the ranks' heat map; None: the first of its figures."""
    is_log: bool = False
    """Whether the chart has a logarithmic axis of values."""
    zoom: int = 0
    """Charts show 1 / 2**zoom of the steps."""
    pan: float | None = None
    """The last step, or second, that they show; None: the newest."""
    cursor: float | None = None
    """The step, or second, at which they tell their values; None: the newest."""
    is_time: bool = False
    """Whether charts of the run have seconds since its begin as their axis."""
    chart_row: int = 0
    """The first row of charts that is shown."""
    is_smooth: bool = False
    """Whether charts show a moving mean."""
    is_paused: bool = False
    rank: int | None = None
    """The rank that is selected, wherever ranks are shown."""
    active: Mapping[str, str] = {}
    """By the page's name, which of its tables the keys work on."""
    tables: Mapping[str, TableView] = {}
    """By the table's name; one that is missing is looked at as it comes."""

    def table(self, name: str) -> TableView:
        """Return how the table of that name is looked at."""
        return self.tables.get(name, TableView())


def filter_rows(rows: Sequence[Row], cells_of: Callable[[Row], Cells], words: str) -> list[Row]:
    """Return the rows that have every word of a filter.

    A word is looked for in all cells, in either case. A word of letters that no row has as it is
    fits the rows that have its letters in this order within one word of a cell: ``alrd`` fits
    ``all_reduce``. ``column=value`` matches a whole cell and ``column!=value`` any other;
    ``<``, ``<=``, ``>``, ``>=`` compare numbers. A column may be shortened, and its blanks are left
    out: ``bytes>1e6`` fits a column ``bytes per step``.
    """
    wanted = words.casefold().split()
    if not wanted:
        return list(rows)
    every = [cells_of(row) for row in rows]
    stays = [True] * len(every)
    for word in wanted:
        found = [_has_word(word, cells) for cells in every]
        if not any(found) and word.isalpha():
            found = [_has_letters(word, cells) for cells in every]
        stays = list(map(operator.and_, stays, found))
    return list(itertools.compress(rows, stays))


def sort_rows(rows: Sequence[Row], cells_of: Callable[[Row], Cells], table: TableView) -> list[Row]:
    """Return the rows by the chosen column; equal rows keep their order, unknown cells go last."""
    column = table.sort
    if column is None:
        return list(rows)
    known = [(cell, row) for row in rows if (cell := cells_of(row).get(column)) is not None]
    unknown = [row for row in rows if cells_of(row).get(column) is None]
    known.sort(key=lambda item: _order(item[0]), reverse=table.is_descending)
    return [row for _, row in known] + unknown


def arrange_rows(
    rows: Sequence[Row], cells_of: Callable[[Row], Cells], table: TableView
) -> list[Row]:
    """Return the rows that stay, sorted: the order that ``TableView.selected`` counts in."""
    return sort_rows(filter_rows(rows, cells_of, table.filter), cells_of, table)


def first_shown(table: TableView, total: int, room: int) -> int:
    """Return the first row of the window: no blank lines at its end, the selected row within."""
    first = min(max(0, table.first), max(0, total - room))
    if table.selected is None or total == 0 or room < 1:
        return first
    selected = min(max(0, table.selected), total - 1)
    return min(max(first, selected - room + 1), selected)


def _has_word(word: str, cells: Cells) -> bool:
    test = _TEST.fullmatch(word)
    name = None if test is None else _column(test["column"], cells)
    if test is None or name is None:
        return any(word in _text(cell) for cell in cells.values())
    return _passes(cells[name], test["sign"], test["value"])


def _has_letters(word: str, cells: Cells) -> bool:
    parts = (part for cell in cells.values() for part in _text(cell).split())
    return any(_is_subsequence(word, part) for part in parts)


def _is_subsequence(letters: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in letters)


def _column(name: str, cells: Cells) -> str | None:
    """Return the column that ``name`` means: the same, else the first that begins with it."""
    plain = {title: title.casefold().replace(" ", "") for title in cells}
    exact = [title for title, text in plain.items() if text == name]
    longer = [title for title, text in plain.items() if text.startswith(name)]
    return next(iter(exact or longer), None)


def _passes(cell: str | float | None, sign: str, value: str) -> bool:
    if cell is None:
        return False
    wanted, found = _number(value), _number(cell)
    if wanted is not None and found is not None:
        return _COMPARISONS[sign](found, wanted)
    if sign in {"=", "!="}:
        return (_text(cell) == value) == (sign == "=")
    return False


def _number(cell: str | float) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _text(cell: str | float | None) -> str:
    if cell is None:
        return ""
    return cell.casefold() if isinstance(cell, str) else f"{cell:.15g}"


def _order(cell: str | float) -> tuple[bool, float, str]:
    """Numbers before text; NaN, which is in no order with anything, before all others."""
    if isinstance(cell, str):
        return (True, 0.0, cell.casefold())
    return (False, -math.inf if math.isnan(cell) else cell, "")
