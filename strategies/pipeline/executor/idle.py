"""What share of a run the ranks of a pipeline stand idle, known to all of them one run late.

The bubble is idle time over the common window of all ranks, from the first start to the last end
of a chunk on any of them, in the mean over the ranks. Each rank tells its own start, end and busy
time with a question that the next run asks anyway, so that nothing is sent for this alone.

Ranks of one host share a clock. Ranks of several count from when the run before ended, which they
all do together, so that clocks which run apart do not matter.
"""

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from boltmesh.strategies.pipeline.executor.spans import DEVICE_STEPS_LATER

FIGURES: Final = 3
"""That each rank tells: first start, last end and busy time, in ns."""


class IdleMeter:
    """Finds the bubble of runs. Collective to make, over the group.

    Args:
        group: The ranks of the pipeline, on the CPU; None for a single rank.
        device: Where chunks run.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self.bubble: float | None = None
        """Of the newest run with backward passes of which all ranks have told; 0 to 1."""
        self.number = 0
        """Of the run, from 1."""
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        # An event of a device is read when a later run ends, and told when the next one begins.
        self._delay = 1 + (DEVICE_STEPS_LATER if device.type == "cuda" else 0)
        self._shares_clock = group is None or _is_one_host(group)
        self._origin_ns: int | None = 0 if self._shares_clock else None
        self._origins: dict[int, int | None] = {}
        """Of runs that are still to be told."""
        self._own: dict[int, tuple[int, int, int]] = {}
        self._is_asked = False

    def begin(self, *, is_training: bool) -> list[int]:
        """Begin a run; return this rank's part of what is asked at its beginning.

        Returns:
            ``FIGURES`` numbers for each rank, zeros for the others; zeros also where nothing is
            known. To be added up over the ranks.
        """
        self.number += 1
        if is_training:
            self._origins[self.number] = self._origin_ns
        told = self.number - self._delay
        self._is_asked = self._origins.pop(told, None) is not None
        figures = [0] * (FIGURES * self._size)
        own = self._own.pop(told, None)
        if own is not None and self._is_asked:
            figures[FIGURES * self._rank : FIGURES * (self._rank + 1)] = own
        return figures

    def hear(self, figures: Sequence[int]) -> None:
        """Take what all ranks have told."""
        starts, ends, busy = (figures[at::FIGURES] for at in range(FIGURES))
        # A device may be too far behind to be asked; then the run is left out.
        if self._is_asked and all(ends) and max(ends) > min(starts):
            window = max(ends) - min(starts)
            self.bubble = max(0.0, 1 - sum(busy) / (len(busy) * window))

    def measured(self, number: int, start_ns: int, end_ns: int, busy_ns: int) -> None:
        """Take this rank's times of a run, on its own clock."""
        origin = self._origins.get(number)
        if origin is not None:
            self._own[number] = (start_ns - origin, end_ns - origin, busy_ns)

    def meet(self) -> None:
        """Note a moment at which all ranks are at the same point."""
        if not self._shares_clock:
            self._origin_ns = time.monotonic_ns()


def _is_one_host(group: ProcessGroup) -> bool:
    """Whether all ranks read the same monotonic clock. Collective."""
    told: list[str] = [""] * group.size()
    dist.all_gather_object(told, _clock(), group=group)
    return len(set(told)) == 1


def _clock() -> str:
    """Name the clock of this host; containers of one host have different host names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()
