"""A step that fails on one rank fails on all, in seconds and with the cause."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from boltmesh.errors import BoltMeshError, PipelineError
from boltmesh.failure_board import Deadline, FailureBoard
from boltmesh.strategies.pipeline.runtime.handshake import RowExchange
from boltmesh.strategies.pipeline.runtime.p2p import HostMessages
from boltmesh.strategies.pipeline.runtime.runtime import PipelineRuntime
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from tests.support.programs import programs
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stages import Piece, PieceStage, whole_model

SIZES = (3, 1, 4, 2, 2, 3)
SECONDS = 30.0
"""However busy the machine is; the ranks of these tests wait a minute for each other."""


class Raise(torch.autograd.Function):
    """Fails when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no way back")


class Broken(PieceStage):
    """Does something else in one microbatch."""

    def __init__(self, piece: Piece, sizes: tuple[int, ...], how: str, at: int) -> None:
        super().__init__(piece, sizes)
        self.how, self.at = how, at

    def values_out(self, microbatch: int) -> tuple[ValueSpec, ...]:
        if self.how == "specs" and microbatch == self.at:
            raise KeyError("nobody knows")
        return super().values_out(microbatch)

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if microbatch != self.at:
            return super().forward(microbatch, received)
        if self.how == "die":
            os._exit(7)
        if self.how == "sleep":
            time.sleep(60)
        if self.how == "module":
            self.piece.linear.register_forward_pre_hook(lambda *_: (torch.ones(1, 99),))
        values = super().forward(microbatch, received)
        if self.how == "backward":
            return (Raise.apply(values[0]), *values[1:])
        if self.how == "shape":
            return (values[0][:, :-1], *values[1:])
        if self.how == "dtype":
            return (*values[:6], values[6].float(), values[7])
        if self.how == "count":
            return values[:-1]
        if self.how == "gradient":
            return (values[0], nn.Parameter(values[1]), *values[2:])
        return values


def attempt(executor: PipelineRuntime, program: Any, stages: list[PieceStage]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        executor.run(program, stages)
    except PipelineError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def fail_and_go_on(
    rank: int, world_size: int, name: str, cases: list[tuple[str, int, int]]
) -> list[tuple[str, float]]:
    """Run each case, and after it a step that has to be right."""
    executor = PipelineRuntime(
        dist.new_group(list(range(world_size))),
        torch.device("cpu"),
        name_of=lambda module: f"the.{type(module).__name__.lower()}",
    )
    program = programs(name, world_size, len(SIZES))[rank]
    num_stages = len(program.rank_of_stage)
    said = []
    for how, stage, at in cases:
        pieces = [Piece(index, num_stages) for index in program.stages]
        stages = [
            Broken(piece, SIZES, how, at) if piece.index == stage else PieceStage(piece, SIZES)
            for piece in pieces
        ]
        said.append(attempt(executor, program, stages))
        pieces = [Piece(index, num_stages) for index in program.stages]
        assert attempt(executor, program, [PieceStage(each, SIZES) for each in pieces])[0] == ""
        for mine, other in zip(whole_model(num_stages, SIZES, 1), range(num_stages), strict=True):
            for piece in pieces:
                if piece.index == other:
                    torch.testing.assert_close(piece.twice.grad, mine.twice.grad)
    executor.close()
    return said


WANTED: dict[tuple[str, int, int], tuple[str, ...]] = {
    ("module", 0, 0): ("Stage 0 on rank 0", "forward pass of microbatch 0", "(Linear)"),
    ("module", 2, 3): ("Stage 2 on rank", "forward pass of microbatch 3", "'the.linear' (Linear)"),
    ("module", 3, 5): ("Stage 3 on rank", "forward pass of microbatch 5", "RuntimeError: mat1"),
    ("backward", 1, 2): ("Stage 1 on rank", "of microbatch 2", "ValueError: no way back"),
    # Nobody waits for this rank any more: it is the last thing that happens in the step.
    ("backward", 0, 5): ("Stage 0 on rank 0", "of microbatch 5", "ValueError: no way back"),
    ("shape", 1, 1): (
        "activation of piece 1 as float64 (6, 0)",
        "from stage 1 to stage 2, in microbatch 1",
        "awaits float64 (6, 1)",
    ),
    ("dtype", 0, 4): ("number of piece 0 as float32 ()", "awaits int64 ()"),
    ("count", 1, 0): ("Stage 1 gave 7 values", "awaits 8"),
    ("gradient", 2, 2): ("skip of piece 2 with a gradient", "would be lost"),
    ("specs", 1, 3): ("KeyError: 'nobody knows'",),
}


@pytest.mark.sample("zbv-2")
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "world_size"), [("1f1b", 4), ("zbv", 2)])
def test_all_ranks_say_what_failed_where_and_can_go_on(name: str, world_size: int) -> None:
    cases = list(WANTED)
    told = run_ranks(fail_and_go_on, world_size, name, cases)
    for number, case in enumerate(cases):
        texts = {said[number][0] for said in told}
        assert len(texts) == 1, (case, texts)
        text = texts.pop()
        for part in WANTED[case]:
            assert part in text, (case, text)
        assert max(said[number][1] for said in told) < SECONDS, case


def fail_twice(rank: int, world_size: int) -> list[str]:
    texts = []
    for how in ("backward", "specs"):
        executor = PipelineRuntime(dist.new_group([rank]), torch.device("cpu"))
        program = programs("1f1b", 1, 2)[0]
        texts.append(attempt(executor, program, [Broken(Piece(0, 1), (1, 2), how, 0)])[0])
        executor.close()
    return texts


@pytest.mark.ranks
def test_a_run_of_a_single_rank_does_not_read_why_the_one_before_failed() -> None:
    first, second = run_ranks(fail_twice, 1)[0]
    assert "no way back" in first
    assert "nobody knows" in second


def meet_with_other_batches(rank: int, world_size: int, differ: Callable[[int], Any]) -> str:
    executor = PipelineRuntime(dist.new_group(list(range(world_size))), torch.device("cpu"))
    sizes = differ(rank)
    program = programs("1f1b", world_size, len(sizes))[rank]
    text, seconds = attempt(executor, program, [PieceStage(Piece(rank, world_size), sizes)])
    assert seconds < SECONDS
    sizes = (1, 2)
    program = programs("1f1b", world_size, len(sizes))[rank]
    assert attempt(executor, program, [PieceStage(Piece(rank, world_size), sizes)])[0] == ""
    executor.close()
    return text


def other_sizes(rank: int) -> tuple[int, ...]:
    return (2, 3, 2) if rank < 2 else (2, 4, 2)


def other_numbers(rank: int) -> tuple[int, ...]:
    return (2, 3) if rank == 0 else (2, 3, 2)


@pytest.mark.ranks
def test_ranks_with_other_batches_are_told_before_anything_is_sent() -> None:
    texts = run_ranks(meet_with_other_batches, 3, other_sizes)
    assert len(set(texts)) == 1
    assert "In microbatch 1 stage 1 on rank 1 sends float64 (6, 3)" in texts[0]
    assert "stage 2 on rank 2 expects float64 (6, 4)" in texts[0]
    assert "same batch" in texts[0]


@pytest.mark.full
@pytest.mark.ranks
def test_ranks_with_other_numbers_of_microbatches_are_told() -> None:
    texts = run_ranks(meet_with_other_batches, 2, other_numbers)
    assert len(set(texts)) == 1
    assert "In microbatch 2 stage 0 on rank 0 sends no such microbatch" in texts[0]


class Scribbler(PieceStage):
    """Gives a tensor of its own, and writes into it in the next microbatch."""

    def __init__(self, piece: Piece, sizes: tuple[int, ...]) -> None:
        super().__init__(piece, sizes)
        self.number = torch.tensor(0)

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = super().forward(microbatch, received)
        self.number += 1
        return values if self.is_last else (*values[:6], self.number, values[7])


def scribble(rank: int, world_size: int) -> str:
    executor = PipelineRuntime(dist.new_group(list(range(world_size))), torch.device("cpu"))
    program = programs("gpipe", world_size, len(SIZES))[rank]
    text, _ = attempt(executor, program, [Scribbler(Piece(rank, world_size), SIZES)])
    executor.close()
    return text


@pytest.mark.ranks
def test_a_value_that_is_written_while_it_is_sent_is_refused() -> None:
    for text in run_ranks(scribble, 2):
        assert "sending number of piece 0 while it was changed in place" in text
        assert ".clone()" in text


def lose(rank: int, world_size: int, folder: str) -> None:
    executor = PipelineRuntime(dist.new_group(list(range(world_size))), torch.device("cpu"))
    program = programs("1f1b", world_size, len(SIZES))[rank]
    piece = Piece(rank, world_size)
    stage = Broken(piece, SIZES, "die", 1) if rank == 2 else PieceStage(piece, SIZES)
    text, seconds = attempt(executor, program, [stage])
    Path(folder, str(rank)).write_text(f"{seconds} {text}")


@pytest.mark.ranks
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 2: died with exit code 7"):
        run_ranks(lose, 4, str(tmp_path), grace_s=SECONDS)
    for rank in (0, 1, 3):
        seconds, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert float(seconds) < SECONDS
        assert re.search(r"Stage [13] waited for the (values|gradients) of microbatch \d", text)
        assert "from pipeline rank 2, which is gone" in text


def exchange_with_a_dead_rank(rank: int, world_size: int, folder: str) -> None:
    assert dist.group.WORLD is not None
    exchange = RowExchange(dist.group.WORLD, 1, torch.int64, tag=0)
    dist.barrier()
    if rank == 1:
        os._exit(7)
    messages = HostMessages(dist.group.WORLD)
    with contextlib.suppress(RuntimeError):  # until gloo has noticed
        while True:
            messages.send(torch.zeros(1), 1, tag=1)
            time.sleep(0.01)
    exchange.send(torch.tensor([10 + rank]))
    with pytest.raises(RuntimeError):
        exchange.recv(Deadline(None))
    if rank == 2:
        Path(folder, "row").write_text(str(exchange._rows[0].item()))


@pytest.mark.ranks
def test_a_row_reaches_the_ranks_behind_one_that_is_gone(tmp_path: Path) -> None:
    """Where only some have noticed, the others waited for their rows until they were ended."""
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        run_ranks(exchange_with_a_dead_rank, 3, str(tmp_path), grace_s=SECONDS)
    assert (tmp_path / "row").read_text() == "10"


TIMEOUT_S = 20.0


def wait_in_vain(rank: int, world_size: int, folder: str, where: str) -> None:
    """Run a step in which one rank falls asleep, before it or in its second microbatch."""
    timeout = timedelta(seconds=TIMEOUT_S)
    group = dist.new_group(list(range(world_size)), timeout)
    executor = PipelineRuntime(group, torch.device("cpu"), timeout=timeout)
    dist.barrier()
    if rank == 1 and where == "before":
        time.sleep(60)
    program = programs("1f1b", world_size, len(SIZES))[rank]
    piece = Piece(rank, world_size)
    stage = Broken(piece, SIZES, "sleep", 1) if rank == 1 else PieceStage(piece, SIZES)
    text, seconds = attempt(executor, program, [stage])
    Path(folder, str(rank)).write_text(f"{seconds} {text}")
    while sum(each.stat().st_size > 0 for each in Path(folder).iterdir()) < world_size - 1:
        time.sleep(0.1)  # the others do not hear of it by the end of this one
    os._exit(3)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("where", ["before", "within"])
def test_a_rank_that_hangs_is_waited_for_once(tmp_path: Path, where: str) -> None:
    with pytest.raises(RankFailure, match="exit code 3"):
        run_ranks(wait_in_vain, 4, str(tmp_path), where, grace_s=0.5)
    waited = []
    for rank in (0, 2, 3):
        seconds, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        waited.append(float(seconds))
        assert "Timed out" in text
    assert TIMEOUT_S <= max(waited) < 2 * TIMEOUT_S, waited


def hang(rank: int, world_size: int, folder: str) -> None:
    def note(error: BoltMeshError) -> None:
        Path(folder, str(rank)).write_text(str(error))

    executor = PipelineRuntime(
        dist.new_group(list(range(world_size))), torch.device("cpu"), on_stuck=note
    )
    executor._board.grace_s = 0.5
    if rank == 1:
        executor._board.post("The device of rank 1 is broken")
        time.sleep(60)
    executor.run(programs("1f1b", 2, 2)[0], [PieceStage(Piece(0, 2), (1, 1))])


@pytest.mark.full
@pytest.mark.ranks
def test_a_rank_that_nothing_reaches_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0: died with exit code 1"):
        run_ranks(hang, 2, str(tmp_path), grace_s=0.5)
    assert (tmp_path / "0").read_text() == "The device of rank 1 is broken"


def test_a_closed_board_leaves_no_thread() -> None:
    board = FailureBoard(0, "alone")
    for _ in range(3):
        before = set(threading.enumerate())
        with board.monitoring():
            assert set(threading.enumerate()) - before
        board.close()
        assert not set(threading.enumerate()) - before
