"""The headline figures are on every screen, with a level that is also a mark."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import PhaseTime
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.header import draw_headline
from boltmesh.tui.render.bars import BUBBLE, MFU, Limits
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.samples import crashed_demo, demo, job, rank, state, step
from tests.tui.screens import open_app, screen_text


@pytest.mark.parametrize(
    ("limits", "value", "level"),
    [
        (MFU, 0.5, "good"),
        (MFU, 0.35, "warn"),
        (MFU, 0.2, "warn"),
        (MFU, 0.15, "bad"),
        (BUBBLE, 0.1, "good"),
        (BUBBLE, 0.2, "warn"),
        (BUBBLE, 0.4, "bad"),
    ],
)
def test_levels_follow_the_limits_in_both_directions(
    limits: Limits, value: float, level: str
) -> None:
    assert limits.level(value) == level


def test_as_many_of_the_first_figures_as_fit() -> None:
    found = fold(None, demo())
    text = draw_headline(found, 200, Style(UNICODE)).plain
    labels = ["tokens/s", "MFU", "util", "memory", "bubble", "exposed comm", "step"]
    assert [text.index(label) for label in labels] == sorted(text.index(label) for label in labels)
    short = draw_headline(found, 30, Style(UNICODE)).plain
    assert short.split()[0] == "tokens/s"
    assert len(short) <= 30
    assert text.startswith(short[:8])


def test_figures_with_limits_stay_where_others_find_no_room() -> None:
    steps = tuple(
        step(at, phases=(PhaseTime("forward", 0.2), PhaseTime("communication", 0.3)), tokens=99_999)
        for at in range(10)
    )
    ranks = tuple(rank(at, steps=steps, flops_per_batch=1.23e12) for at in range(2))
    found = state(job(ranks=ranks))
    wide = draw_headline(found, 200, Style(UNICODE)).plain
    assert "compute" in wide
    short = draw_headline(found, wide.index("exposed") + 18, Style(UNICODE)).plain
    assert "exposed comm 60.0%!!" in short
    assert "compute" not in short


def _stalled_demo() -> Observation:
    seen = demo()
    return msgspec.structs.replace(seen, time=seen.time + 300)


@pytest.mark.parametrize("seen", [_stalled_demo(), crashed_demo()])
def test_nothing_is_green_in_a_job_that_is_stalled_or_has_ended(seen: Observation) -> None:
    line = draw_headline(fold(None, seen), 200, Style(UNICODE))
    assert not {role for _, role in line.spans} & {"good", "warn", "bad"}


@pytest.mark.parametrize("page", PAGES)
async def test_every_screen_has_them(page: str) -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press(PAGES[page].tab.key)
        line = screen_text(pilot.app).splitlines()[2]
        for label in ("tokens/s", "MFU", "util", "memory", "bubble"):
            assert label in line
