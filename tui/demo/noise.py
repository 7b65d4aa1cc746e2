"""Numbers that look random and are a function of their key: the same demo for everybody.

Keeps what was made for the numbers in view, and forgets what they have left behind.
"""

from collections.abc import Callable
from itertools import chain
from typing import Generic, TypeVar

_MASK = 2**64 - 1


def uniform(*key: int) -> float:
    """Return a number from 0 up to 1."""
    return _mix(key) / 2**64


def normal(*key: int) -> float:
    """Return a number of mean 0 and deviation 1: the sum of four uniform ones, so never far off."""
    bits = _mix(key)
    total = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48)
    return (total / 2**16 - 2) * 3**0.5


def four(*key: int) -> tuple[float, float, float, float]:
    """Return four numbers from -1 up to 1, for the price of one."""
    bits = _mix(key)
    return (
        (bits & 0xFFFF) / 2**15 - 1,
        (bits >> 16 & 0xFFFF) / 2**15 - 1,
        (bits >> 32 & 0xFFFF) / 2**15 - 1,
        (bits >> 48) / 2**15 - 1,
    )


def _mix(key: tuple[int, ...]) -> int:
    """Hash integers to 64 bits, by the finalizer of SplitMix64 after each of them.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014, figure 17.
    """
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


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
