"""Checkpoints of ranks that share layers and shards go on in any layout, and those of others there.

Of a parameter each rank has the part that the tensor plan gives it, and of that part its shard.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.strategies import (
    DDPStrategy,
    Parallel3DStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.access import whole_value
from tests.support.gpts import TinyGPT, text_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROWS, BATCH = 20, 8  # the last batch is smaller, and still has a row for each of four replicas


@dataclass(frozen=True)
class Run:
    """A fit, from a checkpoint or from the start, up to an epoch."""

    layout: str
    """``plain`` Lightning, ``ddp``, ``zero``, ``tensor``, or ``grid`` with its stage."""
    epochs: int
    target: str
    source: str | None = None
    seed: int = 1

    def strategy(self, folder: Path) -> Any:
        kind, _, tier = self.layout.partition("_")
        if kind.startswith("grid"):
            away: dict[str, Any] = {"offload_optimizer": tier} if tier else {}
            if tier == "nvme":
                away["offload_path"] = folder
            stage = int(kind.removeprefix("grid"))
            return Parallel3DStrategy(telemetry=False, tensor=2, zero_stage=stage, **away)
        kinds: dict[str, Any] = {
            "plain": lambda: "auto",
            "ddp": lambda: DDPStrategy(telemetry=False),
            "zero": lambda: ZeROStrategy(telemetry=False),
            "tensor": lambda: TensorParallelStrategy(telemetry=False),
        }
        return kinds[kind]()

    @property
    def sharing(self) -> int | None:
        """How many ranks have one batch together; None: all."""
        sizes = {"plain": 1, "ddp": 1, "zero": 1, "tensor": None}
        return sizes.get(self.layout, 2)


def data(rank: int, replicas: int) -> DataLoader[Any]:
    """The batches of one process, or a replica's share of each."""
    loader = text_data(ROWS, BATCH)
    batches = [range(at, min(at + BATCH, ROWS)) for at in range(0, ROWS, BATCH)]
    shares = [list(each[rank::replicas]) for each in batches]
    return DataLoader(loader.dataset, batch_sampler=shares)


def fits(rank: int, world_size: int, folder: str, runs: list[Run]) -> list[dict[str, Tensor]]:
    """Train; return of each run the parameters and moments by name."""
    return [fit(rank, world_size, Path(folder), each) for each in runs]


def fit(rank: int, world_size: int, folder: Path, run: Run) -> dict[str, Tensor]:
    seed_everything(run.seed, verbose=False)
    module = TinyGPT(ties=True, groups=True, freezes=True)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=run.strategy(folder),
        max_epochs=run.epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        gradient_clip_val=0.5,
    )  # fmt: skip
    source = None if run.source is None else str(folder / run.source)
    size = run.sharing or world_size
    trainer.fit(module, data(rank // size, world_size // size), ckpt_path=source)
    trainer.save_checkpoint(folder / run.target)
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = whole_value(parameter.detach(), parameter).clone()
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole_value(value, parameter).clone()
    for number, group in enumerate(trainer.optimizers[0].param_groups):
        found[f"lr of group {number}"] = torch.tensor(group["lr"])
    return found


def different(
    one: dict[str, Tensor], other: dict[str, Tensor], *, exact: bool = False
) -> list[str]:
    limits: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 2e-5}
    assert one.keys() == other.keys()
    return [key for key, each in one.items() if not torch.allclose(each, other[key], **limits)]


def test_runs_go_on_in_every_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    alone = [Run("plain", 2, "plain.ckpt"), Run("plain", 1, "plain_half.ckpt")]
    reference, _ = run_ranks(fits, 1, folder, alone)[0]
    four = [
        Run("grid3", 1, "half"),
        Run("grid3", 2, "again", "half", seed=77),
        Run("grid1", 2, "as_stage_1", "half", seed=77),
        Run("tensor", 2, "as_tensor", "half", seed=77),
        Run("zero", 1, "zero_half"),
        Run("grid1_cpu", 2, "from_zero", "zero_half", seed=77),
        Run("grid3", 2, "from_plain", "plain_half.ckpt", seed=77),
    ]
    ranks = run_ranks(fits, 4, folder, four, timeout_s=150)
    for run, *found in zip(four, *ranks, strict=True):
        for rank, each in enumerate(found):
            if run.epochs == 2:
                assert different(each, reference) == [], f"{run.target}, rank {rank}"
            assert different(each, found[0], exact=True) == [], f"{run.target}, rank {rank}"
    back = [
        Run("ddp", 1, "half.ckpt", "half"),  # trains nothing: a plain file of the directory
        Run("plain", 2, "as_plain.ckpt", "half.ckpt", seed=77),
    ]
    _, plain = run_ranks(fits, 1, folder, back)[0]
    assert different(plain, reference) == []
