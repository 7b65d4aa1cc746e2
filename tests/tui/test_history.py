"""Charts of the run: their data, the grid, zoom, smoothing, and a second series."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import MetricPoint
from boltmesh.tui.panels.chart import charts, draw_plot, seen_through
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.state import Series, fold
from boltmesh.tui.view import View
from tests.tui.samples import crashed_demo, demo, job
from tests.tui.screens import job_screen, open_app, screen_text

LOOK = Style(UNICODE)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 35), (160, 45)])
async def test_h_shows_as_many_charts_as_fit(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        await pilot.press("h")
        text = screen_text(pilot.app)
        assert "loss, val_loss" in text
        assert ("step time, ms" in text) == (size[0] >= 80)
        assert ("utilisation, %" in text) == (size[0] >= 120)
        await pilot.press("escape")
        assert job_screen(pilot).page.tab.name == "overview"


async def test_zoom_and_smoothing_are_said_and_end() -> None:
    async with open_app(demo(), size=(120, 35)) as pilot:
        await pilot.press("h", "z", "z", "e")
        text = screen_text(pilot.app)
        assert "newest 1/4  smooth  4,200" in text
        assert "step 3,160" in text
        await pilot.press("Z", "Z", "Z", "e")
        assert "newest" not in screen_text(pilot.app)
        assert job_screen(pilot).session.view.zoom == 0


def test_a_crashed_job_has_its_trends_and_no_reading_of_devices() -> None:
    found = fold(None, crashed_demo()).trends
    assert set(found) >= {"step_s", "memory_bytes"}
    assert not set(found) & {"utilisation_percent", "power_watts", "temperature_celsius"}


def test_readings_of_devices_are_kept_while_somebody_watches() -> None:
    seen = demo()
    later = msgspec.structs.replace(
        seen, job=msgspec.structs.replace(seen.job, global_step=seen.job.global_step + 1)
    )
    state = fold(fold(None, seen), later)
    assert len(state.trends["power_watts"].steps) == 2
    assert len(fold(state, later).trends["power_watts"].steps) == 2


def test_a_view_is_the_newest_part_and_its_moving_mean() -> None:
    series = Series((0, 10, 20, 30, 40), (1.0, float("nan"), 3.0, 3.0, 5.0))
    assert seen_through(series, View(zoom=1)).steps == (20, 30, 40)
    smooth = seen_through(series, View(is_smooth=True)).values
    assert smooth[0] == 1.0
    assert smooth[1] != smooth[1]
    assert smooth[2] == pytest.approx(0.9 + 0.3)


def test_two_series_share_their_axes() -> None:
    low, high = Series((0, 10), (0.0, 1.0)), Series((0, 10), (9.0, 10.0))
    lines = draw_plot("a, b", low, 40, 12, LOOK, newest="1", beside=high)
    roles = [{role for text, role in line.spans if text.strip()} for line in lines[1:-1]]
    assert "warn" in roles[0]
    assert "chart" in roles[-1]
    assert "chart" not in roles[0]


def test_a_metric_of_the_users_is_no_trend() -> None:
    seen = demo()
    changed = job(trends=(MetricPoint("step_s", 1, 0.5), MetricPoint("step_s", 2, 0.5)))
    state = fold(None, msgspec.structs.replace(seen, job=changed))
    assert "step_s" not in state.series
    assert any(chart.title == "step time, ms" for chart in charts(state))
