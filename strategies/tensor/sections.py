"""Which elements of a dimension each tensor rank keeps, and where they stand in the whole.

A dimension is a row of sections, one after the other: the q, k and v of a fused projection, the
gate and up of a gated MLP. Each section is a block of ``outer x count x inner`` elements, row by
row, of which ``count`` is what is divided: heads, with the channels of a head inside and, in the
layout of some models, (q, k, v) outside. A rank keeps its part of every section, so its shard is
again such a row of sections, with ``count / size`` in the place of ``count``. Only the tokens of a
vocabulary are divided where that is no whole number: the first ranks have one more.

Plain Python: a plan can be made and a checkpoint read where torch is not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """``outer x count x inner`` neighbouring elements, divided along ``count``."""

    outer: int
    count: int
    inner: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.outer * self.count * self.inner

    def divided(self, size: int, rank: int = 0) -> "Section":
        """What one of ``size`` ranks keeps. Only where the count does not divide, ranks differ."""
        return Section(self.outer, balanced_share(self.count, size, rank)[1], self.inner)


def balanced_share(count: int, size: int, rank: int) -> tuple[int, int]:
    """Return where a rank's share of ``count`` begins, and how much it is.

    Where ``count`` does not divide, the first ranks have one more than the last.
    """
    each, left = divmod(count, size)
    return rank * each + min(rank, left), each + (rank < left)


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of the whole dimension that are neighbours in a shard too."""

    start: int
    """In the whole."""
    local_start: int
    """In the shard."""
    length: int


def runs(sections: Sequence[Section], size: int, rank: int) -> list[Run]:
    """The elements of one rank's shard, in the order of the shard, neighbours joined.

    Args:
        sections: Of the whole dimension.
        size: Ranks that share it.
        rank: Whose shard.
    """
    joined: list[Run] = []
    local = 0
    for start, length in _stretches(sections, size, rank):
        last = joined[-1] if joined else None
        if last is not None and last.start + last.length == start:
            joined[-1] = Run(last.start, last.local_start, last.length + length)
        else:
            joined.append(Run(start, local, length))
        local += length
    return joined


def _stretches(sections: Sequence[Section], size: int, rank: int) -> Iterator[tuple[int, int]]:
    """Start and length of each unbroken stretch that a rank keeps."""
    base = 0
    for section in sections:
        start, count = balanced_share(section.count, size, rank)
        for row in range(section.outer if count else 0):
            yield base + (row * section.count + start) * section.inner, count * section.inner
        base += section.length
