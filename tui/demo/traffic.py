"""Bytes that the demo's ranks send, by the formulas of the layout, and how far each rank is.

The layout is DDP on the data axis, column and row splits of attention and MLP on the tensor axis
with vocabulary-parallel embedding and loss, and 1F1B on the pipeline axis. Gradients are clipped by
their norm, which is summed over the tensor and the pipeline axis.

A hang spreads: the peers of the missing rank on the data axis wait in the all-reduce of the
gradients, the tensor peers of those in the sum of the norm, and so do all other stages after them.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from boltmesh.axes import ALL_AXES
from boltmesh.telemetry.snapshot import (
    Chunk,
    CollectiveInFlight,
    CollectiveTotal,
    GroupProgress,
    PeerTotal,
)
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.demo.model import CHOICES, activation_bytes, gradient_bytes, num_buckets
from boltmesh.tui.demo.setup import TOKENS_PER_SAMPLE, Membership, Setup, Timeline

STEPS_BEFORE_A_MEAN = 3
_NORM_BYTES = 4


class Moved(NamedTuple):
    """One operator on one axis in one step of one rank."""

    axis: str
    operator: str
    calls: int
    payload_bytes: int


@functools.lru_cache(maxsize=64)
def moved(setup: Setup, stage: int) -> tuple[Moved, ...]:
    """Return the bytes that one rank of a stage moves in a step; an axis of one rank moves none."""
    found = []
    if setup.pipeline > 1:
        activation, count = activation_bytes(setup), setup.num_microbatches
        boundaries_after, boundaries_before = int(stage < setup.pipeline - 1), int(stage > 0)
        # Activations go to the next stage and gradients come back, and the other way round.
        calls = count * (boundaries_after + boundaries_before)
        found += [
            Moved("pipeline", "send", calls, calls * activation),
            Moved("pipeline", "recv", calls, calls * activation),
            Moved("pipeline", "allreduce", 1, _NORM_BYTES),
        ]
    if setup.data > 1:
        buckets, size = num_buckets(setup, stage), gradient_bytes(setup, stage)
        found.append(Moved("data", "allreduce", buckets, size))
    if setup.tensor > 1:
        calls, size = _tensor_allreduces(setup, stage)
        found.append(Moved("tensor", "allreduce", calls + 1, size + _NORM_BYTES))
    if setup.context > 1:
        # Keys and values of all positions in each layer; their gradients go back.
        size, calls = 2 * activation_bytes(setup), setup.layers(stage)
        found.append(Moved("context", "_allgather_base", calls, calls * size))
        found.append(Moved("context", "_reduce_scatter_base", calls, calls * size))
    if setup.scenario == "experts":
        # Rows go to their experts and back, forward and backward.
        size, calls = CHOICES * activation_bytes(setup) // setup.context, 4 * setup.layers(stage)
        found.append(Moved("expert", "alltoall_base", calls, calls * size))
    found.append(Moved("world", "broadcast", 1, 8))
    return tuple(found)


def _tensor_allreduces(setup: Setup, stage: int) -> tuple[int, int]:
    """Return calls and bytes of one step: two pairs of splits a layer, forward and backward."""
    count, activation = setup.num_microbatches, activation_bytes(setup)
    calls, size = 4 * setup.layers(stage), 4 * setup.layers(stage) * activation
    if stage == 0:  # the embedding, split by rows
        calls, size = calls + 1, size + activation
    if stage == setup.pipeline - 1:  # the head, split by columns, with a parallel loss
        rows = setup.microbatch_size * TOKENS_PER_SAMPLE
        calls, size = calls + 4, size + activation + 3 * 4 * rows
    return count * calls, count * size


_OVER_BOUNDARIES = "an activation or its gradient per boundary and microbatch, mean of ranks"

_WHY = {
    ("pipeline", "send"): _OVER_BOUNDARIES,
    ("pipeline", "recv"): _OVER_BOUNDARIES,
    ("pipeline", "allreduce"): "norm of the gradients, once",
    ("data", "allreduce"): "gradients of all trainable parameters of the stage, once",
    ("tensor", "allreduce"): "4 activations a layer and microbatch, embedding, head, norm",
    ("context", "_allgather_base"): "keys and values of all positions, once a layer",
    ("context", "_reduce_scatter_base"): "gradients of keys and values, once a layer",
    ("expert", "alltoall_base"): "rows to the ranks of their experts and back, in both passes",
}


@functools.lru_cache(maxsize=8)
def expected(setup: Setup) -> tuple[ExpectedTraffic, ...]:
    """Return the expected traffic: the mean over the stages, which have equally many ranks."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for stage in range(setup.pipeline):
        for item in moved(setup, stage):
            calls, size = sums.get(item[:2], (0, 0))
            sums[item[:2]] = (calls + item.calls, size + item.payload_bytes)
    return tuple(
        ExpectedTraffic(
            axis=axis,
            operator=operator,
            payload_bytes=size / setup.pipeline,
            calls=calls / setup.pipeline,
            why=_WHY[axis, operator],
        )
        for (axis, operator), (calls, size) in sums.items()
        if (axis, operator) in _WHY
    )


def collectives(
    setup: Setup, stage: int, step: int, groups: Mapping[str, Membership]
) -> tuple[CollectiveTotal, ...]:
    """Return the counts of a rank in ``groups``; NCCL does not report when an operator ended."""
    is_early = step < STEPS_BEFORE_A_MEAN
    return tuple(
        CollectiveTotal(
            axis=item.axis,
            group=groups[item.axis].group,
            operator=item.operator,
            calls=item.calls * step,
            payload_bytes=item.payload_bytes * step,
            calls_per_step=None if is_early else float(item.calls),
            bytes_per_step=None if is_early else float(item.payload_bytes),
            seconds_per_step=None,
        )
        for item in moved(setup, stage)
    )


def peers(setup: Setup, rank: int, step: int) -> tuple[PeerTotal, ...]:
    """Return the messages between a rank and those of the neighbouring stages."""
    place = setup.place(rank)
    stage = place["pipeline"]
    calls = setup.num_microbatches
    size = calls * activation_bytes(setup)
    return tuple(
        PeerTotal(
            axis="pipeline",
            operator=operator,
            peer=setup.rank_at({**place, "pipeline": other}),
            calls=calls * step,
            payload_bytes=size * step,
            bytes_per_step=None if step < STEPS_BEFORE_A_MEAN else float(size),
        )
        for other in (stage - 1, stage + 1)
        if 0 <= other < setup.pipeline
        for operator in ("send", "recv")
    )


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
        if item.axis in {"context", "expert"}:
            return int(item.calls * self._window)
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
        if axis not in {"pipeline", "data"} and 0 < self._window < 1:
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
    last = max(entered, key=lambda group: (group.time or 0.0, -ALL_AXES.index(group.axis)))
    return CollectiveInFlight(last.axis, last.operator or "", last.sequence, last.is_done)


@functools.lru_cache(maxsize=8)
def stuck_before(setup: Setup, axis: str) -> frozenset[int]:
    """Return the ranks that a hang keeps from summing the norm over an axis."""
    stuck = frozenset(setup.group("data", setup.victim))
    if axis == "pipeline" and setup.tensor > 1:
        stuck = stuck.union(*(setup.group("tensor", rank) for rank in stuck))
    return stuck
