"""The map's figure by place: which stage, which replica, which part of a layer differs."""

from boltmesh.tui.drawing.heat_cell import shade_of
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, heading
from boltmesh.tui.drawing.table import Cell, Column, draw_table
from boltmesh.tui.figures.heat import HEAT_FIGURES, Heat, heat
from boltmesh.tui.figures.places import PlaceRow, place_rows
from boltmesh.tui.state import State

LEAST_SHARE = 0.005
"""A smaller difference from the mean of all ranks is none."""


def draw_places(
    state: State, width: int, height: int, look: Look, *, figure: str = HEAT_FIGURES[0]
) -> list[Line]:
    """A line for each place of each axis; where they are too many, for the worst of them."""
    shown = heat(state, figure)
    rows = place_rows(state, shown)
    top = int(look.has_headings)
    room = max(0, height - top - 1)
    right = Line()
    if len(rows) > room:
        right = Line(f"the worst {room} of {len(rows)}", "muted")
        rows = _worst(rows, room, shown)
    lines = []
    if rows:
        columns = [
            Column("place"),
            Column("mean", is_number=True),
            Column("beside all", is_number=True, rank=1),
            Column("least", is_number=True, rank=3),
            Column("most", is_number=True, rank=3),
            Column("worst rank", is_number=True, rank=2),
            Column("ranks", is_number=True, rank=4),
        ]
        cells = [_cells(row, shown, look) for row in rows]
        lines = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    elif room:
        lines = [Line(_nothing(state), "muted").crop(width)]
    if top:
        lines.insert(0, heading(f"{shown.figure} by place", width, look, right=right))
    return lines[: max(0, height)]


def num_places(state: State) -> int:
    """Return how many lines the table has without its titles, with all of its places."""
    return max(1, sum(size for size in state.job.mesh.values() if size > 1))


def _worst(rows: list[PlaceRow], count: int, shown: Heat) -> list[PlaceRow]:
    """Return so many of the rows, in their order."""
    by_badness = sorted(rows, key=lambda row: row.mean, reverse=shown.is_bad_high)
    kept = {id(row) for row in by_badness[:count]}
    return [row for row in rows if id(row) in kept]


def _cells(row: PlaceRow, shown: Heat, look: Look) -> list[Cell]:
    shade, role = shade_of(row.level, shown, look)
    is_alike = abs(row.share) < LEAST_SHARE
    beside = "as all" if is_alike else f"{100 * row.share:+.0f}%"
    return [
        Line(shade * 2, role).add(f" {row.axis} {row.place}"),
        Line(shown.text(row.mean), "strong"),
        Line(beside, "muted" if is_alike else "text"),
        shown.text(row.least),
        shown.text(row.most),
        str(row.worst),
        Line(str(row.num_ranks), "muted"),
    ]


def _nothing(state: State) -> str:
    if all(size <= 1 for size in state.job.mesh.values()):
        return "one rank, one place"
    return "nothing to compare: this figure is no number, or no rank has told it"
