"""Splits the time of a step into exclusive phases.

[Note: What is exposed communication]
Communication that runs beside computation costs nothing; what counts is the time in which a rank
does nothing but wait for it. That is the phase ``communication``, and it is made of

1. calls that the caller asked to wait for (``dist.all_reduce(x)``): from the enqueue to the
   completion, taken out of whatever phase made the call; and
2. the tail of a backward pass: from the last collective that the backward pass enqueued
   to its completion or to the end of the pass, whichever comes first. Up to that enqueue there
   were gradients left to compute that hid the earlier collectives; after it there are none.

What this does not see: a wait in the middle of a backward pass for a collective that was
enqueued asynchronously before (tensor parallel layers do that) stays ``backward``; and
computation that a model runs after its last collective is charged as communication for at most
as long as that collective runs.

``validation`` and ``checkpoint`` are whole: what they do inside (transfers, forwards, waits) is
part of them, save a checkpoint that is written during validation.

On the host all of this is read from the monotonic clock. On CUDA kernels run behind the host, so
the same boundaries are also marked on the stream by events, and the times between the events
count (see ``device.py``).
"""

import threading
import time
from collections.abc import Callable, Sequence, Sized
from types import TracebackType
from typing import Final, NamedTuple, Protocol

from boltmesh.telemetry.snapshot import PHASES

DATA: Final = PHASES.index("data")
FORWARD: Final = PHASES.index("forward")
BACKWARD: Final = PHASES.index("backward")
COMMUNICATION: Final = PHASES.index("communication")
VALIDATION: Final = PHASES.index("validation")
CHECKPOINT: Final = PHASES.index("checkpoint")
OTHER: Final = PHASES.index("other")


class Timeline(Protocol):
    """Marks the boundaries of phases somewhere else than on the host's clock."""

    def mark(self, phase: int) -> None:
        """Kernels that are enqueued from here on belong to ``phase``."""

    def mark_enqueue(self) -> None:
        """A collective is enqueued by the backward pass."""

    def mark_backward_end(self) -> None:
        """The backward pass is over."""


class Completions(Protocol):
    """Keeps collectives that are done until they are recorded."""

    @property
    def done(self) -> Sized:
        """Collectives that are done and not recorded yet."""

    def settle(self) -> None:
        """Have every one of them noted."""


class StepTime(NamedTuple):
    """How long a step took."""

    total_ns: int
    phases_ns: Sequence[int]
    """By the order of PHASES; their sum is the total."""


class PhaseContext:
    """Enters a phase and leaves it; has no state, so one object serves every use.

    Args:
        enter: Takes the phase.
        leave: Takes the exception that passes through the phase.
        phase: As an index into PHASES.
    """

    __slots__ = ("_enter", "_leave", "_phase")

    def __init__(
        self,
        enter: Callable[[int], None],
        leave: Callable[[BaseException | None], None],
        phase: int,
    ) -> None:
        self._enter = enter
        self._leave = leave
        self._phase = phase

    def __enter__(self) -> None:
        self._enter(self._phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(error)


class PhaseClock:
    """Knows the phase that this rank is in, and how long each has lasted since the last step.

    Driven by one thread, the one that trains; ``note_*`` may be called from others.

    Args:
        timeline: Where the boundaries are marked as well.
        collectives: Asked at every boundary for completions, and so for waits.
    """

    def __init__(
        self, timeline: Timeline | None = None, collectives: Completions | None = None
    ) -> None:
        self._timeline = timeline
        self._collectives = collectives
        self._stack = [OTHER]
        self._totals = [0] * len(PHASES)
        self.since_ns = time.monotonic_ns()
        """When the current phase began or resumed."""
        self._waited_ns = 0
        self._tail_from_ns = 0
        self._tail_until_ns = 0
        self.thread = threading.get_ident()
        """The thread that trains."""
        self.phase = OTHER
        """The phase that the rank is in, as an index into PHASES."""

    def enter(self, phase: int) -> None:
        """Pause the current phase and begin another."""
        current = self.phase
        if (current == VALIDATION and phase != CHECKPOINT) or current == CHECKPOINT:
            phase = current
        if phase == BACKWARD and current != BACKWARD:
            self._tail_from_ns = 0
        self._charge()
        self._stack.append(phase)
        self.phase = phase
        if self._timeline is not None and phase != current:
            self._timeline.mark(phase)

    def leave(self) -> None:
        """End the current phase and resume the one that it paused."""
        if len(self._stack) == 1:
            return
        self._charge()
        left = self._stack.pop()
        current = self.phase = self._stack[-1]
        if left == BACKWARD and current != BACKWARD:
            self._expose_tail()
            if self._timeline is not None:
                self._timeline.mark_backward_end()
        if self._timeline is not None and left != current:
            self._timeline.mark(current)

    def rebase(self, phase: int) -> None:
        """Count time as ``phase`` while no other phase is entered."""
        self._charge()
        self._stack[0] = phase
        self.phase = self._stack[-1]
        if self._timeline is not None and len(self._stack) == 1:
            self._timeline.mark(phase)

    def restart(self, phase: int) -> None:
        """Forget the time so far; begin in ``phase``, outside any other."""
        self.take()
        self._stack = [phase]
        self.phase = phase

    def take(self) -> StepTime:
        """Return the time since the last call, and count from now on."""
        self._charge()
        totals, self._totals = self._totals, [0] * len(PHASES)
        return StepTime(sum(totals), totals)

    def note_enqueue(self, enqueued_ns: int, *, is_synchronous: bool) -> None:
        """A collective was enqueued by the thread that trains or by autograd."""
        if self.phase == BACKWARD and not is_synchronous:
            self._tail_from_ns = enqueued_ns
            self._tail_until_ns = 0
            if self._timeline is not None:
                self._timeline.mark_enqueue()

    def note_wait(self, waited_ns: int) -> None:
        """The thread that trains was waiting for a collective that is now done."""
        self._waited_ns += waited_ns

    def note_done(self, done_ns: int) -> None:
        """A collective is done that the thread does not wait for yet."""
        self._tail_until_ns = max(self._tail_until_ns, done_ns)

    def _charge(self) -> None:
        if self._collectives is not None and self._collectives.done:
            self._collectives.settle()
        now = time.monotonic_ns()
        elapsed = now - self.since_ns
        self.since_ns = now
        current = self.phase
        waited = self._waited_ns
        if waited:
            self._waited_ns = 0
            if current not in {VALIDATION, CHECKPOINT}:
                waited = min(waited, elapsed)
                self._totals[COMMUNICATION] += waited
                elapsed -= waited
        self._totals[current] += elapsed

    def _expose_tail(self) -> None:
        if not self._tail_from_ns:
            return
        until = min(self.since_ns, self._tail_until_ns or self.since_ns)
        tail = min(max(until - self._tail_from_ns, 0), self._totals[BACKWARD])
        self._totals[BACKWARD] -= tail
        self._totals[COMMUNICATION] += tail
        self._tail_from_ns = 0
