"""When a bucket may be stepped before the norm of all gradients is known.

A step is right when nothing gets clipped. A guess that was wrong costs a correction of 2.7 steps,
so guesses are made only while they are likely to hold.
"""

import math

WARMUP_STEPS = 10
"""Early gradients are clipped often, and the second moment, close to zero, loses digits when a
step is corrected: up to a tenth of the step at the first, 8e-6 of it from the tenth on."""


class Forecast:
    """Predicts from the squares that have arrived whether the whole norm will be clipped."""

    def __init__(self) -> None:
        self.steps = 0
        self.max_norm: float | None = None
        self._was_clipped = False
        self._last_running: dict[int, float] = {}
        self._last_total = math.inf
        self._running: dict[int, float] = {}
        self._sum = 0.0

    def add(self, key: int, square: float) -> None:
        """Take the square of a bucket's norm, on this rank, in the order of arrival."""
        self._sum += square
        self._running[key] = self._sum

    def allows(self, key: int) -> bool:
        """Whether to step the bucket whose square was added last.

        The sum so far, of this rank, is a lower bound of the whole. Scaled by how much of the
        whole had arrived at the same bucket in the step before, it is a forecast.
        """
        if self.steps < WARMUP_STEPS or self._was_clipped or not math.isfinite(self._sum):
            return False
        if self.max_norm is None:
            return True
        limit = self.max_norm * self.max_norm
        before = self._last_running.get(key)
        if self._sum > limit or before is None or not math.isfinite(self._last_total):
            return False
        return before == 0 or self._sum / before * self._last_total <= limit

    def finish(self, *, norm: float | None, max_norm: float | None, was_clipped: bool) -> None:
        """Learn from a whole step. ``norm`` is of all ranks, None where nobody asked for it."""
        self.steps += 1
        self.max_norm = max_norm
        self._was_clipped = was_clipped
        self._last_total = math.inf if norm is None else norm * norm
        self._last_running = self._running
        self.forget()

    def forget(self) -> None:
        """Drop what has arrived since the last step: the gradients were thrown away."""
        self._running = {}
        self._sum = 0.0
