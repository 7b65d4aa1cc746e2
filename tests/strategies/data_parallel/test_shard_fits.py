"""What runs and callbacks of Lightning do to shards: unfreezing, validation, several fits."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor

from tests.support.ranks import RankFailure, run_ranks
from tests.support.shard_runs import QUIET, STAGES, trainer, whole_parameters
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Unfreezes(BaseFinetuning):
    """Trains a block from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[1])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer, lr=0.05)


def finetune(rank: int, world_size: int, stage: int, precision: Any) -> dict[str, Tensor]:
    seed_everything(1)
    module = Stack(optimizer="sgd")
    arguments: dict[str, Any] = {
        "max_epochs": 3,
        "callbacks": [Unfreezes()],
        "precision": precision,
    }
    if stage == 0:
        run = Trainer(accelerator="cpu", devices=1, **{**QUIET, **arguments})
    else:
        run = trainer(world_size, stage, use_distributed_sampler=False, **arguments)
    run.fit(module, token_data(8, 4))
    return whole_parameters(module)


@pytest.mark.sample("bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_layer_that_is_unfrozen_later_is_trained(precision: str) -> None:
    reference = run_ranks(finetune, 1, 0, precision)[0]
    for stages in run_ranks(in_turn, 2, finetune, [(2, precision), (3, precision)]):
        for found in stages:
            for name, value in reference.items():
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def fit_with_different_beginnings(rank: int, world_size: int, stage: int) -> Any:
    torch.manual_seed(rank)
    module = Stack()
    module.register_buffer("told", torch.full((3,), float(rank)))
    first = {name: each.detach().clone() for name, each in module.named_parameters()}
    seen = {}

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.update(whole_parameters(pl_module))

    trainer(world_size, stage, max_steps=1, callbacks=[Notes()]).fit(module, token_data(8, 2))
    return first, seen, module.told.tolist()  # type: ignore[operator]


@pytest.mark.full
def test_every_rank_begins_with_the_first_ranks_model() -> None:
    ranks = run_ranks(fit_with_different_beginnings, 2, 3)
    beginning = ranks[0][0]
    for _, seen, told in ranks:
        assert told == [0.0, 0.0, 0.0]
        for name, value in beginning.items():
            assert torch.equal(seen[name], value)


class Samples(Stack):
    """Looks at what it gives, without gradients for good, before the first step and within it."""

    @torch.inference_mode()
    def sample(self, batch: Any) -> None:
        for block in self.blocks:
            block(torch.ones(1, 7))
        self(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sample(batch)
        loss = super().training_step(batch, batch_idx)
        self.sample(batch)
        return loss


def fit_both(rank: int, world_size: int, stage: int, other: type[Stack]) -> list[dict[str, Tensor]]:
    """Return what two classes come to from the same beginning."""
    found = []
    for kind in (Stack, other):
        seed_everything(1)
        module = kind(optimizer="sgd")
        trainer(world_size, stage, max_epochs=1).fit(module, token_data(16, 4))
        found.append(whole_parameters(module))
    return found


@pytest.mark.full
def test_samples_in_inference_mode_change_nothing() -> None:
    for stages in run_ranks(in_turn, 2, fit_both, [(*each, Samples) for each in STAGES]):
        for plain, sampled in stages:
            torch.testing.assert_close(sampled, plain, rtol=0, atol=0)


class Turned(Stack):
    """Has weights that do not lie row by row, as after ``to(memory_format=...)``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        blocks: Any = self.blocks
        for each in (blocks[0].up, self.head):
            each.weight.data = each.weight.data.t().contiguous().t()
            assert not each.weight.is_contiguous()


@pytest.mark.full
def test_weights_may_lie_in_memory_as_they_like() -> None:
    for stages in run_ranks(in_turn, 2, fit_both, [(*each, Turned) for each in STAGES]):
        for plain, turned in stages:
            torch.testing.assert_close(turned, plain, rtol=0, atol=0)


def validate_at_every_step(rank: int, world_size: int, stage: int) -> list[float]:
    seed_everything(1)
    losses = []

    class Notes(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["val_loss"]))

    run = trainer(world_size, stage, max_steps=4, val_check_interval=1, callbacks=[Notes()])
    run.fit(Stack(optimizer="sgd"), token_data(32, 4), token_data(16, 4))
    return losses


@pytest.mark.full
def test_validation_between_steps_sees_the_newest_parameters() -> None:
    first, second, third = run_ranks(in_turn, 2, validate_at_every_step, STAGES)[0]
    assert first == second == third
    assert len(set(first)) == len(first) == 5


def fit_twice(rank: int, world_size: int, stage: int) -> Any:
    """Fit, validate, fit on: with one Trainer, on one module."""
    seed_everything(1)
    module = Stack()
    run = trainer(world_size, stage, max_epochs=1)
    run.fit(module, token_data(16, 4))
    first = run.validate(module, token_data(16, 4), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module, token_data(16, 4))
    second = run.validate(module, token_data(16, 4), verbose=False)
    return first[0]["val_loss"], second[0]["val_loss"], run.global_step


@pytest.mark.full
def test_a_module_may_be_used_again_by_its_trainer() -> None:
    for first, second, steps in run_ranks(fit_twice, 2, 3):
        assert steps == 4
        assert second < first


def fit_with_a_new_head(rank: int, world_size: int) -> None:
    module = Stack()
    run = trainer(world_size, 1, max_epochs=1)
    run.fit(module, token_data(8, 4))
    module.head = torch.nn.Linear(7, module.head.out_features)
    run.fit_loop.max_epochs = 2
    run.fit(module, token_data(8, 4))


def test_a_layer_that_comes_after_a_first_fit_is_refused_by_name() -> None:
    with pytest.raises(RankFailure, match=r"'head.weight' came into Stack after ZeRO had sharded"):
        run_ranks(fit_with_a_new_head, 2)


class Scaled(torch.nn.Module):
    """A vector of its own, which autocast reads as it is, and a matrix below it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.matrix = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.matrix(x)


class ScaledModule(LightningModule):
    """Blocks with such a vector, and with such a module inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Scaled() for _ in range(2))
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), Scaled()) for _ in range(2)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for each in (*self.blocks, *self.layers):
            batch = each(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_scaled(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    module = ScaledModule()
    arguments: dict[str, Any] = {"max_steps": 3, "precision": "bf16-mixed"}
    if stage == 0:
        run = Trainer(accelerator="cpu", devices=1, **{**QUIET, **arguments})
    else:
        run = trainer(world_size, stage, use_distributed_sampler=False, **arguments)
    run.fit(module, torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)))
    return whole_parameters(module)


def test_a_vector_beside_matrices_is_trained_under_autocast() -> None:
    reference = run_ranks(fit_scaled, 1, 0)[0]
    for stages in run_ranks(in_turn, 2, fit_scaled, [(2,), (3,)]):
        for found in stages:
            for name, value in reference.items():
                torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)
