"""Ranks by what they do in a step: every figure of the diagnosis can be put on either side."""

from collections.abc import Callable, Sequence
from typing import Any

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, PhaseTime, RankSnapshot, StepRecord
from tests.tui.samples import NOW, job, rank, step

HEALTHY = {
    "data": 0.002,
    "transfer": 0.002,
    "forward": 0.060,
    "backward": 0.110,
    "communication": 0.016,
    "optimizer": 0.008,
    "other": 0.002,
}
"""Seconds of a step of 200 ms."""

Load = Callable[[int], dict[str, float]]
"""The phases of a step by its index."""


def steady(**phases: float) -> Load:
    """The healthy step with some phases changed."""
    return lambda index: HEALTHY | phases


def records(load: Load, *, num_steps: int = 24, first: int = 0) -> tuple[StepRecord, ...]:
    """Steps one after the other, the last one over just now."""
    times = [load(index) for index in range(first, first + num_steps)]
    ends_in = sum(sum(phases.values()) for phases in times)
    found = []
    for index, phases in enumerate(times, start=first):
        seconds = sum(phases.values())
        ends_in -= seconds
        named = tuple(PhaseTime(name, phases.get(name, 0.0)) for name in PHASES)
        found.append(step(index, end_time=NOW - ends_in, seconds=seconds, phases=named))
    return tuple(found)


def worker(number: int, load: Load | None = None, **changes: Any) -> RankSnapshot:
    """A rank that has made such steps."""
    steps = records(load or steady())
    return rank(number, **{"steps": steps, "global_step": steps[-1].global_step} | changes)


def team(*loads: Load, **changes: Any) -> JobSnapshot:
    """A job with one rank for each load, all on the data axis."""
    ranks = tuple(worker(number, load) for number, load in enumerate(loads))
    return job(**{"ranks": ranks, "global_step": 24} | changes)


def waiting_for(late: float, *, size: int, phase: str = "forward") -> Sequence[Load]:
    """A synchronous team in which the last rank takes ``late`` seconds more in one phase."""
    others = steady(communication=HEALTHY["communication"] + late)
    return [*[others] * (size - 1), steady(**{phase: HEALTHY[phase] + late})]
