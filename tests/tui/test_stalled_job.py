"""A job that is stalled or was stopped is green on no screen."""

import json

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.commands.top import job_json, job_text
from boltmesh.tui.export.prometheus import prometheus_text
from boltmesh.tui.metrics.heat import heat
from boltmesh.tui.metrics.ranks import rank_rows
from boltmesh.tui.panels.devices import draw_devices
from boltmesh.tui.panels.header import draw_header, progress
from boltmesh.tui.panels.jobs import draw_jobs, shown_jobs
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.panels.rank_table import draw_rank_table
from boltmesh.tui.panels.throughput import draw_throughput
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from boltmesh.tui.view import TableView
from tests.tui.exposition import parse
from tests.tui.samples import NOW, crashed_demo, demo, job, rank, state, summary, total
from tests.tui.screens import open_app, screen_text

LOOK = Style(UNICODE)
STALLED_S = 160.0


def _stalled() -> JobSnapshot:
    ranks = [
        rank(
            number,
            last_seen=NOW - STALLED_S,
            collectives=(total(),),
            flops_per_batch=1e12,
            peak_flops_per_second=1e14,
        )
        for number in range(2)
    ]
    return job(ranks=tuple(ranks))


def _stopped() -> JobSnapshot:
    ranks = (rank(0, state="finished"), rank(1, state="finished"))
    return job(ranks=ranks, state="finished", stop_reason="stopped by SIGTERM after step 10")


def _is_green(lines: list[Line]) -> bool:
    return any(role == "good" for line in lines for _, role in line.spans)


@pytest.mark.parametrize(("snapshot", "word"), [(_stalled(), "stalled"), (_stopped(), "stopped")])
def test_no_panel_that_shows_a_state_is_green(snapshot: JobSnapshot, word: str) -> None:
    seen = state(snapshot)
    for lines in (
        draw_header(seen, 100, 2, LOOK),
        draw_rank_table(seen, 160, 10, LOOK),
        draw_rank_detail(seen, 160, 40, LOOK),
    ):
        assert any(word in line.plain for line in lines)
        assert not _is_green(lines)
    healthy = state()
    assert _is_green(draw_header(healthy, 100, 2, LOOK))
    assert _is_green(draw_rank_table(healthy, 160, 10, LOOK))


@pytest.mark.parametrize(
    ("seen", "is_green"),
    [
        (demo(), True),
        (msgspec.structs.replace(demo(), time=NOW + STALLED_S), False),
        (crashed_demo(), False),
    ],
)
def test_no_bar_is_green(seen: Observation, *, is_green: bool) -> None:
    shown = fold(None, seen)
    assert _is_green(draw_throughput(shown, 120, 9, LOOK)) == is_green
    assert _is_green(draw_devices(shown, 160, 20, LOOK)) == is_green


def test_the_header_says_for_how_long_and_promises_no_end() -> None:
    seen = state(_stalled())
    assert draw_header(seen, 100, 2, LOOK)[0].plain.rstrip().endswith("stalled 2m 40s")
    assert progress(seen).left_s is None
    assert progress(state()).left_s is not None


def test_rates_of_a_stalled_job_are_told_as_past() -> None:
    seen = state(_stalled())
    drawn = "\n".join(line.plain for line in draw_throughput(seen, 60, 5, LOOK))
    assert "2m 40s ago" in drawn
    assert [row.tokens_per_second for row in rank_rows(seen)] == [None, None]
    assert not any(each.value for each in heat(seen, "bytes/s").values.values())
    detail = "\n".join(line.plain for line in draw_rank_detail(seen, 160, 40, LOOK))
    assert "TFLOP/s" not in detail
    narrow = draw_throughput(seen, 60, 1, LOOK)[0].plain
    assert "1,024" not in narrow
    assert "2,048" not in narrow
    text = job_text(seen, 120, Style(ASCII, has_headings=False, has_signs=False))
    assert "samples/s -" in text
    assert "stalled 2m 40s" in text


def test_json_and_prometheus_tell() -> None:
    stalled, stopped = Observation(NOW, _stalled()), Observation(NOW, _stopped())
    document = json.loads(job_json(stalled))
    assert (document["stalled_s"], document["stopped"]) == (STALLED_S, False)
    document = json.loads(job_json(stopped))
    assert (document["stalled_s"], document["stopped"]) == (None, True)
    found = parse(prometheus_text(stalled))
    assert found["boltmesh_job_stalled_seconds"].value() == STALLED_S
    assert "boltmesh_job_samples_per_second" not in found
    assert "boltmesh_rank_samples_per_second" not in found
    found = parse(prometheus_text(Observation(NOW, job())))
    assert found["boltmesh_job_stalled_seconds"].value() == 0
    assert found["boltmesh_job_samples_per_second"].value() == 16
    assert found["boltmesh_rank_samples_per_second"].value(rank="1") == 8
    found = parse(prometheus_text(stopped))
    assert "boltmesh_job_stalled_seconds" not in found
    assert found["boltmesh_job_stopped"].value() == 1


def test_the_list_of_jobs_is_amber_and_can_be_filtered_by_it() -> None:
    jobs = [
        summary(1, stalled_s=STALLED_S),
        summary(2, state="finished", stopped=True),
        summary(3),
    ]
    lines = draw_jobs(jobs, 120, 9, LOOK, now=NOW)
    assert "stalled 2m 40s" in lines[2].plain
    assert "stopped" in lines[3].plain
    assert not _is_green(lines[2:4])
    assert _is_green(lines[4:])
    assert [each.id for each in shown_jobs(jobs, TableView(filter="stalled"), now=NOW)] == ["job1"]


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
async def test_every_screen_says_it(size: tuple[int, int]) -> None:
    async with open_app(Observation(NOW, _stalled()), size=size) as pilot:
        for key in "123456789":
            await pilot.press(key)
            text = screen_text(pilot.app)
            assert "stalled 2m 40s" in text
            assert "running" not in text
