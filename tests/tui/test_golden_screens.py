"""Jobs in each kind of trouble at three sizes as text, one screen in four themes as SVG.

See conftest.py for how to renew them.
"""

from collections.abc import Callable

import pytest

from boltmesh.tui.demo import DEFAULT_MESH, HEAD_START, STEP_S, Scenario, observe
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.theme import PALETTES
from tests.tui.samples import NOW, demo
from tests.tui.screens import open_app, screen_text

MatchesSnapshot = Callable[[str, str], None]
SIZES = [(80, 24), (120, 35), (160, 45)]


def _seen(scenario: Scenario) -> Observation:
    started = NOW - HEAD_START * STEP_S - 120
    return observe(0, started=started, now=NOW, scenario=scenario, mesh=DEFAULT_MESH)


@pytest.mark.parametrize("scenario", ["healthy", "straggler", "input_bound", "hang", "crashed"])
async def test_overview_and_history(scenario: Scenario, matches_snapshot: MatchesSnapshot) -> None:
    texts = []
    for size in SIZES:
        async with open_app(_seen(scenario), size=size) as pilot:
            for key in "1h":
                await pilot.press(key)
                texts.append(screen_text(pilot.app))
    matches_snapshot(f"golden-{scenario}", "\n".join(texts))


@pytest.mark.parametrize("palette", list(PALETTES))
async def test_the_overview_in_each_theme(palette: str, matches_snapshot: MatchesSnapshot) -> None:
    async with open_app(demo(), size=(80, 24), palette=palette) as pilot:
        matches_snapshot(f"overview-{palette}.svg", pilot.app.export_screenshot(title="boltmesh"))
