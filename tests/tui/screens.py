"""Opens the dashboard without a terminal, and reads what is on its screen."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from textual.app import App
from textual.pilot import Pilot

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.screens.overview import OverviewScreen
from boltmesh.tui.source import Observation
from tests.tui.samples import FakeSource


@asynccontextmanager
async def open_app(
    *observations: Observation, size: tuple[int, int] = (120, 30), **options: Any
) -> AsyncIterator[Pilot[None]]:
    """Run the dashboard on a fake source; it looks again only when a test says so."""
    source = FakeSource(*observations) if observations else None
    app = DashboardApp(source, interval_s=None, **{"palette": "night"} | options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield pilot


async def look_again(pilot: Pilot[None]) -> None:
    """Let the overview read its source once more and draw the result."""
    screen = pilot.app.screen
    assert isinstance(screen, OverviewScreen)
    await screen.look_again()
    await pilot.pause()


def screen_text(app: App[Any]) -> str:
    """Return the characters on the screen, line by line."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())
