"""A step beside the run is the step of the run, and leaves no trace."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from boltmesh.strategies.dry_run.step import DryRun

CPU = torch.device("cpu")


class HalfFrozen(LightningModule):
    """Takes features of a network that stays in evaluation mode, as users of a backbone do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.backbone.eval()
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.head.training
        assert not self.backbone.training
        return self.head(self.backbone(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert not any(each.training for each in self.modules())
        return self.head(self.backbone(batch)).square().mean()


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_modules_are_in_the_modes_that_they_have_in_the_run(step: str) -> None:
    module = HalfFrozen()
    modes = {name: each.training for name, each in module.named_modules()}
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    batch = torch.randn(3, 4)
    rehearsal = DryRun(module, step, (batch, 0), CPU)

    outcome = rehearsal.run()

    trained = {"head.weight", "head.bias"} if step == "training_step" else set[str]()
    assert outcome.gradients.keys() == trained
    assert {name: each.training for name, each in module.named_modules()} == modes
    assert all(torch.equal(each, buffers[name]) for name, each in module.named_buffers())
    expected = module.head(module.backbone(batch)).square().mean()
    assert torch.equal(outcome.values[0], expected.detach())


class Drawing(HalfFrozen):
    """As a model that was loaded, and is put in training mode by a hook when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.eval()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.dropout.training
        return super().training_step(batch, batch_idx)


def test_who_looks_for_draws_sees_those_of_modules_that_are_to_train() -> None:
    module = Drawing()

    DryRun(module, "training_step", (torch.randn(3, 4), 0), CPU).forward(module)

    assert not any(each.training for each in module.modules())
