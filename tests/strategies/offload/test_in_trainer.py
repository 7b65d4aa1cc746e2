"""Offloading in a Trainer: evaluation, several runs, and callbacks that look on."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from boltmesh.strategies import ZeROStrategy
from boltmesh.strategies.offload import stores
from boltmesh.strategies.offload.update_rule import ElementwiseRule
from boltmesh.strategies.torch_compat.tensors import local_tensor
from tests.strategies.offload.test_elementwise import Counting
from tests.support.models import FEATURES, Regression, regression_data
from tests.support.offloaded import full
from tests.support.ranks import run_ranks
from tests.support.shard_runs import whole_parameters

pytestmark = pytest.mark.ranks

CPU = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
NVME = {"offload_optimizer": "nvme", "offload_parameters": "nvme"}


def make(world_size: int, *, strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    stores.SMALL_NUMEL = 0
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ZeROStrategy(telemetry=False, **(strategy or {})),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def module() -> Regression:
    seed_everything(1, verbose=False)
    return Regression()


def whole(model: LightningModule) -> list[Tensor]:
    return [full(each).detach().clone() for each in model.parameters()]


class OneLayer(Regression):
    """One unit with one tensor of state: its master parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 1))
        del self.side

    def loss(self, batch: Any, *, uses_side: bool = True) -> Tensor:
        return super().loss(batch, uses_side=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_plainly(rank: int, world_size: int, folder: Path) -> list[list[Tensor]]:
    found = []
    for strategy in ({}, {"offload_optimizer": "nvme", "offload_path": folder}):
        trainer = make(world_size, strategy=strategy, max_steps=3, use_distributed_sampler=False)
        seed_everything(1, verbose=False)
        model = OneLayer()
        trainer.fit(model, regression_data(12, 4))
        found.append(whole(model))
    return found


def test_a_state_of_less_than_two_pages_is_kept_on_a_disk(tmp_path: Path) -> None:
    for gathered, offloaded in run_ranks(train_plainly, 2, tmp_path):
        for one, other in zip(gathered, offloaded, strict=True):
            torch.testing.assert_close(other, one)


def evaluate(rank: int, world_size: int, folder: Path) -> list[float]:
    losses = []
    for strategy in ({}, CPU, {**NVME, "offload_path": folder}):
        trainer = make(world_size, strategy=strategy)
        (metrics,) = trainer.validate(module(), regression_data(21, 4), verbose=False)
        losses.append(metrics["val_loss"])
    return losses


@pytest.mark.full
def test_a_model_that_was_never_trained_is_evaluated_from_where_it_is_kept(tmp_path: Path) -> None:
    for plain, *offloaded in run_ranks(evaluate, 2, tmp_path):
        assert offloaded == [plain] * 2


def same_trainer(rank: int, world_size: int, strategy: dict[str, Any]) -> list[float]:
    """The second fit of one Trainer makes new optimizers and goes on from the weights."""
    model = module()
    trainer = make(world_size, strategy=strategy, max_epochs=1)
    found = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, regression_data(24, 4), regression_data(21, 4))
        found.append(float(trainer.callback_metrics["val_loss"]))
        (metrics,) = trainer.test(model, regression_data(21, 4), verbose=False)
        found.append(metrics["val_loss"])
    return found


@pytest.mark.sample("disk")
@pytest.mark.parametrize(
    "strategy", [{"offload_optimizer": "cpu"}, CPU, NVME], ids=["state", "all", "disk"]
)
def test_one_trainer_fits_and_tests_and_fits_again(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    path = {"offload_path": tmp_path} if strategy is NVME else {}
    plain = run_ranks(same_trainer, 2, {})
    offloaded = run_ranks(same_trainer, 2, {**strategy, **path})
    assert plain[0][0] != plain[0][2]
    assert offloaded[0] == pytest.approx(plain[0], rel=1e-5)


class Counted(Regression):
    """An optimizer counts its steps in its group; its rate is a tensor that a scheduler writes."""

    def configure_optimizers(self) -> Any:
        optimizer = Counting(self.parameters(), lr=torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def count(rank: int, world_size: int) -> list[Any]:
    apply = ElementwiseRule.apply

    def slowly(self: ElementwiseRule, chunk: Any, coefficient: float) -> None:
        time.sleep(0.02)  # as long as chunks of a large model take
        apply(self, chunk, coefficient)

    ElementwiseRule.apply = slowly
    found: list[Any] = []
    for strategy in ({}, {"offload_optimizer": "cpu"}):
        seed_everything(1, verbose=False)
        model = Counted()
        trainer = make(world_size, strategy=strategy, max_steps=4)
        trainer.fit(model, regression_data(32, 4))
        steps = trainer.optimizers[0].param_groups[0]["step"]
        found.append(([each.tolist() for each in whole(model)], steps))
    return found


def test_what_steps_and_schedulers_write_into_groups_counts_once_a_step() -> None:
    for (plain, steps), (offloaded, counted) in run_ranks(count, 2):
        assert counted == steps == 4
        for one, other in zip(offloaded, plain, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


class ParameterWatcher(Callback):
    """Reads parameters after each step."""

    def __init__(self) -> None:
        self.gradients: list[float] = []
        self.parameters: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.parameters.append(whole(pl_module))


class GradientWatcher(ParameterWatcher):
    """Reads gradients before each step as well, which keeps them in ``.grad``."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        shards = [local_tensor(p.grad) for p in pl_module.parameters() if p.grad is not None]
        self.gradients.append(float(sum(each.square().sum() for each in shards)))


Seen = tuple[list[float], list[list[Tensor]]]


def watch(
    rank: int, world_size: int, strategy: dict[str, Any], kind: type[ParameterWatcher]
) -> Seen:
    watcher = kind()
    trainer = make(world_size, strategy=strategy, max_steps=3, callbacks=[watcher])
    trainer.fit(module(), regression_data(24, 4))
    return watcher.gradients, watcher.parameters


@pytest.mark.full
@pytest.mark.parametrize("kind", [ParameterWatcher, GradientWatcher])
def test_callbacks_see_what_they_see_without_offload(kind: type[ParameterWatcher]) -> None:
    plain = run_ranks(watch, 2, {}, kind)
    offloaded = run_ranks(watch, 2, CPU, kind)
    for (gradients, parameters), (expected, before) in zip(offloaded, plain, strict=True):
        assert len(expected) == (3 if kind is GradientWatcher else 0)
        assert gradients == pytest.approx(expected, rel=1e-5)
        assert len(parameters) == 3
        for ours, theirs in zip(parameters, before, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


class Meddler(Callback):
    """Writes to a parameter outside of the context manager."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            next(pl_module.parameters()).mul_(0.9)


def meddle(rank: int, world_size: int, strategy: dict[str, Any]) -> dict[str, Tensor]:
    trainer = make(world_size, strategy=strategy, max_steps=3, callbacks=[Meddler()])
    trained = module()
    trainer.fit(trained, regression_data(24, 4))
    return whole_parameters(trained)


@pytest.mark.full
def test_a_write_between_steps_is_what_the_next_step_starts_from() -> None:
    for offloaded, plain in zip(run_ranks(meddle, 2, CPU), run_ranks(meddle, 2, {}), strict=True):
        torch.testing.assert_close(offloaded, plain, rtol=1e-5, atol=1e-7)
