"""Whether a job has stopped making steps, and where its ranks are.

For whom they wait is told by the sequence numbers of their groups, see ``hangs.py``.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from boltmesh.telemetry.snapshot import RankSnapshot
from boltmesh.tui.metrics.step_time import recent_step_seconds
from boltmesh.tui.state import State

STALL_AT_LEAST_S = 15.0
STALL_IN_STEPS = 10.0
"""A job is called stalled when nothing was recorded for this many of its steps, and this long."""

LONG_BY_NATURE = frozenset({"validation", "checkpoint"})
"""Phases that may well take that long."""

UNKNOWN_PHASE = "an unknown phase"


class Stall(msgspec.Struct, frozen=True):
    """Silence of all running ranks."""

    silent_s: float
    phases: dict[str, tuple[int, ...]]
    """The ranks by the phase that they are in, the rarest first: there the cause is most often."""

    @property
    def is_long_by_nature(self) -> bool:
        """Say whether all ranks do what takes long, which then is the whole story."""
        return LONG_BY_NATURE.issuperset(self.phases)


def find_stall(state: State) -> Stall | None:
    """Return the silence, or None while steps are made."""
    running = [rank for rank in state.job.ranks if rank.state == "running"]
    if state.job.state != "running" or not any(rank.steps for rank in running):
        return None
    silent_s = state.time - max(rank.last_seen for rank in running)
    step_s = max((recent_step_seconds(rank) or 0.0 for rank in running), default=0.0)
    if silent_s < max(STALL_AT_LEAST_S, STALL_IN_STEPS * step_s):
        return None
    return Stall(silent_s=silent_s, phases=_by_phase(running))


def _by_phase(ranks: Sequence[RankSnapshot]) -> dict[str, tuple[int, ...]]:
    by_phase: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_phase[rank.phase or UNKNOWN_PHASE].append(rank.rank)
    ordered = sorted(by_phase.items(), key=lambda item: (len(item[1]), item[0]))
    return {phase: tuple(members) for phase, members in ordered}
