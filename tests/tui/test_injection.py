"""Nothing that a job wrote is obeyed by the terminal, by Textual or by Rich."""

import json
from typing import Any

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Event, JobSnapshot, MetricPoint
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.app import DashboardApp
from boltmesh.tui.commands.top import job_json, job_text, jobs_json, jobs_text
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.screens.palette import commands_of
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.samples import NOW, FakeSource, job, rank, summary, total
from tests.tui.screens import job_screen, look_again, open_app, screen_text

HOSTILE = "\x1b[31m\x1b]0;owned\x07[bold red]evil[/bold red]\x9b2J\u202e[@click=app.exit]x[/]\r\n"
VISIBLE = "[bold red]evil[/bold red]"


ADDED = ("devices", "stalled_s", "stopped")
"""Keys of the document that are the viewer's own."""


def _hostile_job() -> JobSnapshot:
    item = rank(
        0,
        device=HOSTILE,
        phase=HOSTILE,
        error=HOSTILE,
        state="failed",
        collectives=(total(HOSTILE, HOSTILE),),
        host=HOSTILE,
    )
    expected = ExpectedTraffic(
        axis=HOSTILE, operator=HOSTILE, payload_bytes=2000.0, calls=None, why=HOSTILE
    )
    return job(
        name=HOSTILE,
        id=HOSTILE,
        strategy=HOSTILE,
        state="failed",
        cause=HOSTILE,
        mesh={HOSTILE: 2, "tensor": 2},
        world_size=4,
        ranks=(item,),
        expected=(expected,),
        communication_note=HOSTILE,
        history=(MetricPoint(HOSTILE, 1, 1.0), MetricPoint("loss", 1, 1.0)),
        metrics={HOSTILE: 1.0},
        events=(Event(NOW, 0, "error", HOSTILE),),
    )


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _strings(item)]
    return []


@pytest.mark.sample("size0")
@pytest.mark.parametrize("size", [(60, 15), (120, 40), (200, 60)])
async def test_hostile_text_is_shown_and_not_obeyed(size: tuple[int, int]) -> None:
    async with open_app(Observation(NOW, _hostile_job()), size=size) as pilot:
        for _ in range(2):
            text = screen_text(pilot.app)
            assert VISIBLE in text
            assert all(line.isprintable() for line in text.split("\n"))
            await pilot.press("m")
            await look_again(pilot)


@pytest.mark.sample("size0")
@pytest.mark.parametrize("size", [(60, 15), (120, 40), (200, 60)])
async def test_hostile_text_is_harmless_on_every_screen(size: tuple[int, int]) -> None:
    async with open_app(Observation(NOW, _hostile_job()), size=size) as pilot:
        for key in (*"234567", "j", "enter", "question_mark"):
            await pilot.press(key)
            assert all(line.isprintable() for line in screen_text(pilot.app).split("\n"))


async def test_a_hostile_metric_is_no_markup_in_the_palette() -> None:
    async with open_app(Observation(NOW, _hostile_job())) as pilot:
        assert isinstance(pilot.app, DashboardApp)
        titles = [item.title for item in commands_of(pilot.app, pilot.app.screen)]
        assert any("evil" in title for title in titles)
        assert all(title.isprintable() and "[" not in title for title in titles)


@pytest.mark.parametrize("digit", "1234567")
async def test_the_terminal_is_sent_no_sequence_of_the_jobs(digit: str) -> None:
    async with open_app(Observation(NOW, _hostile_job()), size=(120, 40)) as pilot:
        await pilot.press(digit)
        sent = "".join(
            strip.render(pilot.app.console)
            for strip in pilot.app.screen._compositor.render_strips()
        )
        assert "owned" not in sent
        assert "\x07" not in sent
        assert "\x9b" not in sent
        assert "\u202e" not in sent


@pytest.mark.parametrize("width", [20, 60, 200])
def test_summaries_are_harmless_at_any_width(width: int) -> None:
    look = Style(UNICODE, has_headings=False, has_signs=False)
    state = fold(None, Observation(NOW, _hostile_job()))
    texts = [
        job_text(state, width, look),
        jobs_text([summary(1, id=HOSTILE, name=HOSTILE, strategy=HOSTILE)], width, look, now=NOW),
    ]
    for text in texts:
        assert all(line.isprintable() for line in text.split("\n"))


def test_json_is_harmless_and_still_says_what_the_job_said() -> None:
    seen = Observation(NOW, _hostile_job())
    text = job_json(seen)
    assert text.isprintable()
    document = json.loads(text)
    assert document["name"] == HOSTILE
    # What the dashboard itself says of the job is words of its own around those of the job.
    assert document.pop("findings")
    assert document.pop("figures")
    assert set(_strings(document)) == {*_strings(msgspec.to_builtins(seen.job)), *ADDED}
    assert jobs_json([summary(1, name=HOSTILE)]).isprintable()


async def test_a_hostile_reason_of_a_lost_source_is_harmless() -> None:
    async with open_app(Observation(NOW, job())) as pilot:
        source = job_screen(pilot).session.source
        assert isinstance(source, FakeSource)
        source.lost = HOSTILE
        await look_again(pilot)
        text = screen_text(pilot.app)
        assert VISIBLE in text
        assert all(line.isprintable() for line in text.split("\n"))
