"""Counts what goes between the device and the host or a disk, and for how long.

Transfers overlap, so durations are not added up: of each way the time is kept in which at least
one transfer was under way, and bytes over that time are the bandwidth.
"""

import time
from threading import RLock
from typing import Final

from boltmesh.telemetry import layout
from boltmesh.telemetry.writer.rank_file import RankFile

_WAYS: Final = {way: 3 * number for number, way in enumerate(layout.OFFLOAD_WAYS)}


class OffloadCounter:
    """The totals of one rank, called from the threads that move the bytes.

    Args:
        file: Where they go; what this process wrote into it before is counted on.
    """

    def __init__(self, file: RankFile) -> None:
        self._file = file
        self._totals = list(file.offloaded)
        self._busy_until_ns = dict.fromkeys(_WAYS.values(), 0)
        self._written = tuple(self._totals)
        self._global_step = 0
        self._lock = RLock()  # a signal handler may move bytes too

    def add(
        self, place: str, direction: str, num_bytes: int, seconds: float, *, is_alone: bool = False
    ) -> None:
        """Count a transfer that ends now, or one that had its way to itself whenever it was."""
        now = time.monotonic_ns()
        at = _WAYS[place, direction]
        lasted_ns = max(0, round(seconds * 1e9))
        with self._lock:
            if not is_alone:
                begin = max(now - lasted_ns, self._busy_until_ns[at])
                self._busy_until_ns[at] = max(now, self._busy_until_ns[at])
                lasted_ns = max(0, now - begin)
            self._totals[at] += 1
            self._totals[at + 1] += num_bytes
            self._totals[at + 2] += lasted_ns

    def after_step(self, global_step: int) -> None:
        """Write a record when an optimizer step has passed."""
        if global_step != self._global_step:
            self.write(global_step)

    def write(self, global_step: int) -> None:
        """Write the totals, unless nothing was moved since the last time and ever."""
        with self._lock:
            totals = tuple(self._totals)
        is_new_step, self._global_step = global_step != self._global_step, global_step
        if totals != self._written or (is_new_step and any(totals)):
            self._written = totals
            self._file.offload(global_step, totals)
