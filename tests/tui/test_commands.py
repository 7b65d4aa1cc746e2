"""The command palette, and choices that are remembered from one time to the next."""

from pathlib import Path

import pytest
from textual.command import CommandPalette

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.palette import commands_of
from boltmesh.tui.settings import Settings, Sorting, load, save
from boltmesh.tui.theme import PALETTES
from tests.tui.samples import FakeSource, demo
from tests.tui.screens import job_screen, open_app, open_source, screen_text, wait_until


async def test_the_palette_of_an_ascii_terminal_is_ascii() -> None:
    async with open_app(demo(), size=(80, 24), is_ascii=True) as pilot:
        await pilot.press("colon")
        await wait_until(pilot, lambda: "Screen: Overview" in screen_text(pilot.app))
        assert screen_text(pilot.app).isascii()


@pytest.mark.parametrize("key", ["colon", "ctrl+p"])
async def test_the_palette_finds_a_command_by_its_name(key: str) -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert isinstance(pilot.app.screen, CommandPalette)
        await pilot.press(*"pipeline")
        # All commands are listed to begin with.
        await wait_until(pilot, lambda: "Screen: Overview" not in screen_text(pilot.app))
        await wait_until(pilot, lambda: "Screen: Pipeline" in screen_text(pilot.app))
        await pilot.press("enter")
        await wait_until(pilot, lambda: not isinstance(pilot.app.screen, CommandPalette))
        await pilot.pause()
        assert job_screen(pilot).page is PAGES["pipeline"]


async def test_every_command_does_what_it_says() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        app, screen = pilot.app, job_screen(pilot)
        assert isinstance(app, DashboardApp)
        titles = [command.title for command in commands_of(app, screen)]
        assert len(set(titles)) == len(titles)
        for page in PAGES.values():
            assert f"Screen: {page.tab.title}" in titles
        for name in PALETTES:
            assert f"Theme: {name}" in titles
        assert {"Metric: loss", "Metric: val_loss", "Sort: none", "Filter", "Pause", "Help"} <= set(
            titles
        )
        for command in commands_of(app, screen):
            if command.title in {"Detach", "Help", "Filter"}:
                continue
            command.run()
            await pilot.pause()
            assert job_screen(pilot) is screen
        assert screen.session.view.is_log
        assert screen.page is PAGES["compare"]
        assert app.palette.name == list(PALETTES)[-1]
        next(command for command in commands_of(app, screen) if command.title == "Help").run()
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)


async def test_a_new_dashboard_begins_as_the_last_one_was_left(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    async with open_source(FakeSource(demo()), palette=None, settings_path=path) as pilot:
        await pilot.press("f", "L", "2", "s", "s", "S", "t")
        left = screen_text(pilot.app)
        await pilot.press("q")
        await pilot.pause()
    async with open_source(FakeSource(demo()), palette=None, settings_path=path) as pilot:
        assert screen_text(pilot.app) == left
        assert isinstance(pilot.app, DashboardApp)
        view = job_screen(pilot).session.view
        assert view.is_log
        assert view.heat_figure is not None
        found, note = load(path)
        assert note is None
        assert found.theme == pilot.app.palette.name


async def test_a_theme_that_was_asked_for_once_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    async with open_source(FakeSource(demo()), palette="mono", settings_path=path) as pilot:
        await pilot.press("2", "q")
    assert load(path)[0] == Settings(screen="ranks")


async def test_settings_that_mean_nothing_here_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    strange = Settings(
        theme="neon", screen="kitchen", sorting={"ranks": Sorting("shoe size")}, heat_figure="hope"
    )
    assert save(path, strange) is None
    async with open_source(FakeSource(demo()), palette=None, settings_path=path) as pilot:
        assert job_screen(pilot).page is PAGES["overview"]
        await pilot.press("f", "2", "s", "1")


async def test_damaged_settings_are_told_once_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    path.write_text("{")
    async with open_source(FakeSource(demo()), settings_path=path, size=(300, 40)) as pilot:
        assert "were ignored" in screen_text(pilot.app).splitlines()[-1]
        await pilot.press("2")
        assert "were ignored" not in screen_text(pilot.app)
        await pilot.press("q")
    assert load(path) == (Settings(screen="ranks"), None)


async def test_nothing_is_written_without_a_place_or_a_change(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    save(path, Settings(screen="overview"))
    before = path.stat().st_mtime_ns
    async with open_source(FakeSource(demo()), settings_path=path) as pilot:
        await pilot.press("j", "slash", "x", "escape", "q")
    assert path.stat().st_mtime_ns == before


async def test_a_place_that_cannot_be_written_is_told_to_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "dashboard.json"
    async with open_source(FakeSource(demo()), settings_path=path) as pilot:
        app = pilot.app
        await pilot.press("2", "q")
    assert isinstance(app, DashboardApp)
    assert app.settings_note is not None
    assert "not written" in app.settings_note
