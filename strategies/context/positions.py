"""Positions of a sequence by rank: arithmetic, without communication."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Interval = tuple[int, int]
"""First position, and the one after the last."""
Intervals = tuple[Interval, ...]
"""Ascending and disjoint."""

Balance = Literal["contiguous", "zigzag", "documents"]

_EVEN = 1.02
"""A division is even enough if the rank with the most work has at most this factor of the mean."""
_MOST_BLOCKS = 32


@dataclass(frozen=True)
class Positions:
    """The intervals of each rank, which together are ``range(length)``."""

    length: int
    parts: tuple[Intervals, ...]
    """By rank of the context group; empty for a rank without positions."""
    are_channels: bool = False
    """Whether these are channels, of which a rank has all positions, see ``by_channels``."""

    def count(self, rank: int) -> int:
        """Return the number of positions of a rank."""
        return self._counts[rank]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(map(num_positions, self.parts))

    def narrowed(self, start: int, stop: int) -> "Positions":
        """Return the positions within ``start:stop``, counted from ``start``; ranks keep theirs."""
        parts = tuple(
            tuple((a - start, b - start) for a, b in common(each, ((start, stop),)))
            for each in self.parts
        )
        return Positions(max(stop - start, 0), parts)


@lru_cache(maxsize=256)
def divide(length: int, ranks: int, balance: Balance = "contiguous") -> Positions:
    """Divide a sequence over ranks; numbers of positions differ by at most one, or two (zigzag).

    Args:
        length: Positions.
        ranks: Number of ranks.
        balance: ``"contiguous"`` gives each rank one interval. ``"zigzag"`` makes twice as many
            intervals and gives rank r the r-th and the r-th last, so that causal attention is
            evenly distributed. ``"documents"`` is done by ``divide_by_work``.
    """
    if balance == "zigzag":
        halves = divide(length, 2 * ranks).parts
        return Positions(length, tuple(merged(halves[r] + halves[-1 - r]) for r in range(ranks)))
    ends = [length * r // ranks for r in range(ranks + 1)]
    return Positions(length, tuple(merged([each]) for each in pairwise(ends)))


def divide_by_work(work: Tensor, ranks: int) -> Positions:
    """Divide a sequence whose positions take different amounts of work.

    It is cut into blocks of equal length, the same number for each rank; those with the most work
    are assigned first, each to the rank with the least. The number of blocks is the smallest that
    makes the work even.

    Args:
        work: Work of each position in any unit, ``(S,)``.
        ranks: Number of ranks.
    """
    length = len(work)
    sums = torch.cat([work.new_zeros(1), work.cumsum(0)])
    best, balanced = float("inf"), divide(length, ranks)
    each = 1
    while best > _EVEN and each <= _MOST_BLOCKS and each * ranks <= max(length, 1):
        ends = [length * at // (each * ranks) for at in range(each * ranks + 1)]
        loads = sums[ends].diff().tolist()
        taken: list[list[int]] = [[] for _ in range(ranks)]
        total = [0] * ranks
        for block in sorted(range(len(loads)), key=lambda block: -loads[block]):
            free = (rank for rank in range(ranks) if len(taken[rank]) < each)
            rank = min(free, key=lambda rank: total[rank])
            taken[rank].append(block)
            total[rank] += loads[block]
        most = max(total) * ranks / max(sum(total), 1)
        if most < best:
            best = most
            parts = ([(ends[at], ends[at + 1]) for at in sorted(blocks)] for blocks in taken)
            balanced = Positions(length, tuple(map(merged, parts)))
        each *= 2
    return balanced


def document_work(tensors: Iterable[object]) -> dict[int, Tensor]:
    """Return how many keys causal attention shows to each position, by length of the sequence.

    Documents are found in integer tensors ``(B, S)`` or ``(S,)``: position ids that restart at 0,
    or document numbers, which rise by one from each document to the next. Results are ``(S,)``,
    summed over rows.
    """
    by_length: dict[int, Tensor] = {}
    for each in tensors:
        if not isinstance(each, Tensor) or each.dtype not in (torch.int32, torch.int64):
            continue
        if each.ndim not in (1, 2) or each.shape[-1] < 2 or each.shape[-1] in by_length:
            continue
        rows = each.detach().cpu().reshape(-1, each.shape[-1])
        step = rows.diff(dim=1)
        begins, rises = rows[:, 1:] == 0, step == 1
        if not bool((rises | begins).all()):
            begins = rises
        if not bool(rises.any()) or not bool((rises | begins | (step == 0)).all()):
            continue
        index = torch.arange(rows.shape[1])
        first = torch.zeros_like(rows)
        first[:, 1:] = begins * index[1:]
        by_length[rows.shape[1]] = (index + 1 - first.cummax(1).values).sum(0)
    return by_length


def of_one(length: int, ranks: int, owner: int) -> Positions:
    """Return positions that are all on one rank."""
    whole = merged([(0, length)])
    return Positions(length, tuple(whole if rank == owner else () for rank in range(ranks)))


def joined(several: Sequence[Positions]) -> Positions:
    """Return the positions of concatenated sequences."""
    parts: list[list[Interval]] = [[] for _ in several[0].parts]
    base = 0
    for each in several:
        for part, own in zip(parts, each.parts, strict=True):
            part += [(a + base, b + base) for a, b in own]
        base += each.length
    return Positions(base, tuple(map(merged, parts)))


def merged(intervals: Iterable[Interval]) -> Intervals:
    """Return ascending intervals without empty ones; adjacent ones are joined."""
    found: list[Interval] = []
    for start, stop in intervals:
        if stop <= start:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def num_positions(intervals: Intervals) -> int:
    """Return the number of positions in intervals."""
    return sum(stop - start for start, stop in intervals)


@lru_cache(maxsize=4096)
def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two sets of intervals."""
    overlap = []
    for begin, end in one:
        for low, high in other:
            start, stop = max(begin, low), min(end, high)
            if start < stop:
                overlap.append((start, stop))
    return tuple(overlap)


@lru_cache(maxsize=4096)
def places(intervals: Intervals, own: Intervals) -> Intervals:
    """Return the indices of intervals within a tensor with the positions ``own``.

    Args:
        intervals: Each of them within one of ``own``.
        own: Intervals of the tensor, stored one after the other.
    """
    shifted = []
    for start, stop in intervals:
        base = 0
        for begin, end in own:
            if begin <= start and stop <= end:
                shifted.append((base + start - begin, base + stop - begin))
                break
            base += end - begin
    return tuple(shifted)
