"""Opens the dashboard without a terminal, and reads what is on its screen."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

from textual._wait import wait_for_idle
from textual.app import App
from textual.pilot import Pilot

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.sources.live import Observation, Source
from tests.tui.samples import FakeSource


@asynccontextmanager
async def open_source(
    source: Source | None, *, size: tuple[int, int] = (120, 30), **options: Any
) -> AsyncIterator[Pilot[None]]:
    """Run the dashboard; it looks again only when a test says so."""
    app = DashboardApp(source, **{"interval_s": None, "palette": "night"} | options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        with _keys_follow_each_other(pilot):
            yield pilot
        assert "cannot be drawn" not in screen_text(app)


@contextmanager
def _keys_follow_each_other(pilot: Pilot[None]) -> Iterator[None]:
    """Let a key come as soon as every widget is done with what the one before it has sent.

    Textual rests twice after each key until a process is idle, which is most of the time of a test
    that presses hundreds. Here it rests once, after the last key of a call.
    """
    press_all = pilot.press

    async def widgets_are_done(*_: float) -> None:
        await pilot._wait_for_screen()

    async def press(*keys: str) -> None:
        with patch("textual.app.wait_for_idle", widgets_are_done):
            await press_all(*keys)
        await wait_for_idle(0)

    with patch.object(pilot, "press", press):
        yield


@asynccontextmanager
async def open_app(
    *observations: Observation, size: tuple[int, int] = (120, 30), **options: Any
) -> AsyncIterator[Pilot[None]]:
    """Run the dashboard on a source that gives these observations."""
    source = FakeSource(*observations) if observations else None
    async with open_source(source, size=size, **options) as pilot:
        yield pilot


def job_screen(pilot: Pilot[None]) -> JobScreen:
    """Return the screen of the job, which has to be in front."""
    screen = pilot.app.screen
    assert isinstance(screen, JobScreen)
    return screen


async def look_again(pilot: Pilot[None]) -> None:
    """Let the screen read its source once more and draw the result."""
    await job_screen(pilot).look_again()
    await pilot.pause()


async def settle(pilot: Pilot[None]) -> None:
    """Wait until what a key has begun in the background is on the screen."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def screen_text(app: App[Any]) -> str:
    """Return the characters on the screen, line by line."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def find_text(app: App[Any], text: str) -> tuple[int, int]:
    """Return the cell at which a text begins; characters of the dashboard are one cell wide."""
    for y, line in enumerate(screen_text(app).split("\n")):
        if text in line:
            return line.index(text), y
    raise AssertionError(f"{text!r} is not on the screen:\n{screen_text(app)}")
