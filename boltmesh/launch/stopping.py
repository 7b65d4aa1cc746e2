"""Signal handling of a rank: Ctrl-C and SIGTERM end a run between two optimizer steps.

Imports nothing heavy, because a rank has to handle signals before it has imported torch. The ranks
of a training run agree on the step in ``graceful_stop.py``.
"""

import os
import signal
import time
from types import FrameType

from boltmesh.process import end_process, write_stderr

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_S = 2.0
"""Seconds within which a second signal is the first one, forwarded by a launcher."""


class StoppedBySignal(BaseException):
    """Ends a run after a signal. Not an ``Exception``: no handler may treat it as a failure."""

    def __init__(
        self, signum: int, *, step: int | None = None, checkpoint: str | None = None
    ) -> None:
        self.signum = signum
        self.step = step
        self.checkpoint = checkpoint
        super().__init__(describe_stop(signum, step))

    @property
    def exit_code(self) -> int:
        """Exit code of a shell for a process that a signal ended."""
        return 128 + self.signum


def describe_stop(signum: int, step: int | None = None) -> str:
    """Return which signal stopped the run, and after which step."""
    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    when = "before the first step" if step is None else f"after step {step}"
    return f"stopped by {name} {when}"


class StopSwitch:
    """Records the signal that stops this process.

    Before ``is_training`` the process ends at once, since there is nothing to keep. After that the
    signal waits for the callback that stops all ranks after the same step. A second signal ends the
    process immediately; under a supervisor, the supervisor does that.
    """

    def __init__(self, *, is_supervised: bool = False, same_signal_s: float = 0.0) -> None:
        self.is_training = False
        self.signum: int | None = None
        self._is_supervised = is_supervised
        self._same_signal_s = same_signal_s
        self._since = 0.0
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle the signals from now on, except those that the parent process ignores."""
        for signum in HANDLED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle)

    @staticmethod
    def unblock() -> None:
        """Receive signals that the supervisor let wait until this process can report them."""
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
        """A forked loader worker ignores Ctrl-C, because its rank needs batches until it stops."""
        if signum != signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


STOPPING = (
    "\nboltmesh: stopping after this step (a validation that is due runs to its end first); "
    "once more kills the run.\n"
)
