"""Floating point operations of one batch, counted while it runs.

Model FLOPs do not have activations that are computed again in the backward pass, hardware FLOPs do
(Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311).
"""

from typing import NamedTuple

from boltmesh.telemetry.writer.phases import BACKWARD, FORWARD, PhaseClock
from boltmesh.telemetry.writer.torch_compat.flops import FunctionFlops

COUNTED = frozenset({FORWARD, BACKWARD})


class BatchFlops(NamedTuple):
    """FLOPs of one batch on one rank, forward and backward."""

    model: int
    recomputed: int
    """FLOPs of activations computed again in the backward pass; hardware FLOPs have both."""


class FlopCounter:
    """Counts in the forward and backward phases of one batch; the optimizer does not count.

    Args:
        clock: Knows the phase.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._calls = FunctionFlops(lambda: clock.phase in COUNTED)
        self._depth = 0

    def enter_phase(self) -> None:
        """Follow the clock into a phase."""
        if self._clock.phase in COUNTED:
            self._depth += 1
            if self._depth == 1:
                self._calls.__enter__()

    def leave_phase(self) -> None:
        """Follow the clock out of its phase; to be called before the clock leaves it."""
        if self._clock.phase in COUNTED and self._depth:
            self._depth -= 1
            if not self._depth:
                self._calls.__exit__(None, None, None)

    def stop(self) -> BatchFlops | None:
        """Return what was counted, None if there was nothing; also in the middle of a phase."""
        if self._depth:
            self._depth = 0
            self._calls.__exit__(None, None, None)
        calls = self._calls
        return BatchFlops(calls.total, calls.recomputed) if calls.total else None
