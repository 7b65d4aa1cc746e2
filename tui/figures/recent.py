"""The times of each rank's recent steps, read out of the records once for all who judge them."""

import math

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.figures.memo import remember_last

RECENT_STEPS = 20
"""Steps that a mean is taken over: a few seconds of most jobs."""

LEAST_STEPS = 8
RECORDS = 4096
"""With many ranks fewer steps of each are enough to tell them apart, and all that time allows."""


class RecentTimes(msgspec.Struct, frozen=True):
    """One rank's recent steps, in columns."""

    indexes: tuple[int, ...]
    seconds: tuple[float, ...]
    phases: dict[str, tuple[float, ...]]
    """Seconds of each phase that took any."""


@remember_last
def recent_times(job: JobSnapshot) -> dict[int, RecentTimes]:
    """Return the columns of each rank that has steps."""
    num_steps = min(RECENT_STEPS, max(LEAST_STEPS, RECORDS // max(1, len(job.ranks))))
    return {
        rank.rank: times for rank in job.ranks if (times := _columns(rank, num_steps)) is not None
    }


def _columns(rank: RankSnapshot, num_steps: int) -> RecentTimes | None:
    indexes: list[int] = []
    seconds: list[float] = []
    rows: list[dict[str, float]] = []
    for step in rank.steps[-num_steps:]:
        row = {phase.name: phase.seconds for phase in step.phases}
        # A recording can hold any number.
        if 0 < step.seconds < math.inf and 0 <= sum(row.values()) < math.inf:
            indexes.append(step.index)
            seconds.append(step.seconds)
            rows.append(row)
    if not rows:
        return None
    names = tuple(rows[0])
    if any(row.keys() != rows[0].keys() for row in rows):
        names = tuple(dict.fromkeys(name for row in rows for name in row))
        rows = [{name: row.get(name, 0.0) for name in names} for row in rows]
    columns = zip(names, zip(*(row.values() for row in rows), strict=True), strict=True)
    return RecentTimes(
        indexes=tuple(indexes),
        seconds=tuple(seconds),
        phases={name: column for name, column in columns if any(column)},
    )
