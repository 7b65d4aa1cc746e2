"""The ranks laid out by the mesh, each a shade of one figure.

A shade is a character of its own in a colour of its own, so the map reads without colours; in
ASCII it is a digit. Where there is room the figure stands beside it.
"""

from itertools import pairwise

from boltmesh.tui.drawing.heat_cell import (
    about_rank,
    cell_widths,
    draw_cell,
    draw_legend,
    worst_rank,
)
from boltmesh.tui.drawing.line import Line
from boltmesh.tui.drawing.look import Look, facts, heading
from boltmesh.tui.figures.heat import HEAT_FIGURES, Heat, heat
from boltmesh.tui.figures.mesh_grid import MeshGrid, plan_grid
from boltmesh.tui.state import State

__all__ = ["HEAT_FIGURES", "draw_heatmap", "heatmap_lines", "rank_at"]

IDEAL_LINES = 12
"""A map of many ranks is given no more lines than this if others need them too."""


def draw_heatmap(
    state: State,
    width: int,
    height: int,
    look: Look,
    *,
    figure: str = HEAT_FIGURES[0],
    selected: int | None = None,
) -> list[Line]:
    """The map, under a heading that tells of the selected rank, and the scale below it."""
    shown = heat(state, figure)
    grid, labels = _plan(state, shown, width, height, look)
    about = about_rank(state, shown, selected, width)
    lines: list[Line] = []
    if look.has_headings:
        axes = Line("" if grid is None else grid.axes, "muted")
        right = about if about.width else axes
        lines.append(heading(f"ranks by {shown.title}", width, look, right=right))
    if grid is None:
        return [*lines, Line("no ranks yet", "muted").crop(width)][: max(0, height)]
    if labels:
        lines.append(_column_labels(grid, width))
    lines += _rows(grid, shown, width, look, selected)
    legend = draw_legend(shown, look, ranks_per_cell=grid.ranks_per_cell)
    if not look.has_headings:
        legend = [about, Line(f"by {shown.figure}", "muted"), *legend]
    lines.append(facts(legend, width))
    return lines[: max(0, height)]


def heatmap_lines(state: State, width: int, look: Look, *, figure: str = HEAT_FIGURES[0]) -> int:
    """How many lines the map would fill, its heading and its scale included."""
    top = int(look.has_headings)
    grid, labels = _plan(state, heat(state, figure), width, IDEAL_LINES + top + 2, look)
    return top + labels + (1 if grid is None else grid.height + 1)


def rank_at(
    state: State,
    width: int,
    height: int,
    x: int,
    y: int,
    *,
    look: Look,
    figure: str = HEAT_FIGURES[0],
) -> int | None:
    """Return the rank whose cell is at a place of the drawing; of several the one that it shows."""
    shown = heat(state, figure)
    grid, labels = _plan(state, shown, width, height, look)
    if grid is None:
        return None
    cell = grid.cell_at(x, y - labels - int(look.has_headings))
    return None if cell is None else worst_rank(cell.ranks, shown)


def _plan(
    state: State, shown: Heat, width: int, height: int, look: Look
) -> tuple[MeshGrid | None, int]:
    """Return the grid, and how many lines of labels stand above it.

    The cells come first, then the scale, then the labels.
    """
    room = height - int(look.has_headings)
    widths = cell_widths(shown)
    if room >= 3:
        grid = plan_grid(state.job, width, room - 2, cell_widths=widths)
        if grid is not None and grid.ranks_per_cell == 1 and any(grid.column_labels.values()):
            return grid, 1
    return plan_grid(state.job, width, max(1, room - 1), cell_widths=widths), 0


def _column_labels(grid: MeshGrid, width: int) -> Line:
    """Name the groups; where their axis does not fit each time, only the first has it."""
    line = Line()
    starts = sorted(grid.column_labels)
    room = min((after - start for start, after in pairwise(starts)), default=width) - 1
    axis = grid.column_labels[starts[0]].rpartition(" ")[0]
    is_short = any(len(label) > room for label in grid.column_labels.values())
    if is_short and len(axis) < grid.left:
        line.pad_to(grid.left - len(axis) - 1).add(axis, "muted")
    for start in starts:
        label = grid.column_labels[start]
        if is_short:
            label = label.rpartition(" ")[2]
        if len(label) <= room:
            line.pad_to(start).add(label, "muted")
    return line.crop(width)


def _rows(grid: MeshGrid, shown: Heat, width: int, look: Look, selected: int | None) -> list[Line]:
    lines = [Line(grid.row_labels.get(y, ""), "muted") for y in range(grid.height)]
    for cell in grid.cells:
        line = lines[cell.y]
        rank = worst_rank(cell.ranks, shown)
        line.pad_to(cell.x)
        line.join(draw_cell(shown, rank, grid.cell_width, look, is_selected=selected in cell.ranks))
    return [line.crop(width) for line in lines]
