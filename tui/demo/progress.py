"""How far each rank is in the collectives of its groups, also where one of them is never entered.

A hang spreads: the peers of the missing rank on the data axis wait in the all-reduce of the
gradients, the tensor peers of those in the sum of the norm, and so do all other stages after them.
"""

import functools
from collections.abc import Mapping

from boltmesh.axes import AXES
from boltmesh.telemetry.snapshot import Chunk, CollectiveInFlight, GroupProgress
from boltmesh.tui.demo.setup import Membership, Setup
from boltmesh.tui.demo.timeline import Timeline
from boltmesh.tui.demo.traffic import Moved, moved


class Moment:
    """One moment of a simulated job, for all of its ranks.

    Args:
        setup: The job.
        timeline: Its times.
        seconds: From its start.
        is_hung: Whether the victim never enters an all-reduce of the gradients in this step.
    """

    def __init__(
        self, setup: Setup, timeline: Timeline, seconds: float, *, is_hung: bool = False
    ) -> None:
        self.seconds = seconds
        self.step = timeline.step_at(seconds)
        self._setup = setup
        self._timeline = timeline
        self.is_hung = is_hung
        self._window = timeline.share_of_window(seconds)
        self._reduce = timeline.share_of_reduce(seconds)

    def groups(
        self, rank: int, stage: int, members: Mapping[str, Membership], started: float
    ) -> tuple[GroupProgress, ...]:
        """Return how far a rank is in each of its groups."""
        return tuple(
            GroupProgress(
                axis=axis,
                group=members[axis].group,
                ranks=members[axis].ranks,
                sequence=sequence,
                operator=None if sequence == 0 else operator,
                is_done=None,  # NCCL does not tell
                time=None if sequence == 0 else started + self._time(axis),
            )
            for axis, operator, sequence in self._sequences(rank, stage)
        )

    def phase(self, row: tuple[Chunk, ...], now: float) -> str:
        """Return where a rank is that has the chunks of ``row`` to do in this step.

        Args:
            row: Its chunks of the step that runs, by the wall clock.
            now: This moment, by the wall clock.
        """
        if self._window == 0:
            return "data"
        if self._window < 1:
            running = [chunk.kind for chunk in row if chunk.start <= now < chunk.end]
            return {"F": "forward", "B": "backward"}[running[0]] if running else "communication"
        if self._reduce < 1:
            return "communication"
        over = self.seconds >= self._timeline.optimizer_end(self.step + 1)
        return "other" if over else "optimizer"

    def _sequences(self, rank: int, stage: int) -> list[tuple[str, str, int]]:
        found = []
        for item in moved(self._setup, stage):
            if item.operator in {"send", "recv"}:
                continue  # they are counted by peer, and every side counts its own
            entered = self._entered(item, rank)
            found.append((item.axis, item.operator, item.calls * self.step + entered))
        return found

    def _entered(self, item: Moved, rank: int) -> int:
        """Return how many of this step's calls a rank has made already."""
        if item.axis == "world":
            return 0
        if item.axis == "tensor":
            # The last one sums the norm.
            return int((item.calls - 1) * self._window) + self._enters_norm("tensor", rank)
        if item.axis == "pipeline":
            return self._enters_norm("pipeline", rank)
        if not self.is_hung:
            return int(item.calls * self._reduce)
        return item.calls // 3 if rank == self._setup.victim else item.calls

    def _enters_norm(self, axis: str, rank: int) -> int:
        if not self.is_hung:
            return int(self._reduce >= 1)
        return int(rank not in stuck_before(self._setup, axis))

    def _time(self, axis: str) -> float:
        """Return when the last collective of an axis was entered, roughly."""
        timeline, step = self._timeline, self.step
        if axis == "world":
            return timeline.end(step)
        if axis == "tensor" and 0 < self._window < 1:
            return self.seconds
        if axis == "data" and (0 < self._reduce < 1 or self.is_hung):
            return self.seconds
        if self.is_hung:
            return self.seconds
        is_over = self._reduce >= 1
        return timeline.reduce_end(step + 1 if is_over else step)


def newest(groups: tuple[GroupProgress, ...]) -> CollectiveInFlight | None:
    """Return the collective that a rank entered last, over all of its groups."""
    entered = [group for group in groups if group.time is not None and group.axis != "world"]
    if not entered:
        return None
    last = max(entered, key=lambda group: (group.time or 0.0, -AXES.index(group.axis)))
    return CollectiveInFlight(last.axis, last.operator or "", last.sequence, last.is_done)


@functools.lru_cache(maxsize=8)
def stuck_before(setup: Setup, axis: str) -> frozenset[int]:
    """Return the ranks that a hang keeps from summing the norm over an axis."""
    stuck = frozenset(setup.group("data", setup.victim))
    if axis == "pipeline" and setup.tensor > 1:
        stuck = stuck.union(*(setup.group("tensor", rank) for rank in stuck))
    return stuck
