"""Opens the dashboard without a terminal, and reads what is on its screen."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

from textual.app import App
from textual.events import Callback
from textual.message import Message
from textual.pilot import Pilot

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.screens import live
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.sources.live import Observation, Source
from tests.tui.samples import FakeSource

REST_S = 60.0
"""Longer than anything takes here, on whatever machine."""


@asynccontextmanager
async def run_app(
    app: App[Any], *, size: tuple[int, int] = (80, 24), first_look_s: float = REST_S
) -> AsyncIterator[Pilot[None]]:
    """Run an app that is at rest after every key, click and pause.

    Textual waits until its process computes little, for a second at most. That is too early where
    the machine gives the time to others, and takes most of the time of a test that presses hundreds
    of keys. Here a key comes when all messages of the one before it are done with, and what the
    last key of a call has changed is drawn.

    Args:
        app: Not running yet.
        size: Columns and lines.
        first_look_s: How long the first paint of a job waits for the first look.
    """

    messages = Messages()

    async def is_handled(*_: float) -> None:
        await messages.end(pilot, is_drawn=False)

    async def is_drawn(*_: float) -> None:
        await messages.end(pilot, is_drawn=True)

    async def press(*keys: str) -> None:
        await press_all(*keys)
        await is_drawn()

    with patch.object(live, "FIRST_LOOK_S", first_look_s):
        async with app.run_test(size=size, message_hook=messages.note) as pilot:
            press_all = pilot.press
            with (
                patch("textual.app.wait_for_idle", is_handled),
                patch("textual.pilot.wait_for_idle", is_drawn),
                patch.object(pilot, "press", press),
            ):
                await pilot.pause()
                yield pilot


class Messages:
    """Counts what the widgets of an app send each other."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, message: Message) -> None:
        """See one that a widget begins to handle."""
        # Not the one by which the pilot asks each widget whether it is done with all before it.
        is_asked = isinstance(message, Callback) and "decrement_counter" in str(message.callback)
        self._count += not is_asked

    async def end(self, pilot: Pilot[None], *, is_drawn: bool) -> None:
        """Wait until all widgets are done, and nothing comes from drawing what has changed."""
        app, deadline, before = pilot.app, time.monotonic() + REST_S, -1
        while await pilot._wait_for_screen() and app.screen_stack:
            if is_drawn:
                app.screen._on_timer_update()
            screens = (screen.walk_children(with_self=True) for screen in app.screen_stack)
            is_waiting = any(
                each.message_queue_size or each._next_callbacks for each in chain([app], *screens)
            )
            # Textual waits for more of the kind before it tells the screen of another size.
            is_resizing = app._resize_timer is not None
            if self._count == before and not is_waiting and not is_resizing:
                return
            before = self._count
            assert time.monotonic() < deadline, "the dashboard does not come to rest"


@asynccontextmanager
async def open_source(
    source: Source | None,
    *,
    size: tuple[int, int] = (120, 30),
    first_look_s: float = REST_S,
    **options: Any,
) -> AsyncIterator[Pilot[None]]:
    """Run the dashboard; it looks again only when a test says so."""
    app = DashboardApp(source, **{"interval_s": None, "palette": "night"} | options)
    async with run_app(app, size=size, first_look_s=first_look_s) as pilot:
        yield pilot
        assert "cannot be drawn" not in screen_text(app)


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
    """Wait until what a key or a message has begun in the background is on the screen."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def wait_until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for what the command palette does in workers of its own."""
    deadline = time.monotonic() + REST_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain:\n{screen_text(pilot.app)}"
        await pilot.pause(0.05)


def screen_text(app: App[Any]) -> str:
    """Return the characters on the screen, line by line."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def find_text(app: App[Any], text: str) -> tuple[int, int]:
    """Return the cell at which a text begins; characters of the dashboard are one cell wide."""
    for y, line in enumerate(screen_text(app).split("\n")):
        if text in line:
            return line.index(text), y
    raise AssertionError(f"{text!r} is not on the screen:\n{screen_text(app)}")
