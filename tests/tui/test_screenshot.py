"""The README's picture is the dashboard itself, as it is now."""

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from boltmesh.tui.pages.registry import PAGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def screenshot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("screenshot", DOCS / "screenshot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _words(svg: str) -> list[str]:
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [word for text in texts for word in (text.text or "").split()]


async def test_the_picture_is_up_to_date(screenshot: ModuleType) -> None:
    drawn = await screenshot.draw()
    words = _words(drawn)
    assert {"Parallel3DStrategy", "backward", "all_reduce", "running"} <= set(words)
    assert words == _words((DOCS / "dashboard.svg").read_text(encoding="utf-8")), (
        "run `make screenshot` and look at docs/dashboard.svg"
    )


@pytest.mark.sample("overview", "pipeline", "mesh", "devices", "compare")
@pytest.mark.parametrize("screen", PAGES)
async def test_every_screen_can_be_drawn(screenshot: ModuleType, screen: str) -> None:
    words = _words(await screenshot.draw((80, 24), screen))
    assert {"Parallel3DStrategy", "running"} <= set(words)


async def test_the_picture_does_not_depend_on_when_it_is_drawn(screenshot: ModuleType) -> None:
    assert await screenshot.draw() == await screenshot.draw()


def test_every_picture_is_there_and_shown() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in (DOCS.parent / "README.md", *DOCS.glob("*.md"))
        for name in re.findall(r"!\[[^\]]*\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == {path.resolve() for path in DOCS.glob("*.svg")}


def test_the_charts_in_the_docs_are_those_of_a_run_that_has_ended() -> None:
    words = _words((DOCS / "history.svg").read_text(encoding="utf-8"))
    assert {"finished", "loss", "val_loss", "utilisation", "tokens/s"} <= set(words)
    assert "gpt-demo" not in words
