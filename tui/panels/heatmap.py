"""The ranks laid out by the mesh, each a shade of one figure.

A shade is a character of its own in a colour of its own, so the map reads without colours; in
ASCII it is a digit. Where there is room the figure is printed beside it.

``draw_places`` is the same figure by place: the mean of each stage, of each place on the data axis,
of each on tensor. A place that is far from the others of its axis shows what slow ranks have in
common: a stage with too much work, a hot host, a link.
"""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.metrics.heat import HEAT_FIGURES, Heat, HeatValue, Mark, heat
from boltmesh.tui.metrics.mesh_grid import MeshGrid, plan_grid
from boltmesh.tui.render.line import Line, Role, fit
from boltmesh.tui.render.ranks import rank_state
from boltmesh.tui.render.style import Style, facts, heading
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State

PLACE_FROM_WIDTH = 64
"""Width from which on the selected rank's place in the mesh is shown."""

LEAST_SHARE = 0.005
"""A smaller difference from the mean of all ranks counts as none."""

_SHADES = 2
"""Cells of shade before a figure; a terminal's cells are twice as high as wide."""


def cell_widths(shown: Heat) -> tuple[int, int, int]:
    """Return the widths that cells may have: with the figure, of two shades, of one."""
    return _SHADES + 1 + shown.widest + 1, _SHADES, 1


def cell_shades(
    shown: Heat, rank: int, width: int, look: Style, *, is_selected: bool
) -> tuple[str, Role]:
    """Return the shade that a rank has in a cell, and its role."""
    glyph, role = _shade(shown.values[rank], shown, look)
    if not is_selected:
        return glyph * min(width, _SHADES), role
    return (look.glyphs.cursor + glyph if width >= _SHADES else glyph), "selected"


def draw_cell(shown: Heat, rank: int, width: int, look: Style, *, is_selected: bool) -> Line:
    """Return the shade of a rank, and its figure where the cell is wide enough."""
    shades, role = cell_shades(shown, rank, width, look, is_selected=is_selected)
    line = Line(shades, role)
    if width > _SHADES:
        text = fit(shown.values[rank].text, width - _SHADES - 2, ellipsis=look.glyphs.ellipsis)
        line.add(" " + text, "selected" if is_selected else "text" if text else "muted")
    return line


def _shade(value: HeatValue, shown: Heat, look: Style) -> tuple[str, Role]:
    if value.mark is not None:
        return _mark(value.mark, look)
    if value.level is None:
        return "?", "muted"
    return look.shade(value.level, is_bad_high=shown.is_bad_high)


def _mark(mark: Mark, look: Style) -> tuple[str, Role]:
    if mark == "not finite":
        return "~", "bad"
    if mark == "failed":  # often because of the one that died, which is marked otherwise
        return "!", "bad"
    sign = rank_state(mark, _with_signs(look))
    return sign.plain[0], sign.spans[0].role


def _with_signs(look: Style) -> Style:
    # A map is made of signs, also where words go without them.
    return msgspec.structs.replace(look, has_signs=True)


def worst_rank(ranks: Iterable[int], shown: Heat) -> int:
    """Return the rank that stands for the others of its cell."""

    def badness(rank: int) -> tuple[bool, float]:
        value = shown.values[rank]
        level = -1.0 if value.level is None else value.level
        is_marked = value.mark not in {None, "running", "finished"}
        return is_marked, level if shown.is_bad_high or value.level is None else 1 - level

    return max(ranks, key=badness)


def _even_share(shown: Heat, look: Style) -> float | None:
    """Return how far ranks of the same shade are apart, as a share of the most; else None."""
    known = [each for each in shown.values.values() if each.value is not None and not each.mark]
    found = [each.value or 0.0 for each in known]
    shades = {_shade(each, shown, look) for each in known}
    if len(found) < len(shown.values) or len(found) < 2 or len(shades) > 1 or min(found) <= 0:
        return None
    return 1 - min(found) / max(found)


def draw_legend(shown: Heat, look: Style, *, ranks_per_cell: int = 1) -> list[Line]:
    """The ends of the scale, the meaning of other signs, and how many ranks a cell stands for."""
    parts: list[Line] = []
    if (share := _even_share(shown, look)) is not None:
        parts.append(Line(f"even within {max(1, math.ceil(100 * share))}%", "muted"))
    elif shown.low:
        shades = look.glyphs.shades
        scale = Line(f"{shown.low} ", "muted")
        for place in range(len(shades)):
            level = (place + 0.5) / len(shades)
            scale.add(*look.shade(level, is_bad_high=shown.is_bad_high))
        parts.append(scale.add(f" {shown.high}", "muted"))
    if ranks_per_cell > 1:
        parts.append(Line(f"each cell the worst of {ranks_per_cell}", "muted"))
    counts = Counter(value.mark for value in shown.values.values() if value.mark is not None)
    for mark, count in sorted(counts.items()):
        sign, role = _mark(mark, look)
        parts.append(Line(f"{sign} ", role).add(f"{count} {mark}", "muted"))
    is_unknown = any(value.level is None and value.mark is None for value in shown.values.values())
    if is_unknown:
        parts.append(Line("? not known", "muted"))
    return parts


def about_rank(state: State, shown: Heat, selected: int | None, width: int) -> Line:
    """Say which rank is selected, its place in the mesh, and its figure."""
    rank = next((rank for rank in state.job.ranks if rank.rank == selected), None)
    if rank is None:
        return Line()
    line = Line(f"rank {rank.rank} ", "strong")
    mesh = state.job.mesh
    places = [f"{axis} {at}" for axis, at in rank.coordinates.items() if mesh.get(axis, 1) > 1]
    # On one axis the place is the rank itself.
    if len(places) > 1 and width >= PLACE_FROM_WIDTH:
        line.add(f"({', '.join(places)}) ", "muted")
    return line.add(shown.values[rank.rank].text, "strong")


IDEAL_LINES = 12
"""A map of many ranks is given no more lines than this if others need them too."""


def draw_heatmap(
    state: State,
    width: int,
    height: int,
    look: Style,
    *,
    figure: str = HEAT_FIGURES[0],
    selected: int | None = None,
) -> list[Line]:
    """The map, under a heading that names the selected rank, and the scale below it."""
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


def heatmap_lines(state: State, width: int, look: Style, *, figure: str = HEAT_FIGURES[0]) -> int:
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
    look: Style,
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
    state: State, shown: Heat, width: int, height: int, look: Style
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


def _rows(grid: MeshGrid, shown: Heat, width: int, look: Style, selected: int | None) -> list[Line]:
    lines = [Line(grid.row_labels.get(y, ""), "muted") for y in range(grid.height)]
    for cell in grid.cells:
        line = lines[cell.y]
        rank = worst_rank(cell.ranks, shown)
        line.pad_to(cell.x)
        line.join(draw_cell(shown, rank, grid.cell_width, look, is_selected=selected in cell.ranks))
    return [line.crop(width) for line in lines]


def neighbour(job: JobSnapshot, rank: int | None, across: int, down: int) -> int | None:
    """Return the rank that is so far from another one, or the last one on the way.

    Without a rank to begin with it is the first. Where there is only one stage, down is across.
    """
    stages = _stages(job)
    for place, stage in enumerate(stages):
        if rank in stage:
            if len(stages) == 1:
                across, down = across + down, 0
            there = stages[_within(place + down, len(stages))]
            column = _within(stage.index(rank), len(there))
            return there[_within(column + across, len(there))]
    return stages[0][0] if stages else None


def _stages(job: JobSnapshot) -> list[list[int]]:
    axes = [axis for axis in job.mesh if axis != "pipeline"]

    def key(rank: RankSnapshot) -> tuple[int, ...]:
        return (*(rank.coordinates.get(axis, 0) for axis in axes), rank.rank)

    stages: dict[int, list[RankSnapshot]] = {}
    for rank in job.ranks:
        stages.setdefault(rank.coordinates.get("pipeline", 0), []).append(rank)
    return [[rank.rank for rank in sorted(ranks, key=key)] for _, ranks in sorted(stages.items())]


def _within(place: int, size: int) -> int:
    return min(max(0, place), size - 1)


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks at one place of one axis."""

    axis: str
    place: int
    num_ranks: int
    mean: float
    level: float
    """Level of the mean, from 0 to 1 on the map's scale."""
    least: float
    most: float
    worst: int
    """The rank that has the worst of them."""
    share: float
    """Excess of the mean over that of all ranks, as a share of the latter; 0 if that is 0."""


class _Place:
    """Sums and extremes of the ranks at one place."""

    __slots__ = ("count", "least", "levels", "most", "rank_of_least", "rank_of_most", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = self.levels = 0.0
        self.least, self.most = math.inf, -math.inf
        self.rank_of_least = self.rank_of_most = 0

    def add(self, rank: int, value: float, level: float) -> None:
        self.count += 1
        self.total += value
        self.levels += level
        if value < self.least:
            self.least, self.rank_of_least = value, rank
        if value > self.most:
            self.most, self.rank_of_most = value, rank


def place_rows(state: State, shown: Heat) -> list[PlaceRow]:
    """Return the places of each axis of more than one rank; ranks without the figure left out."""
    axes = [axis for axis, size in state.job.mesh.items() if size > 1]
    places: dict[str, dict[int, _Place]] = {axis: {} for axis in axes}
    total, count = 0.0, 0
    for rank in state.job.ranks:
        figure = shown.values.get(rank.rank)
        if figure is None or figure.value is None or figure.level is None:
            continue
        value, level, coordinates = figure.value, figure.level, rank.coordinates
        total += value
        count += 1
        for axis in axes:
            at = coordinates.get(axis)
            if at is not None:
                of_axis = places[axis]
                place = of_axis.get(at)
                if place is None:
                    place = of_axis[at] = _Place()
                place.add(rank.rank, value, level)
    mean = total / count if count else 0.0
    return [
        PlaceRow(
            axis=axis,
            place=at,
            num_ranks=found.count,
            mean=(own := found.total / found.count),
            level=found.levels / found.count,
            least=found.least,
            most=found.most,
            worst=found.rank_of_most if shown.is_bad_high else found.rank_of_least,
            share=(own - mean) / abs(mean) if mean else 0.0,
        )
        for axis in axes
        for at, found in sorted(places[axis].items())
    ]


def draw_places(
    state: State, width: int, height: int, look: Style, *, figure: str = HEAT_FIGURES[0]
) -> list[Line]:
    """A line for each place of each axis; where they are too many, for the worst of them."""
    shown = heat(state, figure)
    rows = place_rows(state, shown)
    top = int(look.has_headings)
    room = max(0, height - top - 1)
    right = Line()
    if len(rows) > room:
        right = Line(f"the worst {room} of {len(rows)}", "muted")
        rows = _worst_places(rows, room, shown)
    lines = []
    if rows:
        columns = [
            Column("place"),
            Column("mean", is_number=True),
            Column("vs mean", is_number=True, rank=1),
            Column("min", is_number=True, rank=3),
            Column("max", is_number=True, rank=3),
            Column("worst rank", is_number=True, rank=2),
            Column("ranks", is_number=True, rank=4),
        ]
        cells = [_place_cells(row, shown, look) for row in rows]
        lines = draw_table(columns, cells, width, ellipsis=look.glyphs.ellipsis)
    elif room:
        lines = [Line(_nothing(state), "muted").crop(width)]
    if top:
        lines.insert(0, heading(f"{shown.figure} by place", width, look, right=right))
    return lines[: max(0, height)]


def num_places(state: State) -> int:
    """Return how many lines the table has without its titles, with all of its places."""
    return max(1, sum(size for size in state.job.mesh.values() if size > 1))


def _worst_places(rows: list[PlaceRow], count: int, shown: Heat) -> list[PlaceRow]:
    """Return the ``count`` worst rows, in their order."""
    by_badness = sorted(rows, key=lambda row: row.mean, reverse=shown.is_bad_high)
    kept = {id(row) for row in by_badness[:count]}
    return [row for row in rows if id(row) in kept]


def _place_cells(row: PlaceRow, shown: Heat, look: Style) -> list[Cell]:
    shade, role = look.shade(row.level, is_bad_high=shown.is_bad_high)
    is_alike = abs(row.share) < LEAST_SHARE
    beside = "same" if is_alike else f"{100 * row.share:+.0f}%"
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
    return "nothing to compare: this figure is no number, or no rank has reported it"
