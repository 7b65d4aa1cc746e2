"""A run of a pipeline that draws random numbers goes on to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from typing_extensions import override

from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Block, Stack, token_data

pytestmark = pytest.mark.ranks


class Dropping(Stack):
    """Draws in its layers, between them, and on the host."""

    def __init__(self) -> None:
        super().__init__(depth=4, ties=True)
        self.dropout = nn.Dropout(0.3)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm = nn.Sequential(block.norm, nn.Dropout(0.3))  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens)) * (0.5 + np.random.rand())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.dropout(x)))


class Save(Callback):
    """Saves after some steps."""

    def __init__(self, steps: tuple[int, ...], folder: str) -> None:
        self.steps, self.folder = steps, folder

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


def fit_dropping(rank: int, world_size: int, folder: str, source: str | None) -> dict[str, Tensor]:
    """Train without a seed, each rank with other generators, or go on with what was trained so."""
    torch.manual_seed(10 + rank + 5 * (source is None))
    np.random.seed(10 + rank + 5 * (source is None))
    module = Dropping()
    strategy = PipelineParallelStrategy(telemetry=False, microbatches=4)
    callbacks: list[Callback] = [] if source else [Save((3, 5), folder)]
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=8, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, token_data(38, 8), ckpt_path=source)
    return {
        name: each.detach().clone()
        for name, each in module.named_parameters()
        if strategy.holds(name)
    }


def merged(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: each for found in ranks for name, each in found.items()}


@pytest.mark.full
def test_a_run_with_dropout_goes_on_to_the_bit_without_being_seeded_again(tmp_path: Path) -> None:
    whole = merged(run_ranks(fit_dropping, 2, str(tmp_path), None))
    for steps in (3, 5):  # in an epoch of five, and at its end
        source = str(tmp_path / str(steps))
        same = merged(run_ranks(fit_dropping, 2, str(tmp_path), source))
        assert same.keys() == whole.keys()
        assert all(torch.equal(same[name], each) for name, each in whole.items()), steps
