"""The bubble ratio: one figure for all screens, against truth computed from the chunks alone."""

import random
from typing import Any

import msgspec
import pytest

from boltmesh.schedule_sim import one_forward_one_backward, simulate
from boltmesh.telemetry.snapshot import Chunk, JobSnapshot, PipelinePlan
from boltmesh.tui.commands.top import job_text
from boltmesh.tui.export.prometheus import prometheus_text
from boltmesh.tui.metrics.findings.diagnose import diagnose
from boltmesh.tui.metrics.pipelines import bubble, bubble_ratio
from boltmesh.tui.panels.bubble import draw_bubble
from boltmesh.tui.panels.throughput import draw_throughput
from boltmesh.tui.render.style import UNICODE, Style
from boltmesh.tui.sources.live import Observation
from tests.tui.exposition import parse
from tests.tui.recorded import pipeline_job, recorded_pipelines
from tests.tui.samples import NOW, demo, rank, state

LOOK = Style(UNICODE)
STAGES, MICROBATCHES = 2, 4


def _rows(num_steps: int, *, spread: float, slow_last: float = 1.0) -> list[list[Chunk]]:
    """Steps of 1F1B with chunks of random length, ``slow_last`` times as long in the last step."""
    draw = random.Random(7)
    order = one_forward_one_backward(STAGES, MICROBATCHES)
    rows: list[list[Chunk]] = [[] for _ in range(STAGES)]
    start = NOW
    for number in range(1, num_steps + 1):
        slow = slow_last if number == num_steps else 1.0
        table = simulate(order, lambda _, by=slow: by * draw.uniform(0.01, 0.01 + spread))  # type: ignore[misc]
        # The host stops for a moment between the chunks of a slow step: nobody computes.
        pause = 0.2 * (slow - 1)
        for at, row in enumerate(table):
            for place, slot in enumerate(row):
                shift = start + pause * (place > 1)
                rows[at].append(
                    Chunk(
                        number,
                        slot.action.stage,
                        slot.action.microbatch,
                        slot.action.kind,  # type: ignore[arg-type]
                        shift + slot.start,
                        shift + slot.end,
                    )
                )
        start += 1.0
    return rows


def _truth(rows: list[list[Chunk]], steps: list[int]) -> float:
    shares = []
    for number in steps:
        own = [[chunk for chunk in row if chunk.step == number] for row in rows]
        window = max(c.end for row in own for c in row) - min(c.start for row in own for c in row)
        shares += [1 - sum(c.end - c.start for c in row) / window for row in own]
    return sum(shares) / len(shares)


def _job(rows: list[list[Chunk]], **changes: Any) -> JobSnapshot:
    plan = PipelinePlan(
        "1f1b", STAGES, MICROBATCHES, one_forward_one_backward(STAGES, MICROBATCHES)
    )
    return pipeline_job(plan, tuple(map(tuple, rows)), **changes)


def test_it_is_the_mean_over_the_whole_steps_in_the_ring() -> None:
    rows = _rows(30, spread=0.05)
    job = _job(rows)
    assert bubble_ratio(job) == pytest.approx(_truth(rows, list(range(1, 31))))
    found = bubble(state(job))
    assert found is not None
    assert found.ratio == found.mean.measured == bubble_ratio(job)
    assert (found.num_steps, found.step) == (30, 30)


def test_a_slow_newest_step_moves_it_by_its_share_only() -> None:
    rows = _rows(40, spread=0.01, slow_last=8.0)
    found = bubble_ratio(_job(rows))
    assert found == pytest.approx(_truth(rows, list(range(1, 41))))
    assert _truth(rows, [40]) > 0.6 > 0.3 > (found or 1.0)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_step_of_which_the_ring_holds_only_the_end_is_left_out(cut: int) -> None:
    rows = _rows(10, spread=0.05)
    bitten = [rows[0][cut:], rows[1]]
    first = 1 + 1  # the first step is no longer whole
    assert bubble_ratio(_job(bitten)) == pytest.approx(_truth(rows, list(range(first, 11))))


def test_batches_that_a_step_accumulates_are_not_mixed_where_the_ring_is_cut() -> None:
    rows = _rows(6, spread=0.05)
    # Two batches are one optimizer step.
    joined = [[msgspec.structs.replace(c, step=(c.step + 1) // 2) for c in row] for row in rows]
    cut = [row[3:] for row in joined]
    assert bubble_ratio(_job(joined)) == pytest.approx(_truth(rows, [1, 2, 3, 4, 5, 6]))
    assert bubble_ratio(_job(cut)) == pytest.approx(_truth(rows, [3, 4, 5, 6]))


def test_a_step_under_way_is_left_out() -> None:
    rows = _rows(5, spread=0.05)
    assert bubble_ratio(_job([rows[0], rows[1][:-1]])) == pytest.approx(_truth(rows, [1, 2, 3, 4]))


@pytest.mark.parametrize("name", list(recorded_pipelines()))
def test_recordings_of_real_pipelines_have_their_true_ratio(name: str) -> None:
    job = recorded_pipelines()[name]
    rows = [list(each.chunks) for each in job.ranks]
    numbers = sorted({chunk.step for row in rows for chunk in row})
    assert bubble_ratio(job) == pytest.approx(_truth(rows, numbers), abs=1e-9)


def test_of_several_pipelines_it_is_the_mean() -> None:
    rows = [_rows(4, spread=0.05), _rows(4, spread=0.05, slow_last=5.0)]
    plan = _job(rows[0]).pipeline
    ranks = tuple(
        rank(
            2 * data + at,
            coordinates={"pipeline": at, "data": data, "tensor": 0},
            chunks=tuple(rows[data][at]),
        )
        for data in range(2)
        for at in range(STAGES)
    )
    job = msgspec.structs.replace(
        _job(rows[0]),
        ranks=ranks,
        mesh={"pipeline": 2, "data": 2, "tensor": 1},
        world_size=4,
        pipeline=plan,
    )
    truths = [_truth(each, [1, 2, 3, 4]) for each in rows]
    assert bubble_ratio(job) == pytest.approx(sum(truths) / 2)


def test_every_screen_and_export_shows_the_same_figure() -> None:
    job = _job(_rows(30, spread=0.05, slow_last=6.0))
    ratio = bubble_ratio(job)
    assert ratio is not None
    shown = f"{100 * ratio:.1f}%"
    seen = state(job)

    def text(lines: Any) -> str:
        return "\n".join(line.plain for line in lines)

    assert shown in text(draw_throughput(seen, 80, 9, LOOK))
    assert shown in text(draw_throughput(seen, 120, 1, LOOK))
    assert shown in text(draw_bubble(seen, 120, 12, LOOK)[:2])
    assert f"bubble {shown}" in job_text(seen, 120, LOOK)
    found = parse(prometheus_text(Observation(NOW, job)))
    assert found["boltmesh_job_bubble_ratio"].value() == pytest.approx(ratio)
    told = [finding for finding in diagnose(seen) if finding.kind == "bubble"]
    assert all(f"{ratio:.0%}" in finding.headline for finding in told)
    assert all(finding.cost == pytest.approx(ratio) for finding in told)


def test_the_demo_tells_it_as_well() -> None:
    seen = demo()
    ratio = bubble_ratio(seen.job)
    assert ratio is not None
    assert 0 < ratio < 0.3
    assert f"bubble {100 * ratio:.1f}%" in job_text(state(seen.job), 120, LOOK)
