"""A pipeline's checkpoints go on in any layout, and those of others in a pipeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from typing_extensions import override

from boltmesh.strategies import DDPStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks


def fit(
    rank: int, world_size: int, schedule: str | None, epochs: int, source: str | None, target: str
) -> dict[str, Tensor]:
    """Train; return what this rank holds, parameters and moments by name."""
    seed_everything(1, verbose=False)
    strategy: Any = DDPStrategy(telemetry=False)
    if schedule is not None:
        strategy = PipelineParallelStrategy(telemetry=False, schedule=schedule, microbatches=4)
    module = Stack(depth=4, ties=True)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, token_data(22, 8), ckpt_path=source)
    trainer.save_checkpoint(target)
    found = {}
    for name, parameter in module.named_parameters():
        if not strategy.holds(name):
            continue
        found[name] = parameter.detach().clone()
        for key, value in trainer.optimizers[0].state[parameter].items():
            found[f"{name}.{key}"] = value.clone()
    return found


class Dropping(Stack):
    """Draws in its layers, between them, and on the host."""

    def __init__(self) -> None:
        super().__init__(depth=4, ties=True)
        self.dropout = nn.Dropout(0.3)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.3))

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


def test_a_run_goes_on_in_the_same_layout_to_the_bit_and_in_others(tmp_path: Path) -> None:
    path = tmp_path.joinpath
    whole = merged(run_ranks(fit, 2, "1f1b", 2, None, str(path("whole"))))
    run_ranks(fit, 2, "1f1b", 1, None, str(path("half")))
    same = merged(run_ranks(fit, 2, "1f1b", 2, str(path("half")), str(path("same"))))
    assert same.keys() == whole.keys()
    assert all(torch.equal(same[name], each) for name, each in whole.items())
    layouts: list[tuple[int, str | None]] = [(1, None), (2, "zbv"), (4, "1f1b")]
    for world_size, schedule in layouts:
        target = str(path(f"{world_size}{schedule}"))
        found = merged(run_ranks(fit, world_size, schedule, 2, str(path("half")), target))
        assert found.keys() == whole.keys()
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=2e-5)


def test_a_run_with_dropout_goes_on_to_the_bit_without_being_seeded_again(tmp_path: Path) -> None:
    whole = merged(run_ranks(fit_dropping, 2, str(tmp_path), None))
    for steps in (3, 5):  # in an epoch of five, and at its end
        source = str(tmp_path / str(steps))
        same = merged(run_ranks(fit_dropping, 2, str(tmp_path), source))
        assert same.keys() == whole.keys()
        assert all(torch.equal(same[name], each) for name, each in whole.items()), steps


def test_a_run_of_one_process_goes_on_as_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path.joinpath
    whole = merged(run_ranks(fit, 1, None, 2, None, str(path("whole.ckpt"))))
    run_ranks(fit, 1, None, 1, None, str(path("half.ckpt")))
    half = str(path("half.ckpt"))
    found = merged(run_ranks(fit, 2, "zero_bubble", 2, half, str(path("pipeline"))))
    assert found.keys() == whole.keys()
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=2e-5)
