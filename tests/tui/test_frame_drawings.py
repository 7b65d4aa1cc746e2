"""The lines around every screen: tabs, the time of a replay, help."""

import pytest

from boltmesh.tui.layout.page import JOBS
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.header import draw_timeline
from boltmesh.tui.panels.help import KEYS, WORD_WIDTH, PageHelp, help_lines
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.render.tabs import Tab, draw_tabs, tab_at
from boltmesh.tui.screens.jobs import HELP as JOBS_HELP
from tests.tui.samples import NOW

LOOK = Style(UNICODE)
TABS = (*PAGES.tabs, JOBS)
MANY = (*TABS, *(Tab(f"extra{number}", f"{number}x more") for number in range(9)))
"""Ten with a key, and nine without."""


@pytest.mark.parametrize("current", [tab.name for tab in TABS])
@pytest.mark.parametrize("look", [LOOK, Style(ASCII)], ids=["unicode", "ascii"])
def test_every_screen_has_its_digit_from_60_columns_on(current: str, look: Style) -> None:
    for width in range(60, 301):
        line = draw_tabs(TABS, current, width, look)
        assert line.width <= width
        for tab in TABS:
            forms = (f" {tab.title}", f" {tab.short}", tab.short)
            assert any(f"{tab.key}{form}" in line.plain for form in forms)
        assert look is LOOK or line.plain.isascii()


def test_tabs_use_the_room_that_there_is() -> None:
    assert "3 Communication" in draw_tabs(TABS, "ranks", 120, LOOK).plain
    assert "3 Comm  4 Pipeline" in draw_tabs(TABS, "ranks", 96, LOOK).plain
    assert "3 Comm  4 Pipe  5" in draw_tabs(TABS, "ranks", 80, LOOK).plain
    assert "3Comm 4Pipe 5" in draw_tabs(TABS, "ranks", 60, LOOK).plain
    narrow = draw_tabs(TABS, "communication", 36, LOOK).plain
    assert "3 Communication" in narrow
    assert "Ranks" not in narrow


def test_every_cell_of_a_tab_is_that_tab() -> None:
    for width in range(1, 140):
        line = draw_tabs(TABS, "memory", width, LOOK).plain
        for x, character in enumerate(line):
            if character.isdigit():
                tab = next(tab for tab in TABS if tab.key == character)
                assert tab_at(TABS, "memory", width, x) == tab.name
        assert tab_at(TABS, "memory", width, len(line)) is None
        assert tab_at(TABS, "memory", width, -1) is None


@pytest.mark.parametrize("width", [0, 1, 10, 30, 60, 120])
def test_the_time_of_a_replay_fits_everywhere(width: int) -> None:
    span = (NOW, NOW + 600)
    for now in (NOW - 5, NOW, NOW + 200, NOW + 900):
        line = draw_timeline(span, now, width, LOOK, is_playing=True, speed=2.0)
        assert line.width <= width
    empty = draw_timeline((NOW, NOW), NOW, width, LOOK, is_playing=False, speed=1.0)
    assert empty.width <= width


def test_a_replay_says_where_it_is_and_whether_it_moves() -> None:
    span = (NOW, NOW + 600)
    text = draw_timeline(span, NOW + 150, 100, LOOK, is_playing=True, speed=2.0).plain
    assert text.startswith("replay 2x   04:")
    assert "at 2m 30s of 10m 00s" in text
    bar = text.rsplit("   ", 1)[1]
    assert bar.count("━") == pytest.approx(len(bar) / 4, abs=1)
    assert "replay paused" in draw_timeline(span, NOW, 99, LOOK, is_playing=False, speed=2.0).plain


@pytest.mark.parametrize(
    "page",
    [*(page.help for page in PAGES.values()), JOBS_HELP],
    ids=lambda page: page.about.partition(":")[0],
)
def test_help_fits_into_80_columns_uncut(page: PageHelp) -> None:
    narrow, wide = help_lines(page, 78, LOOK), help_lines(page, 200, LOOK)
    for line, whole in zip(narrow, wide, strict=True):
        assert line.plain.strip("─ ") == whole.plain.strip("─ ")
    assert all(len(word) < WORD_WIDTH for word, _ in (*page.keys, *page.terms, *KEYS))


@pytest.mark.parametrize("width", [28, 58])
def test_help_is_wrapped_where_the_terminal_is_narrow(width: int) -> None:
    page = PAGES["pipeline"].help
    narrow, whole = help_lines(page, width, LOOK), help_lines(page, 200, LOOK)
    assert max(line.width for line in narrow) <= width
    entries = [" ".join(line.plain.split()) for line in whole if "─" not in line.plain]
    shown = " ".join(line.plain for line in narrow if "─" not in line.plain)
    assert shown.split() == " ".join(entries).split()


@pytest.mark.parametrize("current", [tab.name for tab in MANY])
@pytest.mark.parametrize("look", [LOOK, Style(ASCII)], ids=["unicode", "ascii"])
def test_tabs_that_do_not_fit_scroll_with_the_current_one(current: str, look: Style) -> None:
    tab = next(tab for tab in MANY if tab.name == current)
    for width in range(20, 121):
        line = draw_tabs(MANY, current, width, look)
        assert line.width <= width
        assert tab.short in line.plain
        assert tab_at(MANY, current, width, line.plain.index(tab.short)) == current
        assert look is LOOK or line.plain.isascii()


@pytest.mark.parametrize("width", [20, 40, 80])
def test_clicks_on_the_arrows_reach_every_tab_both_ways(width: int) -> None:
    for sign, names in (
        (">", [tab.name for tab in MANY]),
        ("<", [tab.name for tab in reversed(MANY)]),
    ):
        current, seen = names[0], {names[0]}
        while True:
            line = draw_tabs(MANY, current, width, LOOK).plain
            seen |= {tab_at(MANY, current, width, x) or current for x in range(width)}
            if sign not in line:
                break
            following = tab_at(MANY, current, width, line.index(sign))
            assert following is not None
            assert names.index(following) > names.index(current)
            current = following
        assert seen == set(names)


def test_a_screen_with_nothing_to_show_has_a_muted_tab() -> None:
    roles = dict(draw_tabs(TABS, "ranks", 120, LOOK, empty=("pipeline",)).spans)
    assert ("3", "accent") in roles.items()
    assert "4" not in roles
    assert roles["4 Pipeline"] == "muted"
