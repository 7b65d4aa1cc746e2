"""Says what a rank moves between its device, its host and its disk, in all and in a step.

Medians, not means: validation and checkpoints read what is offloaded too, and a step between
which they fell says nothing of the others.
"""

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from boltmesh.telemetry.layout import OFFLOAD_WAYS
from boltmesh.telemetry.recording.file_records import Moved
from boltmesh.telemetry.snapshot import OffloadTotal

_LEAST_STEPS = 3


def offload_totals(records: Iterable[Moved]) -> tuple[OffloadTotal, ...]:
    """Return each way on which anything was moved, from the newest records, oldest first."""
    known = list(records)
    if not known:
        return ()
    steps = _first_of_each_step(known)
    return tuple(
        _total(way, newest, [(each.global_step, each.ways[number]) for each in steps])
        for number, (way, newest) in enumerate(zip(OFFLOAD_WAYS, known[-1].ways, strict=True))
        if newest[0]
    )


def _first_of_each_step(records: list[Moved]) -> list[Moved]:
    """Leave out what was written at the end of the run, behind the last step."""
    found = records[:1]
    for record in records[1:]:
        if record.global_step > found[-1].global_step:
            found.append(record)
        elif record.global_step < found[-1].global_step:
            found = [record]  # another fit of the same process
    return found


def _total(
    way: tuple[str, str],
    newest: tuple[int, int, int],
    steps: list[tuple[int, tuple[int, int, int]]],
) -> OffloadTotal:
    moved: list[float] = []
    busy: list[float] = []
    for (before, old), (after, new) in pairwise(steps):
        moved.append(max(0, new[1] - old[1]) / (after - before))
        busy.append(max(0, new[2] - old[2]) / (after - before) / 1e9)
    is_known = len(moved) >= _LEAST_STEPS
    # A run that was too short for a step's median still has a bandwidth.
    first = steps[0][1] if is_known else (0, 0, 0)
    recent_bytes, recent_ns = newest[1] - first[1], newest[2] - first[2]
    place, direction = way
    return OffloadTotal(
        place=place,  # type: ignore[arg-type]
        direction=direction,  # type: ignore[arg-type]
        calls=newest[0],
        moved_bytes=newest[1],
        bytes_per_step=median(moved) if is_known else None,
        seconds_per_step=median(busy) if is_known else None,
        bytes_per_second=recent_bytes * 1e9 / recent_ns if recent_bytes > 0 < recent_ns else None,
    )
