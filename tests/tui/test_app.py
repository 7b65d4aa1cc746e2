"""Keys and sizes, driven without a terminal, on a frozen clock."""

from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from textual.app import App

from boltmesh.errors import TelemetryError
from boltmesh.tui.app import DashboardApp
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.jobs import JobsScreen
from boltmesh.tui.screens.overview import OverviewScreen
from boltmesh.tui.source import Observation
from boltmesh.tui.theme import PALETTES
from tests.tui.samples import (
    NOW,
    FakeSource,
    crashed_demo,
    demo,
    job,
    losses,
    rank,
    summary,
)
from tests.tui.screens import look_again, open_app, screen_text

SIZES = [(1, 1), (2, 30), (20, 5), (40, 10), (60, 15), (80, 24), (120, 30), (200, 60), (300, 100)]


@pytest.mark.parametrize("size", SIZES)
async def test_every_key_works_at_every_size(size: tuple[int, int]) -> None:
    async with open_app(demo(), size=size) as pilot:
        await pilot.press("m", "M", "space", "t", "j", "k", "pagedown", "pageup", "home", "0")
        await pilot.press("escape", "question_mark", "j", "k", "escape", "x")
        _check_shape(pilot.app, size)


@pytest.mark.parametrize("size", [(20, 5), (60, 15), (120, 30)])
@pytest.mark.parametrize("seen", [crashed_demo(), Observation(NOW, job(ranks=()))])
async def test_jobs_without_data_are_no_special_case(
    size: tuple[int, int], seen: Observation
) -> None:
    async with open_app(seen, size=size) as pilot:
        await pilot.press("m", "space", "j", "pagedown")
        _check_shape(pilot.app, size)


def _check_shape(app: App[Any], size: tuple[int, int]) -> None:
    lines = screen_text(app).split("\n")
    assert len(lines) == size[1]
    assert {cell_len(line) for line in lines} == {size[0]}


async def test_resizing_through_all_sizes_keeps_the_screen_whole() -> None:
    async with open_app(demo()) as pilot:
        for width, height in [*SIZES, *reversed(SIZES)]:
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            assert len(screen_text(pilot.app).split("\n")) == height
        await pilot.resize_terminal(120, 35)
        await pilot.pause()
        resized = screen_text(pilot.app)
    async with open_app(demo(), size=(120, 35)) as pilot:
        assert resized == screen_text(pilot.app)


async def test_a_look_shows_what_is_new() -> None:
    async with open_app(demo(), demo(later_s=60)) as pilot:
        assert "step 4,200 /" in screen_text(pilot.app)
        await look_again(pilot)
        assert "step 4,483 /" in screen_text(pilot.app)


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
        screen = pilot.app.screen
        assert isinstance(screen, OverviewScreen)
        assert "step 14 /" in screen_text(pilot.app)
        # What passed while the screen was held is in the curve all the same.
        assert screen.state.series["loss"].steps == (1, 2, 3, 4)


async def test_m_goes_through_all_metrics_and_back() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        shown = []
        for _ in range(4):
            await pilot.press("m")
            shown.append(screen_text(pilot.app).splitlines()[3].split()[1])
        assert shown == ["grad_norm", "learning_rate", "val_loss", "loss"]
        await pilot.press("M")
        assert "val_loss" in screen_text(pilot.app).splitlines()[3]


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


async def test_the_ranks_scroll_and_stop_at_their_ends() -> None:
    many = job(ranks=tuple(rank(n) for n in range(64)))
    async with open_app(Observation(NOW, many), size=(80, 24)) as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, OverviewScreen)
        await pilot.press("k")
        assert screen.view.first_rank == 0
        await pilot.press("j", "pagedown")
        assert screen.view.first_rank == 11
        for _ in range(10):
            await pilot.press("pagedown")
        text = screen_text(pilot.app)
        assert " 63 " in text
        assert "↓" not in text
        await pilot.press("k")
        assert "↓ 1 more" in screen_text(pilot.app)
        await pilot.press("home")
        assert screen.view.first_rank == 0


async def test_a_rank_in_trouble_is_not_hidden_below_the_others() -> None:
    ranks = [rank(n) for n in range(64)]
    ranks[50] = rank(50, state="dead")
    async with open_app(Observation(NOW, job(ranks=tuple(ranks))), size=(80, 24)) as pilot:
        lines = screen_text(pilot.app).splitlines()
        first = next(line for line in lines if line.lstrip().startswith("rank ")) and [
            line for line in lines if "✗ dead" in line
        ]
        assert first[0].split()[0] == "50"


async def test_the_end_of_a_job_is_shown_and_its_data_stay() -> None:
    async with open_app(demo(), crashed_demo()) as pilot:
        await look_again(pilot)
        text = screen_text(pilot.app)
        assert "crashed: rank 5 was killed by SIGKILL, in backward after step 4200" in text
        assert "✗ dead" in text
        assert "3.4386" in text


async def test_a_source_that_goes_away_leaves_the_last_data_and_comes_back() -> None:
    async with open_app(demo()) as pilot:
        screen = pilot.app.screen
        assert isinstance(screen, OverviewScreen)
        source = screen._source
        assert isinstance(source, FakeSource)
        source.lost = "job.json is gone"
        await look_again(pilot)
        text = screen_text(pilot.app)
        assert "disconnected" in text
        assert "job.json is gone" in text
        assert "3.4386" in text
        source.lost = None
        await look_again(pilot)
        assert "disconnected" not in screen_text(pilot.app)


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_detaching_closes_the_source_and_remembers_what_goes_on(key: str) -> None:
    async with open_app(demo()) as pilot:
        app, screen = pilot.app, pilot.app.screen
        assert isinstance(app, DashboardApp)
        assert isinstance(screen, OverviewScreen)
        await pilot.press(key)
        await pilot.pause()
    assert not app.is_running
    assert isinstance(screen._source, FakeSource)
    assert screen._source.is_closed
    assert app.detached_from == "gpt-demo"


async def test_nothing_goes_on_after_a_job_that_has_ended() -> None:
    async with open_app(crashed_demo()) as pilot:
        app = pilot.app
        assert isinstance(app, DashboardApp)
        assert app.detached_from is None


async def test_help_opens_once_scrolls_and_closes() -> None:
    async with open_app(demo(), size=(60, 10)) as pilot:
        await pilot.press("question_mark", "t")
        assert isinstance(pilot.app.screen, HelpScreen)
        assert "detach; the job goes on" in screen_text(pilot.app)
        await pilot.press(*["j"] * 16)
        assert "never the same as zero" in screen_text(pilot.app)
        await pilot.press("question_mark")
        assert isinstance(pilot.app.screen, OverviewScreen)


def _chooser(*, ids: int = 3) -> tuple[DashboardApp, list[str], list[FakeSource]]:
    opened: list[str] = []
    sources: list[FakeSource] = []

    def open_source(job_id: str) -> FakeSource:
        if job_id == "job3":
            raise TelemetryError("job3 is gone.")
        opened.append(job_id)
        snapshot = msgspec.structs.replace(demo().job, id=job_id, name=f"name of {job_id}")
        sources.append(FakeSource(Observation(NOW, snapshot)))
        return sources[-1]

    app = DashboardApp(
        None,
        list_jobs=lambda: [summary(number) for number in range(1, ids + 1)],
        open_source=open_source,
        interval_s=None,
    )
    return app, opened, sources


async def test_a_job_is_chosen_by_cursor_and_the_list_can_be_opened_again() -> None:
    app, opened, sources = _chooser()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, JobsScreen)
        assert all(f"job{number}" in screen_text(app) for number in (1, 2, 3))
        await pilot.press("escape")
        assert isinstance(app.screen, JobsScreen)
        await pilot.press("j", "enter")
        await pilot.pause()
        assert opened == ["job2"]
        assert "name of job2" in screen_text(app)
        await pilot.press("0")
        assert isinstance(app.screen, JobsScreen)
        await pilot.press("escape")
        assert "name of job2" in screen_text(app)
        await pilot.press("0", "k", "enter")
        await pilot.pause()
        assert opened == ["job2", "job1"]
        assert sources[0].is_closed
        assert not sources[1].is_closed


async def test_a_job_that_went_away_is_reported_and_the_list_stays() -> None:
    app, opened, _ = _chooser()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("j", "j", "j", "j", "enter")
        await pilot.pause()
        assert opened == []
        assert isinstance(app.screen, JobsScreen)
        assert "job3 is gone." in screen_text(app)


async def test_the_cursor_stays_on_its_job_when_the_list_changes() -> None:
    jobs = [summary(1), summary(2)]
    app = DashboardApp(None, list_jobs=lambda: list(jobs), open_source=None, interval_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("j")
        jobs.insert(0, summary(7))
        screen = app.screen
        assert isinstance(screen, JobsScreen)
        await screen.list_again()
        await pilot.pause()
        chosen = [line for line in screen_text(app).splitlines() if line.lstrip().startswith("▸")]
        assert len(chosen) == 1
        assert "job2" in chosen[0]
        jobs.clear()
        await screen.list_again()
        await pilot.press("j", "enter")
        await pilot.pause()
        assert "none" in screen_text(app)


async def test_an_unchanged_screen_sends_nothing_to_the_terminal() -> None:
    async with open_app(demo(), demo()) as pilot:
        screen = pilot.app.screen
        await look_again(pilot)
        assert not screen._compositor._dirty_regions
