"""Steps that leave backward passes to the next one: nothing is lost, mixed up or told wrongly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boltmesh.errors import PipelineError
from boltmesh.schedule_sim import actions, peaks_by_stage
from boltmesh.strategies.pipeline.options import PipelineOptions
from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.schedules.actions import RankPrograms
from tests.support.ranks import run_ranks
from tests.support.stages import Piece, PieceStage, whole_model

pytestmark = pytest.mark.ranks

BATCHES = ((3, 1, 4, 2, 2, 3), (3, 1, 4, 2, 2, 3), (2, 5), (1,), (4, 3, 2, 1, 1, 2, 3, 1))
"""Rows of the microbatches of one batch after the other."""


class Told:
    """What the executor tells of one step."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, str, int]] = []
        self.peaks: dict[int, int] = {}

    def chunk(self, stage: int, microbatch: int, kind: str, start: int, end: int) -> None:
        self.chunks.append((stage, kind, microbatch))


def begin(rank: int, world_size: int) -> tuple[Told, PipelineRuntime, RankPrograms]:
    told = Told()
    executor = PipelineRuntime(
        dist.new_group(list(range(world_size))),
        torch.device("cpu"),
        on_chunk=told.chunk,
        on_peak=lambda peaks: told.peaks.update(peaks),
    )
    options = PipelineOptions(schedule="pipedream_2bw", microbatches=6)
    return told, executor, RankPrograms(options, world_size, rank)


def train(rank: int, world_size: int) -> dict[str, float]:
    told, executor, programs = begin(rank, world_size)
    piece = Piece(rank, world_size)
    before = 0
    for number, sizes in enumerate(BATCHES):
        told.chunks.clear()
        stage = PieceStage(piece, sizes)
        program = programs.asynchronous(before, len(sizes))
        outcome = executor.run(program, [stage])
        before = len(sizes)
        if number == 1:  # as it is drawn and told to who watches
            order = programs.order(before)
            assert told.chunks == [(stage, kind, at) for stage, kind, at in actions(order)[rank]]
            assert told.peaks == {rank: peaks_by_stage(order)[rank]}
        # Runs without backward passes may come between.
        executor.run(program.forward_only, [stage])
        if rank == world_size - 1:
            assert sorted(outcome.outputs) == list(range(before))
    executor.run(programs.asynchronous(before, 0), [])
    executor.close()
    wanted: dict[str, Tensor] = {}
    for sizes in BATCHES:
        for key, parameter in whole_model(world_size, sizes, 1)[rank].named_parameters():
            if parameter.grad is not None:
                wanted[key] = wanted.get(key, torch.zeros_like(parameter)) + parameter.grad
    made = {key: each.grad for key, each in piece.named_parameters() if each.grad is not None}
    assert made.keys() == wanted.keys()
    return {key: float((made[key] - each).abs().max()) for key, each in wanted.items()}


@pytest.mark.sample("1")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batches_of_any_size_follow_each_other(world_size: int) -> None:
    for differences in run_ranks(train, world_size):
        assert len(differences) >= 4
        assert max(differences.values()) < 1e-9, differences


class Failing(torch.autograd.Function):
    """Fails when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


class FailingStage(PieceStage):
    """Whose last microbatch cannot be differentiated."""

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made = super().forward(microbatch, received)
        return (Failing.apply(made[0]), *made[1:]) if microbatch == 5 else made


def fail(rank: int, world_size: int) -> str:
    _, executor, programs = begin(rank, world_size)
    piece = Piece(rank, world_size)
    kind = FailingStage if rank == 1 else PieceStage
    executor.run(programs.asynchronous(0, 6), [kind(piece, BATCHES[0])])
    with pytest.raises(PipelineError) as caught:
        executor.run(programs.asynchronous(6, 6), [PieceStage(piece, BATCHES[0])])
    # It begins anew, with nothing left of what was under way.
    executor.run(programs.asynchronous(0, 6), [PieceStage(piece, BATCHES[0])])
    executor.run(programs.asynchronous(6, 0), [])
    executor.close()
    return str(caught.value)


@pytest.mark.full
def test_a_failure_in_what_was_left_names_its_batch() -> None:
    for said in run_ranks(fail, 2):
        assert (
            "Stage 1 on rank 1 failed in the backward pass of microbatch 5 of the batch before"
            in said
        )
        assert "no gradient today" in said
