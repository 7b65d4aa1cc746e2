"""Writes the members of a process group in few words: runs of evenly spaced ranks.

The groups of a mesh are such runs, of however many ranks; a group of all ranks is one.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Runs: TypeAlias = list[tuple[int, int, int]]
"""First rank, number of ranks, distance between them."""


def pack_ranks(ranks: Sequence[int]) -> Runs:
    """Return runs that, one behind the other, give ``ranks``."""
    runs: Runs = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at == 2 and step != 1 and end < len(ranks):
            end, step = at + 1, 1  # the second may begin a longer run
        runs.append((ranks[at], end - at, step))
        at = end
    return runs


def unpack_ranks(runs: Iterable[tuple[int, int, int]], limit: int) -> tuple[int, ...]:
    """Return the ranks of runs; nothing where they cannot be those of ``limit`` ranks."""
    ranks: list[int] = []
    for first, count, step in runs:
        if count < 1 or len(ranks) + count > limit or step == 0:
            return ()
        if not (0 <= first < limit and 0 <= first + (count - 1) * step < limit):
            return ()
        ranks.extend(range(first, first + count * step, step))
    return tuple(ranks)
