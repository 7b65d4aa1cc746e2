"""SIGTERM to one rank of a pipeline: all of them leave before the same batch, and ask no group."""

import os
import signal
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

TOLD_AT, STEPS = 3, 8


class Told(Callback):
    """Receives the signal in the middle of a batch, on one rank."""

    def __init__(self, rank: int, calls: list[int]) -> None:
        self.rank = rank
        self.calls = calls

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 0:
            self.calls.clear()  # of the setup

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == TOLD_AT and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def train(rank: int, world_size: int, told: int) -> tuple[int, int]:
    warnings.simplefilter("ignore")
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=PipelineParallelStrategy(microbatches=4),
        max_steps=STEPS, callbacks=[Told(told, calls)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    dist.all_reduce = counted
    try:
        trainer.fit(Stack(depth=4), token_data(8 * STEPS, 8))
    except SIGTERMException:
        return trainer.global_step, len(calls)
    return -1, len(calls)


@pytest.mark.ranks
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_rank_ends_all_before_the_same_batch(told: int) -> None:
    # It comes before the optimizer's step of a batch, behind what ranks tell each other at the end
    # of its passes: so the next batch tells it, and none follows that.
    assert run_ranks(train, 2, told) == [(TOLD_AT + 2, 0)] * 2
