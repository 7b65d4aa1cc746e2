"""Stop, go on in another layout, and compare with the run that never stopped.

An epoch is ``STEPS`` optimizer steps over the same samples, however many ranks share a batch: so
any layout may go on at its end, and computes what any other would.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from boltmesh.strategies import DDPStrategy, ZeROStrategy
from boltmesh.strategies.checkpoint.directory import load_directory
from boltmesh.strategies.checkpoint.optimizer_state import parameter_names
from tests.support.models import Regression, regression_data
from tests.support.ranks import run_ranks

STEPS = 5
BATCH = 8
"""Samples of one optimizer step, over all ranks; a multiple of every number of ranks."""


@dataclass(frozen=True)
class Layout:
    """Where a part of a run takes place."""

    ranks: int
    zero: dict[str, Any] | None = None
    """Arguments of ``ZeROStrategy``; None for DDP."""
    trainer: dict[str, Any] = field(default_factory=dict)

    def strategy(self) -> Any:
        """Made anew on each rank."""
        if self.zero is None:
            return DDPStrategy(telemetry=False)
        return ZeROStrategy(telemetry=False, **self.zero)


@dataclass(frozen=True)
class Run:
    """What is trained, in any layout."""

    model: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)

    def module(self) -> LightningModule:
        """With the weights of a seed."""
        seed_everything(5, verbose=False)
        return Regression(**self.model)


def fit(
    rank: int,
    world_size: int,
    layout: Layout,
    run: Run,
    folder: Path,
    epochs: int,
    resume: Path | None = None,
) -> None:
    """Train until the end of an epoch; every epoch leaves ``folder/epoch=N.ckpt``."""
    module = run.module()
    if resume is not None:
        # Nothing that the new process happens to hold may matter.
        seed_everything(77, verbose=False)
        with torch.no_grad():
            for each in module.parameters():
                each.normal_()
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=layout.strategy(),
        max_epochs=epochs,
        accumulate_grad_batches=run.accumulate,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**run.trainer, **layout.trainer},
    )
    data = regression_data(STEPS * BATCH, BATCH // world_size // run.accumulate, shuffle=True)
    trainer.fit(module, data, ckpt_path=resume)
    assert trainer.global_step == STEPS * epochs


def train(layout: Layout, run: Run, folder: Path) -> dict[str, Tensor]:
    """Two epochs without a stop; return how they ended."""
    run_ranks(fit, layout.ranks, layout, run, folder, 2)
    return read_whole(folder / "epoch=1.ckpt", run)


def go_on(layout: Layout, run: Run, checkpoint: Path, folder: Path) -> dict[str, Tensor]:
    """The second epoch after a checkpoint of the first; return how it ended."""
    run_ranks(fit, layout.ranks, layout, run, folder, 2, checkpoint)
    return read_whole(folder / "epoch=1.ckpt", run)


def read_whole(path: Path, run: Run) -> dict[str, Tensor]:
    """Every tensor of a file or directory, by the name of its parameter."""
    checkpoint = load_directory(path) if path.is_dir() else torch.load(path, weights_only=True)
    found = {name: _load(each) for name, each in checkpoint["state_dict"].items()}
    module = run.module()
    configured = module.configure_optimizers()
    optimizers = configured[0] if isinstance(configured, tuple) else [configured]
    for saved, optimizer in zip(checkpoint["optimizer_states"], optimizers, strict=True):
        names = [name for group in parameter_names(module, optimizer) for name in group]
        for key, state in saved["state"].items():
            name = names[key] if isinstance(key, int) else key
            found.update({f"{name}.{kind}": _load(each) for kind, each in state.items()})
    return found


def _load(value: Any) -> Tensor:
    return value.load() if hasattr(value, "load") else value


def differences(
    one: dict[str, Tensor], other: dict[str, Tensor], *, tolerance: float = 0.0
) -> list[str]:
    """Names of what is not alike, with the distance relative to the largest element."""
    found = [f"{name} is on one side only" for name in one.keys() ^ other.keys()]
    for name in one.keys() & other.keys():
        left, right = one[name].double(), other[name].double()
        apart = (left - right).abs().max().item() / max(1e-12, left.abs().max().item())
        if not apart <= tolerance:
            found.append(f"{name} differs by {apart:.2g}")
    return sorted(found)
