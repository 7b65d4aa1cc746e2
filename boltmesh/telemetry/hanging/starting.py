"""Starts the watch over this rank, with what its recorder has."""

import functools
from collections.abc import Callable

from boltmesh.telemetry.hanging.looking import idle_s, look_at_self
from boltmesh.telemetry.hanging.watch import HangWatch
from boltmesh.telemetry.recording.phases import PhaseClock
from boltmesh.telemetry.recording.torch_compat import COLLECTIVES, default_store
from boltmesh.telemetry.recording.writer import RankFile


def start_watch(
    file: RankFile,
    clock: PhaseClock,
    *,
    timeout_s: float,
    progress: Callable[[], tuple[int, bool]],
) -> HangWatch | None:
    """Watch this rank from now on; a rank alone in its job waits for nobody, and None is returned.

    Args:
        file: What the rank records, and where what is found is told.
        clock: Its phase, and the thread that trains.
        timeout_s: How long a collective may take before it ends the run, seconds.
        progress: Gives the newest optimizer step, and whether it has made one in this run.
    """
    header, folder = file.header, file.path.parent
    if header.world_size == 1:
        return None
    return HangWatch(
        rank=header.rank,
        world_size=header.world_size,
        timeout_s=timeout_s,
        folder=folder,
        look=functools.partial(
            look_at_self,
            file,
            clock,
            rank=header.rank,
            settle=COLLECTIVES.settle,
            progress=progress,
        ),
        idle_s=functools.partial(idle_s, file),
        find_store=functools.partial(default_store, f"boltmesh-hangs-{folder.name}", may_grow=True),
        tell=functools.partial(file.event, "warning"),
    )
