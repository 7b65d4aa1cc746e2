"""A step that ended half-way: the user sees its cause, and the Trainer goes on from a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.errors import OffloadError
from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.offload import stores
from tests.support.offloaded import WIDTH, Block, full
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

FAILING_STEP = 5
NUM_STEPS = 8


class Failing(LightningModule):
    """A backward pass of one step ends between its blocks, as one out of memory would."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        generator = torch.Generator().manual_seed(5)
        for each in self.parameters():
            nn.init.uniform_(each, -0.1, 0.1, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.fails and self.global_step == FAILING_STEP:
                x.register_hook(_fail)
        return (x - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _fail(_: Tensor) -> None:
    raise ValueError("the cause")


def make(world_size: int, strategy: dict[str, Any], folder: Path) -> Trainer:
    stores.SMALL_NUMEL = 0
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ZeROStrategy(telemetry=False, **strategy),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        callbacks=[saves, *([OnExceptionCheckpoint(folder)] if world_size == 1 else [])],
    )


def data(world_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(2, NUM_STEPS * 2 * world_size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(*values), batch_size=2)


def go_on(
    rank: int, world_size: int, strategy: dict[str, Any], has_remedy: bool, folder: Path
) -> None:
    if not has_remedy and hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state  # as in torch before 2.13
    whole = Failing(fails=False)
    make(world_size, strategy, folder / "whole").fit(whole, data(world_size))
    module = Failing(fails=True)
    trainer = make(world_size, strategy, folder / "failed")
    with pytest.raises(ValueError, match="the cause"):
        trainer.fit(module, data(world_size))
    module.fails = False
    if strategy.get("offload_optimizer") == "nvme":
        assert not (folder / "failed" / "on_exception.ckpt").exists()
        with pytest.raises(OffloadError, match="Give the next fit the last checkpoint"):
            trainer.fit(module, data(world_size))
    trainer.fit(module, data(world_size), ckpt_path=folder / "failed" / "step=4.ckpt")
    assert trainer.global_step == NUM_STEPS
    for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(mine), full(theirs))


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "has_remedy"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("tier", [None, "cpu", "nvme"])
def test_the_same_trainer_goes_on_from_the_checkpoint_before(
    tier: str | None, ranks: int, has_remedy: bool, tmp_path: Path
) -> None:
    strategy: dict[str, Any] = {"offload_optimizer": tier, "offload_parameters": tier}
    if tier == "nvme":
        strategy["offload_path"] = tmp_path
    run_ranks(go_on, ranks, strategy, has_remedy, tmp_path)
