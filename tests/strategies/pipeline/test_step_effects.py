"""What ``training_step`` sets on the Trainer and in optimizers is set as in one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import reuse_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks


class Guarded(Stack):
    """Ends the run at a loss that is no number, which no batch has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if torch.isnan(loss):
            self.trainer.should_stop = True
            self.trainer.fit_loop.max_epochs = 0
        return loss


def guarded(rank: int, world_size: int) -> tuple[int, bool]:
    seed_everything(1, verbose=False)
    trainer = quiet_trainer(world_size, pipeline(), max_epochs=2)
    trainer.fit(Guarded(depth=4), token_data(24, 8))
    return trainer.global_step, trainer.should_stop


def test_a_branch_that_no_batch_takes_does_not_end_the_run() -> None:
    assert reuse_ranks(guarded, 2) == [(6, False)] * 2
