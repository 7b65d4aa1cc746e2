"""Tells whether the process that writes a telemetry file is alive.

Two signs, because each fails alone. The kernel lets go of the writer's ``flock`` when the
process dies, whatever the reason, but a descendant that inherited the descriptor keeps it. A pid
with its start time names one process for good, but only within its own pid namespace and where
there is a ``/proc``.
"""

import fcntl

from boltmesh.telemetry.job import pid_namespace, process_start_ticks
from boltmesh.telemetry.layout import Header


def is_alive(descriptor: int, header: Header) -> bool:
    """Return whether the writer of an open telemetry file lives."""
    if not _is_locked(descriptor):
        return False
    is_our_namespace = header.pid_namespace != 0 and header.pid_namespace == pid_namespace()
    if is_our_namespace and header.start_ticks:
        return process_start_ticks(header.pid) == header.start_ticks
    return True


def _is_locked(descriptor: int) -> bool:
    """Try a shared lock for an instant; a writer that starts just then tries again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
