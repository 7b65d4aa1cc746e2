"""What the ranks send each other, by the byte formulas of the layout; the demo keeps to them.

The layout is DDP on the data axis, column and row splits of attention and MLP on the tensor axis
with vocabulary-parallel embedding and loss, and 1F1B on the pipeline axis. Gradients are clipped by
their norm, which is summed over the tensor and the pipeline axis.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from boltmesh.telemetry.snapshot import CollectiveTotal, PeerTotal
from boltmesh.telemetry.traffic import ExpectedTraffic
from boltmesh.tui.demo.model import activation_bytes, gradient_bytes, num_buckets
from boltmesh.tui.demo.setup import TOKENS_PER_SAMPLE, Membership, Setup

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
    """Return what one rank of a stage moves in a step; an axis of one rank moves nothing."""
    found = []
    if setup.pipeline > 1:
        activation, count = activation_bytes(setup), setup.num_microbatches
        borders_after, borders_before = int(stage < setup.pipeline - 1), int(stage > 0)
        # Activations go to the next stage and gradients come back, and the other way round.
        calls = count * (borders_after + borders_before)
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


_WHY = {
    ("pipeline", "send"): "an activation or its gradient per border and microbatch, mean of ranks",
    ("pipeline", "recv"): "an activation or its gradient per border and microbatch, mean of ranks",
    ("pipeline", "allreduce"): "norm of the gradients, once",
    ("data", "allreduce"): "gradients of all trainable parameters of the stage, once",
    ("tensor", "allreduce"): "4 activations a layer and microbatch, embedding, head, norm",
}


@functools.lru_cache(maxsize=8)
def expected(setup: Setup) -> tuple[ExpectedTraffic, ...]:
    """Return what the strategy states: the mean over the stages, whose ranks are equally many."""
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
    """Return what a rank in ``groups`` has counted; NCCL does not tell when an operator ended."""
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
    """Return what a rank exchanged with the stages beside its own."""
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
