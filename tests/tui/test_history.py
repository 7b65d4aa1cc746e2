"""Charts of the run: their data, the grid, zoom, smoothing, and a second series."""

from collections.abc import Sequence

import msgspec
import pytest

from boltmesh.telemetry.snapshot import MetricPoint
from boltmesh.tui.export.html import html_page
from boltmesh.tui.panels.chart import Curve, draw_plot, plot_series
from boltmesh.tui.panels.history import charts, draw_history, draw_trends
from boltmesh.tui.panels.window import seen_through, value_at
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import Series, fold
from boltmesh.tui.view import View
from tests.tui.samples import NOW, crashed_demo, demo, job
from tests.tui.screens import job_screen, open_app, screen_text, settle

LOOK = Style(UNICODE)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 35), (160, 45)])
async def test_h_shows_as_many_charts_as_fit(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        await pilot.press("h")
        text = screen_text(pilot.app)
        assert "loss, val_loss" in text
        assert ("step time, ms" in text) == (size[0] >= 80)
        assert ("utilisation of rank 0, %" in text) == (size[0] >= 120)
        await pilot.press("escape")
        assert job_screen(pilot).page.tab.name == "overview"


async def test_zoom_and_smoothing_are_said_and_end() -> None:
    async with open_app(demo(), size=(120, 35)) as pilot:
        await pilot.press("h", "z", "z", "e")
        text = screen_text(pilot.app)
        assert "newest 1/4  smooth  4,200" in text
        assert "step 3,152" in text
        await pilot.press("Z", "Z", "Z", "e")
        assert "newest" not in screen_text(pilot.app)
        assert job_screen(pilot).session.view.zoom == 0


def test_a_crashed_job_has_its_trends_and_those_of_its_device() -> None:
    found = fold(None, crashed_demo()).trends
    names = ("step_s", "memory_bytes", "utilisation_percent", "power_watts", "temperature_celsius")
    assert all(len(found[name].steps) > 100 for name in names)


def test_a_view_is_the_newest_part_and_its_moving_mean() -> None:
    series = Series((0, 10, 20, 30, 40), (1.0, float("nan"), 3.0, 3.0, 5.0))
    assert seen_through(series, View(zoom=1)).steps == (20, 30, 40)
    smooth = seen_through(series, View(is_smooth=True)).values
    assert smooth[0] == 1.0
    assert smooth[1] != smooth[1]
    assert smooth[2] == pytest.approx(0.81 * 1.0 + 0.19 * 3.0)  # 20 steps after the first


def test_a_moving_mean_covers_as_many_steps_where_points_lie_close() -> None:
    early = list(range(0, 1000, 100))
    noise = [(-1.0) ** place for place in range(100)]
    series = Series((*early, *range(1000, 1100)), (*(0.0 for _ in early), *noise))
    whole = seen_through(series, View(is_smooth=True)).values
    newest = seen_through(series, View(is_smooth=True, zoom=4)).values
    swings = [abs(values[-1] - values[-2]) for values in (whole, newest)]
    # Points lie 10 steps apart in the whole, on average, and 1 in its newest part.
    assert swings[0] < 0.015
    assert swings[1] == pytest.approx(2 * 0.1 / 1.9, rel=0.05)


def test_two_series_share_their_axes() -> None:
    low, high = Series((0, 10), (0.0, 1.0)), Series((0, 10), (9.0, 10.0))
    lines = draw_plot(Line("a, b"), low, 40, 12, LOOK, newest=Line("1"), over=[Curve(high, "warn")])
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


async def test_a_cursor_reads_the_values_and_ends() -> None:
    async with open_app(demo(), size=(120, 35)) as pilot:
        await pilot.press("h", "left")
        text = screen_text(pilot.app)
        assert "at step 4,116" in text
        loss = next(p for p in demo().job.history if p.name == "loss" and p.global_step == 4120)
        assert f"{loss.value:.4g}"[:4] in text.splitlines()[5]
        await pilot.press("z", "z", *["left"] * 60)
        view = job_screen(pilot).session.view
        assert view.cursor is not None
        assert view.pan is not None
        assert view.cursor >= view.pan - 1048
        await pilot.press("escape")
        assert job_screen(pilot).page.tab.name == "history"
        assert job_screen(pilot).session.view.cursor is None
        await pilot.press("greater_than_sign", *["greater_than_sign"] * 9)
        assert job_screen(pilot).session.view.pan is None


async def test_a_click_puts_the_cursor_and_time_is_an_axis() -> None:
    async with open_app(demo(), size=(120, 35)) as pilot:
        await pilot.press("h")
        await pilot.click(offset=(30, 8))
        cursor = job_screen(pilot).session.view.cursor
        assert cursor is not None
        assert 1500 < cursor < 4000
        await pilot.press("x")
        text = screen_text(pilot.app)
        assert "28m" in text
        assert job_screen(pilot).session.view.cursor is None
        await pilot.press("x")
        assert "step 10" in screen_text(pilot.app)


async def test_further_charts_are_reached() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press("h")
        assert "1-4 of" in screen_text(pilot.app)
        await pilot.press(*["down"] * 4)
        text = screen_text(pilot.app)
        assert "temperature of rank 0, C" in text
        assert "loss, val_loss" not in text


def test_seconds_of_steps_lie_between_those_that_are_known() -> None:
    seen = job(
        trends=(MetricPoint("wall_s", 8, NOW - 90), MetricPoint("wall_s", 16, NOW - 50)),
        history=tuple(MetricPoint("loss", at, 1.0) for at in (4, 8, 12, 20)),
    )
    (chart, *_) = charts(fold(None, Observation(NOW, seen)), is_time=True)
    assert chart.series.steps == pytest.approx((-10, 10, 30, 70))


def _timed_look(steps: Sequence[int], clock: Sequence[float]) -> Observation:
    """A look at a job whose clock was read after these steps."""
    trends = tuple(MetricPoint("wall_s", *at) for at in zip(steps, clock, strict=True))
    history = tuple(MetricPoint("loss", step, 2.0) for step in steps)
    return Observation(NOW, job(started=0.0, history=history, trends=trends))


async def test_several_points_of_a_step_that_accumulates_many_batches_have_times() -> None:
    seen = _timed_look((0, 0, 0, 1, 2, 2), (10.0, 20.0, 30.0, 40.0, 50.0, 60.0))
    async with open_app(seen, size=(120, 35)) as pilot:
        await pilot.press("h", "x", "left")
        assert "30s" in screen_text(pilot.app)


def test_a_clock_that_is_set_back_lets_time_stand_still_in_the_charts() -> None:
    seen = fold(None, _timed_look((8, 16, 24, 32), (100.0, 200.0, 50.0, 300.0)))
    (loss, *_) = charts(seen, is_time=True)
    assert loss.series.steps == (100.0, 200.0, 200.0, 300.0)
    draw_history(seen, 80, 20, LOOK, view=View(is_time=True, is_log=True))


def test_a_logarithmic_axis_of_a_narrow_range_tells_its_ends_apart() -> None:
    series = Series((1, 2, 3), (158_391.0, 159_032.0, 158_500.0))
    for least_span in (0.0, 0.2):
        plot = plot_series(series, 60, 6, LOOK, is_log=True, least_span=least_span)
        top, bottom = (float(plot.lines[at].plain[: plot.start]) for at in (0, -1))
        assert bottom <= 158_391 < 159_032 <= top
        assert (top / bottom > 1.15) == (least_span > 0)


def test_a_cursor_reads_the_nearest_point_and_nothing_far_beyond_the_ends() -> None:
    series = Series((10, 20, 30), (1.0, 2.0, 3.0))
    read = [value_at(series, x) for x in (0, 14, 16, 30, 49, 51)]
    assert read == [1.0, 1.0, 2.0, 3.0, 3.0, None]
    assert value_at(Series((), ()), 1) is None
    assert value_at(Series((5,), (1.0,)), 5) == 1.0


@pytest.mark.parametrize(
    ("key", "title"),
    [("2", "tokens/s"), ("3", "traffic of rank 0"), ("4", "bubble, %"),
     ("6", "memory of rank 0"), ("8", "step time, ms")],
)  # fmt: skip
async def test_room_below_the_tables_shows_the_run(key: str, title: str) -> None:
    async with open_app(demo(), size=(160, 60)) as pilot:
        await pilot.press(key)
        assert f"─ {title}" in screen_text(pilot.app)
        await pilot.resize_terminal(160, 20)
        await settle(pilot)
        assert f"─ {title}" not in screen_text(pilot.app)


def test_bytes_have_the_unit_of_their_size() -> None:
    seen = fold(None, demo())
    lines = draw_trends(seen, 80, 20, LOOK, view=View(), names=("bytes_per_s",))
    newest = seen.trends["bytes_per_s"].values[-1]
    assert lines[0].plain.endswith(f" {newest / 1e9:.1f} GB/s ─")
    assert any(line.plain.lstrip()[:3].rstrip().endswith("G") for line in lines[1:])
    assert "e+10" not in html_page(seen)


def test_noise_of_the_cost_of_a_step_does_not_fill_its_chart() -> None:
    seen = fold(None, demo())
    (chart,) = [each for each in charts(seen) if each.name == "step_s"]
    values = chart.series.values
    assert max(values) - min(values) < 0.05 * max(values)
    lines = draw_trends(seen, 80, 20, LOOK, view=View(), names=("step_s",))
    drawn = [line.plain for line in lines[1:-1]]
    dotted = [line for line in drawn if any("\u2801" <= char <= "\u28ff" for char in line)]
    assert 1 <= len(dotted) < len(drawn) / 2
