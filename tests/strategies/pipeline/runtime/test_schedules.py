"""Every schedule gives the gradients of one process."""

import pytest
import torch
import torch.distributed as dist

from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from tests.support.programs import NAMES, programs
from tests.support.ranks import run_ranks
from tests.support.stages import Piece, PieceStage, first_values, whole_model

SIZES = (3, 1, 4, 2, 2, 3, 1, 2)


def train(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Two runs on top of each other and one after; the largest difference of each gradient."""
    group = dist.new_group(list(range(world_size)))
    executor = PipelineRuntime(group, torch.device("cpu"))
    found = {}
    for name in names:
        program = programs(name, world_size, len(SIZES))[rank]
        num_stages = len(program.rank_of_stage)
        pieces = {index: Piece(index, num_stages) for index in program.stages}
        stages = [PieceStage(piece, SIZES) for piece in pieces.values()]
        differences: dict[str, float] = {}
        for times in (2, 1):
            for piece in pieces.values():
                piece.zero_grad()
            for _ in range(times):
                outcome = executor.run(program, stages)
            wanted = whole_model(num_stages, SIZES, times)
            for index, piece in pieces.items():
                for key, parameter in piece.named_parameters():
                    other = wanted[index].get_parameter(key).grad
                    mine = parameter.grad
                    assert (mine is None) == (other is None), (name, index, key)
                    if mine is not None and other is not None:
                        difference = float((mine - other).abs().max())
                        differences[f"{times} {index} {key}"] = difference
        if num_stages - 1 in pieces:
            assert sorted(outcome.outputs) == list(range(len(SIZES)))
            assert not any(each.requires_grad for (each,) in outcome.outputs.values())
        found[name] = differences
    executor.close()
    return found


@pytest.mark.sample("4")
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_one_process(world_size: int) -> None:
    for per_rank in run_ranks(train, world_size, NAMES):
        assert set(per_rank) == set(NAMES)
        for name, differences in per_rank.items():
            assert len(differences) >= 12
            worst = max(differences, key=lambda key: differences[key])
            assert differences[worst] < 1e-9, (name, worst, differences[worst])


def validate(rank: int, world_size: int) -> dict[int, float]:
    group = dist.new_group(list(range(world_size)))
    executor = PipelineRuntime(group, torch.device("cpu"))
    losses: dict[int, float] = {}
    for name in NAMES:
        program = programs(name, world_size, len(SIZES))[rank].forward_only
        num_stages = len(program.rank_of_stage)
        stages = [PieceStage(Piece(index, num_stages), SIZES) for index in program.stages]
        with torch.inference_mode():
            outcome = executor.run(program, stages)
        assert not any(outcome.peak_live.values())
        if num_stages == 2 * world_size:
            losses |= {key: float(value) for key, (value,) in outcome.outputs.items()}
    executor.close()
    return losses


@pytest.mark.full
@pytest.mark.ranks
def test_a_run_without_backward_gives_the_outputs_of_the_last_stage() -> None:
    found = [each for each in run_ranks(validate, 2) if each]
    pieces = [Piece(index, 4) for index in range(4)]
    with torch.no_grad():
        for microbatch, size in enumerate(SIZES):
            values = first_values(size, microbatch)
            for piece in pieces:
                values = piece(values)
            loss = float(pieces[-1].loss(values))
            for losses in found:
                assert losses[microbatch] == pytest.approx(loss, rel=1e-12)


def test_one_rank_alone_needs_no_group() -> None:
    program = programs("zbv", 1, 3)[0]
    stages = [PieceStage(Piece(index, 2), SIZES) for index in program.stages]
    executor = PipelineRuntime(None, torch.device("cpu"))
    executor.run(program, stages)
    executor.close()
    for mine, other in zip(stages, whole_model(2, SIZES[:3], 1), strict=True):
        for key, parameter in mine.piece.named_parameters():
            wanted = other.get_parameter(key).grad
            if wanted is not None:
                torch.testing.assert_close(parameter.grad, wanted)
