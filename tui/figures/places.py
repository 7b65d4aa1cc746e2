"""One figure by place: the mean of each stage, of each place on the data axis, of each on tensor.

A place that is far from the others of its axis says what a slow rank has in common with others:
a stage with too much work, a host that is hot, a link.
"""

import math

import msgspec

from boltmesh.tui.figures.heat import Heat
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
