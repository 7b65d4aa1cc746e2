"""The axes of a mesh: their names in order, and which rank has which coordinates on them.

Strategies, plans, telemetry and the dashboard read ``AXES``. Ranks are laid out row by row, the
outermost axis first. Global ranks are node-major, so the innermost axis stays inside a node.
"""

import math
from collections.abc import Mapping
from functools import cache

AXES: tuple[str, ...] = ("pipeline", "data", "context", "tensor")
"""Outermost to innermost."""

ALL_AXES: tuple[str, ...] = (*AXES, "expert")
"""All axes, the expert axis included, which divides ranks of other axes a second time."""

OPTIONAL = frozenset({"context"})
"""Axes that are named only where they have several ranks."""


def named_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of axes, outermost first, without optional ones of one rank."""
    return {
        axis: size for axis, size in full_sizes(sizes).items() if size > 1 or axis not in OPTIONAL
    }


def full_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every axis, outermost first; 1 for those that are left out."""
    return {axis: sizes.get(axis, 1) for axis in AXES}


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number of ranks, smallest first."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of a rank on each axis.

    Args:
        rank: Global; from 0 to the product of the sizes.
        sizes: By axis, outermost first.
    """
    found = {}
    for axis in reversed(list(sizes)):
        rank, found[axis] = divmod(rank, sizes[axis])
    return {axis: found[axis] for axis in sizes}


def rank_at(place: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Return the rank with these coordinates; 0 on an axis that is left out.

    Args:
        place: By axis.
        sizes: By axis, outermost first.
    """
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place.get(axis, 0)
    return rank


def group_of(rank: int, axis: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` along ``axis`` alone, itself included."""
    stride = math.prod([sizes[each] for each in list(sizes)[list(sizes).index(axis) + 1 :]])
    first = rank - coordinates(rank, sizes)[axis] * stride
    return tuple(range(first, first + sizes[axis] * stride, stride))
