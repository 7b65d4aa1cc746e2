"""A pipeline's checkpoints go on in any layout, and those of others in a pipeline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from boltmesh.strategies import DDPStrategy, ZeROStrategy
from boltmesh.strategies.pipeline_parallel import PipelineParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

pytestmark = pytest.mark.ranks

ROWS, BATCH = 22, 8


@dataclass(frozen=True)
class Run:
    """A fit, from a checkpoint or from the start, up to an epoch."""

    layout: str
    """``plain`` Lightning, ``ddp``, ``zero`` or a schedule."""
    epochs: int
    target: str
    source: str | None = None

    def strategy(self) -> Any:
        if self.layout == "plain":
            return "auto"
        if self.layout == "ddp":
            return DDPStrategy(telemetry=False)
        if self.layout == "zero":
            return ZeROStrategy(telemetry=False)
        return PipelineParallelStrategy(telemetry=False, schedule=self.layout, microbatches=4)


def data(rank: int, replicas: int) -> DataLoader[Any]:
    """The batches of one process, or a replica's share of each."""
    loader = token_data(ROWS, BATCH)
    batches = [range(at, min(at + BATCH, ROWS)) for at in range(0, ROWS, BATCH)]
    shares = [list(each[rank::replicas]) for each in batches]
    return DataLoader(loader.dataset, batch_sampler=shares)


def fits(rank: int, world_size: int, folder: str, runs: list[Run]) -> list[dict[str, Tensor]]:
    """Train; return of each run what this rank holds, parameters and moments by name."""
    return [fit(rank, world_size, Path(folder), each) for each in runs]


def fit(rank: int, world_size: int, folder: Path, run: Run) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    strategy = run.strategy()
    module = Stack(depth=4, ties=True, groups=True, freezes=True, has_scalar=True)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=run.epochs,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    source = None if run.source is None else str(folder / run.source)
    loader = data(rank, world_size) if run.layout == "zero" else data(0, 1)
    trainer.fit(module, loader, ckpt_path=source)
    trainer.save_checkpoint(folder / run.target)
    found = {}
    for name, parameter in module.named_parameters():
        if isinstance(strategy, PipelineParallelStrategy) and not strategy.holds(name):
            continue
        found[name] = whole(parameter)
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole(value)
    for number, group in enumerate(trainer.optimizers[0].param_groups):
        found[f"lr of group {number}"] = torch.tensor(group["lr"])
    return found


def whole(value: Tensor) -> Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


def merged(ranks: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    return [
        {name: each for found in runs for name, each in found.items()}
        for runs in zip(*ranks, strict=True)
    ]


def test_runs_go_on_in_every_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    two = [
        Run("1f1b", 2, "whole"),
        Run("1f1b", 1, "half"),
        Run("1f1b", 2, "same", "half"),
        Run("zbv", 2, "as_zbv", "half"),
        Run("zero", 2, "as_zero", "half"),
        Run("zero", 1, "zero_half"),
        Run("interleaved_1f1b", 2, "from_zero", "zero_half"),
    ]
    reference, _, same, *others = merged(run_ranks(fits, 2, folder, two, timeout_s=110))
    assert same.keys() == reference.keys()
    assert all(torch.equal(same[name], each) for name, each in reference.items())
    one = [
        Run("plain", 2, "plain.ckpt"),
        Run("plain", 1, "plain_half.ckpt"),
        Run("ddp", 2, "as_ddp.ckpt", "half"),
        Run("ddp", 1, "half.ckpt", "half"),  # trains nothing: a plain file of the directory
        Run("plain", 2, "as_plain.ckpt", "half.ckpt"),
    ]
    alone = merged(run_ranks(fits, 1, folder, one))
    four = [
        Run("1f1b", 2, "as_four", "half"),
        Run("zero_bubble", 2, "from_plain", "plain_half.ckpt"),
    ]
    wide = merged(run_ranks(fits, 4, folder, four))
    halves = {"zero_half", "plain_half.ckpt", "half.ckpt"}
    names = [each.target for each in (*two[3:], *one, *four)]
    for name, found in zip(names, (*others, *alone, *wide), strict=True):
        if name in halves:
            continue
        assert found.keys() == reference.keys(), name
        for key, each in found.items():
            torch.testing.assert_close(
                each, reference[key], rtol=1e-4, atol=2e-5, msg=f"{name}: {key}"
            )
