"""Keeps what was made for the numbers in view, and forgets what they have left behind."""

from collections.abc import Callable
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Blocks(Generic[Item]):
    """A sequence that is computed in blocks, where it is looked at.

    Args:
        build: Makes the item of a number; always the same one.
        size: Items of a block.
    """

    def __init__(self, build: Callable[[int], Item], *, size: int = 8) -> None:
        self._build = build
        self._size = size
        self._blocks: dict[int, tuple[Item, ...]] = {}

    def between(self, first: int, last: int) -> tuple[Item, ...]:
        """Return the items from ``first`` to ``last``, both included, and keep no others."""
        if last < first:
            return ()
        numbers = range(first // self._size, last // self._size + 1)
        self._blocks = {number: self._block(number) for number in numbers}
        start = first - numbers[0] * self._size
        items = tuple(chain.from_iterable(self._blocks.values()))
        return items[start : start + last - first + 1]

    def _block(self, number: int) -> tuple[Item, ...]:
        known = self._blocks.get(number)
        if known is not None:
            return known
        return tuple(map(self._build, range(number * self._size, (number + 1) * self._size)))
