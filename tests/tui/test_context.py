"""The context screen: who has more work, and the largest messages."""

import msgspec
import pytest

from boltmesh.telemetry.snapshot import MetricPoint, PhaseTime
from boltmesh.tui.panels.context import context_rows
from boltmesh.tui.sources.live import Observation
from tests.tui.samples import NOW, demo, job, rank, step, total
from tests.tui.screens import open_app, screen_text

SLOW = tuple(
    step(at, phases=(PhaseTime("forward", 0.2), PhaseTime("communication", 0.3)))
    for at in range(10)
)
JOB = job(
    ranks=tuple(
        rank(
            at,
            coordinates={"data": 0, "context": at},
            steps=SLOW if at < 2 else rank().steps,
            collectives=(
                total("context", "allgather_base", calls=10, payload_bytes=10 << 20),
                total("context", "allreduce", calls=100, payload_bytes=1 << 20),
                total("data", "allreduce", calls=1, payload_bytes=1 << 30),
            ),
        )
        for at in range(3)
    ),
    mesh={"pipeline": 1, "data": 1, "context": 3, "tensor": 1},
)


def test_work_is_compute_time_beside_the_median() -> None:
    rows = context_rows(JOB)
    assert [row.part for row in rows] == [0, 1, 2]
    assert [row.compute_s for row in rows] == pytest.approx([0.2, 0.2, 0.5])
    assert rows[2].work == pytest.approx(1.5)
    assert rows[0].largest == "all_gather"
    assert rows[0].message_bytes == 1 << 20


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (160, 45)])
async def test_the_screen_shows_it(size: tuple[int, int]) -> None:
    async with open_app(Observation(NOW, JOB), size=size) as pilot:
        await pilot.press("n")
        text = screen_text(pilot.app)
        assert "+150%" in text
        await pilot.press("down", "enter")
        assert "rank 1" in screen_text(pilot.app)


async def test_a_job_without_the_axis_says_so() -> None:
    async with open_app(demo(), size=(80, 24)) as pilot:
        await pilot.press("n")
        assert "no context axis" in screen_text(pilot.app)


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
async def test_the_traffic_of_the_axis_is_below_the_ranks(size: tuple[int, int]) -> None:
    points = tuple(MetricPoint("step_s", at, 0.1 * at) for at in range(1, 9))
    seen = msgspec.structs.replace(JOB, trends=points)
    async with open_app(Observation(NOW, seen), size=size) as pilot:
        await pilot.press("n")
        lines = screen_text(pilot.app).splitlines()
        (at,) = [at for at, line in enumerate(lines) if "context axis, per step" in line]
        assert "all_gather" in lines[at + 2]
        assert any("step time, ms" in line for line in lines)
