"""What ``training_step`` sets on the Trainer and in optimizers is set as in one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn

from boltmesh.errors import UnsupportedError
from boltmesh.strategies.pipeline.step_effects import StepEffects
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import reuse_ranks
from tests.support.stack import Stack, token_data


class Guarded(Stack):
    """Ends the run at a loss that is no number, which no batch has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if torch.isnan(loss):
            self.trainer.should_stop = True
            self.trainer.fit_loop.max_epochs = 0
        return loss


def guarded(rank: int, world_size: int) -> tuple[int, bool]:
    seed_everything(1, verbose=False)
    trainer = quiet_trainer(world_size, pipeline(), max_epochs=2)
    trainer.fit(Guarded(depth=4), token_data(24, 8))
    return trainer.global_step, trainer.should_stop


@pytest.mark.ranks
def test_a_branch_that_no_batch_takes_does_not_end_the_run() -> None:
    assert reuse_ranks(guarded, 2) == [(6, False)] * 2


class Sets(Stack):
    """Sets options of its optimizer before and behind its layers, and ends in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        groups = self.optimizers().param_groups
        groups[1]["betas"] = (0.9 / (1 + self.global_step), 0.95)
        groups[0]["weight_decay"] *= 0.5
        loss = self.loss(batch)
        for group in groups:
            group["lr"] *= 0.9
        if self.current_epoch == 1 and batch_idx == 1:
            self.trainer.should_stop = True
        return loss

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[0]


def sets(rank: int, world_size: int, schedule: str) -> Any:
    seed_everything(1, verbose=False)
    strategy: Any = pipeline(schedule=schedule, timeout_s=30.0) if world_size > 1 else "auto"
    trainer = quiet_trainer(world_size, strategy, max_epochs=3)
    trainer.fit(Sets(depth=4, groups=True), token_data(24, 8))
    groups = trainer.optimizers[0].param_groups
    return trainer.global_step, [
        {k: v for k, v in group.items() if k in {"lr", "betas", "weight_decay"}} for group in groups
    ]


@pytest.mark.ranks
@pytest.mark.sample("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_rates_and_the_end_of_the_run_that_a_step_sets_are_those_of_one_process(
    schedule: str,
) -> None:
    (alone,) = reuse_ranks(sets, 1, schedule)
    assert alone[0] == 5
    assert reuse_ranks(sets, 2, schedule) == [alone] * 2


class Shows(Stack):
    """Logs weights of its first layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        blocks: Any = self.blocks
        self.log("size", blocks[0].up.weight.detach().norm())
        self.log("gate", blocks[1].up.bias[0])
        return super().training_step(batch, batch_idx)


def shows(rank: int, world_size: int) -> dict[str, float]:
    seed_everything(1, verbose=False)
    strategy: Any = pipeline() if world_size > 1 else "auto"
    trainer = quiet_trainer(world_size, strategy)
    trainer.fit(Shows(depth=4), token_data(24, 8))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.ranks
def test_weights_of_other_stages_are_logged_with_their_values() -> None:
    (alone,) = reuse_ranks(shows, 1)
    for metrics in reuse_ranks(shows, 2):
        assert {key: metrics[key] for key in alone} == pytest.approx(alone, rel=1e-4)


@pytest.fixture
def attached() -> Any:
    module: Any = LightningModule()
    module.layer = nn.Linear(2, 2)
    module.trainer = quiet_trainer(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5))
    module.trainer.strategy.optimizers = [optimizer]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module.trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler)]
    return module


def test_a_rate_that_is_a_tensor_stays_that_tensor(attached: Any) -> None:
    (group,) = attached.trainer.optimizers[0].param_groups
    rate, effects = group["lr"], StepEffects(attached)
    for _ in range(3):
        with effects.undone():
            rate.mul_(0.5)
        with effects.kept():
            rate.mul_(0.5)
            group["nesterov"] = True
    assert float(rate) == 0.5
    logged = effects.logged()
    assert effects.apply(logged, stops=False) == []
    assert group["lr"] is rate
    assert (float(rate), group["nesterov"]) == (0.25, True)


def test_microbatches_that_set_different_rates_are_refused(attached: Any) -> None:
    (group,) = attached.trainer.optimizers[0].param_groups
    effects = StepEffects(attached)
    for rate in (0.1, 0.1, 0.2):
        with effects.kept():
            group["lr"] = rate
    with pytest.raises(UnsupportedError, match=r"sets 'lr' .* on_train_batch_end"):
        effects.logged()


def test_a_microbatch_that_ends_the_run_alone_ends_it_with_a_warning(attached: Any) -> None:
    """As a handler of a signal does that came within it."""
    effects = StepEffects(attached)
    for stops in (False, True, False):
        with effects.kept():
            attached.trainer.should_stop = stops
    assert effects.stops(torch.tensor(float("nan")))
    with pytest.warns(UserWarning, match=r"for some microbatches .* on_train_batch_end"):
        assert effects.stops(torch.tensor(1.0))


def test_what_cannot_be_sent_and_steps_of_schedulers_are_refused(attached: Any) -> None:
    optimizer, effects = attached.trainer.optimizers[0], StepEffects(attached)
    with (
        pytest.raises(UnsupportedError, match=r"sets 'name' .* on_train_batch_end"),
        effects.kept(),
    ):
        optimizer.param_groups[0]["name"] = "late"
    assert "name" not in optimizer.param_groups[0]
    (config,) = attached.trainer.strategy.lr_scheduler_configs
    optimizer.step()
    for context in (effects.kept, effects.undone):
        with pytest.raises(UnsupportedError, match="steps a learning rate scheduler"), context():
            config.scheduler.step()
