"""Tells whether the process that writes a telemetry file is alive.

Two signs, because each fails alone. The kernel lets go of the writer's ``flock`` when the
process dies, whatever the reason, but a descendant that inherited the descriptor keeps it. A pid
with its start time names one process for good, but only within its own pid namespace and where
there is a ``/proc``.
"""

import fcntl
import functools
import os
import time
from typing import Final

from boltmesh.telemetry.job import pid_namespace, process_start_ticks
from boltmesh.telemetry.layout import Header

CHECK_PID_EVERY_S: Final = 3.0
"""How often a pid is looked up whose process exists: it may be a zombie, or another process."""


class Liveness:
    """Asks after one writer again and again.

    Args:
        header: Of its file.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._is_ours = False
        self._checked_s = -CHECK_PID_EVERY_S

    def is_alive(self, descriptor: int) -> bool:
        """Return whether the writer of an open telemetry file lives."""
        if not _is_locked(descriptor):
            return False
        header = self._header
        is_our_namespace = header.pid_namespace != 0 and header.pid_namespace == _namespace(
            os.getpid()
        )
        if not (is_our_namespace and header.start_ticks):
            return True
        now = time.monotonic()
        if now - self._checked_s >= CHECK_PID_EVERY_S:
            self._checked_s = now
            self._is_ours = process_start_ticks(header.pid) == header.start_ticks
        return self._is_ours and _exists(header.pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


@functools.lru_cache(maxsize=1)
def _namespace(pid: int) -> int:
    """Return this process's pid namespace, which stays while its pid does."""
    return pid_namespace()


def _is_locked(descriptor: int) -> bool:
    """Try a shared lock for an instant; a writer that starts just then tries again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
