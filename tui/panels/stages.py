"""The map's figure by place: which stage, which replica, which part of a layer differs.

One figure by place: the mean of each stage, of each place on the data axis, of each on tensor.

A place that is far from the others of its axis says what a slow rank has in common with others:
a stage with too much work, a host that is hot, a link.
"""

import math

import msgspec

from boltmesh.tui.metrics.heat import HEAT_FIGURES, Heat, heat
from boltmesh.tui.panels.heatmap import shade_of
from boltmesh.tui.render.line import Line
from boltmesh.tui.render.style import Style, heading
from boltmesh.tui.render.table import Cell, Column, draw_table
from boltmesh.tui.state import State


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks at one place of one axis."""

    axis: str
    place: int
    num_ranks: int
    mean: float
    level: float
    """Of the mean, from 0 to 1 on the map's scale."""
    least: float
    most: float
    worst: int
    """The rank that has the worst of them."""
    share: float
    """By how much the mean is above that of all ranks, as a share of that; 0 where that is 0."""


class _Place:
    """What the ranks at one place have said so far."""

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


LEAST_SHARE = 0.005
"""A smaller difference from the mean of all ranks is none."""


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
        rows = _worst(rows, room, shown)
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


def _cells(row: PlaceRow, shown: Heat, look: Style) -> list[Cell]:
    shade, role = shade_of(row.level, shown, look)
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
