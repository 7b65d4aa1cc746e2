"""Where the time of a step goes, with the idle time of a pipeline as a part of its own.

Ranks record what they wait for their neighbours as communication, or as a part of the chunk that
they wait in. The chunks of a step tell how much of that the pipeline stood idle.
"""

import msgspec

from boltmesh.telemetry.snapshot import PHASES, PhaseTime
from boltmesh.tui.figures.bubble import bubble
from boltmesh.tui.figures.memo import remember_last
from boltmesh.tui.figures.phases import PhaseSplit, phase_split
from boltmesh.tui.figures.step_time import batches_per_step
from boltmesh.tui.state import State

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
    found = bubble(state)
    if found is None:
        return None
    # The window is an optimizer step; what ranks record is a batch.
    return found.mean.measured * found.window_s / batches_per_step(state.job)


def least_idle_seconds(state: State) -> float | None:
    """Return the idle time of the busiest rank in a batch."""
    found, mean_s = bubble(state), bubble_seconds(state)
    if found is None or not mean_s:
        return None
    return mean_s * min(row.parts.measured for row in found.rows) / found.mean.measured
