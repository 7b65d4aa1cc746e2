"""The executor loses no time of its own: the measured bubble is that of the simulated schedule.

Chunks sleep, so that cores do not matter. What else runs on the machine makes a chunk late, never
early: of several steps each chunk's earliest start and end are taken, counted from the first start
of its step. What the executor itself costs is in every step, and so in these too.
"""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boltmesh.schedule_sim import Action, simulate
from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from tests.support.programs import order, programs
from tests.support.ranks import run_ranks

RANKS, MICROBATCHES = 4, 8
SECONDS = {"F": 0.02, "B": 0.04, "I": 0.02, "W": 0.02}
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
TOLERANCE = 0.03
EXCESS = 0.05
"""Of the step, that chunks of 20 ms may wait for anything but the schedule."""
TRIES = 12

Chunk = tuple[float, float]
"""Start and end, in s."""


class Weight(torch.autograd.Function):
    """Takes its time when a weight is differentiated."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SECONDS["W"])
        return grad


class Input(torch.autograd.Function):
    """Takes its time when an input is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SECONDS["F"])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SECONDS["I"])
        return grad


class SleepyStage:
    """A stage that costs what the simulator is told."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        # A matrix: vectors are differentiated with the inputs.
        self.weight = torch.ones(1, 8, requires_grad=True)

    def values_in(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self.is_first else (ValueSpec((8,), torch.float32, True, "activation"),)

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self.is_last else (ValueSpec((8,), torch.float32, True, "activation"),)

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The first stage has one of its own, which nobody receives a gradient of.
        x = received[0] if received else torch.ones(8, requires_grad=True)
        x = Input.apply(x) + Weight.apply(self.weight)[0]
        return (x.sum(),) if self.is_last else (x,)


def seconds(action: Action) -> float:
    """How long an action takes; the first stage has no inputs, so its second half is the whole."""
    if action.stage == 0 and action.kind in "IW":
        return SECONDS["B"] * (action.kind == "W")
    return SECONDS[action.kind]


def window(rows: Sequence[Sequence[Chunk]]) -> float:
    """From the first start to the last end."""
    starts = [start for row in rows for start, _ in row]
    return max(end for row in rows for _, end in row) - min(starts)


def bubble(rows: Sequence[Sequence[Chunk]]) -> float:
    """The share of the common window in which a rank does not compute, over all ranks."""
    busy = sum(end - start for row in rows for start, end in row)
    return 1 - busy / (len(rows) * window(rows))


def undisturbed(steps: Sequence[Sequence[Sequence[Chunk]]]) -> list[list[Chunk]]:
    """Return the earliest that each chunk of each rank was in any step, by step and rank given."""
    begins = [min(start for row in step for start, _ in row) for step in steps]
    shifted = [
        [[(start - begin, end - begin) for start, end in row] for row in step]
        for step, begin in zip(steps, begins, strict=True)
    ]
    return [
        [
            (min(start for start, _ in same), min(end for _, end in same))
            for same in zip(*rows, strict=True)
        ]
        for rows in zip(*shifted, strict=True)
    ]


def measure(rank: int, world_size: int, name: str) -> list[list[tuple[float, float]]]:
    """The chunks of each of some steps, in s."""
    steps: list[list[tuple[float, float]]] = []
    executor = PipelineRuntime(
        dist.new_group(list(range(world_size))),
        torch.device("cpu"),
        on_chunk=lambda *chunk: steps[-1].append((chunk[3] / 1e9, chunk[4] / 1e9)),
    )
    program = programs(name, world_size, MICROBATCHES)[rank]
    num_stages = len(program.rank_of_stage)
    stages = [SleepyStage(index, num_stages) for index in program.stages]
    for _ in range(TRIES):
        steps.append([])
        dist.barrier()
        executor.run(program, stages)
    executor.close()
    return steps


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_that_of_the_schedule(name: str) -> None:
    rows = tuple(map(tuple, order(name, RANKS, MICROBATCHES)))
    timetable = simulate(rows, seconds)
    wanted = [[(slot.start, slot.end) for slot in row] for row in timetable]
    by_rank = run_ranks(measure, RANKS, name)
    measured = undisturbed([[steps[number] for steps in by_rank] for number in range(TRIES)])
    assert abs(bubble(measured) - bubble(wanted)) < TOLERANCE
    # Sleeps are longer than they are asked to be, which is none of the executor's doing.
    chunks = {
        slot.action: end - start
        for planned, row in zip(timetable, measured, strict=True)
        for slot, (start, end) in zip(planned, row, strict=True)
    }
    slept = simulate(rows, lambda action: chunks[action])
    least = window([[(slot.start, slot.end) for slot in row] for row in slept])
    assert window(measured) - least < EXCESS * least
