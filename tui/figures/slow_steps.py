"""Steps that took much longer than the others, and what held them up.

The ranks of a job wait for each other, so a step that is slow on one is slow on all: a few ranks
are searched for slow steps, and all ranks only for the cause of each.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, RankSnapshot, StepRecord
from boltmesh.tui.figures.memo import remember_last

SLOW_FACTOR = 2.0
SLOW_DEVIATIONS = 8.0
"""A step is slow when it takes this many times the median, and is this many median deviations
beyond it: where all steps differ, none of them is an event."""

MIN_STEPS = 10
"""Fewer steps have no median to speak of."""

WARM_UP_BATCHES = 3
"""At the start of a run: kernels are chosen, files opened, buckets arranged."""

SEARCHED_RANKS = 4
MAX_SLOW_STEPS = 8
"""Half of them the newest, half the longest: for each of them every rank is looked at."""

CULPRIT_SHARE = 0.5
"""A rank is named when the time that it alone took is this much of the delay."""

_INTERRUPTIONS = frozenset({"validation", "checkpoint"})
_COMMUNICATION = PHASES.index("communication")


class SlowStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, on the slowest of the ranks."""

    index: int
    """Of the batch."""
    global_step: int
    time: float
    """Wall clock of its end."""
    seconds: float
    median_s: float
    rank: int | None
    """The rank that the others waited for; None where no single one stands out."""
    phase: str | None
    """What took longer than usual; None where no phase stands out."""
    excess_s: float
    """How much longer that phase took than its median."""


@remember_last
def slow_steps(job: JobSnapshot) -> tuple[SlowStep, ...]:
    """Return the slow steps that the rings still hold, oldest first."""
    stride = max(1, len(job.ranks) // SEARCHED_RANKS)
    found: dict[int, tuple[RankSnapshot, StepRecord, float]] = {}
    for rank in job.ranks[::stride]:
        for step, usual_s in _slow_records(rank.steps):
            known = found.get(step.index)
            if known is None or step.seconds > known[1].seconds:
                found[step.index] = (rank, step, usual_s)
    half = MAX_SLOW_STEPS // 2
    older, newest = sorted(found)[:-half], sorted(found)[-half:]
    longest = sorted(older, key=lambda index: (found[index][1].seconds, index))[-half:]
    return tuple(_explain(job, *found[index]) for index in sorted([*longest, *newest]))


def _slow_records(steps: Sequence[StepRecord]) -> Iterable[tuple[StepRecord, float]]:
    """Yield the slow records of one rank, each with the median of its like.

    Where a step accumulates batches, the last of them also updates the model: the batches that end
    a step are compared with each other, and the others with each other.
    """
    alike: tuple[list[StepRecord], list[StepRecord]] = ([], [])
    for before, step in pairwise(steps):
        if step.index >= WARM_UP_BATCHES:
            alike[step.global_step > before.global_step].append(step)
    for records in alike:
        if len(records) < MIN_STEPS:
            continue
        times = sorted(step.seconds for step in records)
        usual_s = times[len(times) // 2]
        deviation_s = median(abs(seconds - usual_s) for seconds in times)
        limit_s = max(SLOW_FACTOR * usual_s, usual_s + SLOW_DEVIATIONS * deviation_s)
        for step in records:
            if step.seconds > limit_s and _worked_s(step) > limit_s:
                yield step, usual_s


def _worked_s(step: StepRecord) -> float:
    """Return the time without validation and checkpoints, which are events of their own."""
    return step.seconds - sum(
        phase.seconds for phase in step.phases if phase.name in _INTERRUPTIONS
    )


def _explain(job: JobSnapshot, seen: RankSnapshot, step: StepRecord, usual_s: float) -> SlowStep:
    delay_s = _worked_s(step) - usual_s
    own = sorted(
        (
            (_own_s(record), rank)
            for rank in job.ranks
            if (record := _record(rank, step.index)) is not None
        ),
        key=lambda item: item[0],
    )
    slowest_s, slowest = own[-1]
    middle_s = own[(len(own) - 1) // 2][0]
    is_alone = len(own) > 1 and slowest_s - middle_s >= CULPRIT_SHARE * delay_s
    culprit = slowest if is_alone else seen
    record = _record(culprit, step.index) or step
    phase, excess_s = _longest_phase(culprit, record)
    return SlowStep(
        index=step.index,
        global_step=step.global_step,
        time=step.end_time,
        seconds=step.seconds,
        median_s=usual_s,
        rank=slowest.rank if is_alone else None,
        phase=phase if excess_s >= CULPRIT_SHARE * delay_s else None,
        excess_s=excess_s,
    )


def _record(rank: RankSnapshot, index: int) -> StepRecord | None:
    """Return the record of a batch; the ring holds consecutive ones, save where some were torn."""
    if not rank.steps:
        return None
    at = index - rank.steps[0].index
    if 0 <= at < len(rank.steps) and rank.steps[at].index == index:
        return rank.steps[at]
    return next((step for step in rank.steps if step.index == index), None) if at >= 0 else None


def _own_s(step: StepRecord) -> float:
    """Return what a rank took without waiting for others: the late rank waits the shortest."""
    phases = step.phases
    # A record of this version has all phases in their order, which saves looking for the one.
    if len(phases) == len(PHASES) and phases[_COMMUNICATION].name == "communication":
        return step.seconds - phases[_COMMUNICATION].seconds
    return step.seconds - sum(phase.seconds for phase in phases if phase.name == "communication")


def _longest_phase(rank: RankSnapshot, step: StepRecord) -> tuple[str | None, float]:
    """Return the phase that exceeds its median over the rank's recent steps the most."""
    usual: dict[str, list[float]] = {}
    recent = [each for each in rank.steps[-64:] if each.index != step.index]
    for each in recent:
        for phase in each.phases:
            usual.setdefault(phase.name, []).append(phase.seconds)
    excess = [
        (phase.seconds - (median(usual[phase.name]) if phase.name in usual else 0.0), phase.name)
        for phase in step.phases
        if phase.name not in _INTERRUPTIONS
    ]
    excess_s, name = max(excess, default=(0.0, None))
    return name, excess_s
