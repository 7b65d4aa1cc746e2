"""How far a job is: elapsed time, pace, time that is left."""

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.state import State


class Progress(msgspec.Struct, frozen=True):
    """``None`` where it cannot be known."""

    elapsed_s: float
    left_s: float | None
    fraction: float | None
    """Of ``max_steps``."""


def progress(state: State) -> Progress:
    """Return how far the job is, and when it will end at its recent pace."""
    job = state.job
    is_running = job.state == "running"
    elapsed_s = max(0.0, (state.time if is_running else job.updated) - job.started)
    pace = _pace(job)
    # Lightning writes -1 for "no limit".
    limit = job.max_steps if job.max_steps is not None and job.max_steps > 0 else None
    left_s = None
    if is_running and limit is not None and pace is not None:
        left_s = max(0, limit - job.global_step) / pace
    return Progress(
        elapsed_s=elapsed_s,
        left_s=left_s,
        fraction=None if limit is None else min(1.0, job.global_step / limit),
    )


def _pace(job: JobSnapshot) -> float | None:
    """Return optimizer steps a second, from the first rank that has records."""
    for rank in job.ranks:
        if len(rank.steps) >= 2:
            first, last = rank.steps[0], rank.steps[-1]
            steps = last.global_step - first.global_step
            seconds = last.end_time - first.end_time
            return steps / seconds if steps > 0 and seconds > 0 else None
    return None
