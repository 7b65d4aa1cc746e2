"""Trainers of sharded models for tests, and what their models are whole."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from boltmesh.strategies import ZeROStrategy

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(
    world_size: int, stage: int, *, options: Mapping[str, Any] | None = None, **arguments: Any
) -> Trainer:
    """Make a quiet Trainer of a ZeROStrategy with further ``options`` of the strategy."""
    strategy = ZeROStrategy(telemetry=False, stage=stage, **(options or {}))
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, **{**QUIET, **arguments}
    )


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters whole. Collective."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for name, each in module.named_parameters()
    }


STAGES = [(1,), (2,), (3,)]
