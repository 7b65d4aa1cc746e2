"""The window of a table, its marks, and sentences."""

import pytest

from boltmesh.tui.render.style import ASCII, UNICODE, Style, sentence
from boltmesh.tui.render.table import AS_IT_COMES, Cell, Column, browse, column_at, selected_row
from boltmesh.tui.view import TableView

LOOK = Style(UNICODE)
COLUMNS = (Column("name"), Column("of step", is_number=True))


def _cells(row: int) -> list[Cell]:
    return [f"row {row}", str(row)]


def test_only_the_rows_of_the_window_are_drawn() -> None:
    drawn: list[int] = []

    def draw(row: int) -> list[Cell]:
        drawn.append(row)
        return _cells(row)

    seen = browse(COLUMNS, range(1000), draw, 40, 5, LOOK, TableView(first=10))
    assert drawn == [10, 11, 12, 13, 14]
    assert seen.hidden.plain == "↑ 10 more  ↓ 985 more"


def test_the_window_follows_the_selected_row_and_stops_at_the_end() -> None:
    seen = browse(COLUMNS, range(20), _cells, 40, 5, LOOK, TableView(selected=12))
    assert [line.spans[0].role for line in seen.lines] == ["text"] * 4 + ["selected"]
    assert seen.lines[4].plain.startswith("row 12")
    assert seen.lines[4].width == 40
    end = browse(COLUMNS, range(20), _cells, 40, 5, LOOK, TableView(first=99))
    assert end.lines[-1].plain.startswith("row 19")


def test_a_selection_beyond_the_end_is_the_last_row() -> None:
    assert selected_row([1, 2, 3], TableView(selected=9)) == 3
    assert selected_row([], TableView(selected=0)) is None
    assert selected_row([1], AS_IT_COMES) is None


def test_sums_stay_below_the_window() -> None:
    seen = browse(
        COLUMNS, range(20), _cells, 40, 4, LOOK, TableView(first=3), totals=[["all", "190"]]
    )
    assert [line.plain.split()[0] for line in seen.lines] == ["row", "row", "row", "all"]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_a_title_is_found_under_the_mouse_with_or_without_its_mark(glyphs: object) -> None:
    look = Style(glyphs)  # type: ignore[arg-type]
    for view in (AS_IT_COMES, TableView(sort="of step"), TableView(sort="name")):
        header = browse(COLUMNS, range(3), _cells, 40, 5, look, view).header
        titles = ("name", "of step")
        assert column_at(header, 1, titles) == "name"
        assert column_at(header, header.width - 1, titles) == "of step"
        assert column_at(header, 39, titles) == "of step"
    assert column_at(header, 0, ()) is None


def test_a_sentence_wraps_at_blanks_and_stands_in_from_its_mark() -> None:
    lines = sentence("one two three four", 12, LOOK, mark="✗ ")
    assert [line.plain for line in lines] == ["✗ one two", "  three four"]


def test_a_sentence_that_is_too_long_shows_that_it_is_cut() -> None:
    lines = sentence("one two three four five six", 10, LOOK, max_lines=2)
    assert [line.plain for line in lines] == ["one two", "three fou…"]


@pytest.mark.parametrize("width", range(12))
def test_a_sentence_fits_any_width(width: int) -> None:
    lines = sentence("a_word_without_any_blank and others", width, LOOK, mark="! ")
    assert all(line.width <= width for line in lines)
    assert len(lines) <= 3
