"""The whole mesh in one figure: a block for each stage, data down, tensor across.

In a block data goes down and tensor across, so that the ranks which talk the most are side by side
and a row, a column or a block that is slower than the others is seen as one. Blocks stand side by
side as far as there is room. A mesh without data or without tensor is laid out as in
``mesh_grid.py``, and so is one that does not fit with a cell for each rank.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.metrics.heat import HEAT_FIGURES, Heat, heat
from boltmesh.tui.metrics.mesh_grid import Cell, CellGrid, Layout, MeshGrid, grid_of, lay_out
from boltmesh.tui.panels.heatmap import (
    about_rank,
    cell_shades,
    cell_widths,
    draw_legend,
    worst_rank,
)
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.style import Style, facts, heading
from boltmesh.tui.state import State

_BLOCK_GAP = 3
_GROUP_GAP = 1


class AxisLabel(NamedTuple):
    """A word at its place."""

    text: str
    x: int
    y: int


class MeshMap(CellGrid, frozen=True):
    """Cells with labels at places of their own."""

    labels: tuple[AxisLabel, ...]
    height: int
    ranks_per_cell: int
    axes: str
    """Names of the axes down and across; empty on a mesh of one axis."""

    @property
    def width(self) -> int:
        """Lines of the cells, with the labels on their left."""
        return max(cell.x for cell in self.cells) + self.cell_width

    def beside(self, rank: int | None, across: int, down: int) -> Cell | None:
        """Return the cell that is so far from a rank's, or the last one on the way.

        Without a rank to begin with it is the first.
        """
        here = next((cell for cell in self.cells if rank in cell.ranks), None)
        if here is None:
            return self.cells[0] if self.cells else None
        if across:
            line = sorted(cell.x for cell in self.cells if cell.y == here.y)
            x = line[min(max(0, line.index(here.x) + across), len(line) - 1)]
            return self.cell_at(x, here.y)
        lines = sorted({cell.y for cell in self.cells})
        y = lines[min(max(0, lines.index(here.y) + down), len(lines) - 1)]
        below = [cell for cell in self.cells if cell.y == y]
        return min(below, key=lambda cell: abs(cell.x - here.x))


def plan_map(
    job: JobSnapshot, width: int, height: int, *, cell_widths: Sequence[int]
) -> MeshMap | None:
    """Return the map with the widest cells that fit, or None if there is no room at all."""
    if width < 1 or height < 1 or not job.ranks:
        return None
    return _plan(lay_out(job), width, height, tuple(cell_widths))


@functools.lru_cache(maxsize=32)
def _plan(layout: Layout, width: int, height: int, cell_widths: tuple[int, ...]) -> MeshMap | None:
    """Return the map; ranks stay where they are, so the next look needs no other one."""
    if layout.num_groups > 1 and layout.group_size > 1:
        for cell_width in cell_widths:
            found = _blocks(layout, width, height, cell_width)
            if found is not None:
                return found
        num_merged = 2
        while num_merged < 2 * layout.group_size:  # up to a cell for all of a tensor group
            found = _blocks(layout, width, height, cell_widths[-1], num_merged=num_merged)
            if found is not None:
                return found
            num_merged *= 2
    return _lines(layout, width, height, cell_widths)


class _Arrangement(NamedTuple):
    """How blocks are placed."""

    across: int
    """Blocks in a row of blocks."""
    per_line: int
    """Groups of the data axis on one line of a block."""
    cell_width: int
    labels: tuple[str, ...]
    """Height of a block in lines."""
    has_places: bool
    """Whether the first line names the places on the tensor axis."""
    num_merged: int
    """Ranks of a group that share a cell."""

    def group_width(self, layout: Layout) -> int:
        """Cells of the terminal that a group takes."""
        return -(-layout.group_size // self.num_merged) * self.cell_width

    @property
    def left(self) -> int:
        """Cells that the labels of the lines take."""
        return max(map(len, self.labels)) + 2 if any(self.labels) else 0


def _blocks(
    layout: Layout, width: int, height: int, cell_width: int, *, num_merged: int = 1
) -> MeshMap | None:
    for found in _arrangements(layout, cell_width, num_merged):
        block = _block_width(layout, found)
        whole = found.left + found.across * (block + _BLOCK_GAP) - _BLOCK_GAP
        if whole <= width and _height(layout, found) <= height:
            return _placed(layout, found)
    return None


def _arrangements(layout: Layout, cell_width: int, num_merged: int) -> Iterator[_Arrangement]:
    """Yield layouts that may fit, the most readable first: a line for each data rank."""
    stages, groups = len(layout.stages), layout.num_groups
    across = [number for number in range(stages, 0, -1) if stages % number == 0]
    for per_line in (number for number in range(1, groups + 1) if groups % number == 0):
        for number in across:
            for labels in _row_labels(layout, per_line):
                for has_places in (True, False):
                    # One line of places is for one group; more would repeat it.
                    if not has_places or per_line == num_merged == 1:
                        yield _Arrangement(
                            number, per_line, cell_width, labels, has_places, num_merged
                        )


def _row_labels(layout: Layout, per_line: int) -> Iterable[tuple[str, ...]]:
    starts = range(0, layout.num_groups, per_line)
    axis = layout.group_axis
    if axis:
        yield tuple(f"{axis} {start}" for start in starts)
        yield tuple(map(str, starts))
    elif len(layout.stages) == 1:
        yield tuple(f"rank {layout.stages[0][start][0]}" for start in starts)
    yield ("",)


def _block_width(layout: Layout, found: _Arrangement) -> int:
    return found.per_line * (found.group_width(layout) + _GROUP_GAP) - _GROUP_GAP


def _height(layout: Layout, found: _Arrangement) -> int:
    stages = len(layout.stages)
    lines = -(-layout.num_groups // found.per_line) + int(stages > 1)
    return -(-stages // found.across) * lines + int(found.has_places)


def _placed(layout: Layout, found: _Arrangement) -> MeshMap:
    stages = len(layout.stages)
    has_titles = stages > 1
    block = _block_width(layout, found)
    lines = -(-layout.num_groups // found.per_line)
    merged, size = found.num_merged, found.cell_width
    cells: list[Cell] = []
    labels: list[AxisLabel] = []
    y = 0
    for first in range(0, stages, found.across):
        row = layout.stages[first : first + found.across]
        starts = [found.left + at * (block + _BLOCK_GAP) for at in range(len(row))]
        if has_titles:
            labels += _titles(first, starts, block, y)
            y += 1
        if found.has_places and first == 0:
            labels += _places(layout, found, starts, y)
            y += 1
        if found.left:
            labels += [AxisLabel(text, 0, y + at) for at, text in enumerate(found.labels)]
        for groups, start in zip(row, starts, strict=True):
            for number, group in enumerate(groups):
                line, column = divmod(number, found.per_line)
                x = start + column * (found.group_width(layout) + _GROUP_GAP)
                cells += [
                    Cell(tuple(group[at : at + merged]), x + at // merged * size, y + line)
                    for at in range(0, len(group), merged)
                ]
        y += lines
    return MeshMap(
        cell_width=found.cell_width,
        cells=tuple(cells),
        labels=tuple(labels),
        height=y,
        ranks_per_cell=merged,
        axes=_words(layout, found),
    )


def _titles(first: int, starts: Sequence[int], width: int, y: int) -> Iterator[AxisLabel]:
    for at, start in enumerate(starts, first):
        forms = (f"stage {at}", f"s{at}", str(at))
        yield AxisLabel(next((form for form in forms if len(form) <= width), ""), start, y)


def _places(
    layout: Layout, found: _Arrangement, starts: Sequence[int], y: int
) -> Iterator[AxisLabel]:
    if found.left >= len("tensor "):
        yield AxisLabel("tensor", 0, y)
    last = layout.group_size - 1
    # Numbers that would touch each other are no numbers: then the first and the last alone.
    is_apart = last < 10 or len(str(last)) < found.cell_width
    shown = range(last + 1) if is_apart else (0, last)
    for start in starts:
        for at in shown:
            text, x = str(at), start + at * found.cell_width
            end = start + (last + 1) * found.cell_width
            yield AxisLabel(text, min(x, end - len(text)), y)


def _words(layout: Layout, found: _Arrangement) -> str:
    down = layout.group_axis or "replicas"
    words = [f"{down} {layout.num_groups} down", f"tensor {layout.group_size} across"]
    if found.per_line > 1:
        words[0] = f"{down} {layout.num_groups}, {found.per_line} on a line"
    if len(layout.stages) > 1:
        words.append(f"{len(layout.stages)} stages")
    return ", ".join(words)


def _lines(layout: Layout, width: int, height: int, cell_widths: Sequence[int]) -> MeshMap | None:
    """Return the map of a line for each stage, with its labels as far as they fit."""
    for top in (1, 0):
        grid = grid_of(layout, width, height - top, cell_widths) if height > top else None
        if grid is not None and (not top or any(grid.column_labels.values())):
            return MeshMap(
                cell_width=grid.cell_width,
                cells=tuple(cell._replace(y=cell.y + top) for cell in grid.cells),
                labels=tuple(_labels_of(grid, top)),
                height=grid.height + top,
                ranks_per_cell=grid.ranks_per_cell,
                axes=grid.axes,
            )
    return None


def _labels_of(grid: MeshGrid, top: int) -> Iterator[AxisLabel]:
    for y, text in grid.row_labels.items():
        yield AxisLabel(text, 0, y + top)
    if not top:
        return
    starts = sorted(grid.column_labels)
    room = min((after - start for start, after in pairwise(starts)), default=99)
    is_short = any(len(text) >= room for text in grid.column_labels.values())
    for start in starts:
        text = grid.column_labels[start]
        text = text.rpartition(" ")[2] if is_short else text
        if len(text) < room:
            yield AxisLabel(text, start, 0)


def draw_map(
    state: State,
    width: int,
    height: int,
    look: Style,
    *,
    figure: str = HEAT_FIGURES[0],
    selected: int | None = None,
) -> list[Line]:
    """The map, under a heading that describes the selected rank, and the scale below it."""
    shown = heat(state, figure)
    found = map_of(state, width, height, look, figure=figure)
    about = about_rank(state, shown, selected, width)
    lines: list[Line] = []
    if look.has_headings:
        axes = Line("" if found is None else found.axes, "muted")
        right = about if about.width else axes
        lines.append(heading(f"ranks by {shown.title}", width, look, right=right))
    if found is None:
        return [*lines, Line("no ranks yet", "muted").crop(width)][: max(0, height)]
    lines += _rows(found, shown, width, look, selected)
    legend = draw_legend(shown, look, ranks_per_cell=found.ranks_per_cell)
    if not look.has_headings:
        legend = [about, Line(f"by {shown.figure}", "muted"), *legend]
    elif about.width:
        axes = Line(found.axes, "muted")
        legend = [*legend, axes] if about.plain in lines[0].plain else [*legend, about, axes]
    lines.append(facts(legend, width))
    return lines[: max(0, height)]


def map_lines(
    state: State, width: int, height: int, look: Style, *, figure: str = HEAT_FIGURES[0]
) -> int:
    """How many of ``height`` lines the map would fill, its heading and its scale included."""
    found = map_of(state, width, height, look, figure=figure)
    return int(look.has_headings) + (1 if found is None else found.height + 1)


def map_of(
    state: State, width: int, height: int, look: Style, *, figure: str = HEAT_FIGURES[0]
) -> MeshMap | None:
    """Return the place of each rank in a drawing of that size, without its heading."""
    room = max(1, height - int(look.has_headings) - 1)
    return plan_map(state.job, width, room, cell_widths=cell_widths(heat(state, figure)))


def rank_on_map(
    state: State,
    width: int,
    height: int,
    x: int,
    y: int,
    *,
    look: Style,
    figure: str = HEAT_FIGURES[0],
) -> int | None:
    """Return the rank whose cell is at a place of the drawing; of several the one that it shows."""
    found = map_of(state, width, height, look, figure=figure)
    cell = None if found is None else found.cell_at(x, y - int(look.has_headings))
    return None if cell is None else worst_rank(cell.ranks, heat(state, figure))


def rank_beside(
    state: State,
    width: int,
    height: int,
    selected: int | None,
    across: int,
    down: int,
    *,
    look: Style,
    figure: str = HEAT_FIGURES[0],
) -> int | None:
    """Return the rank in the cell that is so far from the selected one's."""
    found = map_of(state, width, height, look, figure=figure)
    cell = None if found is None else found.beside(selected, across, down)
    if cell is None:
        return None
    # At an edge of the map the selected one of several stays selected.
    return selected if selected in cell.ranks else worst_rank(cell.ranks, heat(state, figure))


def _rows(found: MeshMap, shown: Heat, width: int, look: Style, selected: int | None) -> list[Line]:
    pieces: list[list[tuple[int, str, Role]]] = [[] for _ in range(found.height)]
    for label in found.labels:
        if label.y < found.height:
            pieces[label.y].append((label.x, label.text, "muted"))
    for cell in found.cells:
        rank = cell.ranks[0] if len(cell.ranks) == 1 else worst_rank(cell.ranks, shown)
        is_selected = selected in cell.ranks
        shades, role = cell_shades(shown, rank, found.cell_width, look, is_selected=is_selected)
        pieces[cell.y].append((cell.x, shades, role))
        text = _text(shown, rank, found.cell_width - len(shades) - 2, look)
        if text:
            at = cell.x + len(shades) + 1
            pieces[cell.y].append((at, text, "selected" if is_selected else "text"))
    return [_line(row).crop(width) for row in pieces]


def _text(shown: Heat, rank: int, room: int, look: Style) -> str:
    return fit(shown.values[rank].text, room, ellipsis=look.glyphs.ellipsis) if room > 0 else ""


def _line(pieces: list[tuple[int, str, Role]]) -> Line:
    """Join the spans of one line; neighbours of one role are one span, for there are many."""
    line = Line()
    text, end = "", 0
    role: Role = "text"
    for x, piece, its_role in sorted(pieces, key=lambda item: item[0]):
        if x > end or its_role != role:
            line.add(text, role)
            line.pad_to(x)
            text, role = "", its_role
        text += piece
        end = x + len(piece)
    return line.add(text, role)
