"""A model on a disk that is sampled from while it trains: in whatever mode, wherever in a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.offload import stores
from tests.support.offloaded import WIDTH, Block, full
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

PLACES = [
    "before_loss",
    "after_loss",
    "on_before_backward",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
]


class Sampled(LightningModule):
    """A model whose blocks are called beside the loss too."""

    def __init__(self, place: str, *, trains: bool, checkpoints: bool) -> None:
        super().__init__()
        self.place, self.trains, self.checkpoints = place, trains, checkpoints
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            runs_again = self.checkpoints and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=True) if runs_again else block(x)
        return self.head(x)

    def sample(self, place: str) -> None:
        """Call the blocks without the root, which is what a callback would do."""
        if place != self.place:
            return
        self.blocks.train(self.trains)
        with torch.no_grad():
            x = torch.ones(2, WIDTH)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
        self.blocks.train()
        assert x.isfinite().all()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sample("before_loss")
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.sample("after_loss")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Sampler(Callback):
    """Samples in its hooks; it looks at no gradients."""

    reads_gradients = False

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        pl_module.sample("on_before_backward")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.sample("on_train_batch_start")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.sample("on_train_batch_end")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.sample("on_validation_end")


def train(
    rank: int, world_size: int, options: dict[str, Any], accumulate: int, folder: Path
) -> None:
    disk = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": folder}
    expected = fit(Sampled("nowhere", **options), {}, accumulate)
    for place in PLACES:
        found = fit(Sampled(place, **options), disk, accumulate)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6, msg=place)


def fit(module: Sampled, strategy: dict[str, Any], accumulate: int) -> list[Tensor]:
    stores.SMALL_NUMEL = 0
    generator = torch.Generator().manual_seed(5)
    for each in module.parameters():
        torch.nn.init.uniform_(each, -0.1, 0.1, generator=generator)
    data = torch.randn(2, 16, WIDTH, generator=generator)
    loader = DataLoader(TensorDataset(*data), batch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeROStrategy(telemetry=False, **strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        val_check_interval=2,
        limit_val_batches=1,
        accumulate_grad_batches=accumulate,
        callbacks=[Sampler()],
    )
    trainer.fit(module, loader, loader)
    return [full(each).detach().clone() for each in module.parameters()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({"trains": False, "checkpoints": False}, 1),
        ({"trains": False, "checkpoints": False}, 2),
        ({"trains": True, "checkpoints": False}, 1),
        ({"trains": False, "checkpoints": True}, 1),
    ],
    ids=["eval", "accumulated", "train", "checkpointed"],
)
def test_sampling_changes_no_step(options: dict[str, Any], accumulate: int, tmp_path: Path) -> None:
    run_ranks(train, 2, options, accumulate, tmp_path)
