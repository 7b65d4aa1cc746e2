"""The last step of a pipeline over time: real recordings, a hang, every size."""

from typing import Any

import msgspec
import pytest

from boltmesh.telemetry.snapshot import Chunk, JobSnapshot
from boltmesh.tui.panels.gantt import draw_gantt, gantt
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.state import fold
from tests.tui.recorded import pipeline_job, recorded_pipelines
from tests.tui.samples import NOW, demo, job, state

LOOK = Style(UNICODE)
PLAIN = Style(ASCII, has_headings=False)


def text(
    snapshot: JobSnapshot, width: int = 100, height: int = 12, look: Style = LOOK
) -> list[str]:
    lines = draw_gantt(state(snapshot), width, height, look)
    assert len(lines) <= height
    assert all(line.width <= width for line in lines)
    return [line.plain for line in lines]


def row(*spans: tuple[str, int, float, float], stage: int = 0, step: int = 1) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(step, stage, microbatch, kind, NOW + start, NOW + end)  # type: ignore[arg-type]
        for kind, microbatch, start, end in spans
    )


def test_blocks_stand_at_their_times() -> None:
    first = row(("F", 0, 0.0, 0.2), ("F", 1, 0.2, 0.4), ("B", 0, 0.6, 1.0), step=2)
    # Steps before and after it make this one whole, for no schedule is known.
    around = (row(("F", 0, -2, -1)), row(("F", 0, 8, 9), step=3))
    snapshot = pipeline_job(None, (around[0] + first + around[1],))
    name, blocks = text(snapshot, 3 + 20, 1, PLAIN)[0].split(" ")
    assert name == "r0"
    assert blocks == "0---1---....0======="


def test_what_a_block_is_needs_no_colour() -> None:
    shown = "\n".join(text(recorded_pipelines()["zero_bubble"], 120, look=PLAIN))
    for sign, word in (("--", "forward"), ("++", "input gradient"), ("##", "weight gradient")):
        assert f"{sign} {word}" in shown
    assert ".. idle" in shown
    assert shown.isascii()


@pytest.mark.parametrize("name", list(recorded_pipelines()))
def test_every_microbatch_of_a_wide_drawing_is_named(name: str) -> None:
    found = gantt(state(recorded_pipelines()[name]))
    assert found is not None
    shown = text(recorded_pipelines()[name], 600)
    for line, row in zip(shown[1:], found.rows, strict=False):
        for (stage, _, microbatch), _, _ in row.slots:
            named = f"{stage}.{microbatch}" if len(row.stages) > 1 else f"{microbatch}"
            assert named in line


def test_the_stage_is_named_where_a_rank_has_several_and_blocks_have_room() -> None:
    wide, narrow = (text(recorded_pipelines()["interleaved_1f1b"], width) for width in (300, 100))
    assert "0.0" in wide[1]
    assert "digits: stage.microbatch" in wide[-1]
    assert "0.0" not in narrow[1]
    assert "digits: microbatch" in narrow[-1]


def test_a_block_that_is_too_small_for_its_number_keeps_its_sign() -> None:
    shown = text(recorded_pipelines()["1f1b"], 30, 4, PLAIN)[0]
    assert set(shown.split(" ")[1]) >= set("-=")


def test_the_time_axis_ends_with_the_window() -> None:
    found = gantt(state(recorded_pipelines()["gpipe"]))
    assert found is not None
    axis = text(recorded_pipelines()["gpipe"])[-2]
    assert axis.split()[0] == "0"
    assert axis.endswith(f"{1e3 * found.window_s:.0f} ms")


def test_a_step_that_runs_is_not_shown_before_it_is_whole() -> None:
    found = gantt(state(demo(later_s=0.2).job, time=NOW + 0.2))
    assert found is not None
    assert found.is_whole
    assert found.step == 4200


@pytest.mark.parametrize(("scenario", "later_s"), [("hang", 60), ("crashed", 1)])
def test_where_a_job_stops_the_step_in_which_it_did_is_shown(scenario: Any, later_s: float) -> None:
    seen = demo(later_s=later_s, scenario=scenario)
    if scenario == "hang":
        # Some chunks of the last stage never ran.
        ranks = tuple(
            msgspec.structs.replace(rank, chunks=rank.chunks[:-3]) for rank in seen.job.ranks
        )
        seen = Observation(seen.time, msgspec.structs.replace(seen.job, ranks=ranks))
    found = gantt(fold(None, seen))
    assert found is not None
    assert not found.is_whole
    assert found.step == 4201
    lines = draw_gantt(fold(None, seen), 100, 8, LOOK)
    assert "the step in which it stopped: step 4,201" in lines[0].plain


def test_a_step_that_an_ended_job_has_begun_is_not_where_it_stopped() -> None:
    seen = demo(later_s=1, scenario="crashed")
    ended = msgspec.structs.replace(seen.job, state="finished")
    found = gantt(state(ended, time=seen.time + 1000))
    assert found is not None
    assert found.is_whole


@pytest.mark.pairwise
@pytest.mark.parametrize("width", [1, 2, 4, 20, 59, 60, 120, 300])
@pytest.mark.parametrize("height", [0, 1, 2, 3, 5, 40])
@pytest.mark.parametrize("look", [LOOK, PLAIN])
def test_every_size_holds_the_drawing(width: int, height: int, look: Style) -> None:
    empty = pipeline_job(None, ((), ()))
    for snapshot in (recorded_pipelines()["zero_bubble"], empty, job(), job(ranks=())):
        text(snapshot, width, height, look)


def test_ranks_without_room_are_counted() -> None:
    shown = text(recorded_pipelines()["gpipe"], 100, 4)
    assert "3 more" in shown[-2]


def test_without_a_pipeline_one_line_says_why() -> None:
    assert text(job())[1] == "no pipeline: each rank runs all layers, so no stage waits for another"
