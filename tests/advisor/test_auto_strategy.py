"""``bolt_auto``: the choice by a rank's memory, with the numbers of the chosen strategy."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from boltmesh.errors import ConfigError
from boltmesh.strategies.parameter_access import gathered_parameters
from boltmesh.strategies.registry import build_strategy
from tests.support.models import FEATURES, regression_data
from tests.support.ranks import RankFailure, run_ranks

STEPS = 4


class Perceptron(LightningModule):
    """Wide enough that its state, not its activations, decides.

    Args:
        is_late: Make the layers in ``configure_model``.
        reads_data: Branch on a value, which no tensor without data has.
    """

    def __init__(self, *, is_late: bool = False, reads_data: bool = False) -> None:
        super().__init__()
        self.reads_data = reads_data
        self.losses: list[float] = []
        if not is_late:
            self.layers = self._layers()

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = self._layers()

    def _layers(self) -> nn.Sequential:
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(nn.Linear(FEATURES, 64), *blocks, nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        if self.reads_data:
            float(loss)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", (self.layers(x) - y).square().mean(), sync_dist=True)

    def on_train_end(self) -> None:
        self.losses = [float(each) for each in self.losses]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    rank: int, world_size: int, strategy: str, options: dict[str, Any], model: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], str | None]:
    """Train some steps; return losses, whole parameters, and the choice."""
    module = Perceptron(**model)
    made = build_strategy(strategy, telemetry=False, **options)
    trainer = Trainer(
        strategy=made,
        devices=world_size,
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, regression_data(32, 4))
    with gathered_parameters(module) as whole:
        values = {name: each.detach().clone() for name, each in whole.items()}
    return module.losses, values, getattr(made, "chosen", None)


@pytest.mark.parametrize(
    ("most_bytes", "model", "chosen"),
    [
        pytest.param(None, {}, "bolt_ddp", marks=pytest.mark.full),
        pytest.param(None, {"is_late": True}, "bolt_ddp", marks=pytest.mark.full),
        (None, {"reads_data": True}, "bolt_ddp"),
        (230_000, {}, "bolt_zero1"),
        pytest.param(193_990, {}, "bolt_zero3", marks=pytest.mark.full),
        (193_990, {"is_late": True}, "bolt_zero3"),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_chosen_strategy(most_bytes, model, chosen) -> None:
    auto = run_ranks(train, 2, "bolt_auto", {"max_memory_bytes": most_bytes}, model)
    same = run_ranks(train, 2, chosen, {}, model)
    for (losses, values, name), (expected, wanted, _) in zip(auto, same, strict=True):
        assert name == chosen
        assert len(losses) == STEPS
        assert losses == expected
        assert values.keys() == wanted.keys()
        assert all(torch.equal(values[each], wanted[each]) for each in values)


def resume(
    rank: int, world_size: int, folder: str, strategy: str, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Evaluate, train and save, and go on in another run; return its parameters."""

    def trainer(steps: int) -> Trainer:
        return Trainer(
            strategy=build_strategy(strategy, telemetry=False, **options),
            devices=world_size,
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    data = regression_data(32, 4)
    first, second = Perceptron(), Perceptron()
    stopped = trainer(STEPS // 2)
    if strategy == "bolt_auto":
        stopped.test(first, data, verbose=False)
    stopped.fit(first, data)
    stopped.save_checkpoint(f"{folder}/half.ckpt")
    with torch.no_grad():
        for each in second.parameters():
            each.zero_()
    trainer(STEPS).fit(second, data, ckpt_path=f"{folder}/half.ckpt")
    with gathered_parameters(second) as whole:
        return {name: each.detach().clone() for name, each in whole.items()}


@pytest.mark.parametrize(
    ("most_bytes", "chosen"),
    [pytest.param(None, "bolt_ddp", marks=pytest.mark.full), (193_990, "bolt_zero3")],
)
def test_a_run_is_evaluated_and_resumed(tmp_path, most_bytes, chosen) -> None:
    options = {"max_memory_bytes": most_bytes}
    auto = run_ranks(resume, 2, str(tmp_path / "auto"), "bolt_auto", options)
    same = run_ranks(resume, 2, str(tmp_path / "same"), chosen, {})
    for resumed, expected in zip(auto, same, strict=True):
        assert any(each.any() for each in resumed.values())
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_what_fits_nowhere_is_refused_with_the_least() -> None:
    with pytest.raises(RankFailure, match="no layout of the whole model fits into the"):
        run_ranks(train, 2, "bolt_auto", {"max_memory_bytes": 1000}, {})


def test_memory_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_memory_bytes=0 holds no model"):
        build_strategy("bolt_auto", max_memory_bytes=0)
