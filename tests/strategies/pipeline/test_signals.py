"""SIGTERM to one rank of a pipeline: all of them leave before the same batch, and ask no group."""

import os
import signal
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from boltmesh.strategies.pipeline.step_report import NUM_SIGNALS, SharedSignals
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


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_rank_ends_all_before_the_same_batch(told: int) -> None:
    # It comes before the optimizer's step of a batch, behind what ranks tell each other at the end
    # of its passes: so the next batch tells it, and none follows that.
    assert run_ranks(train, 2, told) == [(TOLD_AT + 2, 0)] * 2


def rows_of(*rows: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_what_any_rank_heard_in_any_run_is_kept_until_it_is_taken() -> None:
    signals = SharedSignals()
    signals.receive(rows_of((0, 0), (1, 0), (0, 0)))
    signals.receive(rows_of((0, 0), (0, 10), (0, 12)))
    signals.receive(rows_of((0, 0), (0, 0), (0, 0)))
    assert signals.take_received() == (1, 12)
    assert signals.take_received() == (0, 0)


def test_a_rank_tells_what_it_was_told_until_the_run_is_closed() -> None:
    signals = SharedSignals()
    assert signals.row().tolist() == [0, 0]
    signals.own = lambda: (1, 10)
    assert signals.row().tolist() == [1, 10]
    assert len(signals.row()) == NUM_SIGNALS
    signals.receive(rows_of((1, 10)))
    signals.forget()
    assert signals.row().tolist() == [0, 0]
    assert signals.take_received() == (0, 0)
