"""With activation checkpointing every strategy computes what one process computes without."""

from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn

from boltmesh.check.differences import Trace, find_differences
from boltmesh.check.parity import Problem, trace_layout, trace_one_process
from boltmesh.strategies import DDPStrategy, ZeROStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.shard_runs import QUIET
from tests.support.stack import Block, Stack, token_data

pytestmark = pytest.mark.ranks

HOST: dict[str, Any] = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "zero2": partial(ZeROStrategy, stage=2),
    "zero3, offloaded, tiled": partial(ZeROStrategy, tile_linear_bytes=4096, **HOST),
    "1f1b": partial(PipelineParallelStrategy, microbatches=4),
    "interleaved": partial(PipelineParallelStrategy, microbatches=4, schedule="interleaved_1f1b"),
}


def problem() -> Problem:
    return Problem(
        module=partial(Stack, depth=4, width=33, hidden=40, ties=True),
        train=partial(token_data, 64, 8),
        validation=partial(token_data, 21, 8),
        steps=3,
        accumulate=2,
        trainer={"accelerator": "cpu", "gradient_clip_val": 0.5},
    )


def one_process(rank: int, world_size: int, data_size: int) -> Trace:
    return trace_one_process(problem(), data_size=data_size, is_dealt=data_size > 1)


def layouts(rank: int, world_size: int, name: str) -> list[tuple[Trace, int]]:
    """Traces, and how often blocks ran: without checkpointing, full and selective."""
    runs = 0
    forward = Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return forward(self, x)

    Block.forward = counted
    found = []
    for kind in (None, "full", "selective"):
        runs = 0
        strategy = STRATEGIES[name](telemetry=False, activation_checkpointing=kind)
        trace = trace_layout(problem(), strategy, devices=world_size)
        found.append((trace, runs))
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_checkpointed_blocks_equal_one_process(name: str) -> None:
    is_pipeline = name in {"1f1b", "interleaved"}
    reference = run_ranks(one_process, 1, 1 if is_pipeline else 2)[0]
    assert reference.losses[-1] != reference.losses[0]
    for (plain, once), *others in run_ranks(layouts, 2, name):
        assert [str(each) for each in find_differences(reference, plain)] == []
        for trace, runs in others:
            assert [str(each) for each in find_differences(reference, trace)] == []
            assert runs > 1.4 * once


class DropBlock(Block):
    def __init__(self) -> None:
        super().__init__(16, 24)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(self.drop(x)))


class Dropping(Stack):
    """Random masks inside of blocks and between them."""

    def __init__(self) -> None:
        super().__init__(depth=4, width=16)
        self.blocks = nn.ModuleList(DropBlock() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        return self.head(self.norm(x))


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def drop(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for kind in (None, "full", "selective"):
        seed_everything(1, verbose=False)
        losses = Losses()
        strategy = PipelineParallelStrategy(
            telemetry=False, microbatches=2, activation_checkpointing=kind
        )
        trainer = Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1,
            callbacks=[losses], **QUIET,
        )  # fmt: skip
        trainer.fit(Dropping(), token_data(40, 8))
        found.append(losses.seen)
    return found


@pytest.mark.full
def test_dropout_of_a_pipeline_is_the_same_with_checkpointing() -> None:
    for plain, full, selective in run_ranks(drop, 2):
        assert len(set(plain)) == 5
        assert full == plain
        assert selective == plain
