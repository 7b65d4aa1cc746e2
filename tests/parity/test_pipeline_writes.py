"""Writes to a parameter in a step, from itself alone, count once for a batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from boltmesh.strategies import (
    Parallel3DStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    gathered_parameters,
)
from tests.support.ranks import run_ranks


def clamp(scale: Any) -> None:
    with torch.no_grad():
        scale.clamp_(0, 1.5)


def halve(scale: Any) -> None:
    scale.data.mul_(0.5)


def assign(scale: Any) -> None:
    scale.data = scale.data * 0.5 + 0.1


WRITES: dict[str, tuple[Callable[[Any], None], bool]] = {
    "clamp": (clamp, False),
    "clamp_late": (clamp, True),
    "halve": (halve, False),
    "halve_late": (halve, True),
    "assign": (assign, False),
}
"""What is done to the parameter, and whether behind its uses."""


class Scaled(LightningModule):
    """As CLIP's, a scale that the loss uses, and a weight of the first layer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.write, self.is_late = WRITES[form]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.is_late:
            self.write(self.scale)
            self.write(self.layers[0].weight)
        x = batch
        for layer in self.layers:
            x = layer(x).tanh()
        loss = (x * self.scale.exp()).square().mean() + self.scale.exp()
        if self.is_late:
            self.write(self.scale)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def parallel_3d(**axes: Any) -> Parallel3DStrategy:
    return Parallel3DStrategy(pipeline=2, microbatches=4, telemetry=False, **axes)


STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "gpipe": (2, lambda: PipelineParallelStrategy(schedule="gpipe", telemetry=False)),
    "1f1b": (2, lambda: PipelineParallelStrategy(schedule="1f1b", telemetry=False)),
    "interleaved": (
        2,
        lambda: PipelineParallelStrategy(schedule="interleaved_1f1b", telemetry=False),
    ),
    "zero_bubble": (2, lambda: PipelineParallelStrategy(schedule="zero_bubble", telemetry=False)),
    "tensor": (2, lambda: TensorParallelStrategy(telemetry=False)),
    "3d": (4, lambda: parallel_3d(tensor=2)),
    "zero3": (4, lambda: parallel_3d(data=2, zero_stage=3)),
}


def train(rank: int, world_size: int, name: str) -> dict[str, list[Tensor]]:
    """Return the parameters by form of the write."""
    found = {}
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    for form in WRITES:
        trainer = Trainer(
            accelerator="cpu", devices=world_size, max_steps=3, logger=False,
            strategy=STRATEGIES[name][1]() if world_size > 1 else "auto",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        model = Scaled(form)
        trainer.fit(model, DataLoader(rows, 8))  # type: ignore[arg-type]
        with gathered_parameters(model):
            found[form] = [each.detach().clone() for each in model.parameters()]
    return found


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("name", STRATEGIES)
def test_writes_to_parameters_in_a_step_equal_those_of_one_process(name: str) -> None:
    (alone,) = run_ranks(train, 1, name)
    for found in run_ranks(train, STRATEGIES[name][0], name):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
