"""The mouse does what the keys do, where it points."""

import re

import msgspec
import pytest
from textual import events
from textual.pilot import Pilot

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.heatmap import rank_at
from boltmesh.tui.render.line import TITLES
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.render.tabs import Tab
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.screens.jobs import JobsScreen
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from boltmesh.tui.view import TableView
from tests.tui.samples import NOW, FakeSource, demo, job, rank, summary
from tests.tui.screens import (
    find_text,
    job_screen,
    open_app,
    open_source,
    run_app,
    screen_text,
)

MANY = Observation(NOW, job(ranks=tuple(rank(number) for number in range(64))))


def _tab_at(pilot: Pilot[None], tab: Tab) -> tuple[int, int]:
    """Where a tab is; in a narrow terminal no blank follows its digit."""
    text = screen_text(pilot.app)
    blank = " " if f"{tab.key} {tab.short[:2]}" in text else ""
    return find_text(pilot.app, f"{tab.key}{blank}{tab.short[:2]}")


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
async def test_a_click_on_a_tab_opens_it(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        for tab in PAGES.tabs:
            await pilot.click(offset=_tab_at(pilot, tab))
            assert job_screen(pilot).page.tab.name == tab.name


async def test_a_wide_terminal_has_the_tabs_of_all_screens() -> None:
    async with open_app(demo(), size=(200, 40)) as pilot:
        for page in PAGES.values():
            await pilot.click(offset=find_text(pilot.app, f"{page.tab.key} {page.tab.title}"))
            assert job_screen(pilot).page is page
    async with open_app(demo(), size=(120, 40)) as pilot:
        assert "h History" not in screen_text(pilot.app)


async def test_the_tab_of_the_jobs_opens_their_list() -> None:
    async with open_source(
        FakeSource(demo()), size=(120, 40), list_jobs=lambda: [summary(1)]
    ) as pilot:
        await pilot.click(offset=find_text(pilot.app, "0 Jobs"))
        assert isinstance(pilot.app.screen, JobsScreen)


async def test_a_click_on_a_title_sorts_and_another_one_turns_it_round() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        await pilot.press("2")
        for is_descending in (False, True, False):
            await pilot.click(offset=find_text(pilot.app, "step time"))
            view = job_screen(pilot).session.view.table("ranks")
            assert (view.sort, view.is_descending) == ("step time", is_descending)


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
@pytest.mark.parametrize("keys", [(), ("end",), ("end", "k", "k"), ("s", "S", "j", "j")])
async def test_a_click_selects_the_row_under_it(
    size: tuple[int, int], keys: tuple[str, ...]
) -> None:
    async with open_app(MANY, size=size) as pilot:
        await pilot.press("2", *keys)
        lines = screen_text(pilot.app).splitlines()
        rows = [
            (y, int(line.split()[0]))
            for y, line in enumerate(lines)
            if y > 2 and "● running" in line
        ]
        assert len(rows) > 5
        for y, number in (rows[0], rows[-1], rows[3]):
            await pilot.click(offset=(4, y))
            assert job_screen(pilot).session.view.rank == number
            assert screen_text(pilot.app).splitlines()[y].split()[0] == str(number)


async def test_a_click_on_nothing_does_nothing() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        await pilot.press("2")
        before = screen_text(pilot.app)
        for offset in ((0, 0), (60, 30), (119, 39), (60, 4), (60, 2), (60, 1)):
            await pilot.click(offset=offset)
        assert screen_text(pilot.app) == before


async def test_two_clicks_on_a_row_show_the_rank_in_full() -> None:
    async with open_app(MANY, size=(120, 40)) as pilot:
        await pilot.press("2")
        x, y = find_text(pilot.app, "   7  ")
        await pilot.click(offset=(x, y), times=2)
        assert job_screen(pilot).session.view.rank == 7
        assert "rank 7" in screen_text(pilot.app)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_every_rank_of_the_heat_map_can_be_clicked(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        screen = job_screen(pilot)
        region = next(
            drawn.panel.region for drawn in screen.canvas.drawn if drawn.panel.name == "heat"
        )
        assert screen.scene is not None
        places = {
            rank_at(
                screen.scene.state, region.width, region.height, x, y, look=screen.scene.look
            ): (region.x + x, region.y + y)
            for x in range(region.width)
            for y in range(region.height)
        }
        assert set(places) - {None} == set(range(8))
        for number, place in places.items():
            before = screen.session.view.rank
            await pilot.click(offset=place)
            assert screen.session.view.rank == (before if number is None else number)


async def test_the_wheel_goes_through_the_rows_under_it() -> None:
    async with open_app(MANY, size=(80, 24)) as pilot:
        await pilot.press("2")
        for _ in range(4):
            await pilot._post_mouse_events(  # the pilot has no wheel of its own
                [events.MouseScrollDown],
                offset=(5, 10),
            )
        assert job_screen(pilot).session.view.table("ranks").selected == 12


async def test_a_click_on_a_metric_shows_it_in_the_chart() -> None:
    async with open_app(demo(), size=(160, 45)) as pilot:
        await pilot.click(offset=find_text(pilot.app, "val_loss"))
        assert job_screen(pilot).session.view.metric == "val_loss"


async def test_jobs_are_sorted_chosen_and_opened_by_clicks() -> None:
    opened: list[str] = []

    def open_source(job_id: str) -> FakeSource:
        opened.append(job_id)
        return FakeSource(demo())

    app = DashboardApp(
        None,
        list_jobs=lambda: [summary(number) for number in range(1, 6)],
        open_source=open_source,
        interval_s=None,
    )
    async with run_app(app) as pilot:
        await pilot.click(offset=find_text(app, " age"))
        await pilot.click(offset=find_text(app, " age"))
        found = re.findall(r"job\d", screen_text(app))
        assert found == ["job5", "job4", "job3", "job2", "job1"]
        await pilot.click(offset=find_text(app, "job2"), times=2)
        await pilot.pause()
        assert opened == ["job2"]
        assert isinstance(app.screen, JobScreen)


@pytest.mark.parametrize("width", [60, 120, 200])
def test_every_table_says_which_row_is_on_which_line(width: int) -> None:
    shown = fold(None, demo(mesh={"pipeline": 2, "data": 2, "context": 2, "tensor": 2}))
    shown = msgspec.structs.replace(shown, other=fold(None, demo(scenario="straggler")))
    tables = [table for page in PAGES.values() for table in page.tables]
    assert len(tables) > 10
    for table in tables:
        view = TableView(selected=4, first=2)
        num_rows = len(table.rows(shown, view))
        lines = table.draw(shown, width, 16, Style(UNICODE), table=view)
        rows = [line.row for line in lines if line.row is not None]
        titles, *numbers = rows
        assert titles == TITLES
        assert bool(numbers) == bool(num_rows)
        first = min(numbers, default=0)
        assert numbers == list(range(first, first + len(numbers)))
        selected = [line.row for line in lines if "selected" in {role for _, role in line.spans}]
        assert selected == ([min(4, num_rows - 1)] if num_rows else [])
