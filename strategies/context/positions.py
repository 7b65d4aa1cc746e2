"""Which rank has which positions of a sequence: arithmetic, without communication."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

Stretch = tuple[int, int]
"""First position, and the one behind the last."""
Stretches = tuple[Stretch, ...]
"""Ascending and disjoint."""

Balance = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Positions:
    """The stretches of each rank, which together are ``range(length)``."""

    length: int
    parts: tuple[Stretches, ...]
    """By rank of the context group; empty for a rank without positions."""

    def count(self, rank: int) -> int:
        """Return how many positions a rank has."""
        return self._counts[rank]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(map(num_positions, self.parts))

    def narrowed(self, start: int, stop: int) -> "Positions":
        """Return those of ``axis[start:stop]``: every rank keeps what it has."""
        parts = tuple(
            tuple((a - start, b - start) for a, b in common(each, ((start, stop),)))
            for each in self.parts
        )
        return Positions(max(stop - start, 0), parts)


@lru_cache(maxsize=256)
def divide(length: int, ranks: int, balance: Balance = "contiguous") -> Positions:
    """Divide a sequence over ranks; numbers of positions differ by one at most, or by two.

    Args:
        length: Positions.
        ranks: Number of ranks.
        balance: ``"contiguous"`` gives each rank one stretch. ``"zigzag"`` makes twice as many
            and gives rank r the r-th and the r-th last, so that causal attention is even work.
    """
    if balance == "zigzag":
        halves = divide(length, 2 * ranks).parts
        return Positions(length, tuple(merged(halves[r] + halves[-1 - r]) for r in range(ranks)))
    ends = [length * r // ranks for r in range(ranks + 1)]
    return Positions(length, tuple(merged([each]) for each in pairwise(ends)))


def of_one(length: int, ranks: int, owner: int) -> Positions:
    """Return positions that one rank has all of."""
    whole = merged([(0, length)])
    return Positions(length, tuple(whole if rank == owner else () for rank in range(ranks)))


def joined(several: Sequence[Positions]) -> Positions:
    """Return the positions of sequences one after the other."""
    parts: list[list[Stretch]] = [[] for _ in several[0].parts]
    base = 0
    for each in several:
        for part, own in zip(parts, each.parts, strict=True):
            part += [(a + base, b + base) for a, b in own]
        base += each.length
    return Positions(base, tuple(map(merged, parts)))


def merged(stretches: Iterable[Stretch]) -> Stretches:
    """Return ascending stretches without empty ones, neighbours joined."""
    found: list[Stretch] = []
    for start, stop in stretches:
        if stop <= start:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def num_positions(stretches: Stretches) -> int:
    """Return how many positions stretches have."""
    return sum(stop - start for start, stop in stretches)


@lru_cache(maxsize=4096)
def common(one: Stretches, other: Stretches) -> Stretches:
    """Return what two rows of stretches have in common."""
    found = []
    for a, b in one:
        for c, d in other:
            start, stop = max(a, c), min(b, d)
            if start < stop:
                found.append((start, stop))
    return tuple(found)


@lru_cache(maxsize=4096)
def places(stretches: Stretches, own: Stretches) -> Stretches:
    """Return where stretches are within a tensor that has the positions ``own``.

    Args:
        stretches: Each of them within one of ``own``.
        own: What the tensor has, one stretch behind the other.
    """
    found = []
    for start, stop in stretches:
        base = 0
        for a, b in own:
            if a <= start and stop <= b:
                found.append((base + start - a, base + stop - a))
                break
            base += b - a
    return tuple(found)
