"""A tensor group's checkpoints go on in any layout, and those of others in a tensor group."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.strategies import (
    DDPStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from boltmesh.strategies.access import whole_value
from boltmesh.strategies.engine.pipeline_mesh import PipelineMeshStrategy
from tests.support.gpts import TinyGPT, text_data
from tests.support.pipeline_tensor import PipelineTensor
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROWS, BATCH = 22, 8


@dataclass(frozen=True)
class Run:
    """A fit, from a checkpoint or from the start, up to an epoch."""

    layout: str
    """``plain`` Lightning, ``ddp``, ``zero``, ``pipeline``, ``both`` of two stages and two ranks
    that share layers, or ``tensor`` with its size."""
    epochs: int
    target: str
    source: str | None = None
    seed: int = 1

    def strategy(self) -> Any:
        kinds: dict[str, Any] = {
            "plain": lambda: "auto",
            "ddp": lambda: DDPStrategy(telemetry=False),
            "zero": lambda: ZeROStrategy(telemetry=False),
            "pipeline": lambda: PipelineParallelStrategy(telemetry=False, microbatches=4),
            "both": lambda: PipelineTensor(telemetry=False, stages=2, size=2),
        }
        if self.layout in kinds:
            return kinds[self.layout]()
        return TensorParallelStrategy(telemetry=False, size=int(self.layout.removeprefix("tensor")))


def data(rank: int, replicas: int) -> DataLoader[Any]:
    """The batches of one process, or a replica's share of each."""
    loader = text_data(ROWS, BATCH)
    batches = [range(at, min(at + BATCH, ROWS)) for at in range(0, ROWS, BATCH)]
    shares = [list(each[rank::replicas]) for each in batches]
    return DataLoader(loader.dataset, batch_sampler=shares)


def fits(rank: int, world_size: int, folder: str, runs: list[Run]) -> list[dict[str, Tensor]]:
    """Train; return of each run what this rank holds, parameters and moments by name."""
    return [fit(rank, world_size, Path(folder), each) for each in runs]


def fit(rank: int, world_size: int, folder: Path, run: Run) -> dict[str, Tensor]:
    seed_everything(run.seed, verbose=False)
    strategy = run.strategy()
    module = TinyGPT(ties=True, groups=True, freezes=True)
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=run.epochs,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder / f"{run.target}-epochs", "{epoch}", save_top_k=-1)],
    )  # fmt: skip
    source = None if run.source is None else str(folder / run.source)
    size = world_size  # of what sees one batch together
    if isinstance(strategy, (DDPStrategy, ZeROStrategy)):
        size = 1
    elif isinstance(strategy, TensorParallelStrategy):
        size = strategy.options.size or world_size
    elif isinstance(strategy, PipelineTensor):
        size = 4
    trainer.fit(module, data(rank // size, world_size // size), ckpt_path=source)
    trainer.save_checkpoint(folder / run.target)
    found = {}
    for name, parameter in module.named_parameters():
        if isinstance(strategy, PipelineMeshStrategy) and not strategy.holds(name):
            continue
        found[name] = whole_value(parameter.detach(), parameter).clone()
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole_value(value, parameter).clone()
    for number, group in enumerate(trainer.optimizers[0].param_groups):
        found[f"lr of group {number}"] = torch.tensor(group["lr"])
    return found


def merged(ranks: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    return [
        {name: each for found in runs for name, each in found.items()}
        for runs in zip(*ranks, strict=True)
    ]


def test_runs_go_on_in_every_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    two = [
        Run("tensor2", 2, "whole"),
        Run("tensor2", 1, "half"),
        Run("tensor2", 2, "same", "half", seed=77),
        Run("tensor2", 2, "of_callback", "half-epochs/epoch=0.ckpt", seed=77),
        Run("zero", 2, "as_zero", "half", seed=77),
        Run("zero", 1, "zero_half"),
        Run("tensor2", 2, "from_zero", "zero_half", seed=77),
        Run("pipeline", 2, "as_pipeline", "half", seed=77),
        Run("pipeline", 1, "pipeline_half"),
        Run("tensor2", 2, "from_pipeline", "pipeline_half", seed=77),
    ]
    reference, _, same, of_callback, *others = merged(
        run_ranks(fits, 2, folder, two, timeout_s=110)
    )
    for again in (same, of_callback):
        assert again.keys() == reference.keys()
        assert [
            name for name, each in again.items() if not torch.equal(each, reference[name])
        ] == []
    one = [
        Run("plain", 2, "plain.ckpt"),
        Run("plain", 1, "plain_half.ckpt"),
        Run("ddp", 2, "as_ddp.ckpt", "half", seed=77),
        Run("ddp", 1, "half.ckpt", "half"),  # trains nothing: a plain file of the directory
        Run("plain", 2, "as_plain.ckpt", "half.ckpt", seed=77),
        Run("tensor1", 2, "as_one", "half", seed=77),
    ]
    alone = merged(run_ranks(fits, 1, folder, one, timeout_s=110))
    four = [
        Run("tensor4", 2, "as_four", "half", seed=77),
        Run("tensor2", 2, "as_two_groups", "half", seed=77),
        Run("tensor4", 2, "from_plain", "plain_half.ckpt", seed=77),
        Run("tensor4", 1, "four_half"),
        Run("tensor2", 2, "two_groups_from_four", "four_half", seed=77),
    ]
    wide = merged(run_ranks(fits, 4, folder, four, timeout_s=110))
    halves = {"zero_half", "pipeline_half", "plain_half.ckpt", "half.ckpt", "four_half"}
    names = [each.target for each in (*two[4:], *one, *four)]
    for name, found in zip(names, (*others, *alone, *wide), strict=True):
        if name in halves:
            continue
        assert found.keys() == reference.keys(), name
        for key, each in found.items():
            near = torch.isclose(each, reference[key], rtol=1e-4, atol=2e-5)
            assert bool(near.all()), f"{name}: {key}"


def test_stages_of_shared_layers_go_on_in_every_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    alone = [Run("plain", 2, "plain.ckpt"), Run("plain", 1, "half.ckpt")]
    reference, _ = merged(run_ranks(fits, 1, folder, alone, timeout_s=110))
    four = [
        Run("both", 2, "whole"),
        Run("both", 1, "half"),
        Run("both", 2, "same", "half", seed=77),
        Run("both", 2, "from_plain", "half.ckpt", seed=77),
        Run("tensor4", 2, "as_four", "half", seed=77),
    ]
    whole, _, same, from_plain, as_four = merged(run_ranks(fits, 4, folder, four, timeout_s=110))
    assert same.keys() == whole.keys()
    assert [name for name, each in same.items() if not torch.equal(each, whole[name])] == []
    one = [
        Run("ddp", 1, "of_both.ckpt", "half"),  # trains nothing: a plain file of the directory
        Run("plain", 2, "as_plain.ckpt", "of_both.ckpt", seed=77),
        Run("tensor1", 2, "as_one", "half", seed=77),
    ]
    _, as_plain, as_one = merged(run_ranks(fits, 1, folder, one, timeout_s=110))
    others = {
        "whole": whole, "from plain": from_plain, "tensor 4": as_four,
        "plain": as_plain, "one rank": as_one,
    }  # fmt: skip
    for name, found in others.items():
        assert found.keys() == reference.keys(), name
        for key, each in found.items():
            near = torch.isclose(each, reference[key], rtol=1e-4, atol=2e-5)
            assert bool(near.all()), f"{name}: {key}"
