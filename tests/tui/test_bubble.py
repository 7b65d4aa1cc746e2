"""The bubble of a step: measured on real pipelines, and split into its causes."""

import math
from typing import Any

import msgspec
import pytest

from boltmesh.schedule_sim import of_ideal, one_forward_one_backward, simulate
from boltmesh.telemetry.snapshot import Chunk, PipelinePlan
from boltmesh.tui.metrics.pipelines import Bubble, Parts, bubble
from boltmesh.tui.panels.bubble import _bar, draw_bubble
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from tests.support.cpu_time import least_cpu_s
from tests.tui.recorded import pipeline_job, recorded_pipelines
from tests.tui.samples import NOW, demo, job, rank, state

LOOK = Style(UNICODE)


def measured(name: str) -> Bubble:
    found = bubble(state(recorded_pipelines()[name]))
    assert found is not None
    return found


def simulated_job(num_stages: int = 2, num_microbatches: int = 4, **changes: Any) -> Any:
    """A step whose stages all take 10 ms forward and 20 ms backward, as stage 1 does twice that."""
    order = one_forward_one_backward(num_stages, num_microbatches)
    costs = {"F": 0.01, "B": 0.02}
    timetable = simulate(order, lambda action: costs[action.kind] * (1 + (action.stage == 1)))
    chunks = tuple(
        tuple(
            Chunk(
                step=5,
                stage=slot.action.stage,
                microbatch=slot.action.microbatch,
                kind="F" if slot.action.kind == "F" else "B",
                start=NOW + slot.start,
                end=NOW + slot.end,
            )
            for slot in row
        )
        for row in timetable
    )
    plan = PipelinePlan("1f1b", num_stages, num_microbatches, order)
    return pipeline_job(changes.pop("plan", plan), changes.pop("chunks", chunks), **changes)


@pytest.mark.parametrize(
    ("name", "formula"),
    [("gpipe", 3 / 11), ("1f1b", 3 / 11), ("interleaved_1f1b", 3 / 19), ("zero_bubble", 0.059)],
)  # fmt: skip
def test_a_real_pipeline_of_equal_stages_is_near_its_formula(name: str, formula: float) -> None:
    found = measured(name)
    assert found.mean.ideal == pytest.approx(formula, abs=0.001)
    assert found.mean.structural == pytest.approx(formula, abs=0.003)
    assert found.mean.imbalance == pytest.approx(0.0, abs=0.003)
    # What sending over gloo and the host cost: little, and never less than nothing.
    assert found.mean.excess is not None
    assert 0 < found.mean.excess < 0.07
    assert len(found.rows) == 4


def test_a_real_pipeline_with_a_slow_stage_is_told_from_a_slow_network() -> None:
    found = measured("1f1b, stage 2 slow by half")
    mean = found.mean
    assert mean.imbalance is not None
    assert mean.excess is not None
    assert mean.imbalance > 0.08 > 0.03 > mean.excess
    by_stage = {row.stages: row.parts.imbalance or 0.0 for row in found.rows}
    assert min(by_stage, key=by_stage.__getitem__) == (2,)


@pytest.mark.parametrize("name", list(recorded_pipelines()))
def test_the_parts_add_up_to_what_was_measured(name: str) -> None:
    found = measured(name)
    for parts in (found.mean, *(row.parts for row in found.rows)):
        total = (parts.structural or 0) + (parts.imbalance or 0) + (parts.excess or 0)
        assert total == pytest.approx(parts.measured)


def test_the_window_is_common_so_late_stages_are_not_flattered() -> None:
    chunks = recorded_pipelines()["1f1b"].ranks[3].chunks
    own = 1 - sum(chunk.end - chunk.start for chunk in chunks) / (chunks[-1].end - chunks[0].start)
    assert measured("1f1b").rows[3].parts.measured > own + 0.1


def test_the_window_ends_with_whoever_is_last() -> None:
    """Also where that is not the first rank, as it is in 1F1B."""
    plan = PipelinePlan("forward only", 2, 1, (("0F0",), ("1F0",)))
    rows = ((Chunk(1, 0, 0, "F", NOW, NOW + 1),), (Chunk(1, 1, 0, "F", NOW + 1, NOW + 4),))
    found = bubble(state(pipeline_job(plan, rows)))
    assert found is not None
    assert found.window_s == 4.0
    assert [row.parts.measured for row in found.rows] == [0.75, 0.25]


def test_simulated_times_leave_no_excess() -> None:
    found = bubble(state(simulated_job()))
    assert found is not None
    assert found.mean.excess == pytest.approx(0.0, abs=1e-5)
    # Stage 0 works 120 ms and stage 1 240 ms of a window of 270 ms; alike they would idle a fifth.
    assert found.mean.imbalance == pytest.approx(1 / 3 - 1 / 5, abs=1e-5)
    assert found.window_s == pytest.approx(4 * 0.06 + 0.03)


def test_both_definitions_are_the_ones_of_the_papers() -> None:
    stages, microbatches = 4, 8
    of_total = (stages - 1) / (microbatches + stages - 1)
    assert of_ideal(of_total) == pytest.approx((stages - 1) / microbatches)
    assert of_ideal(1.0) == math.inf


def test_a_step_that_one_rank_has_not_finished_is_not_measured() -> None:
    ready = simulated_job()
    late = msgspec.structs.replace(ready.ranks[1], chunks=ready.ranks[1].chunks[:-1])
    assert bubble(state(msgspec.structs.replace(ready, ranks=(ready.ranks[0], late)))) is None


def test_of_several_pipelines_the_slowest_is_shown() -> None:
    seen = demo(scenario="straggler").job
    found = bubble(state(seen))
    assert found is not None
    # Rank 5 is too hot: stage 1 of data 0, and all tensor peers wait for it.
    assert found.place["data"] == 0
    assert found.num_pipelines == 4
    assert found.rows[1].parts.measured < 0.1 < 0.25 < found.rows[0].parts.measured


def test_the_demo_has_the_ideal_of_its_schedule() -> None:
    found = bubble(state(demo().job))
    assert found is not None
    assert found.mean.ideal == pytest.approx(1 / 9)
    assert found.step == 4200


def test_a_step_is_measured_once_however_often_it_is_looked_at() -> None:
    first, again = (bubble(state(demo(later_s=later).job)) for later in (0.05, 0.1))
    assert first == again
    assert bubble(state(demo(later_s=0.6).job)) != first


def test_without_a_schedule_the_order_as_it_ran_is_simulated() -> None:
    chunks = tuple(each.chunks for each in simulated_job().ranks)
    earlier, later = (
        tuple(tuple(msgspec.structs.replace(chunk, step=step) for chunk in row) for row in chunks)
        for step in (4, 6)
    )
    rows = tuple(map(sum, zip(earlier, chunks, later, strict=True), [(), ()]))
    found = bubble(state(pipeline_job(None, rows)))
    assert found is not None
    assert found.step == 5
    assert found.mean.ideal == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    "order",
    [((), ()), (("1F0",), ("0F0",)), (("0F0",) * 8, ("1F0",) * 8), (("x", ""), (None, "0F"))],
)  # fmt: skip
def test_a_schedule_that_makes_no_sense_breaks_nothing(order: Any) -> None:
    snapshot = simulated_job(plan=PipelinePlan("nonsense", 2, 4, order))
    found = bubble(state(snapshot))
    assert found is None or found.mean.measured > 0
    assert draw_bubble(state(snapshot), 80, 10, LOOK)


def test_chunks_that_run_backwards_or_take_no_time_break_nothing() -> None:
    plan = PipelinePlan("1f1b", 2, 1, (("0F0",), ("1F0",)))
    for start, end in ((NOW, NOW), (NOW, NOW - 5), (math.inf, math.inf), (math.nan, math.nan)):
        rows = ((Chunk(1, 0, 0, "F", start, end),), (Chunk(1, 1, 0, "F", start, end),))
        snapshot = pipeline_job(plan, rows)
        assert draw_bubble(state(snapshot), 80, 10, LOOK)


def text(snapshot: Any, width: int = 120, height: int = 12, look: Style = LOOK) -> str:
    lines = draw_bubble(state(snapshot), width, height, look)
    assert len(lines) <= height
    assert all(line.width <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def test_the_drawing_names_the_parts_and_both_definitions() -> None:
    shown = text(recorded_pipelines()["1f1b, stage 2 slow by half"])
    assert "of total (idle/all) 38.7%  ideal 27.3%" in shown
    assert "of ideal (idle/busy) 63.2%  ideal 37.5%" in shown
    for word in ("structural", "imbalance", "excess", "4 stages, 8 microbatches"):
        assert word in shown
    slow = next(line for line in shown.splitlines() if "stage 2" in line)
    assert "-10.0%" in slow


def test_a_bar_is_as_long_as_what_was_measured_and_marks_the_ideal() -> None:
    shown = text(recorded_pipelines()["1f1b"], look=Style(ASCII))
    bar = next(line for line in shown.splitlines() if "rank 0" in line).rpartition("%  ")[2]
    assert len(bar.rstrip()) / len(bar) == pytest.approx(0.294 / 0.30, abs=0.02)
    assert bar.index("|") / len(bar) == pytest.approx(0.273 / 0.30, abs=0.02)
    assert set(bar) == set("#|- ")


@pytest.mark.parametrize(
    ("parts", "drawn"),
    [
        (Parts(0.4, 0.1, 0.1, 0.2, 0.1), "#|=-      "),
        # Faster than simulated: the bar ends at what was measured all the same.
        (Parts(0.2, 0.1, 0.1, 0.3, -0.2), "#|        "),
        (Parts(0.3, 0.5, 0.5, -0.3, 0.1), "##-  |    "),
        (Parts(0.3), "###       "),
    ],
)  # fmt: skip
def test_parts_that_are_negative_shorten_the_others(parts: Parts, drawn: str) -> None:
    assert _bar(parts, 1.0, 10, Style(ASCII)).plain == drawn


@pytest.mark.pairwise
@pytest.mark.parametrize("width", [1, 2, 7, 20, 59, 60, 80, 300])
@pytest.mark.parametrize("height", [0, 1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize("look", [LOOK, Style(ASCII, has_headings=False, has_signs=False)])
def test_every_size_holds_the_drawing(width: int, height: int, look: Style) -> None:
    for snapshot in (recorded_pipelines()["zero_bubble"], job(), job(ranks=())):
        shown = text(snapshot, width, height, look)
        assert not look.glyphs.is_ascii or shown.isascii()


def test_where_rows_do_not_fit_the_mean_stays_and_the_others_are_counted() -> None:
    shown = text(recorded_pipelines()["gpipe"], 100, 7)
    assert "mean" in shown
    assert "more" in shown


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        (job(), "no pipeline: each rank runs all layers"),
        (pipeline_job(None, ((), ())), "no microbatch recorded yet"),
        (pipeline_job(None, ((Chunk(1, 0, 0, "F", NOW, NOW + 1),), ())), "1 of 2 ranks"),
    ],
)  # fmt: skip
def test_one_line_says_why_nothing_is_shown(snapshot: Any, words: str) -> None:
    shown = text(snapshot, 120, 12)
    assert words in shown
    assert len(shown.splitlines()) == 2


def test_a_name_from_the_job_is_cleaned() -> None:
    plan = PipelinePlan("\x1b[31mred", 2, 4, one_forward_one_backward(2, 4))
    assert "\x1b" not in text(simulated_job(plan=plan))


def test_a_thousand_ranks_are_measured_in_little_time() -> None:
    """By CPU time, with room for a slow host: 7 ms where it was measured."""
    mesh = {"pipeline": 4, "data": 32, "tensor": 8}
    seen = [state(demo(mesh=mesh, later_s=60.0 * number).job) for number in range(3)]
    unseen = iter(seen)  # what was measured once is remembered
    assert least_cpu_s(lambda: bubble(next(unseen)), times=len(seen)) < 0.15
    found = bubble(seen[0])
    assert found is not None
    assert found.num_pipelines == 256
    assert found.mean.ideal == pytest.approx(3 / 19)


def test_a_rank_that_is_missing_leaves_its_pipeline_out() -> None:
    ready = simulated_job()
    assert bubble(state(msgspec.structs.replace(ready, ranks=(ready.ranks[0], rank(1))))) is None
