"""Which collective follows which: what ranks have agreed on once they need not agree on again."""

from typing import Final

START: Final = 0

_MOST_REMEMBERED: Final = 1 << 20
"""Places; a model that never does the same twice must not fill the memory with what it did."""

_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


class Route:
    """Where this rank is in the order of collectives, and what came next the last time.

    [Note: Ranks part only where somebody asks]
    At each place one continuation is free: the one that the ranks took there last. Whoever takes
    another one asks all others first. Ranks that are at one place hold one table, for it changes
    in agreement alone. So two ranks that go on differently are never both free: at least one of
    them asks, is not answered by those that took the free one, and stays away from the collective
    that these wait in. No collective of one module is ever paired with that of another.

    A place is a hash of all that was passed since the last ``restart``.
    """

    def __init__(self) -> None:
        self._place = START
        self._next: dict[int, int] = {}

    def learn(self, event: int) -> None:
        """Make this the free continuation; all ranks do so at once."""
        if len(self._next) >= _MOST_REMEMBERED:
            self._next.clear()
        self._next[self._place] = event

    def take_free(self, event: int) -> bool:
        """Go on by one event if it is the free continuation; return whether it is."""
        if self._next.get(self._place) != event:
            return False
        self._place = (self._place * _PRIME ^ event) & _MASK
        return True

    def advance(self, event: int) -> None:
        """Go on by one event."""
        self._place = (self._place * _PRIME ^ event) & _MASK

    def restart(self, place: int = START) -> None:
        """Go to a place by name, however this rank came to be here."""
        self._place = place
