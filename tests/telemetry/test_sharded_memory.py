"""Of a sharded model telemetry measures what a rank holds, wherever it is, and what it moves."""

import lightning.pytorch as lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ZeROStrategy
from boltmesh.telemetry.reader.reader import open_job
from boltmesh.telemetry.writer import memory
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 192
NUM_STEPS = 6


class Layers(lightning.LightningModule):
    """Large enough for its shards to be worth offloading, and nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_worker(rank, world_size, options):
    vars(memory)["MEMORY_EVERY_NS"] = vars(memory)["WALK_EVERY_NS"] = 0
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world_size, max_steps=NUM_STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=ZeROStrategy(**options),
    )  # fmt: skip
    trainer.fit(Layers(), DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=4))
    with open_job() as job:
        found = job.snapshot().ranks[rank]
    kinds = {
        (each.kind, each.place): (each.measured_bytes, each.predicted_bytes)
        for each in found.memory_kinds
    }
    return kinds, {(each.place, each.direction): each for each in found.offload}


NUMEL = 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
SHARD = 4 * NUMEL // 2
"""Bytes of one tensor of all parameters on one of two ranks; every number of rows is even."""

PAGE = 4096 * 8
"""What the blocks of a file round up to, all of them together."""


@pytest.mark.sample("1")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_are_measured_as_they_are_predicted_and_gathered_copies_are_gone(stage):
    for kinds, moved in run_ranks(fit_worker, 2, {"stage": stage}):
        assert kinds["parameters", "host"] == (SHARD, SHARD)
        assert kinds["gradients", "host"] == (SHARD, SHARD)
        measured, predicted = kinds["optimizer", "host"]
        assert measured == predicted
        assert 0 <= measured - 2 * SHARD <= 4 * 16  # a count of the steps for each parameter
        assert moved == {}


@pytest.mark.full
def test_what_is_offloaded_to_the_host_is_measured_there():
    for kinds, _ in run_ranks(fit_worker, 2, {"stage": 3, "offload_optimizer": "cpu"}):
        measured, predicted = kinds["optimizer", "host"]
        assert 3 * SHARD <= measured <= 3 * SHARD + 2**21  # one page of 2 MiB at most
        assert predicted == 3 * SHARD


@pytest.mark.full
def test_what_is_on_disk_is_measured_there_and_written_in_every_step(tmp_path):
    options = {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "nvme",
        "offload_path": str(tmp_path),
    }
    for kinds, moved in run_ranks(fit_worker, 2, options):
        measured, predicted = kinds["optimizer", "disk"]
        assert 3 * SHARD <= predicted <= measured <= 3 * SHARD + PAGE
        written = moved["disk", "write"]
        # State and the copies that are gathered, once each; on a busy machine a write may end in
        # the step after its own.
        assert 2 * SHARD <= written.bytes_per_step <= 6 * SHARD + 2 * PAGE
        assert written.seconds_per_step > 0
        assert written.bytes_per_second > 0
        # So small a model is read from the buffers around it, once they hold all of it.
        assert moved["disk", "read"].moved_bytes > 0
