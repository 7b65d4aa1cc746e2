"""Bytes over the boundaries of a pipeline's stages, measured beside expected."""

import msgspec
import pytest

from boltmesh.strategies.pipeline.schedules.orders.gpipe_1f1b import gpipe
from boltmesh.telemetry.snapshot import (
    Chunk,
    JobSnapshot,
    LiveMicrobatches,
    PeerTotal,
    PipelinePlan,
)
from boltmesh.tui.metrics.pipelines import bubble
from boltmesh.tui.panels.bubble import boundaries, draw_boundaries, draw_bubble
from boltmesh.tui.panels.gantt import draw_gantt, gantt
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from tests.tui.recorded import pipeline_job
from tests.tui.samples import NOW, state, step

LOOK = Style(UNICODE)


def interleaved(sent: dict[tuple[int, int], float], steps: int = 9) -> JobSnapshot:
    """Two ranks with two stages each; stages 0 and 2 are on rank 0."""
    order = (("0F0", "2F0", "2B0", "0B0"), ("1F0", "3F0", "3B0", "1B0"))
    sizes = ((10, 8), (20, 16), (40, 32))
    plan = PipelinePlan("interleaved_1f1b", 4, 1, order, (0, 1, 0, 1), sizes)
    times = {0: (0.0, 2.0, 5.0, 7.0), 1: (1.0, 3.0, 4.0, 6.0)}
    rows = tuple(
        tuple(
            Chunk(steps, int(text[0]), 0, text[1], NOW + at, NOW + at + 1.0)  # type: ignore[arg-type]
            for text, at in zip(row, times[rank], strict=True)
        )
        for rank, row in enumerate(order)
    )
    job = pipeline_job(plan, rows, global_step=steps)
    ranks = tuple(
        msgspec.structs.replace(
            rank,
            live_microbatches=(LiveMicrobatches(rank.rank, 1), LiveMicrobatches(rank.rank + 2, 1)),
            peers=tuple(
                PeerTotal("pipeline", "send", to, 5, 500, num_bytes)
                for (source, to), num_bytes in sent.items()
                if source == rank.rank
            ),
        )
        for rank in job.ranks
    )
    return msgspec.structs.replace(job, ranks=ranks)


def test_values_and_gradients_of_all_boundaries_between_two_ranks_are_added_up() -> None:
    # From 0 to 1: values of boundaries 0 and 2, gradients of boundary 1, which leads back.
    (found,) = boundaries(interleaved({(0, 1): 66.0, (1, 0): 60.0}))
    assert (found.ranks, found.stages) == ((0, 1), (0, 1, 2))
    assert (found.there.expected, found.back.expected) == (10 + 40 + 16, 8 + 32 + 20)
    assert found.there.is_equal
    assert found.back.is_equal


@pytest.mark.parametrize("look", [LOOK, Style(ASCII, has_headings=False)])
def test_a_difference_is_a_word_and_no_colour(look: Style) -> None:
    for back, word in ((60.0, "as expected"), (120.0, "differs")):
        lines = draw_boundaries(state(interleaved({(0, 1): 66.0, (1, 0): back})), 80, 6, look)
        assert word in lines[-1].plain
        assert "0 - 1" in lines[-1].plain
        assert all(line.width <= 80 for line in lines)


def test_bytes_of_smaller_batches_vary() -> None:
    seen = interleaved({(0, 1): 66.0, (1, 0): 50.0})
    steps = tuple(step(index, samples=2 if index == 5 else 4) for index in range(9))
    ranks = tuple(msgspec.structs.replace(rank, steps=steps) for rank in seen.ranks)
    seen = msgspec.structs.replace(seen, ranks=ranks)
    assert "varies" in draw_boundaries(state(seen), 80, 6, LOOK)[-1].plain


def test_early_in_a_run_nothing_is_judged() -> None:
    assert "counting" in draw_boundaries(state(interleaved({}, steps=1)), 80, 6, LOOK)[-1].plain


@pytest.mark.parametrize(
    "changes",
    [{"rank_of_stage": ()}, {"border_bytes": ()}, {"rank_of_stage": (0, 1, 0, 7)}],
)
def test_what_no_strategy_told_is_not_drawn(changes: dict[str, object]) -> None:
    job = interleaved({(0, 1): 66.0, (1, 0): 60.0})
    assert job.pipeline is not None
    job = msgspec.structs.replace(job, pipeline=msgspec.structs.replace(job.pipeline, **changes))
    assert boundaries(job) == ()
    assert draw_boundaries(state(job), 80, 6, LOOK) == []


def test_microbatches_in_flight_stand_beside_the_bubble() -> None:
    job = interleaved({})
    found = bubble(state(job))
    assert found is not None
    assert [(row.kept, row.planned) for row in found.rows] == [((1, 1), (1, 1))] * 2
    shown = "\n".join(line.plain for line in draw_bubble(state(job), 120, 20, LOOK))
    assert "in flight" in shown
    assert "1+1" in shown
    more = msgspec.structs.replace(job.ranks[0], live_microbatches=(LiveMicrobatches(0, 5),))
    job = msgspec.structs.replace(job, ranks=(more, *job.ranks[1:]))
    shown = "\n".join(line.plain for line in draw_bubble(state(job), 120, 20, LOOK))
    assert "5+0 of 1+1" in shown


def accumulated(*complete: int) -> JobSnapshot:
    """An optimizer step of several batches, of which each rank has done so many chunks."""
    order = gpipe(2, 2)
    plan = PipelinePlan("gpipe", 2, 2, order)
    rows = []
    for rank, count in enumerate(complete):
        texts = [text for _ in range(4) for text in order[rank]][:count]
        rows.append(
            tuple(
                Chunk(7, rank, int(str(text)[2:]), str(text)[1], NOW + at, NOW + at + 1.0)  # type: ignore[arg-type]
                for at, text in enumerate(texts)
            )
        )
    return pipeline_job(plan, tuple(rows), global_step=6)


def test_each_batch_of_an_accumulated_step_is_measured_by_itself() -> None:
    found = bubble(state(accumulated(12, 12)))
    assert found is not None
    assert (found.step, found.num_steps) == (7, 3)
    assert found.window_s == pytest.approx(4.0)
    found = bubble(state(accumulated(10, 9)))  # the third is under way
    assert found is not None
    assert found.num_steps == 2
    drawn = gantt(state(accumulated(10, 9)))
    assert drawn is not None
    assert (drawn.batch, drawn.is_whole) == (1, True)
    assert "step 7, batch 2 of it" in draw_gantt(state(accumulated(10, 9)), 80, 8, LOOK)[0].plain


def test_stages_have_rows_of_their_own_where_blocks_cannot_name_them() -> None:
    job = interleaved({})
    wide, narrow = (draw_gantt(state(job), width, 12, LOOK) for width in (100, 19))
    assert "0.0" in wide[1].plain
    rows = [line.plain for line in narrow[1:5]]
    assert [row[:3] for row in rows] == ["r0 ", "r0 ", "r1 ", "r1 "]
    # The second stage computes between both chunks of the first.
    assert rows[0][3:].index("0") < rows[1][3:].index("0")
    assert "  " in rows[0][3:]


def test_blocks_without_room_for_their_number_have_it_below() -> None:
    job = accumulated(4, 4)
    (first, below, *_) = (line.plain for line in draw_gantt(state(job), 3 + 4, 12, LOOK)[1:])
    assert first == "r0 ░░██"
    assert below == "   0101"
