"""What a signal does to a rank: Ctrl-C and SIGTERM end a run between two optimizer steps.

Loads nothing heavy, because a rank must be ready for a signal before it has imported torch. How
the ranks of a training run agree on the step is in ``graceful.py``.
"""

import os
import signal
import time
from types import FrameType

from boltmesh.process import end_process, write_stderr

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_S = 2.0
"""Launchers hand a signal on to ranks that may have had it already: that is no second one."""


class StoppedBySignal(BaseException):
    """Ends a run that was asked to stop. No Exception, so that nothing takes it for a failure."""

    def __init__(
        self, signum: int, *, step: int | None = None, checkpoint: str | None = None
    ) -> None:
        self.signum = signum
        self.step = step
        self.checkpoint = checkpoint
        super().__init__(describe_stop(signum, step))

    @property
    def exit_code(self) -> int:
        """As a shell has it for a process that a signal ended."""
        return 128 + self.signum


def describe_stop(signum: int, step: int | None = None) -> str:
    """What has stopped the run, and when."""
    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    when = "before the first step" if step is None else f"after step {step}"
    return f"stopped by {name} {when}"


class StopSwitch:
    """Remembers the signal that asks this process to stop.

    Until ``is_training`` the process just ends, since there is nothing to keep. Then the signal
    waits for the callback that brings the ranks to the same step. A second signal ends the
    process at once; where a supervisor started it, that is the supervisor's to do.
    """

    def __init__(self, *, is_supervised: bool = False, same_signal_s: float = 0.0) -> None:
        self.is_training = False
        self.signum: int | None = None
        self._is_supervised = is_supervised
        self._same_signal_s = same_signal_s
        self._since = 0.0
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle the signals from now on; one that the caller of this program ignores, stays so."""
        for each in HANDLED:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(signum)
        elif not self.is_training:
            raise StoppedBySignal(signum)
        elif self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            if not self._is_supervised:
                write_stderr(STOPPING)
        elif not self._is_supervised and time.monotonic() - self._since > self._same_signal_s:
            end_process(128 + signum, "killed by a second signal.")

    @staticmethod
    def _handle_in_child(signum: int) -> None:
        """A forked loader worker outlives Ctrl-C, for its rank needs batches until it stops."""
        if signum != signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


STOPPING = (
    "\nboltmesh: stopping after this step (a validation that is due runs to its end first); "
    "once more kills the run.\n"
)
