"""The list of jobs: choosing, filtering, sorting, and what happens when one goes away."""

import threading

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.tui.app import DashboardApp
from boltmesh.tui.panels.jobs import COLUMNS, draw_jobs, shown_jobs
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.screens.help import HelpScreen
from boltmesh.tui.screens.jobs import JobsScreen
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.view import TableView
from tests.tui.samples import NOW, FakeSource, demo, summary
from tests.tui.screens import REST_S, run_app, screen_text, wait_until


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
    async with run_app(app) as pilot:
        assert isinstance(app.screen, JobsScreen)
        assert all(f"job{number}" in screen_text(app) for number in (1, 2, 3))
        await pilot.press("escape")
        assert isinstance(app.screen, JobsScreen)
        await pilot.press("j", "enter")
        await pilot.pause()
        assert opened == ["job2"]
        assert "name of job2" in screen_text(app)
        await pilot.press("3", "0", "0")
        assert isinstance(app.screen, JobsScreen)
        await pilot.press("escape")
        assert "name of job2" in screen_text(app)
        await pilot.press("0", "k", "enter")
        await pilot.pause()
        assert opened == ["job2", "job1"]
        assert sources[0].is_closed
        assert not sources[1].is_closed
        assert app.screen.page.tab.name == "communication"  # type: ignore[attr-defined]


async def test_a_job_that_went_away_is_reported_and_the_list_stays() -> None:
    app, opened, _ = _chooser()
    async with run_app(app) as pilot:
        await pilot.press("end", "enter")
        await pilot.pause()
        assert opened == []
        assert isinstance(app.screen, JobsScreen)
        assert "job3 is gone." in screen_text(app)
        await pilot.press("k")
        assert "job3 is gone." not in screen_text(app)


async def test_the_cursor_stays_on_its_job_when_the_list_changes() -> None:
    jobs = [summary(1), summary(2)]
    opened: list[str] = []

    def open_source(job_id: str) -> FakeSource:
        opened.append(job_id)
        return FakeSource(demo())

    app = DashboardApp(None, list_jobs=lambda: list(jobs), open_source=open_source, interval_s=None)
    async with run_app(app) as pilot:
        await pilot.press("j")
        jobs.insert(0, summary(7))
        screen = app.screen
        assert isinstance(screen, JobsScreen)
        await screen.list_again()
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert opened == ["job2"]
        await pilot.press("0")
        jobs.clear()
        assert isinstance(app.screen, JobsScreen)
        await app.screen.list_again()
        await pilot.press("j", "enter", "s", "S", "end")
        assert "none" in screen_text(app)


async def test_a_list_that_cannot_be_had_is_said_and_comes_back() -> None:
    lists: list[Exception | list[JobSummary]] = [
        TelemetryError("node1 cannot be reached."),
        [summary(1)],
        PermissionError("no"),
        [summary(2)],
    ]

    def list_jobs() -> list[JobSummary]:
        found = lists.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    app = DashboardApp(FakeSource(demo()), list_jobs=list_jobs, interval_s=None)
    async with run_app(app) as pilot:
        await pilot.press("0")
        screen = app.screen
        assert isinstance(screen, JobsScreen)
        assert screen_text(app).count("node1 cannot be reached.") == 2  # in the list and below it
        assert "none" not in screen_text(app)
        for job_id, trouble in (("job1", ""), ("job1", "no"), ("job2", "")):
            await screen.list_again()
            await pilot.pause()
            assert job_id in screen_text(app)
            assert screen._trouble == trouble


async def test_a_slow_list_is_read_by_one_thread_at_a_time_and_shown() -> None:
    running, most = [], []
    is_seen = threading.Event()

    def list_jobs() -> list[JobSummary]:
        running.append(1)
        most.append(len(running))
        is_seen.wait(REST_S)
        running.pop()
        return [summary(len(most))]

    app = DashboardApp(FakeSource(demo()), list_jobs=list_jobs, interval_s=0.02)
    async with run_app(app, first_look_s=0.01) as pilot:
        await pilot.press("0")
        assert "reading the list of jobs" in screen_text(app)
        is_seen.set()
        await wait_until(pilot, lambda: "job2" in screen_text(app))
    assert max(most) == 1


async def test_jobs_are_filtered_and_sorted_by_keys() -> None:
    app, opened, _ = _chooser(ids=30)
    async with run_app(app) as pilot:
        assert "more" in screen_text(app)
        await pilot.press("slash", *"step>1900", "enter")
        shown = [line.split()[1] for line in screen_text(app).splitlines() if " run " in line]
        assert shown == [f"{number}" for number in range(20, 31)]
        await pilot.press("s", "S", "enter")
        await pilot.pause()
        assert opened == ["job30"] or opened == ["job29"]
        await pilot.press("0", "escape", "0")
        assert isinstance(app.screen, JobsScreen)


async def test_help_of_the_jobs_is_about_jobs() -> None:
    app, _, _ = _chooser()
    async with run_app(app) as pilot:
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        assert "attach to the job" in screen_text(app)
        await pilot.press("escape")
        assert isinstance(app.screen, JobsScreen)


def test_every_column_is_there_and_sorts() -> None:
    jobs = [summary(2, recipe="zero3"), summary(1, recipe="ddp"), summary(3, recipe=None)]
    look = Style(UNICODE, has_headings=False)
    header = draw_jobs(jobs, 160, 10, look, now=NOW)[0].plain
    assert header.split() == list(COLUMNS)
    for column, expected in (("recipe", [1, 2, 3]), ("age", [1, 2, 3]), ("id", [1, 2, 3])):
        found = shown_jobs(jobs, TableView(sort=column), now=NOW)
        assert [job.id for job in found] == [f"job{number}" for number in expected]


def test_a_column_of_nothing_is_left_out() -> None:
    look = Style(UNICODE, has_headings=False)
    assert "recipe" not in draw_jobs([summary(1, recipe=None)], 160, 10, look, now=NOW)[0].plain
