"""The time of an optimizer step, all of its accumulated batches together."""

from itertools import pairwise
from statistics import median

from boltmesh.telemetry.snapshot import JobSnapshot, RankSnapshot
from boltmesh.tui.figures.recent import RECENT_STEPS

STEP_SAMPLES = 8
"""Ranks whose steps are averaged for the time of a step: synchronous ranks all take as long."""


def optimizer_step_seconds(job: JobSnapshot) -> float | None:
    """Return the time of a recent optimizer step, all of its accumulated batches together."""
    stride = max(1, len(job.ranks) // STEP_SAMPLES)
    found = [seconds for rank in job.ranks[::stride] if (seconds := step_seconds(rank)) is not None]
    return median(found) if found else None


def batches_per_step(job: JobSnapshot) -> int:
    """Return how many batches an optimizer step accumulates, by the first rank that shows it."""
    for rank in job.ranks:
        ends = _step_ends(rank)
        if len(ends) >= 2:
            return max(1, round((ends[-1] - ends[0]) / (len(ends) - 1)))
    return 1


def step_seconds(rank: RankSnapshot) -> float | None:
    """Return the recent time of an optimizer step of one rank."""
    ends = _step_ends(rank)[-RECENT_STEPS - 1 :]
    if len(ends) < 2:
        return None
    whole_steps = rank.steps[ends[0] + 1 : ends[-1] + 1]
    return sum(step.seconds for step in whole_steps) / (len(ends) - 1)


def _step_ends(rank: RankSnapshot) -> list[int]:
    """Return the places of the records with which an optimizer step ends."""
    return [
        place + 1
        for place, (before, step) in enumerate(pairwise(rank.steps))
        if step.global_step > before.global_step
    ]
