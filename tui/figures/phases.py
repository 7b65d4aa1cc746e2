"""Where the time of a step goes."""

import msgspec

from boltmesh.telemetry.snapshot import PHASES, JobSnapshot, PhaseTime, RankSnapshot
from boltmesh.tui.figures.recent import RECENT_STEPS, recent_times


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


def recent_step_seconds(rank: RankSnapshot) -> float | None:
    """Return the mean time of the rank's recent steps."""
    recent = rank.steps[-RECENT_STEPS:]
    return sum(step.seconds for step in recent) / len(recent) if recent else None
