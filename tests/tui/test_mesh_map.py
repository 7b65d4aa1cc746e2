"""The page of the mesh: where ranks stand, how one moves, what each place and axis says."""

import time

import msgspec
import pytest

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.metrics.heat import heat
from boltmesh.tui.panels.heatmap import draw_places, place_rows
from boltmesh.tui.panels.mesh_map import (
    MeshMap,
    draw_map,
    map_lines,
    map_of,
    plan_map,
    rank_beside,
    rank_on_map,
)
from boltmesh.tui.panels.peers import axis_rows, draw_axes, rank_bytes, verdict
from boltmesh.tui.render.style import ASCII, UNICODE, Style
from boltmesh.tui.state import State, fold
from tests.tui.loads import steady, worker
from tests.tui.meshes import coordinates, mesh_job
from tests.tui.samples import demo, job, rank, state, total

LOOK = Style(UNICODE)
PLAIN = Style(ASCII, has_headings=False)
CELL_WIDTHS = (10, 2, 1)
MESHES = [
    (2, 2, 2), (4, 2, 8), (4, 32, 8), (1, 8, 1), (1, 4, 2), (8, 1, 1), (4, 1, 8), (8, 128, 1),
    (3, 5, 7), (1, 1, 1), (2, 3, 16), (16, 8, 8),
]  # fmt: skip
PLACES = [(156, 34), (116, 28), (78, 12), (60, 4), (30, 9), (9, 3), (1, 1), (300, 90)]


def made(pipeline: int, data: int, tensor: int) -> JobSnapshot:
    mesh = {"pipeline": pipeline, "data": data, "tensor": tensor}
    ranks = tuple(
        rank(number, coordinates=place, steps=(), global_step=number)
        for number, place in enumerate(coordinates(mesh))
    )
    return job(ranks=ranks, mesh=mesh)


def planned(snapshot: JobSnapshot, width: int = 156, height: int = 34) -> MeshMap:
    found = plan_map(snapshot, width, height, cell_widths=CELL_WIDTHS)
    assert found is not None
    return found


@pytest.mark.each_choice
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("width", "height"), PLACES)
def test_every_rank_stands_once_within_its_place(
    sizes: tuple[int, int, int], width: int, height: int
) -> None:
    snapshot = made(*sizes)
    found = planned(snapshot, width, height)
    ranks = sorted(number for cell in found.cells for number in cell.ranks)
    assert ranks == list(range(len(snapshot.ranks)))
    taken = [(cell.x + at, cell.y) for cell in found.cells for at in range(found.cell_width)]
    assert len(set(taken)) == len(taken)
    words = [(label.x + at, label.y) for label in found.labels for at in range(len(label.text))]
    assert not set(words) & set(taken)
    assert all(x < width and y < found.height <= height for x, y in [*taken, *words])


def test_a_block_is_a_stage_with_data_down_and_tensor_across() -> None:
    found = planned(made(2, 3, 4))
    at = {cell.ranks[0]: (cell.x, cell.y) for cell in found.cells}
    for number, place in enumerate(coordinates({"pipeline": 2, "data": 3, "tensor": 4})):
        first = at[12 * place["pipeline"]]
        assert at[number] == (first[0] + 10 * place["tensor"], first[1] + place["data"])
    texts = {label.text: (label.x, label.y) for label in found.labels}
    assert texts["stage 1"][0] == at[12][0]
    assert [texts[f"data {number}"][1] for number in range(3)] == [at[4 * n][1] for n in range(3)]
    assert texts["tensor"][1] == texts["stage 0"][1] + 1
    assert found.axes == "data 3 down, tensor 4 across, 2 stages"


def test_blocks_go_below_each_other_where_they_do_not_fit_side_by_side() -> None:
    beside, below = planned(made(2, 2, 4), 100, 20), planned(made(2, 2, 4), 52, 20)
    assert {beside.cell_width, below.cell_width} == {10}
    assert beside.height < below.height
    assert len({cell.x for cell in below.cells}) == 4


def test_as_many_ranks_share_a_cell_as_have_to_and_they_are_neighbours() -> None:
    found = planned(made(4, 32, 8), 78, 9)
    assert found.ranks_per_cell == 4
    assert all(cell.ranks == tuple(range(cell.ranks[0], cell.ranks[0] + 4)) for cell in found.cells)
    assert [label.text for label in found.labels if label.text.startswith("data")] == [
        f"data {number}" for number in range(0, 32, 4)
    ]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 8), (1, 8, 1), (4, 1, 8)], ids=str)
def test_arrows_reach_every_rank_and_stop_at_the_edges(sizes: tuple[int, int, int]) -> None:
    found = planned(made(*sizes))
    first = found.beside(None, 1, 0)
    assert first is not None
    assert first.ranks == (0,)
    reached, waiting = {0}, [0]
    while waiting:
        here = waiting.pop()
        for across, down in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            cell = found.beside(here, across, down)
            assert cell is not None
            if cell.ranks[0] not in reached:
                reached.add(cell.ranks[0])
                waiting.append(cell.ranks[0])
    assert len(reached) == len(found.cells)
    corner = min(found.cells, key=lambda cell: (cell.y, cell.x)).ranks[0]
    for across, down in ((-1, 0), (0, -1)):
        cell = found.beside(corner, across, down)
        assert cell is not None
        assert cell.ranks == (corner,)


def test_right_goes_along_tensor_and_down_along_data() -> None:
    shown = state(made(2, 2, 4))
    step = {"look": LOOK, "figure": "behind"}
    assert rank_beside(shown, 120, 20, 1, 1, 0, **step) == 2  # type: ignore[arg-type]
    assert rank_beside(shown, 120, 20, 1, 0, 1, **step) == 5  # type: ignore[arg-type]
    # From the last part of a layer to the next stage, on the same replica.
    assert rank_beside(shown, 120, 20, 7, 1, 0, **step) == 12  # type: ignore[arg-type]


@pytest.mark.parametrize("look", [LOOK, PLAIN], ids=["headings", "plain"])
@pytest.mark.parametrize(
    ("sizes", "width", "height"),
    [((2, 2, 2), 120, 10), ((4, 2, 8), 80, 20), ((4, 32, 8), 158, 36), ((1, 64, 1), 80, 8)],
)
def test_the_mouse_finds_the_rank_under_it(
    sizes: tuple[int, int, int], width: int, height: int, look: Style
) -> None:
    shown = state(made(*sizes))
    size = len(shown.job.ranks)
    for number in {0, 1, size // 3, size // 2, size - 1}:
        lines = draw_map(shown, width, height, look, figure="behind", selected=number)
        places = [
            (x, y)
            for y, line in enumerate(lines)
            for x, role in enumerate(role for text, role in line.spans for _ in text)
            if role == "selected"
        ]
        assert places
        for x, y in (places[0], places[-1]):
            assert rank_on_map(shown, width, height, x, y, look=look, figure="behind") == number


@pytest.mark.parametrize("world", [8, 64, 1024])
@pytest.mark.parametrize("look", [LOOK, PLAIN], ids=["headings", "plain"])
def test_the_drawing_fits_and_says_its_scale(world: int, look: Style) -> None:
    sizes = {8: (2, 2, 2), 64: (4, 2, 8), 1024: (4, 32, 8)}[world]
    shown = state(made(*sizes))
    for width, height in PLACES:
        lines = draw_map(shown, width, height, look, figure="behind", selected=0)
        assert len(lines) <= height
        assert all(line.width <= width for line in lines)
    wide = [line.plain for line in draw_map(shown, 156, 40, look, figure="behind")]
    assert any(f"0 {look.glyphs.shades} {world - 1:,}" in line for line in wide)
    assert len(wide) == map_lines(shown, 156, 40, look, figure="behind")


def test_a_late_rank_is_seen_with_and_without_colour() -> None:
    ranks = tuple(
        worker(
            number,
            steady(forward=0.26) if number == 6 else steady(),
            coordinates=place,
        )
        for number, place in enumerate(coordinates({"pipeline": 2, "data": 2, "tensor": 2}))
    )
    shown = state(job(ranks=ranks, mesh={"pipeline": 2, "data": 2, "tensor": 2}))
    (line,) = [line for line in draw_map(shown, 30, 9, LOOK) if "██" in line.plain]
    assert [role for text, role in line.spans if "█" in text] == ["heat5"]
    rows = {(row.axis, row.place): row for row in place_rows(shown, heat(shown, "compute time"))}
    assert rows["pipeline", 1].worst == rows["data", 1].worst == rows["tensor", 0].worst == 6
    assert rows["pipeline", 1].share > 0.1 > 0 > rows["pipeline", 0].share
    assert rows["pipeline", 1].num_ranks == 4
    text = "\n".join(each.plain for each in draw_places(shown, 80, 9, LOOK))
    assert "pipeline 1" in text


def test_places_are_means_and_where_they_do_not_fit_the_worst_are_shown() -> None:
    shown = state(made(2, 4, 2))
    rows = {(row.axis, row.place): row for row in place_rows(shown, heat(shown, "behind"))}
    assert len(rows) == 2 + 4 + 2
    assert (rows["pipeline", 0].mean, rows["pipeline", 1].mean) == (11.5, 3.5)
    assert (rows["tensor", 1].least, rows["tensor", 1].most) == (0, 14)
    assert rows["data", 0].worst == 0
    lines = [line.plain for line in draw_places(shown, 80, 4, LOOK, figure="behind")]
    assert "the worst 2 of 8" in lines[0]
    assert ["pipeline 0" in lines[2], "data 0" in lines[3]] == [True, True]
    few = [line.plain for line in draw_places(state(job(ranks=(), mesh={"data": 2})), 60, 5, LOOK)]
    assert "nothing to compare" in few[1]


def test_an_axis_is_the_sum_of_its_operators_beside_the_sum_that_is_stated() -> None:
    snapshot = mesh_job({"pipeline": 1, "data": 2, "tensor": 2})
    expected = (ExpectedTraffic("data", "allreduce", 2e6, 2, "gradients"),
                ExpectedTraffic("tensor", "allreduce", 1e6, 2, "activations"))  # fmt: skip
    rows = {
        row.axis: row for row in axis_rows(msgspec.structs.replace(snapshot, expected=expected))
    }
    assert list(rows) == ["data", "tensor", "world"]
    assert (rows["data"].payload_bytes, rows["data"].expected_bytes) == (2e6, 2e6)
    words = {axis: verdict(row, LOOK).plain for axis, row in rows.items()}
    assert words == {"data": "✓ as expected", "tensor": "≠ 2x", "world": "no formula"}


def test_an_axis_on_which_nothing_has_moved_is_shown_all_the_same() -> None:
    quiet = job(mesh={"pipeline": 1, "data": 2, "tensor": 1})
    (row,) = axis_rows(quiet)
    assert (row.axis, row.payload_bytes, row.expected_bytes) == ("data", None, None)
    assert verdict(row, LOOK).plain == "nothing yet"


def test_the_selected_rank_has_a_column_of_its_own() -> None:
    uneven = tuple(
        rank(number, collectives=(total(bytes_per_step=1000.0 * (number + 1)),))
        for number in range(2)
    )
    shown = state(job(ranks=uneven))
    assert rank_bytes(shown.job, 1) == {"data": 2000.0}
    titles, line = (each.plain for each in draw_axes(shown, 100, 4, PLAIN, selected=1))
    assert "rank 1" in titles
    assert "2.00 kB" in line


def test_communication_that_is_not_counted_says_so() -> None:
    shown = state(job(communication_note="no dispatcher"))
    text = "\n".join(line.plain for line in draw_axes(shown, 80, 5, LOOK))
    assert "communication is not counted: no dispatcher" in text


def test_bubble_and_bytes_are_figures_of_every_rank() -> None:
    shown = fold(None, demo())
    bubbles = heat(shown, "bubble").values
    assert set(bubbles) == set(range(8))
    assert all(value.value is not None and 0 < value.value < 0.6 for value in bubbles.values())
    moved = heat(shown, "bytes/s").values
    assert all(value.text.endswith("/s") for value in moved.values())
    alone = heat(state(job()), "bubble").values
    assert {value.value for value in alone.values()} == {None}


def _fresh(seen: State) -> State:
    """The same job as one more look gives it: nothing of it has been figured out."""
    return msgspec.structs.replace(seen, job=msgspec.structs.replace(seen.job))


def test_the_page_adds_little_to_what_all_pages_know_of_a_thousand_ranks() -> None:
    """In CPU time, the best of five, with room for a slow machine; some 5 ms where nothing else
    runs, and what grows with the square of the ranks takes seconds."""
    seen = state(made(4, 32, 8))
    best = 1e9
    for _ in range(5):
        shown = _fresh(seen)
        heat(shown, "state")  # the rows of the ranks, which every page needs
        began = time.process_time()
        draw_map(shown, 156, 36, LOOK, figure="behind", selected=5)
        draw_places(shown, 46, 40, LOOK, figure="behind")
        draw_axes(shown, 156, 8, LOOK, selected=5)
        best = min(best, time.process_time() - began)
    assert best < 0.03
    assert map_of(seen, 156, 36, LOOK) is map_of(_fresh(seen), 156, 36, LOOK)
