"""Lines, tables, bars and curves."""

import math
import random

import pytest
from rich.cells import cell_len

from boltmesh.telemetry.snapshot import PHASES, PhaseTime
from boltmesh.tui.panels.chart import nice_scale, plot_series
from boltmesh.tui.render.bars import bar, phase_role, sparkline, stacked_bar
from boltmesh.tui.render.line import Line, fit, to_ascii
from boltmesh.tui.render.style import (
    ASCII,
    UNICODE,
    Glyphs,
    Style,
    facts,
    heading,
    spread,
    wrap_facts,
)
from boltmesh.tui.render.table import Column, draw_table
from boltmesh.tui.state import Series

BOTH = pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])


def test_a_line_counts_cells_and_not_characters() -> None:
    line = Line("学習").add("e\u0301")
    assert line.width == 5
    assert Line("学習中").crop(5).plain == "学習 "
    assert Line("学習中").crop(4).plain == "学習"
    assert Line("abc").add("def", "bad").crop(4).spans == [("abc", "text"), ("d", "bad")]


def test_a_line_cleans_what_is_put_into_it() -> None:
    assert Line("\x1b[31ma").add("b\x1b]0;x\x07").plain == "ab"


@pytest.mark.parametrize("width", range(8))
def test_cut_text_fits_and_shows_that_it_was_cut(width: int) -> None:
    cut = fit("学習 a long name", width, ellipsis="…")
    assert cell_len(cut) <= width
    assert fit("short", 5, ellipsis="…") == "short"
    assert fit("longer", 5, ellipsis="…") == "long…"


def test_ascii_keeps_every_column_in_place() -> None:
    assert to_ascii("naïve 学習!") == "na?ve ????!"
    assert to_ascii("e\u0301x") == "ex"


def test_facts_that_do_not_fit_are_left_out_whole() -> None:
    parts = [Line("one"), Line(), Line("two"), Line("three")]
    assert facts(parts, 80).plain == "one   two   three"
    assert facts(parts, 15).plain == "one  two  three"
    assert facts(parts, 14).plain == "one  two"
    assert facts(parts, 2).plain == ""
    assert [line.plain for line in wrap_facts(parts[2:], 8)] == ["two", "three"]


@pytest.mark.parametrize("width", range(30))
def test_headings_and_ends_of_lines_fit_any_width(width: int) -> None:
    look = Style(UNICODE)
    assert heading("communication", width, look, right=Line("498 MB")).width <= width
    assert spread(Line("a long name"), Line("running"), width).width <= max(width, 0)


COLUMNS = [
    Column("rank", is_number=True),
    Column("device", rank=2, shrinks_to=6),
    Column("util", is_number=True, rank=1),
    Column("state"),
]
ROWS = [["0", "cuda:0 H100", "97%", "running"], ["11", "cuda:1 H100", "4%", "dead"]]


def _table(width: int) -> list[str]:
    return [line.plain for line in draw_table(COLUMNS, ROWS, width, ellipsis="…")]


def test_numbers_stand_at_the_right_under_their_title() -> None:
    assert _table(40) == [
        "rank  device       util  state",
        "   0  cuda:0 H100   97%  running",
        "  11  cuda:1 H100    4%  dead",
    ]


def test_a_narrow_column_takes_the_room_that_a_wide_one_has_left() -> None:
    columns = [Column("rank"), Column("a long title", rank=1), Column("loss", rank=2)]
    rows = [["0", "text", "1.25"]]
    header, _ = draw_table(columns, rows, 14, ellipsis="…")
    assert header.plain.split() == ["rank", "loss"]
    header, _ = draw_table(columns, rows, 18, ellipsis="…")
    assert header.plain.split("  ") == ["rank", "a long title"]


def test_text_shrinks_before_a_column_goes_and_the_highest_rank_goes_first() -> None:
    assert _table(27)[1] == "   0  cuda:…   97%  running"
    assert _table(26)[1] == "   0   97%  running"
    assert _table(18)[1] == "   0  running"
    assert _table(9)[1] == "   0  run"


@pytest.mark.parametrize("width", range(45))
def test_no_row_of_a_table_is_wider_than_its_place(width: int) -> None:
    assert all(cell_len(row) <= width for row in _table(width))


@BOTH
@pytest.mark.parametrize("value", [-1.0, 0.0, 0.03, 0.5, 1.0, 7.0, math.nan, math.inf])
def test_a_bar_always_has_its_width(value: float, glyphs: Glyphs) -> None:
    assert bar(value, 8, glyphs).width == 8


@BOTH
def test_a_bar_grows_by_half_cells(glyphs: Glyphs) -> None:
    drawn = [bar(n / 8, 4, glyphs).plain for n in range(9)]
    assert len(set(drawn)) == 9
    assert drawn[4] == glyphs.bar_full * 2 + glyphs.bar_rest * 2


@BOTH
def test_a_sparkline_reaches_from_the_least_to_the_most(glyphs: Glyphs) -> None:
    levels = glyphs.levels
    drawn = sparkline([100, 105, 110], 5, glyphs).plain
    assert drawn.strip()[0] == levels[0]
    assert drawn[-1] == levels[-1]
    assert len(drawn) == 5
    assert levels.index(drawn[-2]) == pytest.approx((len(levels) - 1) / 2, abs=0.5)


@BOTH
def test_a_sparkline_of_what_hardly_differs_is_flat(glyphs: Glyphs) -> None:
    levels = glyphs.levels
    flat = sparkline([3, 3], 2, glyphs).plain
    assert flat[0] == flat[1]
    assert 0 < levels.index(flat[0]) < len(levels) - 1
    drawn = sparkline([420.0, 420.4, 419.8], 3, glyphs).plain
    assert max(map(levels.index, drawn)) - min(map(levels.index, drawn)) <= 1
    assert sparkline([0, 0], 2, glyphs).plain == levels[0] * 2
    assert sparkline([1, math.nan, math.inf], 3, glyphs).plain[1:] == levels[0] + levels[-1]
    assert sparkline([], 3, glyphs).plain == "   "
    assert sparkline(range(100), 0, glyphs).plain == ""


@BOTH
def test_every_phase_has_a_sign_and_a_colour_of_its_own(glyphs: Glyphs) -> None:
    assert len({glyphs.phases[name] for name in PHASES}) == len(PHASES)
    assert len({phase_role(name) for name in PHASES}) == len(PHASES)


def test_a_stacked_bar_is_full_and_in_proportion() -> None:
    generator = random.Random(0)
    for _ in range(300):
        names = generator.sample(PHASES, generator.randint(1, len(PHASES)))
        phases = [PhaseTime(name, generator.expovariate(1)) for name in names]
        width = generator.randint(1, 80)
        drawn = stacked_bar(phases, width, UNICODE).plain
        total = sum(phase.seconds for phase in phases)
        assert len(drawn) == width
        for phase in phases:
            cells = drawn.count(UNICODE.phases[phase.name])
            assert abs(cells - phase.seconds / total * width) < 1


def test_nothing_makes_an_empty_stacked_bar() -> None:
    assert stacked_bar([PhaseTime("data", 0.0)], 10, UNICODE).width == 0
    assert stacked_bar([PhaseTime("data", 1.0)], 0, UNICODE).width == 0


@pytest.mark.parametrize("ticks", [2, 4])
@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (396, 424), (2.1, 10.9), (-5, 5), (1e-9, 3e-9), (1e12, 5e12), (3, 3), (0, 0), (-2, -2),
     (1, 1 + 1e-12), (-1e300, 1e300)],
)  # fmt: skip
def test_a_scale_holds_its_values_and_has_few_ticks(low: float, high: float, ticks: int) -> None:
    scale = nice_scale(low, high, ticks=ticks)
    assert scale.low <= low <= high <= scale.high
    assert scale.low < scale.high
    assert 2 <= len(scale.ticks) <= ticks + 2
    margin = 1e-9 * (scale.high - scale.low)
    assert all(scale.low - margin <= tick <= scale.high + margin for tick in scale.ticks)


@pytest.mark.parametrize(
    ("low", "high", "newest"),
    [(155_900, 158_200, "158k"), (3e9, 3.02e9, "3.02G"), (1.00001e-5, 1.00004e-5, "1.00004e-05"),
     (405, 425, "425"), (1e20, 1.0001e20, "1.0001e+20")],
)  # fmt: skip
def test_labels_of_an_axis_differ(low: float, high: float, newest: str) -> None:
    lines = _plot(low, high, width=60, height=13)
    labels = [line.split(" ")[0] for line in map(str.strip, lines) if line and line[0].isdigit()]
    assert len(labels) > 2
    assert len(set(labels)) == len(labels)
    assert any(label[:3] == newest[:3] for label in labels)


def _plot(*values: float, width: int = 20, height: int = 4, glyphs: Glyphs = UNICODE) -> list[str]:
    series = Series(tuple(range(1, len(values) + 1)), values)
    return [line.plain for line in plot_series(series, width, height, Style(glyphs)).lines]


def test_a_falling_curve_falls() -> None:
    rows = _plot(*range(9, -1, -1), width=12, height=3, glyphs=ASCII)
    marked = [[x for x, dot in enumerate(row[2:]) if dot not in " -"] for row in rows]
    assert all(marked)
    assert marked[0][0] == 0
    assert marked[-1][-1] == 9
    assert max(marked[0]) <= min(marked[1]) + 1 <= max(marked[1]) <= min(marked[2]) + 1


@BOTH
def test_any_values_are_drawn_in_their_place(glyphs: Glyphs) -> None:
    generator = random.Random(1)
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0, 1e-320]
    for _ in range(300):
        values = [
            generator.choice([generator.gauss(0, 10 ** generator.randint(-9, 9)), *odd])
            for _ in range(generator.randint(1, 60))
        ]
        width, height = generator.randint(1, 50), generator.randint(1, 12)
        rows = _plot(*values, width=width, height=height, glyphs=glyphs)
        assert len(rows) <= height
        assert all(cell_len(row) <= width for row in rows)


def test_a_curve_of_no_numbers_says_so() -> None:
    assert _plot(math.nan, math.inf)[0].startswith("no finite value")


def test_a_single_point_is_visible() -> None:
    assert any(0x2800 < ord(character) < 0x2900 for row in _plot(3.0) for character in row)
