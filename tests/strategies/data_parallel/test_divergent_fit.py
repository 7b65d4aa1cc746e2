"""A fit whose ranks run different layers ends on every rank with both named, and in telemetry."""

import os
import time
from functools import partial
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.data_parallel import order_check
from boltmesh.telemetry.reader.reader import open_job
from tests.support.ranks import RankFailure
from tests.support.ranks import run_ranks as run_ranks_within

pytestmark = [pytest.mark.ranks]

run_ranks = partial(run_ranks_within, grace_s=60.0)
"""With time for a machine that does much else: each rank has to come to what it says."""

NUM_BATCHES = 6


class Skipping(lightning.LightningModule):
    """Rank 1 leaves a layer out from one batch on; with ``together`` all ranks do."""

    def __init__(self, *, leaves_at: int, where: str, together: bool, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=width == 8) for _ in range(3))
        self.leaves_at, self.where, self.together = leaves_at, where, together

    def run(self, batch, batch_idx, where):
        is_leaving = where == self.where and batch_idx >= self.leaves_at
        (x,) = batch
        for number, layer in enumerate(self.layers):
            if is_leaving and number == 1 and (self.together or self.global_rank == 1):
                continue
            x = x + layer(x)
        return x.square().mean()

    def training_step(self, batch, batch_idx):
        return self.run(batch, batch_idx, "training")

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.run(batch, batch_idx, "validation"))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Scaling(Skipping):
    """Each rank has a scalar of its own for the loss, as where the kind of a batch chooses it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scales[self.global_rank]


def fit_worker(
    rank, world_size, folder, stage, leaves_at, where, together, kind=Skipping, **options
):
    vars(order_check)["PATIENCE_S"] = 0.4
    os.environ["BOLTMESH_JOB_ID"] = "parting"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world_size, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=ZeROStrategy(stage=stage, telemetry=not together, **options),
        gradient_clip_val=1.0, default_root_dir=folder,
    )  # fmt: skip
    width = 64 if options else 8
    module = kind(leaves_at=leaves_at, where=where, together=together, width=width)
    samples = TensorDataset(torch.randn(8 * NUM_BATCHES, width))
    train, validation = DataLoader(samples, batch_size=4), DataLoader(samples, batch_size=4)
    if together:
        trainer.fit(module, train, validation)
        trainer.validate(module, validation, verbose=False)
        return trainer.global_step
    try:
        trainer.fit(module, train, validation)
    except RuntimeError as error:
        with open_job("parting") as job:
            recorded = next(each.error for each in job.snapshot().ranks if each.rank == rank)
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}\n{recorded}")
    time.sleep(0.5)
    os._exit(3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "leaves_at", "where"),
    [
        (3, 0, "training"),
        pytest.param(3, 2, "training", marks=pytest.mark.full),
        (1, 2, "training"),
        (3, 2, "validation"),
    ],
)
def test_a_fit_ends_with_rank_and_module_named(tmp_path, stage, leaves_at, where):
    with pytest.raises(RankFailure, match="died with exit code 3"):
        run_ranks(fit_worker, 2, str(tmp_path), stage, leaves_at, where, False)
    for rank in range(2):
        said, recorded = (tmp_path / str(rank)).read_text().splitlines()
        for text in (said, recorded):
            assert "Ranks issued different collectives: rank 1" in text
            assert "while rank 0" in text
            assert "'layers.1'" in text
    assert "DivergenceError" in (tmp_path / "1").read_text()


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_layers_that_all_ranks_leave_out_are_nobodys_error(tmp_path, stage, where):
    # 8 * NUM_BATCHES samples on two ranks in batches of 4, two epochs.
    steps = run_ranks(fit_worker, 2, str(tmp_path), stage, 2, where, True)
    assert steps == [2 * NUM_BATCHES] * 2


def tiled_worker(rank, world_size, folder):
    fit_worker(rank, world_size, folder, 3, 2, "training", False, tile_linear_bytes=4096)


@pytest.mark.full
def test_a_layer_in_tiles_is_named_too(tmp_path):
    with pytest.raises(RankFailure, match="died with exit code 3"):
        run_ranks(tiled_worker, 2, str(tmp_path))
    for rank in range(2):
        assert (
            "rank 0 called all_gather of 'layers.1.weight' in tiles"
            in (tmp_path / str(rank)).read_text()
        )


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_scalar_that_one_rank_uses_is_named_too(tmp_path, stage):
    with pytest.raises(RankFailure, match="died with exit code 3"):
        run_ranks(fit_worker, 2, str(tmp_path), stage, 9, "training", False, Scaling)
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        for number in range(2):
            assert f"rank {number} averaged the gradient of 'scales.{number}'" in text
