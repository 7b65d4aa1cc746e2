"""The time of an optimizer step, all of its accumulated batches together.

The times of each rank's recent steps, read out of the records once for all who judge them.

Where the time of a step goes.

Where the time of a step goes, with the idle time of a pipeline as a part of its own.

Ranks record what they wait for their neighbours as communication, or as a part of the chunk that
they wait in. The chunks of a step tell how much of that the pipeline stood idle.

What an ordinary step of each rank is like: the base of every judgement about ranks.

A step that validates or writes a checkpoint says nothing about the others, and the first steps of
a run compile, allocate and fill caches. Both are left out.
"""

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean, median

import msgspec

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, PhaseTime, RankSnapshot
from boltmesh.telemetry.stall import RECENT_STEPS
from boltmesh.tui.metrics.memo import remember_last
from boltmesh.tui.metrics.pipelines import bubble, bubble_ratio, pipelines
from boltmesh.tui.state import State

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


class PhaseSplit(msgspec.Struct, frozen=True):
    """The mean recent step over the ranks that have one."""

    seconds: float
    phases: tuple[PhaseTime, ...]
    """In the order of ``PHASES``, without those that took no time; they add up to ``seconds``."""


def phase_split(job: JobSnapshot) -> PhaseSplit | None:
    """Return the mean recent step of the job, or None before the first."""
    total_s = 0.0
    num_steps = 0
    seconds_by_phase = dict.fromkeys(PHASES, 0.0)
    for times in recent_times(job).values():
        total_s += sum(times.seconds)
        num_steps += len(times.seconds)
        for phase, column in times.phases.items():
            # A newer writer may know more phases than this reader has words for.
            name = phase if phase in seconds_by_phase else "other"
            seconds_by_phase[name] += sum(column)
    if num_steps == 0:
        return None
    # Records may leave a rest unnamed; it is shown rather than lost.
    seconds_by_phase["other"] += max(0.0, total_s - sum(seconds_by_phase.values()))
    return PhaseSplit(
        seconds=total_s / num_steps,
        phases=tuple(
            PhaseTime(name, seconds / num_steps)
            for name, seconds in seconds_by_phase.items()
            if seconds > 0
        ),
    )


BUBBLE = "bubble"

SPLIT_PHASES = (*PHASES[:-1], BUBBLE, PHASES[-1])
"""The parts of a step in the order in which they are drawn; ``other`` stays the last."""

_IDLE_HIDES_IN = ("communication", "other", "backward", "forward")
"""The phases that idle time was recorded as, the likeliest first."""


@remember_last
def step_split(state: State) -> PhaseSplit | None:
    """Return the mean recent step of the job, or None before the first."""
    split = phase_split(state.job)
    idle_s = bubble_seconds(state)
    if split is None or not idle_s:
        return split
    seconds = {phase.name: phase.seconds for phase in split.phases}
    moved_s = 0.0
    for name in _IDLE_HIDES_IN:
        part = min(seconds.get(name, 0.0), idle_s - moved_s)
        if part > 0:
            seconds[name] -= part
            moved_s += part
    seconds[BUBBLE] = moved_s
    phases = [PhaseTime(name, seconds[name]) for name in SPLIT_PHASES if seconds.get(name, 0.0) > 0]
    return msgspec.structs.replace(split, phases=tuple(phases))


def bubble_seconds(state: State) -> float | None:
    """Return the mean idle time of the pipeline's ranks in a batch, where it is known."""
    found = [each for each in pipelines(state.job) if each.whole]
    ratio = bubble_ratio(state.job)
    if not found or ratio is None:
        return None
    window_s = fmean(fmean(batch.window_s for batch in each.times) for each in found)
    # Without the schedule the batches of an optimizer step have one window.
    return ratio * window_s / (batches_per_step(state.job) if state.job.pipeline is None else 1)


def least_idle_seconds(state: State) -> float | None:
    """Return the idle time of the busiest rank in a batch."""
    found, mean_s = bubble(state), bubble_seconds(state)
    if found is None or not mean_s:
        return None
    return mean_s * min(row.parts.measured for row in found.rows) / found.mean.measured


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
