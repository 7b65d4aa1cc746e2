"""How long ranks of a pipeline wait for each other once one of them is known to have failed.

Whoever waits in vain for a peer has waited for as long as a collective may take. What is left to do
then, messages in flight and the agreement that all fail, would wait as long again for the same peer
where it hangs. So all of it together gets what is left of the one time, and a little for the
others, who learn of a failure when they stand still.
"""

import contextlib
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from torch.distributed import Work

LEAST_S: Final = 3.0
"""What is given to the others in any case, seconds."""


class Patience:
    """Counts from when this rank began what has failed.

    Args:
        timeout: How long ranks may wait for each other; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        self._ends_s: float | None = None

    def begin(self, since_s: float) -> None:
        """A failure is known, of what began at ``since_s`` of the monotonic clock."""
        if self._timeout_s is not None:
            self._ends_s = max(since_s + self._timeout_s, time.monotonic() + LEAST_S)

    def wait(self, works: Iterable[Work | None]) -> None:
        """Wait for messages on the CPU, as long as any may take while nothing has failed.

        Raises:
            RuntimeError: One of them did not come.
        """
        for work in works:
            if work is None:
                continue
            if self._ends_s is None:
                work.wait()
            else:
                # No time at all would mean as much as one likes.
                left_s = max(0.001, self._ends_s - time.monotonic())
                work.wait(timedelta(seconds=left_s))

    def wait_for_each(self, works: Iterable[Work]) -> None:
        """The same, whatever becomes of each."""
        for work in works:
            with contextlib.suppress(Exception):  # the cause is known; this peer may be gone
                self.wait([work])
