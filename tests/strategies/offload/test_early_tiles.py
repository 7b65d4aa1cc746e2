"""Weights in tiles on a disk are no unit's: they are stepped when their last gradient is in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.data_parallel.zero import ZeroAxis
from boltmesh.strategies.offload import stores
from tests.support.offloaded import WIDTH, Block, full
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

VOCABULARY = 96


class Tied(LightningModule):
    """An embedding, blocks, and a head with the embedding's weight."""

    def __init__(self, *, ties: bool, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if ties:
            self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(5)
        for each in self.parameters():
            nn.init.uniform_(each, -0.1, 0.1, generator=generator)

    def after_embedding(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        x = self.embed(tokens)
        if self.checkpoints:
            x = checkpoint(self.after_embedding, x, use_reentrant=True)
        else:
            x = self.after_embedding(x)
        return nn.functional.cross_entropy(x, tokens.roll(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Held(Callback):
    """Counts the bytes of gradients that wait for the step."""

    reads_gradients = False

    def __init__(self) -> None:
        self.most = 0

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, ZeROStrategy)
        assert isinstance(trainer.strategy.data_axis, ZeroAxis)
        engine = trainer.strategy.data_axis._offload
        if engine is not None:
            held = engine.stored()["gradients"]
            self.most = max(self.most, sum(e.nbytes for e in held if isinstance(e, Tensor)))


def fit(strategy: dict[str, Any], **options: bool) -> tuple[list[Tensor], int]:
    stores.SMALL_NUMEL = 0
    module, held = Tied(**options), Held()
    tokens = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(6))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeROStrategy(telemetry=False, tile_linear_bytes=20_000, **strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        callbacks=[held],
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=4))
    return [full(each).detach().clone() for each in module.parameters()], held.most


def train(rank: int, world_size: int, folder: Path, options: dict[str, bool], waits: bool) -> None:
    disk = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "offload_path": folder}
    expected, _ = fit({}, **options)
    found, most = fit(disk, **options)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert most == (4 * VOCABULARY * WIDTH // 2 if waits else 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ties", "checkpoints", "waits"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_a_weight_in_tiles_is_stepped_once(
    ties: bool, checkpoints: bool, waits: bool, tmp_path: Path
) -> None:
    run_ranks(train, 2, tmp_path, {"ties": ties, "checkpoints": checkpoints}, waits)
