"""The ranks laid out by the mesh, from eight to a thousand, in any place."""

import math
import random
from typing import Any

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.devices import DeviceReading
from boltmesh.tui.metrics.heat import HEAT_FIGURES, heat
from boltmesh.tui.metrics.mesh_grid import plan_grid
from boltmesh.tui.panels.heatmap import draw_heatmap, heatmap_lines, rank_at
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import State
from tests.tui.loads import steady, team, waiting_for, worker
from tests.tui.samples import demo, job, rank, state

LOOK = Style(UNICODE)
PLAIN = Style(ASCII, has_headings=False)


def _mesh(pipeline: int, data: int, tensor: int, **changes: Any) -> JobSnapshot:
    ranks = tuple(
        rank(
            number,
            coordinates={
                "pipeline": number // (data * tensor),
                "data": number // tensor % data,
                "tensor": number % tensor,
            },
            steps=(),
            global_step=number,
            **changes,
        )
        for number in range(pipeline * data * tensor)
    )
    return job(ranks=ranks, mesh={"pipeline": pipeline, "data": data, "tensor": tensor})


def _late(size: int = 8, **changes: Any) -> State:
    ranks = tuple(
        worker(number, load, **changes) for number, load in enumerate(waiting_for(0.1, size=size))
    )
    return state(job(ranks=ranks))


def _draw(shown: State, width: int = 80, height: int = 10, **options: Any) -> list[str]:
    look = options.pop("look", LOOK)
    return [line.plain for line in draw_heatmap(shown, width, height, look, **options)]


def test_stages_stand_below_each_other_and_the_inner_axis_side_by_side() -> None:
    grid = plan_grid(_mesh(2, 3, 2), 40, 5, cell_widths=(2,))
    assert grid is not None
    where = {cell.ranks[0]: (cell.x, cell.y) for cell in grid.cells}
    assert {y for rank, (_, y) in where.items() if rank < 6} == {0}
    assert {y for rank, (_, y) in where.items() if rank >= 6} == {1}
    assert where[1][0] - where[0][0] == 2
    assert where[2][0] - where[1][0] == 3
    assert grid.row_labels == {0: "stage 0", 1: "stage 1"}
    assert list(grid.column_labels.values()) == ["data 0", "data 1", "data 2"]
    assert grid.axes == "pipeline 2 down, data 3 x tensor 2 across"


def test_what_counts_are_coordinates_and_not_rank_numbers() -> None:
    ranks = tuple(
        rank(number, coordinates={"pipeline": number % 2, "data": number // 2, "tensor": 0})
        for number in range(8)
    )
    snapshot = job(ranks=ranks, mesh={"pipeline": 2, "data": 4, "tensor": 1})
    grid = plan_grid(snapshot, 40, 4, cell_widths=(2,))
    assert grid is not None
    rows = [[cell.ranks[0] for cell in grid.cells if cell.y == y] for y in range(2)]
    assert rows == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_rank_that_has_not_said_where_it_is_stands_in_its_place() -> None:
    snapshot = _mesh(2, 2, 2)
    ranks = list(snapshot.ranks)
    ranks[5] = msgspec.structs.replace(ranks[5], coordinates={}, state="missing")
    grid = plan_grid(msgspec.structs.replace(snapshot, ranks=tuple(ranks)), 40, 4, cell_widths=(2,))
    whole = plan_grid(snapshot, 40, 4, cell_widths=(2,))
    assert grid == whole


@pytest.mark.parametrize(
    ("pipeline", "data", "tensor"),
    [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (4, 1, 1), (3, 5, 7), (8, 16, 8), (1, 1024, 1),
     (1024, 1, 1), (1, 13, 1)],
)  # fmt: skip
def test_every_rank_has_one_cell_in_any_place(pipeline: int, data: int, tensor: int) -> None:
    snapshot = _mesh(pipeline, data, tensor)
    generator = random.Random(data)
    sizes = [(1, 1), (2, 1), (300, 100)]
    sizes += [(generator.randint(1, 120), generator.randint(1, 30)) for _ in range(20)]
    for width, height in sizes:
        grid = plan_grid(snapshot, width, height, cell_widths=(9, 2, 1))
        assert grid is not None
        ranks = [number for cell in grid.cells for number in cell.ranks]
        assert sorted(ranks) == list(range(len(snapshot.ranks)))
        taken = {(cell.x + at, cell.y) for cell in grid.cells for at in range(grid.cell_width)}
        assert len(taken) == len(grid.cells) * grid.cell_width
        assert all(x < width and y < height for x, y in taken)
        assert grid.height <= height


def test_the_widest_cells_that_fit_are_taken() -> None:
    snapshot = _mesh(1, 8, 1)
    widths = [plan_grid(snapshot, width, 1, cell_widths=(9, 2, 1)) for width in (80, 40, 12, 6)]
    assert [grid.cell_width for grid in widths if grid is not None] == [9, 2, 1, 1]
    assert [grid.ranks_per_cell for grid in widths if grid is not None] == [1, 1, 1, 2]


def test_lines_are_broken_at_round_numbers_and_name_their_first_rank() -> None:
    grid = plan_grid(_mesh(1, 64, 1), 60, 8, cell_widths=(2,))
    assert grid is not None
    assert list(grid.row_labels.values()) == ["rank 0", "rank 16", "rank 32", "rank 48"]


def test_the_late_rank_stands_out_in_its_own_time_and_not_in_its_step() -> None:
    shown = _late()
    own = heat(shown, "compute time").values
    assert [number for number, value in own.items() if value.level == 1.0] == [7]
    assert all(value.level == 0.0 for number, value in own.items() if number != 7)
    assert {value.level for value in heat(shown, "step time").values.values()} == {0.0}


def test_a_scale_is_not_made_of_noise() -> None:
    generator = random.Random(2)
    noisy = [steady(forward=generator.gauss(0.06, 0.001)) for _ in range(64)]
    values = heat(state(team(*noisy)), "compute time").values
    assert all(value.level is not None and value.level < 0.2 for value in values.values())


def test_more_is_better_for_some_figures_and_the_colours_turn_round() -> None:
    ranks = tuple(rank(number, tokens_per_second=1000.0 - 500 * number) for number in range(2))
    shown = heat(state(job(ranks=ranks)), "tokens/s")
    assert [value.level for value in shown.values.values()] == [1.0, 0.0]
    alike = tuple(rank(number, tokens_per_second=1000.0 - 10 * number) for number in range(3))
    levels = [value.level for value in heat(state(job(ranks=alike)), "tokens/s").values.values()]
    assert all(level is not None and level >= 0.9 for level in levels)
    lines = draw_heatmap(state(job(ranks=ranks)), 80, 5, LOOK, figure="tokens/s")
    roles = [role for line in lines for text, role in line.spans if text in {"··", "██"}]
    assert roles == ["heat1", "heat5"]


@pytest.mark.parametrize(
    ("figure", "text", "level"),
    [("utilisation", "97%", 0.97), ("memory", "50%", 0.5), ("temperature", "95 C", 1.0),
     ("memory used", "5.00 GiB", 0.0)],
)  # fmt: skip
def test_readings_of_the_device_are_figures(figure: str, text: str, level: float) -> None:
    gpu = DeviceReading(
        kind="gpu", ranks=(0,), name="H100", uuid="GPU-a", utilization_percent=97.0,
        memory_used_bytes=5 * 2**30, memory_total_bytes=10 * 2**30, temperature_celsius=95.0,
    )  # fmt: skip
    snapshot = job(ranks=(rank(0, device="cuda:0 (H100)", device_uuid="GPU-a"),))
    shown = msgspec.structs.replace(state(snapshot), devices=(gpu,))
    value = heat(shown, figure).values[0]
    assert value.text == text
    assert value.level == pytest.approx(level)


def test_shares_of_phases_steps_behind_and_losses_are_figures() -> None:
    ranks = (
        worker(0, steady(data=0.194, transfer=0.002)),
        worker(1, steady(communication=0.2), global_step=20),
    )
    shown = state(job(ranks=ranks))
    assert heat(shown, "data").values[0].text == "50%"
    assert heat(shown, "communication").values[1].text == "52%"
    assert [value.text for value in heat(shown, "behind").values.values()] == ["0", "4"]
    assert heat(shown, "loss").values[0].text == "2.0000"


def test_a_rank_in_trouble_is_marked_in_every_figure() -> None:
    ranks = (worker(0), worker(1, state="dead"), rank(2, state="missing", steps=()))
    shown = state(job(ranks=ranks))
    for figure in HEAT_FIGURES:
        values = heat(shown, figure).values
        assert (values[1].mark, values[2].mark) == ("dead", "missing")
        text = "\n".join(_draw(shown, figure=figure))
        assert "1 dead" in text
        assert "1 missing" in text


def test_what_is_not_known_and_what_is_no_number_have_signs_of_their_own() -> None:
    unknown = state(job(ranks=(rank(0, tokens_per_second=None), rank(1))))
    assert any("?" in line for line in _draw(unknown, figure="tokens/s"))
    broken = tuple(msgspec.structs.replace(step, loss=math.nan) for step in rank(0).steps)
    shown = state(job(ranks=(rank(0, steps=broken), rank(1))))
    assert heat(shown, "loss").values[0].mark == "not finite"
    assert any("~~ nan" in line for line in _draw(shown, figure="loss"))


def test_the_ends_of_the_scale_and_its_shades_are_named() -> None:
    lines = _draw(_late(), figure="compute time")
    assert lines[-1].startswith("184 ms ·░▒▓█ 284 ms")
    digits = _draw(_late(), figure="compute time", look=Style(ASCII))
    assert digits[-1].startswith("184 ms 0123456789 284 ms")


def test_ranks_that_differ_by_little_are_called_even() -> None:
    loads = [steady(forward=0.1 + 0.0001 * number) for number in range(4)]
    seen = state(job(ranks=tuple(worker(number, load) for number, load in enumerate(loads))))
    assert _draw(seen, figure="compute time")[-1].startswith("even within 1%")
    assert not any("even" in line for line in _draw(_late(), figure="compute time"))


def test_without_colours_a_map_still_reads() -> None:
    signs = {line.strip()[:2] for line in _draw(_late(2), 14, 6, figure="compute time")[1:3]}
    assert {"··", "██"} & signs
    assert all(line.isascii() for line in _draw(_late(), look=PLAIN))


def test_the_selected_rank_is_told_in_words() -> None:
    shown = state(_mesh(2, 2, 2))
    lines = _draw(shown, figure="behind", selected=5)
    assert "rank 5 (pipeline 1, data 0, tensor 1) 2" in lines[0]
    assert sum(line.count(UNICODE.cursor) for line in lines) == 1
    assert _draw(shown, figure="behind", selected=99) == _draw(shown, figure="behind")
    narrow = _draw(shown, 30, 4, figure="behind", selected=5, look=PLAIN)
    assert any("rank 5 2" in line for line in narrow)


@pytest.mark.parametrize("look", [LOOK, PLAIN], ids=["headings", "plain"])
@pytest.mark.parametrize(
    ("mesh", "width", "height"),
    [((2, 2, 2), 80, 8), ((8, 16, 8), 160, 14), ((8, 16, 8), 80, 20), ((1, 64, 1), 80, 8)],
)
def test_the_mouse_finds_the_rank_under_it(
    mesh: tuple[int, int, int], width: int, height: int, look: Style
) -> None:
    shown = state(_mesh(*mesh))
    # The cell that is drawn as selected is the one that is found.
    size = len(shown.job.ranks)
    for number in {0, 1, size // 3, size // 2, size - 1}:
        lines = draw_heatmap(shown, width, height, look, figure="behind", selected=number)
        places = [
            (x, y)
            for y, line in enumerate(lines)
            for x, (_, role) in enumerate((c, role) for text, role in line.spans for c in text)
            if role == "selected"
        ]
        assert places
        for x, y in (places[0], places[-1]):
            assert rank_at(shown, width, height, x, y, look=look, figure="behind") == number


@pytest.mark.parametrize("look", [LOOK, PLAIN], ids=["headings", "plain"])
def test_every_cell_belongs_to_a_rank_and_no_label_does(look: Style) -> None:
    shown = state(_mesh(2, 2, 2))
    found = [
        rank_at(shown, 40, 6, x, y, look=look, figure="behind") for y in range(6) for x in range(40)
    ]
    assert set(found) == {None, *range(8)}
    assert rank_at(shown, 40, 6, 0, 2 if look.has_headings else 1, look=look) is None
    assert rank_at(state(job(ranks=())), 40, 6, 0, 0, look=look) is None


def test_a_cell_of_several_ranks_shows_the_worst_of_them() -> None:
    snapshot = _mesh(8, 16, 8)
    ranks = list(snapshot.ranks)
    ranks[7] = msgspec.structs.replace(ranks[7], state="dead")
    shown = state(msgspec.structs.replace(snapshot, ranks=tuple(ranks)))
    lines = _draw(shown, 66, 8, figure="tokens/s")
    assert "✗" in lines[1][:2]
    assert "each cell the worst of 4" in lines[-1]
    assert rank_at(shown, 66, 8, 1, 1, look=LOOK, figure="tokens/s") == 7


def test_a_map_asks_for_the_lines_that_it_fills() -> None:
    for mesh in ((1, 8, 1), (2, 2, 2), (8, 16, 8)):
        shown = state(_mesh(*mesh))
        lines = heatmap_lines(shown, 120, LOOK, figure="behind")
        assert len(_draw(shown, 120, lines, figure="behind")) == lines


@pytest.mark.parametrize("figure", [*HEAT_FIGURES, "no such figure"])
@pytest.mark.parametrize("look", [LOOK, PLAIN], ids=["unicode", "ascii"])
def test_every_figure_fits_every_place(figure: str, look: Style) -> None:
    states = [state(demo().job), state(job(ranks=())), state(job(ranks=(rank(0, steps=()),)))]
    for shown in states:
        for width, height in ((0, 0), (1, 1), (1, 9), (9, 1), (40, 2), (80, 6), (300, 40)):
            lines = draw_heatmap(shown, width, height, look, figure=figure, selected=0)
            assert len(lines) <= height
            assert all(line.width <= width for line in lines)


def test_a_rank_that_died_and_those_that_failed_with_it_look_different() -> None:
    ranks = (rank(0, state="dead"), rank(1, state="failed"))
    for look, dead in ((LOOK, "✗"), (PLAIN, "X")):
        text = "\n".join(_draw(state(job(ranks=ranks)), figure="compute time", look=look))
        assert f"{dead} 1 dead" in text
        assert "! 1 failed" in text
        assert dead * 2 in text
        assert "!!" in text
