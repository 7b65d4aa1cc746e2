"""Whatever a snapshot holds, overview, ranks, mesh, plan and events are drawn in their place."""

import json
import math
import random

import msgspec
import pytest
from rich.cells import cell_len

from boltmesh.telemetry.snapshot import (
    ExpertLoad,
    GroupProgress,
    JobSnapshot,
    PhaseTime,
    RankSnapshot,
)
from boltmesh.tui.commands.top import job_text, state_json
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.heat import HEAT_FIGURES
from boltmesh.tui.panels.diagnosis import diagnosis_lines, draw_diagnosis
from boltmesh.tui.panels.differences import draw_differences
from boltmesh.tui.panels.events import draw_event_table
from boltmesh.tui.panels.heatmap import draw_heatmap, draw_places, heatmap_lines, rank_at
from boltmesh.tui.panels.mesh_map import draw_map
from boltmesh.tui.panels.peers import draw_axes
from boltmesh.tui.panels.plan_table import draw_plan
from boltmesh.tui.panels.rank_detail import draw_rank_detail
from boltmesh.tui.panels.rank_table import COLUMNS, draw_rank_table
from boltmesh.tui.panels.throughput import draw_phases, draw_throughput
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import State
from boltmesh.tui.view import TableView
from tests.tui.random_values import Randomly
from tests.tui.samples import NOW, job, rank, state, step

NUMBERS = (0.0, -1.5, 1e-320, 1e300, -1e300, 1.7e308, math.inf, -math.inf, math.nan, 0.2, 3.0)


def _strange_rank(number: int, draw: random.Random) -> RankSnapshot:
    """A rank whose numbers can be anything, as a recording that somebody wrote may have them."""
    steps = tuple(
        step(
            draw.randint(0, 40),
            seconds=draw.choice(NUMBERS),
            end_time=draw.choice((NOW, *NUMBERS)),
            loss=draw.choice((None, *NUMBERS)),
            phases=tuple(
                PhaseTime(draw.choice(("data", "forward", "communication", "new")), seconds)
                for seconds in draw.choices(NUMBERS, k=draw.randint(0, 4))
            ),
        )
        for _ in range(draw.randint(0, 12))
    )
    made: RankSnapshot = Randomly(draw.randint(0, 10**9), largest=3).value(RankSnapshot)
    return msgspec.structs.replace(
        made,
        rank=number,
        steps=steps,
        coordinates=draw.choice(
            ({}, {"data": number}, {"pipeline": 2**40, "tensor": -1}, {"x": 1, "data": 0})
        ),
        last_seen=draw.choice((NOW, *NUMBERS)),
        flops_per_batch=draw.choice((None, *NUMBERS)),
        peak_flops_per_second=draw.choice((None, *NUMBERS)),
        tokens_per_second=draw.choice((None, *NUMBERS)),
    )


def _strange_state(seed: int) -> State:
    draw = random.Random(seed)
    made: JobSnapshot = Randomly(seed, largest=3).value(JobSnapshot)
    snapshot = msgspec.structs.replace(
        made,
        ranks=tuple(_strange_rank(number, draw) for number in range(draw.choice((0, 1, 2, 5, 40)))),
        mesh=draw.choice(({}, {"data": 0}, {"pipeline": 2, "data": 2, "tensor": 2}, {"x": 3})),
        state=draw.choice(("running", "running", "crashed", "finished")),
    )
    shown = state(snapshot, time=draw.choice((NOW, 0.0, 1e12)))
    readings = Randomly(seed + 1, largest=3)
    devices = tuple(readings.value(DeviceReading) for _ in range(draw.randint(0, 3)))
    return msgspec.structs.replace(shown, devices=devices)


def _drawings(
    shown: State, width: int, height: int, look: Style, draw: random.Random
) -> list[Line]:
    figure = draw.choice((*HEAT_FIGURES, "?"))
    table = TableView(
        first=draw.choice((0, 7, 10**6)),
        selected=draw.choice((None, 0, 3, 10**6)),
        sort=draw.choice((None, "?", *COLUMNS)),
        is_descending=draw.random() < 0.5,
        filter=draw.choice(("", "rank>1", "late<5", "x")),
    )
    diagnosis_lines(shown, width, look)
    heatmap_lines(shown, width, look, figure=figure)
    rank_at(shown, width, height, 3, 2, look=look, figure=figure)
    drawn = (
        draw_diagnosis(shown, width, height, look),
        draw_heatmap(shown, width, height, look, figure=figure, selected=draw.choice((None, 0, 3))),
        draw_rank_table(shown, width, height, look, table=table),
        draw_rank_detail(shown, width, height, look, rank=draw.choice((0, 3, -1))),
        draw_phases(shown, width, height, look),
        draw_throughput(shown, width, height, look),
        draw_map(shown, width, height, look, figure=figure, selected=draw.choice((None, 0, 3))),
        draw_places(shown, width, height, look, figure=figure),
        draw_axes(shown, width, height, look, selected=draw.choice((None, 0, 3))),
        draw_plan(shown, width, height, look, table=table),
        draw_event_table(shown, width, height, look, table=table),
        draw_differences(msgspec.structs.replace(shown, other=shown), width, height, look),
    )
    for lines in drawn:
        assert len(lines) <= max(0, height)
    return [line for lines in drawn for line in lines]


@pytest.mark.parametrize("seed", range(120))
def test_strange_numbers_are_drawn_within_their_place(seed: int) -> None:
    draw = random.Random(seed)
    shown = _strange_state(seed)
    for look in (Style(UNICODE), Style(ASCII, has_headings=False, has_signs=False)):
        width, height = draw.choice(((1, 1), (60, 15), (120, 40), (draw.randint(1, 300), 20)))
        for line in _drawings(shown, width, height, look, draw):
            assert cell_len(line.plain) == line.width <= width


@pytest.mark.parametrize("rows", [(0, 0), (-5, 0), (5, -5)])
def test_devices_without_memory_and_experts_of_no_rows_have_a_summary(
    rows: tuple[int, ...],
) -> None:
    gpu = DeviceReading(
        kind="gpu",
        name="NVIDIA H100",
        ranks=(0, 1),
        uuid="GPU-0",
        memory_used_bytes=5,
        memory_total_bytes=0,
    )
    ranks = tuple(
        rank(
            number,
            device="cuda:0",
            device_uuid="GPU-0",
            experts=(ExpertLoad("moe", rows, rows, 0),),
            groups=(GroupProgress("expert", "1", (0, 1), 1, "alltoall", None, NOW),),
        )
        for number in range(2)
    )
    shown = msgspec.structs.replace(state(job(ranks=ranks)), devices=(gpu,))
    text = job_text(shown, 100, Style(UNICODE))
    assert "cuda:0" in text
    json.loads(state_json(shown))


def test_a_thousand_ranks_are_drawn_like_eight() -> None:
    ranks = tuple(rank(number) for number in range(1024))
    shown = state(job(ranks=ranks, mesh={"pipeline": 8, "data": 16, "tensor": 8}))
    for width, height in ((60, 15), (200, 60)):
        for line in _drawings(shown, width, height, Style(UNICODE), random.Random(0)):
            assert line.width <= width
