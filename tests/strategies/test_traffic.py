"""What ``DDPStrategy`` says a step moves is what telemetry counts, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import DDPStrategy
from boltmesh.telemetry.reader.reader import open_job
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Wide(LightningModule):
    """Matrices for PowerSGD to factor, a batch norm for its buffers, a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.norm = nn.BatchNorm1d(96)
        self.last = nn.Linear(96, 3)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (inputs,) = batch
        return self.last(self.norm(self.first(inputs)).relu()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def train(rank: int, world_size: int, options: Any, accumulate: int) -> str:
    strategy = DDPStrategy(**options)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=12, logger=False,
        accumulate_grad_batches=accumulate, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    path = []

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            path.append(str(strategy.recorder.path))

    trainer.callbacks.append(Notes())  # type: ignore[attr-defined]
    data = DataLoader(TensorDataset(torch.randn(12 * accumulate * world_size * 2, 64)), 2)
    trainer.fit(Wide(), data)
    return path[0]


@pytest.mark.sample("2-{}-3", "2-{'gradient_compression': 'bf16'}-1")
@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        ({}, 1),
        ({}, 3),
        ({"bucket_cap_mb": 0.001}, 1),
        ({"bucket_cap_mb": 0.001}, 2),
        ({"static_graph": True}, 2),
        ({"find_unused_parameters": True}, 1),
        ({"gradient_compression": "bf16"}, 1),
        ({"gradient_compression": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 2}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2])
def test_the_bytes_of_a_step_are_the_bytes_expected(
    world_size: int, options: Any, accumulate: int
) -> None:
    paths = run_ranks(train, world_size, options, accumulate)
    assert len(set(paths)) == 1
    with open_job(Path(paths[0])) as job:
        snapshot = job.snapshot()
    assert snapshot.communication_note is None
    expected = {each.operator: each.payload_bytes for each in snapshot.expected}
    assert expected["broadcast"] == 96 * 4 * 2 + 8
    for rank in snapshot.ranks:
        counted = {
            each.operator: each.bytes_per_step
            for each in rank.collectives
            if each.axis == "data" and each.bytes_per_step
        }
        assert counted == expected
