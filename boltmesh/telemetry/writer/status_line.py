"""The line of a rank's file that says how far it is: its state, epoch, step and memory.

It is written ten times a second at most, and where loops begin and end; only the phase and the
global step, a number each, are written whenever they may have changed. What else may wait for as
long goes with it.
"""

import time
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.writer.memory import MemorySampler
from boltmesh.telemetry.writer.phases import PhaseClock
from boltmesh.telemetry.writer.rank_file import RankFile
from boltmesh.telemetry.writer.step_queue import StepQueue
from boltmesh.telemetry.writer.torch_compat.hook import COLLECTIVES

STATUS_EVERY_NS: Final = 100_000_000


class StatusLine:
    """Knows how far this rank is, and writes it when that is due.

    In a batch the recorder sets the fields itself, which takes no call.

    Args:
        file: Where it goes.
        clock: The phase, and when it began.
        steps: Queue whose steps on the host are written with the line.
        memory: The totals as last read.
    """

    def __init__(
        self, file: RankFile, clock: PhaseClock, steps: StepQueue, memory: MemorySampler
    ) -> None:
        self.state = "starting"
        """One of ``layout.STATES``."""
        self.has_ended = False
        """The phase does not change."""
        self.epoch = 0
        self.global_step = 0
        self.batch_index = 0
        self.start_step = 0
        """The global step at which this run's loop began."""
        self._file = file
        self._clock = clock
        self._steps = steps
        self._memory = memory
        self._written_ns = 0

    def begin(self, epoch: int, global_step: int) -> None:
        """Say that batches follow from here."""
        self.state = "running"
        self.epoch = epoch
        self.global_step = self.start_step = global_step
        self._file.newest_step(global_step)

    def end(self, state: str) -> None:
        """Say how the rank ended."""
        self.has_ended = True
        self.state = state

    def progress(self) -> tuple[int, bool]:
        """Return the newest optimizer step, and whether this run has made one; from any thread."""
        return self.global_step, self.global_step > self.start_step

    def write_phase(self) -> None:
        """Write the phase; the whole line too if it is due, for loops that end no batches."""
        if not self.has_ended:
            self._file.phase(self._clock.phase)
            if self._clock.since_ns - self._written_ns >= STATUS_EVERY_NS:
                self.write()

    def write(self) -> None:
        """Write the line, and other fields that may wait for as long."""
        self._written_ns = self._clock.since_ns
        COLLECTIVES.find_sources()
        self._file.write_counters()
        self._steps.write_ended()
        self._file.status(
            layout.STATES.index(self.state),
            0,
            0,
            self.epoch,
            self.global_step,
            self.batch_index,
            time.time(),
            *self._memory.totals,
        )
