"""Runs that stop at the end of an epoch and go on in another layout, for tests of checkpoints.

A run is a fit up to an epoch, from the start or from what another run has saved. All see the same
batches, so that wherever a run is continued, it ends as one process ends that was not interrupted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from boltmesh.strategies.engine import MeshStrategy
from boltmesh.strategies.parameter_access import whole_value
from tests.support.gpts import TinyGPT, text_data
from tests.support.layouts import ALL_LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data

BATCH = 8
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
"""Layouts add up in other orders, and Adam amplifies that."""


class Trained(NamedTuple):
    """A model and its data."""

    model: Callable[[], LightningModule]
    data: Callable[[int, int], DataLoader[Any]]
    rows: int
    """The last batch is smaller, and has rows for all replicas, as many for each."""


def _deep_gpt() -> TinyGPT:
    module = TinyGPT(depth=4, ties=True, groups=True)
    module.blocks[1].requires_grad_(False)
    return module


MODELS = {
    "gpt": Trained(lambda: TinyGPT(ties=True, groups=True, freezes=True), text_data, 20),
    "deep gpt": Trained(_deep_gpt, text_data, 20),
    "stack": Trained(
        lambda: Stack(depth=4, ties=True, groups=True, freezes=True, has_scalar=True),
        token_data,
        22,
    ),
}
"""With tied weights, groups of parameters, a schedule and something frozen."""


@dataclass(frozen=True)
class Run:
    """A fit, from a checkpoint or from the start, up to an epoch."""

    layout: str
    """One of ``ALL_LAYOUTS``."""
    epochs: int
    target: str
    """What it saves at its end."""
    source: str | None = None
    keeps_epochs: bool = False
    """Whether ``ModelCheckpoint`` saves ``TARGET-epochs/epoch=N.ckpt``."""


def share(model: str, place: int, replicas: int) -> DataLoader[Any]:
    """The batches of one process, or a replica's share of each."""
    _, data, rows = MODELS[model]
    batches = [range(at, min(at + BATCH, rows)) for at in range(0, rows, BATCH)]
    shares = [list(each[place::replicas]) for each in batches]
    return DataLoader(data(rows, BATCH).dataset, batch_sampler=shares)


def train(
    rank: int, world_size: int, folder: Path, model: str, run: Run, *callbacks: Callback
) -> tuple[Trainer, LightningModule]:
    """Train a run to its end, on the ranks of its layout."""
    # Nothing that a process which goes on happens to hold may matter.
    seed_everything(1 if run.source is None else 77, verbose=False)
    layout = ALL_LAYOUTS[run.layout]
    assert layout.mesh.world_size == world_size, run
    module = MODELS[model].model()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=layout.strategy(folder),
        max_epochs=run.epochs, gradient_clip_val=0.5, callbacks=list(callbacks), logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    place = layout.mesh.coordinates(rank)["data"]
    source = None if run.source is None else str(folder / run.source)
    trainer.fit(module, share(model, place, layout.mesh.data), ckpt_path=source)
    return trainer, module


def fits(
    rank: int, world_size: int, folder: str, model: str, runs: Sequence[Run]
) -> list[dict[str, Tensor]]:
    """Train and save; return of each run what this rank has, whole, by the names of parameters."""
    return [_fit(rank, world_size, Path(folder), model, each) for each in runs]


def _fit(rank: int, world_size: int, folder: Path, model: str, run: Run) -> dict[str, Tensor]:
    kept = ModelCheckpoint(folder / f"{run.target}-epochs", "{epoch}", save_top_k=-1)
    trainer, module = train(
        rank, world_size, folder, model, run, *([kept] if run.keeps_epochs else [])
    )
    trainer.save_checkpoint(folder / run.target)
    found = {}
    for name, parameter in module.named_parameters():
        used = trainer.strategy
        if isinstance(used, MeshStrategy) and not used.holds(name):
            continue
        found[name] = whole_value(parameter.detach(), parameter).clone()
        for optimizer in trainer.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = whole_value(value, parameter).clone()
    for number, group in enumerate(trainer.optimizers[0].param_groups):
        found[f"lr of group {number}"] = torch.tensor(group["lr"])
    return found


def run_all(folder: Path, model: str, runs: Sequence[Run]) -> dict[str, dict[str, Tensor]]:
    """Carry out runs of as many ranks; return by target how each ended, on all ranks together."""
    (ranks,) = {ALL_LAYOUTS[each.layout].mesh.world_size for each in runs}
    found = run_ranks(fits, ranks, str(folder), model, runs)
    ends = zip(*found, strict=True)
    return {run.target: merged(each, run.target) for run, each in zip(runs, ends, strict=True)}


def merged(ranks: Sequence[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """Put together what ranks hold; what several hold is the same to the bit."""
    whole: dict[str, Tensor] = {}
    for rank, found in enumerate(ranks):
        for name, value in found.items():
            kept = whole.setdefault(name, value)
            assert torch.equal(kept, value), f"{where}, rank {rank}: {name}"
    return whole


def different(
    one: dict[str, Tensor], other: dict[str, Tensor], *, exact: bool = False
) -> list[str]:
    """Name what is not alike, or on one side only."""
    limits = {"rtol": 0.0, "atol": 0.0} if exact else NEAR
    odd = sorted(one.keys() ^ other.keys())
    both = sorted(one.keys() & other.keys())
    return odd + [key for key in both if not torch.allclose(one[key], other[key], **limits)]
