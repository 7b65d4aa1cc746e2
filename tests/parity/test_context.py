"""Trains with a divided sequence and compares with one process: fits, evaluations, checkpoints."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from boltmesh.strategies import ContextParallelStrategy, gathered_parameters
from tests.support.context_models import Trained, batch_of, built
from tests.support.pipelines import quiet_trainer
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow(20)]


def context(**options: Any) -> ContextParallelStrategy:
    return ContextParallelStrategy(**{"telemetry": False, "timeout_s": 60.0, **options})


class AdamW(Trained):
    """Keeps what each step logged and the norm of its gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int = 0) -> Tensor:
        loss = super().training_step(batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Gradients of biases of keys are zero but for roundings, which a small eps would enlarge.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Texts(torch.utils.data.Dataset[Any]):
    """Texts with a prompt of ``-100`` labels each, of other lengths."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        batch = batch_of("llama", 21, torch.Generator().manual_seed(row))
        return {key: each[row % 2] for key, each in batch.items()}


def loader(share: int, shares: int) -> DataLoader[Any]:
    """Batches of two texts of one data rank; of all of them for one process."""
    rows = range(share, 16, shares) if shares else range(16)
    return DataLoader(Subset(Texts(), rows), batch_size=2 if shares else 4)


def trained(
    name: str, strategy: Any, devices: int, texts: DataLoader[Any], **options: Any
) -> tuple[AdamW, Trainer]:
    torch.manual_seed(1)
    module = AdamW(built(name))
    trainer = quiet_trainer(devices, strategy, **options)
    trainer.fit(module, texts, texts)
    return module, trainer


def values_of(module: LightningModule) -> list[Tensor]:
    with gathered_parameters(module):
        return [each.detach().clone() for each in module.parameters()]


def fit_beside(
    rank: int, size: int, name: str, strategy: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Train on all ranks, then in one process; return how far apart they are."""
    context_size = strategy.get("size", size)
    data = size // context_size
    own, whole = (loader(rank // context_size, data), loader(0, 0 if data > 1 else 1))
    cut, trainer = trained(name, context(**strategy), size, own, **options)
    values = values_of(cut)
    one, reference = trained(name, "auto", 1, whole, **options)
    pairs = zip(values, one.parameters(), strict=True)
    found = {"parameters": max(float((a - b).abs().max()) for a, b in pairs)}
    if data == 1:
        metrics = [float(each.callback_metrics["val_loss"]) for each in (trainer, reference)]
        found["val_loss"] = abs(metrics[0] - metrics[1])
        losses = zip(cut.losses, one.losses, strict=True)
        found["losses"] = max(abs(a - b) for a, b in losses)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fit_is_that_of_one_process(stage: int) -> None:
    """With clipping, accumulation and AdamW, over every ZeRO stage."""
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    for found in run_ranks(fit_beside, 2, "llama", {"zero_stage": stage}, options):
        assert max(found.values()) < 2e-5, found


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_and_context_axes_train_together(stage: int) -> None:
    for found in run_ranks(fit_beside, 4, "gpt", {"size": 2, "zero_stage": stage}, {}):
        assert max(found.values()) < 2e-5, found


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_blocks_may_be_run_again(kind: str) -> None:
    strategy = {"activation_checkpointing": kind}
    for found in run_ranks(fit_beside, 2, "llama", strategy, {"limit_train_batches": 2}):
        assert max(found.values()) < 2e-5, found
