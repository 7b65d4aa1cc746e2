"""Every screen of jobs in each kind of trouble, at three sizes and in four themes, and SVGs of one.

A file for each job and size, compressed: the text of each screen, and a hash of its SVG in each
theme. See conftest.py for how to renew them.
"""

import difflib
import hashlib
import json
import lzma
import os
from collections.abc import Callable
from typing import Any

import pytest

from boltmesh.tui.demo import DEFAULT_MESH, HEAD_START, STEP_S, Scenario, observe
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.theme import PALETTES
from tests.tui.conftest import SNAPSHOTS, UPDATE
from tests.tui.samples import NOW, demo
from tests.tui.screens import open_app, screen_text

MatchesSnapshot = Callable[[str, str], None]
SIZES = [(80, 24), (120, 35), (160, 45)]
JOBS: dict[str, tuple[Scenario, dict[str, int]]] = {
    "healthy": ("healthy", dict(DEFAULT_MESH)),
    "straggler": ("straggler", dict(DEFAULT_MESH)),
    "input_bound": ("input_bound", dict(DEFAULT_MESH)),
    "hang": ("hang", dict(DEFAULT_MESH)),
    "crashed": ("crashed", dict(DEFAULT_MESH)),
    "pipeline": ("healthy", {"pipeline": 4, "data": 1, "tensor": 1}),
}


def _seen(job: str) -> Observation:
    started = NOW - HEAD_START * STEP_S - 120
    scenario, mesh = JOBS[job]
    return observe(0, started=started, now=NOW, scenario=scenario, mesh=mesh)


async def _drawn(job: str, size: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Return the text of each screen, and the hash of its SVG by theme."""
    found: dict[str, dict[str, Any]] = {name: {"text": [], "svg": {}} for name in PAGES}
    for theme in PALETTES:
        async with open_app(_seen(job), size=size, palette=theme) as pilot:
            for name, page in PAGES.items():
                await pilot.press(page.tab.key)
                text = screen_text(pilot.app).splitlines()
                found[name]["text"] = [line.rstrip() for line in text]
                svg = pilot.app.export_screenshot(title="boltmesh")
                found[name]["svg"][theme] = hashlib.sha256(svg.encode()).hexdigest()[:16]
    return found


@pytest.mark.sample("crashed-size1")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("job", JOBS)
async def test_every_screen_in_each_theme(job: str, size: tuple[int, int]) -> None:
    path = SNAPSHOTS / f"golden-{job}-{size[0]}x{size[1]}.json.xz"
    found = await _drawn(job, size)
    if os.environ.get(UPDATE) == "1":
        content = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
        path.write_bytes(lzma.compress(content, preset=9))
    assert path.is_file(), f"{path.name} is missing: run the test with {UPDATE}=1"
    expected = json.loads(lzma.decompress(path.read_bytes()))
    for name, screen in found.items():
        before = expected.get(name, {"text": [], "svg": {}})
        difference = difflib.unified_diff(before["text"], screen["text"], lineterm="", n=1)
        assert screen["text"] == before["text"], f"{name}:\n" + "\n".join(difference)
        assert screen["svg"] == before["svg"], f"{name}: the text is the same, colours are not"


@pytest.mark.parametrize("palette", list(PALETTES))
async def test_the_overview_in_each_theme(palette: str, matches_snapshot: MatchesSnapshot) -> None:
    async with open_app(demo(), size=(80, 24), palette=palette) as pilot:
        matches_snapshot(f"overview-{palette}.svg", pilot.app.export_screenshot(title="boltmesh"))
