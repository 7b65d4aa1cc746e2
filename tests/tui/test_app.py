"""The shell at every size: what stays whole, what is shown, and how it begins and ends."""

import threading
from typing import Any

import pytest
from rich.cells import cell_len
from textual import events
from textual.app import App

from boltmesh.tui.app import DashboardApp
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.render.line import Line
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.job import JobScreen
from boltmesh.tui.screens.live import FIRST_LOOK_S
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.theme import PALETTES
from tests.tui.samples import NOW, FakeSource, crashed_demo, demo, job, losses, rank, step
from tests.tui.screens import (
    job_screen,
    look_again,
    open_app,
    open_source,
    run_app,
    screen_text,
    settle,
)

SIZES = [(1, 1), (2, 30), (20, 5), (40, 10), (60, 15), (80, 24), (120, 40), (200, 60), (300, 100)]
USUAL_SIZES = SIZES[4:]
FEW_KEYS = ("j", "s", "enter", "escape", "o", "f", "end")
KEYS = (
    "j", "k", "l", "h", "s", "S", "pagedown", "pageup", "end", "home", "o", "enter", "j",
    "escape", "m", "M", "L", "f", "F", "space", "space", "slash", "x", "escape", "t",
    "question_mark", "j", "escape", "left_square_bracket", "full_stop", "plus",
    "tab", "shift+tab", "g", "escape", "0",
)  # fmt: skip


def _check_shape(app: App[Any], size: tuple[int, int]) -> None:
    lines = screen_text(app).split("\n")
    assert len(lines) == size[1]
    assert {cell_len(line) for line in lines} == {size[0]}


@pytest.mark.sample("1x1", "20x5", "80x24")
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_every_key_works_on_every_screen_at_every_size(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        for name, page in PAGES.items():
            has_all = size in USUAL_SIZES and name == "ranks"
            await pilot.press(page.tab.key, *(KEYS if has_all else FEW_KEYS))
            _check_shape(pilot.app, size)
            assert isinstance(pilot.app.screen, JobScreen)


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [(20, 5), (60, 15), (120, 40)])
@pytest.mark.parametrize(
    "seen", [crashed_demo(), Observation(NOW, job(ranks=())), Observation(NOW, job())]
)
async def test_jobs_without_data_are_no_special_case(
    size: tuple[int, int], seen: Observation
) -> None:
    async with open_app(seen, size=size) as pilot:
        for page in PAGES.values():
            await pilot.press(page.tab.key, "m", "j", "s", "f", "enter", "escape", "pagedown")
            _check_shape(pilot.app, size)


async def test_a_thousand_ranks_are_no_special_case() -> None:
    many = job(ranks=tuple(rank(number) for number in range(1024)))
    async with open_app(Observation(NOW, many), size=(120, 40)) as pilot:
        for page in PAGES.values():
            await pilot.press(page.tab.key, "j", "end", "s", "pageup")
            _check_shape(pilot.app, (120, 40))


async def test_resizing_through_all_sizes_keeps_the_screen_whole() -> None:
    async with open_app(demo()) as pilot:
        for place, (width, height) in enumerate([*SIZES, *reversed(SIZES)]):
            await pilot.press(str(1 + place % 7))
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            _check_shape(pilot.app, (width, height))
        await pilot.press("1")
        await pilot.resize_terminal(120, 35)
        await pilot.pause()
        resized = screen_text(pilot.app)
    async with open_app(demo(), size=(120, 35)) as pilot:
        assert resized == screen_text(pilot.app)


@pytest.mark.sample("80x24")
@pytest.mark.parametrize("size", USUAL_SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_digits_and_arrows_go_to_every_screen(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        screen, seen = job_screen(pilot), set()
        for name, page in PAGES.items():
            await pilot.press(page.tab.key)
            assert screen.page.tab.name == name
            seen.add(screen_text(pilot.app))
        assert len(seen) == len(PAGES)
        await pilot.press("9", "right")
        assert screen.page.tab.name == "overview"
        await pilot.press("7", "left")
        assert screen.page.tab.name == "memory"
        await pilot.press("right", "right")
        assert screen.page.tab.name == "mesh"
        await pilot.press("right")  # here the arrows go through the ranks
        assert screen.page.tab.name == "mesh"


async def test_a_look_shows_what_is_new() -> None:
    async with open_app(demo(), demo(later_s=60)) as pilot:
        before = screen_text(pilot.app)
        assert "step 4,200 /" in before
        await look_again(pilot)
        assert "step 4,200 /" not in screen_text(pilot.app)


async def test_a_held_screen_shows_the_newest_when_it_goes_on() -> None:
    observations = [
        Observation(NOW + n, job(history=losses(float(n), first=n), global_step=10 + n))
        for n in range(1, 5)
    ]
    async with open_app(*observations) as pilot:
        await pilot.press("space")
        held = screen_text(pilot.app)
        assert "paused" in held
        for _ in range(3):
            await look_again(pilot)
        assert screen_text(pilot.app) == held
        await pilot.press("space")
        assert "step 14 /" in screen_text(pilot.app)


async def test_m_goes_through_all_metrics_and_back() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:

        def shown() -> str:
            line = next(line for line in screen_text(pilot.app).splitlines() if " of 4 " in line)
            return line.split()[1]

        names = [shown()]
        for _ in range(4):
            await pilot.press("m")
            names.append(shown())
        assert names == ["loss", "grad_norm", "learning_rate", "val_loss", "loss"]
        await pilot.press("M")
        assert shown() == "val_loss"


async def test_y_changes_the_axis_and_back() -> None:
    async with open_app(demo()) as pilot:
        linear = screen_text(pilot.app)
        await pilot.press("L")
        assert " log " in screen_text(pilot.app)
        await pilot.press("L")
        assert screen_text(pilot.app) == linear


async def test_f_goes_through_all_figures_of_the_ranks() -> None:
    async with open_app(demo(), size=(120, 40)) as pilot:
        titles = []
        for _ in range(20):
            text = screen_text(pilot.app)
            titles.append(next(line for line in text.splitlines() if "ranks by" in line))
            await pilot.press("f")
        assert len(set(titles)) > 3
        assert titles[0] in titles[1:]
        before = screen_text(pilot.app)
        await pilot.press("f", "F")
        assert screen_text(pilot.app) == before


async def test_t_goes_through_all_palettes() -> None:
    async with open_app(demo()) as pilot:
        app = pilot.app
        assert isinstance(app, DashboardApp)
        seen = []
        for _ in PALETTES:
            seen.append(app.palette.name)
            await pilot.press("t")
        assert seen == list(PALETTES)
        assert app.palette.name == seen[0]


async def test_the_end_of_a_job_is_shown_and_its_data_stay() -> None:
    async with open_app(demo(), crashed_demo()) as pilot:
        loss = next(line for line in screen_text(pilot.app).splitlines() if " loss " in line)
        await look_again(pilot)
        text = " ".join(screen_text(pilot.app).split())
        assert "rank 5 was killed by SIGKILL" in text
        assert "crashed" in text
        assert " ".join(loss.split("─")[1].split()) in text


async def test_a_source_that_goes_away_leaves_the_last_data_and_comes_back() -> None:
    source = FakeSource(demo())
    async with open_source(source) as pilot:
        source.lost = "job.json is gone"
        await look_again(pilot)
        text = screen_text(pilot.app)
        assert "disconnected" in text
        assert "job.json is gone" in text
        assert "step 4,200 /" in text
        source.lost = None
        await look_again(pilot)
        assert "disconnected" not in screen_text(pilot.app)


async def test_a_job_that_cannot_be_read_yet_says_why_and_waits() -> None:
    source = FakeSource(demo())
    source.lost = "connecting to node7"
    async with open_source(source, size=(60, 15)) as pilot:
        assert "connecting to node7" in screen_text(pilot.app)
        await pilot.press("2", "j", "enter", "slash", "s", "m", "f", "space", "space", "1")
        _check_shape(pilot.app, (60, 15))
        source.lost = None
        await look_again(pilot)
        assert "step 4,200 /" in screen_text(pilot.app)


async def test_a_slow_first_look_does_not_keep_the_screen_dark() -> None:
    source, may_go_on = FakeSource(demo()), threading.Event()
    read = source.read

    def read_slowly() -> Observation:
        may_go_on.wait(60)
        return read()

    source.read = read_slowly
    async with open_source(source, size=(60, 15), first_look_s=FIRST_LOOK_S) as pilot:
        assert "reading the job" in screen_text(pilot.app)
        job_screen(pilot).start_look()
        may_go_on.set()
        await settle(pilot)
        assert "step 4,200 /" in screen_text(pilot.app)
        assert source.num_reads == 1


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_detaching_closes_the_source_and_remembers_what_goes_on(key: str) -> None:
    source = FakeSource(demo())
    async with open_source(source) as pilot:
        app = pilot.app
        assert isinstance(app, DashboardApp)
        await pilot.press(key)
        await pilot.pause()
    assert not app.is_running
    assert source.is_closed
    assert app.detached_from == "gpt-demo"


async def test_nothing_goes_on_after_a_job_that_has_ended() -> None:
    async with open_app(crashed_demo()) as pilot:
        app = pilot.app
        assert isinstance(app, DashboardApp)
        assert app.detached_from is None


async def test_help_is_about_the_screen_opens_once_scrolls_and_closes() -> None:
    async with open_app(demo(), size=(60, 12)) as pilot:
        await pilot.press("4", "question_mark", "t")
        assert isinstance(pilot.app.screen, HelpScreen)
        assert "structural" in screen_text(pilot.app)
        await pilot.press("end")
        assert "slower, faster" in screen_text(pilot.app)
        end = screen_text(pilot.app)
        await pilot.press("j", "pagedown")
        assert screen_text(pilot.app) == end
        await pilot.press("home")
        assert "structural" in screen_text(pilot.app)
        await pilot.press("question_mark")
        assert job_screen(pilot).page.tab.name == "pipeline"


async def test_an_unchanged_screen_sends_nothing_to_the_terminal() -> None:
    async with open_app(demo(), demo()) as pilot:
        for page in PAGES.values():
            await pilot.press(page.tab.key)
            await look_again(pilot)
            assert not pilot.app.screen._compositor._dirty_regions


async def test_a_changed_figure_sends_its_own_panel_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = job(global_step=10)
    async with open_app(
        Observation(NOW, first), Observation(NOW, job(global_step=11)), size=(120, 40)
    ) as pilot:
        refreshed: list[Any] = []
        canvas = job_screen(pilot).canvas
        monkeypatch.setattr(canvas, "refresh", lambda *regions, **_: refreshed.extend(regions))
        await look_again(pilot)
        assert [(region.y, region.height) for region in refreshed] == [(1, 1)]


async def test_an_alert_rings_the_bell_and_stands_among_the_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = rank(0, steps=(step(10), step(11, loss=float("nan"))))
    broken = Observation(NOW, job(ranks=(bad, rank(1))))
    rung: list[bool] = []
    async with open_app(Observation(NOW, job()), broken, broken) as pilot:
        monkeypatch.setattr(pilot.app, "bell", lambda: rung.append(True))
        await look_again(pilot)
        await look_again(pilot)
        assert rung == [True]
        await pilot.press("7")
        assert "alert" in screen_text(pilot.app)


async def test_an_unfocused_terminal_is_looked_at_less_and_at_once_when_it_is_back() -> None:
    source = FakeSource(*(Observation(NOW, job(global_step=10 + n)) for n in range(50)))
    async with open_source(source, interval_s=1000.0) as pilot:
        await settle(pilot)
        app, screen = pilot.app, job_screen(pilot)
        assert isinstance(app, DashboardApp)
        now = app.clock()
        app.clock = lambda: now
        screen.start_look()
        await settle(pilot)
        before = source.num_reads
        app.post_message(events.AppBlur())
        await pilot.pause()
        for wait_s, num_looks in ((1.0, 0), (9.0, 0), (11.0, 1)):
            app.clock = lambda wait_s=wait_s: now + wait_s  # type: ignore[misc]
            screen._on_tick()
            await settle(pilot)
            assert source.num_reads == before + num_looks
        app.post_message(events.AppFocus())
        await settle(pilot)
        assert source.num_reads == before + 2
        app.clock = lambda: now + 20.0
        screen._on_tick()
        await settle(pilot)
        assert source.num_reads == before + 3


async def test_looks_that_cost_much_come_seldom() -> None:
    source = FakeSource(*(Observation(NOW, job(global_step=10 + n)) for n in range(50)))
    async with open_source(source, interval_s=1000.0) as pilot:
        await settle(pilot)
        app, screen = pilot.app, job_screen(pilot)
        assert isinstance(app, DashboardApp)
        now = app.clock()
        app.clock = lambda: now
        screen.start_look()
        await settle(pilot)
        before = source.num_reads
        for waited_s, cost_s, num_looks in ((7.0, 1.0, 0), (8.0, 1.0, 1), (9.0, 0.1, 2)):
            screen._cost_s = cost_s
            app.clock = lambda waited_s=waited_s: now + waited_s  # type: ignore[misc]
            screen._on_tick()
            await settle(pilot)
            assert source.num_reads == before + num_looks


async def test_a_slash_can_be_typed_into_a_filter() -> None:
    async with open_app(demo()) as pilot:
        await pilot.press("3", "slash", "a", "slash", "b")
        await pilot.pause()
        screen = job_screen(pilot)
        assert screen.table is not None
        assert screen.session.view.table(screen.table.name).filter == "a/b"


async def test_a_drawing_that_fails_says_so_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> list[Line]:
        raise ValueError("impossible")

    app = DashboardApp(FakeSource(demo()), interval_s=None, palette="night")
    async with run_app(app, size=(120, 40)) as pilot:
        monkeypatch.setattr("boltmesh.tui.pages.overview.draw_chart", fail)
        job_screen(pilot).paint()
        await pilot.pause()
        text = screen_text(app)
    assert "chart cannot be drawn: ValueError: impossible" in text
    assert "step time" in text
