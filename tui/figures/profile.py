"""What an ordinary step of each rank is like: the base of every judgement about ranks.

A step that validates or writes a checkpoint says nothing about the others, and the first steps of
a run compile, allocate and fill caches. Both are left out.
"""

from collections.abc import Iterable

import msgspec

from boltmesh.telemetry.snapshot import JobSnapshot
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.recent import RecentTimes, recent_times

WARM_UP_STEPS = 3
"""Batches at the start of a run that are not judged: kernels are chosen, buckets arranged."""

_INTERRUPTIONS = ("validation", "checkpoint")


class RankProfile(msgspec.Struct, frozen=True):
    """The recent ordinary steps of one rank."""

    rank: int
    num_steps: int
    step_s: float
    """Mean."""
    phases: dict[str, float]
    """Mean seconds of each phase in a step."""
    own_s: float
    """Median time of a step in which the rank did not wait for communication.

    Ranks that work together all take as long as the slowest: only this tells them apart, for the
    late rank waits the shortest.
    """
    typical: dict[str, float]
    """Median seconds of each phase: one odd step in twenty does not move it."""
    waits: dict[int, float]
    """Exposed communication in seconds by the index of the step."""


@remember_last
def rank_profiles(job: JobSnapshot) -> dict[int, RankProfile]:
    """Return a profile for each rank that has ordinary steps."""
    return {
        rank: profile
        for rank, times in recent_times(job).items()
        if (profile := _profile(rank, times)) is not None
    }


def middle(values: Iterable[float]) -> float:
    """Return the median of ``values``, of which there is at least one."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _profile(rank: int, times: RecentTimes) -> RankProfile | None:
    seconds, indexes, phases = times.seconds, times.indexes, times.phases
    if indexes[0] < WARM_UP_STEPS or any(name in phases for name in _INTERRUPTIONS):
        seconds, indexes, phases = _only_ordinary(times)
    count = len(seconds)
    if count == 0:
        return None
    waits = phases.get("communication", (0.0,) * count)
    return RankProfile(
        rank=rank,
        num_steps=count,
        step_s=sum(seconds) / count,
        phases={name: sum(column) / count for name, column in phases.items()},
        own_s=middle([step - wait for step, wait in zip(seconds, waits, strict=True)]),
        typical={name: middle(column) for name, column in phases.items()},
        waits=dict(zip(indexes, waits, strict=True)),
    )


def _only_ordinary(
    times: RecentTimes,
) -> tuple[tuple[float, ...], tuple[int, ...], dict[str, tuple[float, ...]]]:
    """Return seconds, indexes and phases without the steps that are not judged."""
    interruptions = [times.phases[name] for name in _INTERRUPTIONS if name in times.phases]
    kept = [
        place
        for place, index in enumerate(times.indexes)
        if index >= WARM_UP_STEPS and not any(column[place] for column in interruptions)
    ]
    columns = {
        name: tuple(column[place] for place in kept) for name, column in times.phases.items()
    }
    return (
        tuple(times.seconds[place] for place in kept),
        tuple(times.indexes[place] for place in kept),
        {name: column for name, column in columns.items() if any(column)},
    )
