"""Filters and orders of tables, without any table."""

import math

import pytest

from boltmesh.tui.view import (
    Cells,
    TableView,
    arrange_rows,
    filter_rows,
    first_shown,
    sort_rows,
)

CELLS: Cells = {"rank": 12, "device": "cuda:1 (NVIDIA H100)", "step time": 0.25, "loss": None}


def _stays(cells: Cells, words: str) -> bool:
    return filter_rows([cells], lambda row: row, words) == [cells]


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        ("", True),
        ("h100", True),
        ("H100 12", True),
        ("h100 13", False),
        ("rank=12", True),
        ("rank=1", False),
        ("rank!=1", True),
        ("rank>11 rank<13", True),
        ("rank>=12 rank<=12", True),
        ("rank>12", False),
        ("step>0.2", True),
        ("steptime<0.2", False),
        ("device=cuda", False),
        ("device!=cuda", True),
        ("device>3", False),
        ("loss=1", False),
        ("loss!=1", False),
        ("nothing=1", False),
        ("rank>", False),
        ("=", False),
        ("nvd", True),
        ("nvd 12", True),
        ("dvn", False),
        ("cdanv", False),
    ],
)
def test_a_row_stays_when_it_has_every_word(words: str, stays: bool) -> None:
    assert _stays(CELLS, words) is stays


def test_a_sign_within_text_is_looked_for_as_it_is() -> None:
    assert _stays({"message": "started with lr=0.1"}, "lr=0.1")


def test_a_whole_title_comes_before_a_longer_one() -> None:
    assert _stays({"step time": 9, "step": 3}, "step=3")


def test_letters_of_a_word_are_enough_where_no_row_has_the_word() -> None:
    rows: list[Cells] = [
        {"operator": "all_reduce", "axis": "data"},
        {"operator": "reduce_scatter", "axis": "tensor"},
        {"operator": "send", "axis": "pipeline", "bytes": 1234},
    ]
    for words, found in {
        "rdsc": [1],
        "reduce": [0, 1],
        "alrd": [0],
        "RDC": [0, 1],
        "rdc tnsr": [1],
        "end": [2],  # of send; the letters of another word do not count
        "alrd pipe": [],
        "134": [],
    }.items():
        assert filter_rows(rows, lambda row: row, words) == [rows[at] for at in found], words


def test_a_filter_of_blanks_keeps_all_rows() -> None:
    rows: list[Cells] = [{"a": 1}, {"a": 2}]
    assert filter_rows(rows, lambda row: row, "  ") == rows


def _ranks(rows: list[Cells]) -> list[object]:
    return [row["rank"] for row in rows]


ROWS: list[Cells] = [
    {"rank": 0, "loss": 2.0, "state": "running"},
    {"rank": 1, "loss": None, "state": "Dead"},
    {"rank": 2, "loss": 1.0, "state": "running"},
    {"rank": 10, "loss": math.nan, "state": "running"},
]


def test_numbers_are_sorted_as_numbers_and_unknown_cells_stay_last() -> None:
    ascending = TableView(sort="loss")
    assert _ranks(sort_rows(ROWS, lambda row: row, ascending)) == [10, 2, 0, 1]
    descending = TableView(sort="loss", is_descending=True)
    assert _ranks(sort_rows(ROWS, lambda row: row, descending)) == [0, 2, 10, 1]


def test_equal_rows_keep_their_order_in_both_directions() -> None:
    for is_descending, expected in ((False, [1, 0, 2, 10]), (True, [0, 2, 10, 1])):
        table = TableView(sort="state", is_descending=is_descending)
        assert _ranks(sort_rows(ROWS, lambda row: row, table)) == expected


def test_without_a_column_or_with_an_unknown_one_rows_stay_as_they_are() -> None:
    for sort in (None, "color"):
        assert sort_rows(ROWS, lambda row: row, TableView(sort=sort)) == ROWS


def test_rows_are_filtered_and_then_sorted() -> None:
    table = TableView(sort="rank", is_descending=True, filter="running rank<5")
    assert _ranks(arrange_rows(ROWS, lambda row: row, table)) == [2, 0]


@pytest.mark.parametrize(
    ("table", "total", "room", "first"),
    [
        (TableView(), 100, 10, 0),
        (TableView(first=95), 100, 10, 90),
        (TableView(first=5), 3, 10, 0),
        (TableView(first=0, selected=30), 100, 10, 21),
        (TableView(first=50, selected=30), 100, 10, 30),
        (TableView(first=25, selected=30), 100, 10, 25),
        (TableView(selected=500), 100, 10, 90),
        (TableView(selected=3), 0, 10, 0),
        (TableView(selected=3), 10, 0, 0),
    ],
)
def test_the_window_holds_the_selected_row(
    table: TableView, total: int, room: int, first: int
) -> None:
    assert first_shown(table, total, room) == first
