"""A new screen is one module in ``tui/pages``: everything else finds it there."""

import importlib
from pathlib import Path

import pytest
from textual.command import CommandPalette

from boltmesh.tui import pages
from boltmesh.tui.app import DashboardApp
from boltmesh.tui.layout.page import Page
from boltmesh.tui.pages.registry import PAGES, PageRegistry, find_pages
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.sources.live import Observation
from tests.tui.samples import NOW, demo, job
from tests.tui.screens import find_text, job_screen, open_app, screen_text, wait_until

MODULE = """
from boltmesh.tui.layout.page import Page, Panel
from boltmesh.tui.panels.help import PageHelp
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.tabs import Tab


class NewPage(Page):
    tab = Tab({name!r}, {title!r}, key={key!r})
    help = PageHelp({about!r}, keys=(("x", "a key of {name}"),), terms=(("term", "of {name}"),))
    keys = (("x", "does {name}"),)

    def panels(self, scene, body):
        return [Panel({name!r}, body, lambda width, height: [Line("lines of {name}")])]

    def empty_reason(self, state):
        return () if state.job.ranks else ("{name} needs a rank",)


PAGE = NewPage()
"""

NEW = {"echo": ("Echo", "e"), "ablation": ("Ablation", ""), "zebra": ("Zebra", "")}
"""Title and key by name: one with a letter, two that are reached by name alone."""


@pytest.fixture
def new_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three modules beside those of the package, and nothing else."""
    for name, (title, key) in NEW.items():
        about = f"{name}: what {name} is about"
        text = MODULE.format(name=name, title=title, key=key, about=about)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(pages, "__path__", [*pages.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    before = len(PAGES)
    found = PageRegistry(find_pages(pages))
    for field, value in vars(found).items():
        monkeypatch.setattr(PAGES, field, value)
    assert len(PAGES) == before + len(NEW)


@pytest.mark.usefixtures("new_pages")
@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
async def test_new_screens_are_in_the_tabs_and_reached_by_keys(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        screen = job_screen(pilot)
        await pilot.press("e")
        assert screen.page.tab.name == "echo"
        text = screen_text(pilot.app)
        assert "lines of echo" in text
        assert "x does echo" in text
        seen = []
        for _ in PAGES.tabs:
            await pilot.press("tab")
            seen.append(screen.page.tab.name)
            tab = screen.page.tab
            assert any(
                tab.title in line or tab.short in line
                for line in screen_text(pilot.app).splitlines()[2:4]
            )
        assert sorted(seen) == sorted(tab.name for tab in PAGES.tabs)
        assert seen[:3] == ["ablation", "zebra", "overview"]
        await pilot.press("shift+tab", "shift+tab")
        assert screen.page.tab.name == seen[-3]


@pytest.mark.usefixtures("new_pages")
async def test_a_click_on_its_tab_opens_a_new_screen() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        await pilot.click(offset=find_text(pilot.app, "Zebr"))
        assert job_screen(pilot).page.tab.name == "zebra"


@pytest.mark.usefixtures("new_pages")
@pytest.mark.parametrize("first", ["g", "colon"])
async def test_new_screens_are_found_by_name(first: str) -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press(first)
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
        await pilot.press(*"ablat")
        await wait_until(pilot, lambda: "Overview" not in screen_text(pilot.app))
        await wait_until(pilot, lambda: "ablation: what" in screen_text(pilot.app))
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, JobScreen))
        assert job_screen(pilot).page.tab.name == "ablation"


@pytest.mark.usefixtures("new_pages")
async def test_help_explains_a_new_screen() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press("e", "question_mark")
        text = screen_text(pilot.app)
        assert "echo: what echo is about" in text
        assert "a key of echo" in text
        assert "term        of echo" in text


@pytest.mark.usefixtures("new_pages")
async def test_a_new_screen_without_data_says_why() -> None:
    async with open_app(Observation(NOW, job(ranks=())), size=(80, 24)) as pilot:
        await pilot.press("e")
        text = screen_text(pilot.app)
        assert "echo needs a rank" in text
        assert "lines of echo" not in text
        assert "does echo" not in text


def test_two_pages_never_share_a_key_or_a_name() -> None:
    page = PAGES["ranks"]
    with pytest.raises(ValueError, match="ranks"):
        PageRegistry([page, page])


def test_no_page_takes_a_key_that_works_on_every_screen() -> None:
    bound = {
        key
        for binding in (*JobScreen.BINDINGS, *DashboardApp.BINDINGS)
        for key in binding.key.split(",")
    }
    assert not bound & {page.tab.key for page in PAGES.values()}


def test_every_module_of_the_package_but_the_registry_is_a_page() -> None:
    names = {path.stem for path in Path(pages.__path__[0]).glob("*.py")}
    assert names - {"__init__", "registry"} == set(PAGES)
    assert all(isinstance(page, Page) for page in PAGES.values())
