"""Whole screens and summaries of the seeded demo as text; see conftest.py for how to renew them."""

from collections.abc import Callable

import pytest

from boltmesh.tui.commands.top import job_text, jobs_text
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.samples import NOW, crashed_demo, demo, job, summary
from tests.tui.screens import open_app, screen_text

MatchesSnapshot = Callable[[str, str], None]


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("page", PAGES)
async def test_every_screen(
    page: str, size: tuple[int, int], matches_snapshot: MatchesSnapshot
) -> None:
    async with open_app(demo(), size=size) as pilot:
        await pilot.press(PAGES[page].tab.key)
        matches_snapshot(f"{page}-{size[0]}x{size[1]}", screen_text(pilot.app))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_one_rank(size: tuple[int, int], matches_snapshot: MatchesSnapshot) -> None:
    async with open_app(demo(), size=size) as pilot:
        await pilot.press("2", "j", "j", "j", "enter")
        matches_snapshot(f"rank-{size[0]}x{size[1]}", screen_text(pilot.app))


async def test_every_screen_in_ascii(matches_snapshot: MatchesSnapshot) -> None:
    async with open_app(demo(), size=(100, 30), is_ascii=True) as pilot:
        texts = []
        for page in PAGES.values():
            await pilot.press(page.tab.key)
            texts.append(screen_text(pilot.app))
            assert texts[-1].isascii()
        matches_snapshot("ascii", "\n".join(texts))


@pytest.mark.parametrize("page", ["overview", "events"])
async def test_a_crashed_job(page: str, matches_snapshot: MatchesSnapshot) -> None:
    async with open_app(crashed_demo(), size=(100, 30)) as pilot:
        await pilot.press(PAGES[page].tab.key)
        matches_snapshot(f"{page}-crashed", screen_text(pilot.app))


async def test_a_job_before_its_first_step(matches_snapshot: MatchesSnapshot) -> None:
    young = job(ranks=(), world_size=2, samples_per_second=None, tokens_per_second=None)
    async with open_app(Observation(NOW, young), size=(80, 24)) as pilot:
        texts = []
        for page in PAGES.values():
            await pilot.press(page.tab.key)
            texts.append(screen_text(pilot.app))
        matches_snapshot("starting", "\n".join(texts))


@pytest.mark.sample("pipeline")
@pytest.mark.parametrize("page", PAGES)
async def test_the_help_pages(page: str, matches_snapshot: MatchesSnapshot) -> None:
    async with open_app(demo(), size=(80, 45)) as pilot:
        await pilot.press(PAGES[page].tab.key, "question_mark")
        matches_snapshot(f"help-{page}", screen_text(pilot.app))


@pytest.mark.parametrize("width", [60, 100])
def test_the_summary(width: int, matches_snapshot: MatchesSnapshot) -> None:
    look = Style(UNICODE, has_headings=False, has_signs=False)
    text = job_text(fold(None, demo()), width, look)
    assert max(map(len, text.splitlines())) <= width
    matches_snapshot(f"once-{width}", text)


def test_the_summary_of_a_crashed_job(matches_snapshot: MatchesSnapshot) -> None:
    look = Style(ASCII, has_headings=False, has_signs=False)
    text = job_text(fold(None, crashed_demo()), 100, look)
    assert text.isascii()
    matches_snapshot("once-crashed", text)


def test_the_table_of_jobs(matches_snapshot: MatchesSnapshot) -> None:
    jobs = [
        summary(1),
        summary(2, state="crashed", strategy="Parallel3DStrategy", world_size=16,
                mesh={"pipeline": 2, "data": 4, "tensor": 2}),
        summary(3, state="finished", name="a name that is rather long for a table"),
    ]  # fmt: skip
    look = Style(UNICODE, has_headings=False, has_signs=False)
    matches_snapshot("jobs", jobs_text(jobs, 80, look, now=NOW))
