"""The floating point operations of one batch, counted while it runs.

Model FLOPs are those of the module itself, hardware FLOPs those that run: activations that are
computed again in the backward pass count in the second alone (Chowdhery et al. 2022, appendix B,
https://arxiv.org/abs/2204.02311).
"""

from typing import NamedTuple

from boltmesh.telemetry.writer.phases import BACKWARD, FORWARD, PhaseClock
from boltmesh.telemetry.writer.torch_compat.flops import OperatorFlops

COUNTED = frozenset({FORWARD, BACKWARD})


class BatchFlops(NamedTuple):
    """FLOPs of one batch on this rank, forward and backward."""

    model: int
    hardware: int


class FlopCounter:
    """Counts in the forward and backward phases of one batch; the optimizer does not count.

    Args:
        clock: Knows the phase.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._operators = OperatorFlops(lambda: clock.phase in COUNTED)
        self._depth = 0

    def enter_phase(self) -> None:
        """Follow the clock into a phase."""
        if self._clock.phase in COUNTED:
            self._depth += 1
            if self._depth == 1:
                self._operators.__enter__()  # type: ignore[no-untyped-call]

    def leave_phase(self) -> None:
        """Follow the clock out of its phase; to be called before the clock leaves it."""
        if self._clock.phase in COUNTED and self._depth:
            self._depth -= 1
            if not self._depth:
                self._operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> BatchFlops | None:
        """Return what was counted, None if there was nothing; also in the middle of a phase."""
        if self._depth:
            self._depth = 0
            self._operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        total, recomputed = self._operators.total, self._operators.recomputed
        return BatchFlops(total - recomputed, total) if total else None
