"""Turns counters that only grow into rates, from one look to the next."""

from collections.abc import Callable, Mapping


class Rates:
    """The rates of a few counters of one thing.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, Mapping[str, float]] | None = None

    def since_last(self, counters: Mapping[str, float]) -> Mapping[str, float]:
        """Return how much each counter grew a second; nothing for one that was not known before.

        A counter that fell was reset in between, so nothing is known of it either.
        """
        now = self._clock()
        last, self._last = self._last, (now, counters)
        if last is None or now <= last[0]:
            return {}
        before = last[1]
        return {
            name: (value - before[name]) / (now - last[0])
            for name, value in counters.items()
            if name in before and value >= before[name]
        }
