"""Cuts the GPUs of a host into groups that fast links join throughout."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from boltmesh.strategies.topology.links import Link
from boltmesh.strategies.topology.places import Topology

MOST_RANKS = 16
"""Of a host that is searched; no host has more GPUs of one job, and the search grows fast."""


class Arrangement(NamedTuple):
    """An order of ranks in which neighbours form groups."""

    ranks: list[int]
    """Whose GPUs the ranks of the host should have, in the order of the ranks."""
    link: Link
    """The slowest within any group."""


def arrange(
    topology: Topology, ranks: Sequence[int], size: int, *, above: Link
) -> Arrangement | None:
    """Find the order with the fastest links within groups; the present one where it serves.

    Args:
        topology: Of the job.
        ranks: Of one host, in order.
        size: Of a group; divides their number.
        above: What all links have to be faster than.

    Returns:
        None where there is no such order.
    """
    if len(ranks) > MOST_RANKS:
        return None
    for link in sorted((each for each in Link if each > above), reverse=True):
        found = _cut(topology, list(ranks), size, link)
        if found is not None:
            return Arrangement(found, link)
    return None


def _cut(topology: Topology, ranks: list[int], size: int, link: Link) -> list[int] | None:
    """Return the ranks in groups joined by at least ``link``, each group behind the other."""
    if not ranks:
        return []
    first, rest = ranks[0], ranks[1:]
    near = [rank for rank in rest if _is_joined(topology, first, rank, link)]
    for others in combinations(near, size - 1):
        if all(_is_joined(topology, one, two, link) for one, two in combinations(others, 2)):
            left = _cut(topology, [rank for rank in rest if rank not in others], size, link)
            if left is not None:
                return [first, *others, *left]
    return None


def _is_joined(topology: Topology, one: int, other: int, link: Link) -> bool:
    found = topology.link(one, other)
    return found is not None and found >= link
