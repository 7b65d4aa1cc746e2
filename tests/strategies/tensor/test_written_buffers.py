"""Buffers that a step writes through ``.data`` are written by training, not by verification."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.strategies import TensorParallelStrategy
from tests.support.numbered import Losses
from tests.support.ranks import run_ranks

WIDTH = 8


class Counting(nn.Module):
    """Counts its batches, and keeps a moving average as codebooks do."""

    number: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.number.data.add_(1)
            self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x) + self.number + self.mean


class Written(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.counting = Counting()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.counting(self.first(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(rank: int, world_size: int) -> tuple[list[float], list[float], int]:
    seed_everything(1, verbose=False)
    module, losses = Written(), Losses()
    strategy: Any = TensorParallelStrategy(telemetry=False) if world_size > 1 else "auto"
    Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[losses],
    ).fit(module, DataLoader(torch.randn(12, WIDTH), batch_size=4))  # type: ignore[arg-type]  # fmt: skip
    counting = module.counting
    divided = 0 if world_size == 1 else len(strategy.plan.sharded)
    return losses.kept, [*counting.number.tolist(), *counting.mean.tolist()], divided


@pytest.mark.ranks
def test_losses_and_buffers_are_those_of_one_process() -> None:
    wanted, buffers, _ = run_ranks(train, 1)[0]
    for losses, written, divided in run_ranks(train, 2):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert written == pytest.approx(buffers, rel=1e-5)
        assert divided
