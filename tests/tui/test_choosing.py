"""Rows, columns, filters and ranks, by keys."""

from pathlib import Path

import msgspec
import pytest

from boltmesh.telemetry.snapshot import ExpertLoad
from boltmesh.tui.layout.page import active_table
from boltmesh.tui.pages.ranks import RANK
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.screens.base import Prompt
from boltmesh.tui.settings import Settings, save
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from boltmesh.tui.view import TableView
from tests.tui.samples import NOW, FakeSource, crashed_demo, demo, job, rank, state
from tests.tui.screens import job_screen, look_again, open_app, open_source, screen_text

MANY = Observation(NOW, job(ranks=tuple(rank(number) for number in range(64))))
TABLES = [(name, table.name) for name, page in PAGES.items() for table in page.tables]
PAGES_WITH_TABLES = [name for name, page in PAGES.items() if page.tables]


def _view(pilot: object, name: str = "ranks") -> TableView:
    return job_screen(pilot).session.view.table(name)  # type: ignore[arg-type]


async def test_rows_are_chosen_and_stop_at_their_ends() -> None:
    async with open_app(MANY, size=(80, 24)) as pilot:
        await pilot.press("2", "k")
        assert _view(pilot).selected == 0
        await pilot.press("j", "down")
        assert _view(pilot).selected == 2
        await pilot.press("pagedown")
        selected = _view(pilot).selected
        assert selected is not None
        assert 10 < selected < 24
        await pilot.press("pageup", "up")
        assert _view(pilot).selected == 1
        await pilot.press("end", "j")
        assert _view(pilot).selected == 63
        assert " 63 " in screen_text(pilot.app)
        await pilot.press("home")
        assert _view(pilot).selected == 0


async def test_a_table_without_a_row_has_none_to_show_in_full() -> None:
    async with open_app(crashed_demo(), size=(60, 20)) as pilot:
        await pilot.press("5", "enter")  # the devices may serve others by now
        assert "this table has no row" in screen_text(pilot.app)


@pytest.mark.each_choice
@pytest.mark.parametrize("page", PAGES_WITH_TABLES)
@pytest.mark.parametrize("size", [(60, 15), (200, 60)])
async def test_every_table_sorts_by_every_column_and_says_so(
    page: str, size: tuple[int, int]
) -> None:
    async with open_app(demo(), size=size) as pilot:
        await pilot.press(PAGES[page].tab.key)
        table = active_table(PAGES[page], job_screen(pilot).session.view)
        assert table is not None
        sorts = []
        for _ in range(len(table.columns) + 1):
            await pilot.press("s")
            view = _view(pilot, table.name)
            sorts.append(view.sort)
            if page == "ranks" and view.sort in {"rank", "state", "step time"}:
                assert f"{view.sort} ↑" in screen_text(pilot.app)
        assert sorts == [*table.columns, None]


async def test_capital_s_turns_the_order_round() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        await pilot.press("2", "S")
        assert "press s first" in screen_text(pilot.app)
        await pilot.press("s")
        assert "press s first" not in screen_text(pilot.app)
        ascending = _view(pilot)
        await pilot.press("S")
        assert (_view(pilot).sort, _view(pilot).is_descending) == (ascending.sort, True)
        assert f"{ascending.sort} ↓" in screen_text(pilot.app)


async def test_a_filter_is_typed_kept_changed_and_taken_away() -> None:
    async with open_app(MANY, size=(80, 24)) as pilot:
        await pilot.press("2", "slash", *"rank>61", "enter")
        assert _view(pilot).filter == "rank>61"
        assert not pilot.app.screen.query(Prompt)
        text = screen_text(pilot.app)
        assert "rank>61" in text
        rows = [line for line in text.splitlines()[3:] if "● running" in line]
        assert [row.split()[0] for row in rows] == ["62", "63"]
        # While it is typed, keys are letters.
        await pilot.press("slash", "q", "1")
        assert _view(pilot).filter == "rank>61 q1"
        await pilot.press("backspace", "backspace", "escape")
        assert _view(pilot).filter == ""
        assert job_screen(pilot).page.tab.name == "ranks"
        assert not pilot.app.screen.query(Prompt)


async def test_every_key_of_a_filter_counts_at_once() -> None:
    async with open_app(MANY, size=(80, 24)) as pilot:
        await pilot.press("2", "slash", *"rank=7")
        await pilot.pause()
        rows = [line for line in screen_text(pilot.app).splitlines()[3:] if "● running" in line]
        assert len(rows) == 1
        assert "/ rank=7" in screen_text(pilot.app).splitlines()[-1]
        await look_again(pilot)
        assert "/ rank=7" in screen_text(pilot.app).splitlines()[-1]


async def test_esc_undoes_one_thing_after_the_other() -> None:
    async with open_app(MANY, size=(80, 24)) as pilot:
        screen = job_screen(pilot)
        await pilot.press("2", "slash", *"rank>60", "enter", "j", "enter")
        assert screen.page is not PAGES["ranks"]
        await pilot.press("escape")
        assert screen.page is PAGES["ranks"]
        assert _view(pilot).filter == "rank>60"
        await pilot.press("escape")
        assert _view(pilot).filter == ""
        await pilot.press("escape")
        assert screen.page is PAGES["overview"]
        await pilot.press("escape")
        assert screen.page is PAGES["overview"]


async def test_the_last_line_says_what_esc_does() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        screen = job_screen(pilot)
        await pilot.press("2", "slash", *"rank>3", "enter")
        assert "esc all rows" in screen_text(pilot.app).splitlines()[-1]
        await pilot.press("l")
        assert "rank=0   esc back" in screen_text(pilot.app).splitlines()[-1]
        await pilot.press("escape")
        assert screen.page is PAGES["ranks"]
        assert "esc all rows" in screen_text(pilot.app).splitlines()[-1]
    async with open_source(FakeSource(demo()), size=(80, 24), first_page="config") as pilot:
        screen = job_screen(pilot)
        await pilot.press("l")
        assert "esc back" in screen_text(pilot.app).splitlines()[-1]
        await pilot.press("escape")
        assert screen.page is PAGES["overview"]


async def test_enter_opens_from_the_start_and_esc_goes_back() -> None:
    async with open_app(MANY, size=(120, 40)) as pilot:
        screen = job_screen(pilot)
        await pilot.press("enter")
        assert screen.page is RANK
        await pilot.press("escape")
        assert screen.page is PAGES["overview"]


@pytest.mark.parametrize(
    ("seen", "page", "first"),
    [
        (MANY, "memory", "memory"),
        (MANY, "plan", "overview"),
        (crashed_demo(), "memory", "overview"),
        (msgspec.structs.replace(MANY, time=MANY.time + 500), "memory", "overview"),
    ],
)
async def test_the_remembered_screen_hides_neither_an_end_nor_a_stall(
    seen: Observation, page: str, first: str, tmp_path: Path
) -> None:
    path = tmp_path / "dashboard.json"
    save(path, Settings(screen=page))
    async with open_app(seen, settings_path=path) as pilot:
        assert job_screen(pilot).page is PAGES[first]


async def test_a_filter_needs_a_table() -> None:
    async with open_app(demo()) as pilot:
        await pilot.press("4", "slash")
        assert not pilot.app.screen.query(Prompt)
        assert "no table" in screen_text(pilot.app).splitlines()[-1]
        await pilot.press("j")
        assert "no table" not in screen_text(pilot.app)


async def test_enter_shows_the_selected_rank_in_full_and_j_k_go_on() -> None:
    async with open_app(MANY, size=(120, 40)) as pilot:
        screen = job_screen(pilot)
        await pilot.press("2", "enter")
        assert "rank 0" in screen_text(pilot.app)
        await pilot.press("escape", "slash", *"rank>=40", "enter", "j", "enter")
        assert screen.session.view.rank == 41
        assert "rank 41" in screen_text(pilot.app)
        await pilot.press("j", "right")
        assert "rank 43" in screen_text(pilot.app)
        await pilot.press("k")
        assert "rank 42" in screen_text(pilot.app)
        await look_again(pilot)
        assert "rank 42" in screen_text(pilot.app)


async def test_the_rank_chosen_on_the_overview_is_the_one_that_enter_shows() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        screen = job_screen(pilot)
        await pilot.press("right", "right", "right", "left", "enter")
        assert screen.session.view.rank is not None
        assert f"rank {screen.session.view.rank}" in screen_text(pilot.app)
        await pilot.press("escape")
        assert screen.page is PAGES["overview"]


async def test_tab_moves_the_keys_to_the_other_table() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        screen = job_screen(pilot)
        await pilot.press("5")
        names = []
        for _ in range(3):
            assert screen.table is not None
            names.append(screen.table.name)
            await pilot.press("o")
        assert names == ["devices", "processes", "devices"]
        await pilot.press("j")
        assert _view(pilot, "processes").selected == 1


async def test_a_rank_that_goes_away_while_it_is_shown_does_no_harm() -> None:
    few = Observation(NOW, job(ranks=(rank(0),)))
    async with open_app(MANY, few, size=(80, 24)) as pilot:
        await pilot.press("2", "end", "enter")
        await look_again(pilot)
        await pilot.press("j", "k", "escape", "j", "end")
        assert _view(pilot).selected == 0


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_a_table_says_that_nothing_fits_its_filter(page: str, name: str) -> None:
    load = ExpertLoad("blocks.0.moe", (10, 10), (4, 4))
    seen = fold(None, demo())
    ranks = tuple(msgspec.structs.replace(each, experts=(load,)) for each in seen.job.ranks)
    seen = msgspec.structs.replace(
        seen, job=msgspec.structs.replace(seen.job, ranks=ranks), other=state()
    )
    table = next(each for each in PAGES[page].tables if each.name == name)
    for width, height in ((60, 10), (160, 40)):
        for words, says in (("qqq", True), ("", False)):
            drawn = table.draw(seen, width, height, Style(UNICODE), table=TableView(filter=words))
            text = "\n".join(line.plain for line in drawn)
            assert ("nothing fits the filter" in text) is says, (words, text)
