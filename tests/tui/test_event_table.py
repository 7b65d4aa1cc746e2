"""Events: what the ranks told and what can be seen from outside, folded, filtered and sorted."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Event, JobSnapshot, PhaseTime
from boltmesh.tui.pages.registry import PAGES
from boltmesh.tui.panels.events import (
    COLUMNS,
    EventRow,
    clock,
    draw_event_table,
    draw_events,
    shown_events,
    timeline,
)
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.view import TableView
from tests.tui.meshes import SEQUENCE, change_group, change_rank, mesh_job
from tests.tui.samples import NOW, demo, job, rank, state, step
from tests.tui.screens import job_screen, open_app

LOOK = Style(UNICODE)


def _rows(snapshot: JobSnapshot, kind: str, *, later_s: float = 0.0) -> list[EventRow]:
    return [row for row in timeline(state(snapshot, time=NOW + later_s)) if row.kind == kind]


def _drawn(snapshot: JobSnapshot, width: int = 120, height: int = 20, **options: object) -> str:
    lines = draw_event_table(state(snapshot), width, height, LOOK, **options)  # type: ignore[arg-type]
    return "\n".join(line.plain for line in lines)


def test_the_same_event_of_a_thousand_ranks_is_one_line() -> None:
    events = tuple(Event(NOW + n / 100, n, "warning", "disk is slow") for n in range(1024))
    (row,) = _rows(job(events=events), "warning")
    assert row.ranks == tuple(range(1024))
    assert row.time == NOW


def test_the_same_rank_again_and_a_later_moment_are_other_events() -> None:
    again = (Event(NOW, 0, "warning", "x"), Event(NOW + 1, 0, "warning", "x"))
    assert len(_rows(job(events=again), "warning")) == 2
    later = (Event(NOW, 0, "warning", "x"), Event(NOW + 31, 1, "warning", "x"))
    assert len(_rows(job(events=later), "warning")) == 2
    other = (Event(NOW, 0, "warning", "x"), Event(NOW, 1, "warning", "y"))
    assert len(_rows(job(events=other), "warning")) == 2


def test_alerts_of_the_watcher_have_their_own_kind() -> None:
    events = (
        Event(NOW, -1, "warning", "alert: throughput is down by 60%"),
        Event(NOW + 1, 3, "warning", "alert: memory of rank 3 is nearly full"),
        Event(NOW + 2, -1, "warning", "alert is over: throughput is down by 60%"),
        Event(NOW + 3, 0, "warning", "alertness is low"),
    )
    rows = _rows(job(events=events), "alert")
    assert [(row.ranks, row.message) for row in rows] == [
        ((), "throughput is down by 60%"),
        ((3,), "memory of rank 3 is nearly full"),
        ((), "alert is over: throughput is down by 60%"),
    ]
    assert len(_rows(job(events=events), "warning")) == 1
    assert "the job" in _drawn(job(events=events))


@pytest.mark.parametrize(("batches", "name"), [(1, "step 41"), (3, "batch 40")])
def test_a_slow_step_is_an_event_with_its_cause(batches: int, name: str) -> None:
    def steps(number: int) -> tuple:
        extra = ("data" if number == 1 else "communication", 1.0)
        return tuple(
            step(index, seconds=0.5 + (index == 40), global_step=(index + 1) // batches,
                 phases=(PhaseTime("forward", 0.5), PhaseTime(extra[0], extra[1] * (index == 40))))
            for index in range(60)
        )  # fmt: skip

    snapshot = job(ranks=tuple(rank(n, steps=steps(n)) for n in range(4)))
    (row,) = _rows(snapshot, "slow step")
    assert row.ranks == (1,)
    assert row.time == steps(0)[40].end_time
    slow = "took 1.50 s, 3x the median of 500 ms: 1.00 s more in data of rank 1"
    assert row.message == f"{name} {slow}"


def test_ranks_that_are_gone_are_events_and_those_of_one_place_one_line() -> None:
    snapshot = msgspec.structs.replace(mesh_job({"data": 4}), state="crashed")
    for number in (1, 2):
        snapshot = change_rank(snapshot, number, state="dead", last_seen=NOW - number)
    snapshot = change_rank(snapshot, 3, state="dead", error="killed by SIGKILL")
    rows = _rows(snapshot, "stopped")
    assert [(row.ranks, row.message) for row in rows] == [
        ((2, 1), "died in forward at step 10"),
        ((3,), "killed by SIGKILL, in forward at step 10"),
    ]


def test_a_failure_that_the_rank_told_itself_is_not_told_twice() -> None:
    snapshot = msgspec.structs.replace(mesh_job({"data": 2}), state="failed")
    snapshot = change_rank(snapshot, 1, state="failed", error="ValueError: x")
    assert len(_rows(snapshot, "stopped")) == 1
    told = msgspec.structs.replace(snapshot, events=(Event(NOW, 1, "error", "ValueError: x"),))
    assert _rows(told, "stopped") == []


def test_a_missing_rank_is_an_event_once_the_job_has_begun() -> None:
    young = change_rank(mesh_job({"data": 2}, started=NOW - 5), 1, state="missing", last_seen=0.0)
    assert _rows(young, "stopped") == []
    (row,) = _rows(young, "stopped", later_s=60.0)
    assert (row.ranks, row.message) == ((1,), "has no telemetry on this host")
    damaged = change_rank(young, 1, error="rank-1.bin: it is damaged")
    (row,) = _rows(damaged, "stopped", later_s=60.0)
    assert row.message == "cannot be read: rank-1.bin: it is damaged"


def test_a_hang_is_an_event_of_the_ranks_that_are_missing() -> None:
    snapshot = mesh_job({"data": 4})
    for each in snapshot.ranks:
        changes = {"time": NOW - 40}
        if each.rank != 2:
            changes |= {"sequence": SEQUENCE + 1, "is_done": False}
        snapshot = change_rank(
            snapshot, each.rank, groups=change_group(each, "data", **changes).groups
        )
    (row,) = _rows(snapshot, "hang")
    assert (row.time, row.ranks) == (NOW - 40, (2,))
    assert row.message.startswith("rank 2 never entered all_reduce #1,842 of data")


def test_the_newest_stands_first_and_its_whole_message_below_when_it_is_selected() -> None:
    long = "a message of many words " * 12
    snapshot = job(events=(Event(NOW - 9, 0, "start", "2 ranks"), Event(NOW - 5, 1, "error", long)))
    lines = _drawn(snapshot, width=80).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["time", "04:39:55", "04:39:51"]
    text = _drawn(snapshot, width=80, table=TableView(selected=0))
    assert text.count("message") == 1 + 2 + 12  # the title, the row, the whole
    assert "2025-11-21 04:39:55  rank 1  error" in text


def test_events_can_be_sorted_by_every_column_and_filtered() -> None:
    events = (
        Event(NOW - 9, 1, "start", "2 ranks"),
        Event(NOW - 5, 0, "checkpoint", "b.ckpt"),
        Event(NOW - 90_000, 0, "checkpoint", "a.ckpt"),
    )
    seen = state(job(events=events))
    for title in COLUMNS:
        assert len(shown_events(seen, TableView(sort=title))) == 3
    first = shown_events(seen, TableView(sort="time"))[0]
    assert first.message == "a.ckpt"
    assert len(shown_events(seen, TableView(filter="kind=checkpoint"))) == 2
    (found,) = shown_events(seen, TableView(filter="04:39 ckpt"))
    assert found.message == "b.ckpt"
    assert "nothing fits the filter" in _drawn(job(events=events), table=TableView(filter="zz"))


@pytest.mark.parametrize(
    ("moment", "text"), [(NOW, "04:40:00"), (NOW - 86_400, "Nov 20 04:40"), (0.0, "Jan 01 00:00")]
)
def test_the_clock_has_a_date_on_another_day(moment: float, text: str) -> None:
    assert clock(moment, NOW) == text


def test_the_overview_has_the_newest_at_the_bottom() -> None:
    events = tuple(Event(NOW - n, 0, "warning", f"number {n}") for n in range(9))
    lines = [line.plain for line in draw_events(state(job(events=events)), 80, 4, LOOK)]
    assert [line.split()[-1] for line in lines[1:]] == ["2", "1", "0"]
    assert "no events yet" in draw_events(state(), 80, 4, LOOK)[1].plain


async def test_keys_work_on_a_table_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES["events"]
    broken = msgspec.structs.replace(page.tables[0], draw=lambda *_, **__: 1 / 0)
    monkeypatch.setattr(type(page), "tables", (broken,))
    async with open_app(demo()) as pilot:
        await pilot.press("7", "down", "end")
        assert job_screen(pilot).page is page
