"""Writes to parameters from a step or a hook count, or are refused by name; none is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.distributed.tensor import DTensor

from boltmesh.errors import ConfigError
from boltmesh.strategies import ZeROStrategy, gathered_parameters
from tests.support.ranks import RankFailure, run_ranks
from tests.support.shard_runs import QUIET, whole_parameters
from tests.support.sharded import whole
from tests.support.stack import Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks


class Written(Stack):
    """Halves what it gets by ``parameters()``, as moving averages and clamps are written."""

    is_gathered = False

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    @contextmanager
    def writing(self) -> Iterator[None]:
        if self.is_gathered:
            with gathered_parameters(self, writes=True):
                yield
        else:
            yield

    @torch.no_grad()
    def halve(self) -> None:
        with self.writing():
            for each in self.parameters():
                each.mul_(0.5)


class BetweenBatches(Written):
    def on_train_batch_end(self, *_: Any) -> None:
        self.halve()


class BeforeBackward(Written):
    def on_before_backward(self, loss: Any) -> None:
        self.halve()


class Gathered(BetweenBatches):
    is_gathered = True


class Shards(Written):
    """Writes to what its optimizer has, in the midst of an accumulation window."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.mul_(0.5)


class Sharpened(Written):
    """Takes the gradient at another place than it steps from."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @torch.no_grad()
    def move(self, optimizer: Any, gradients: list[Any], by: float) -> None:
        with self.writing():
            moved = self.parameters() if self.is_gathered else optimizer.param_groups[0]["params"]
            for each, gradient in zip(moved, gradients, strict=True):
                each.add_(gradient, alpha=by)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        gradients = [each.grad.clone() for each in optimizer.param_groups[0]["params"]]
        if self.is_gathered:
            gradients = [whole(each) for each in gradients]
        optimizer.zero_grad()
        self.move(optimizer, gradients, 0.05)
        self.manual_backward(self.loss(batch))
        self.move(optimizer, gradients, -0.05)
        optimizer.step()
        optimizer.zero_grad()


class SharpenedGathered(Sharpened):
    is_gathered = True


class RowsOfWeight(Written):
    """Clears a row of its table, as of the padding."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.embedding.weight[0].fill_(0.0)


class RowsOfGradient(Written):
    """Trains the last rows of its table alone, as those of new words."""

    def on_after_backward(self) -> None:
        gradient: Any = self.embedding.weight.grad
        gradient[:9].zero_()


class RowsByHook(Written):
    """The same, as the error of the other says."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.embedding.weight
        mask = (torch.arange(len(weight)) >= 9).float()[:, None]
        weight.register_hook(lambda gradient: gradient * mask)


def fit(rank: int, world_size: int, kind: type[LightningModule], stage: int) -> Any:
    seed_everything(1)
    module = kind()
    train(module, world_size, stage)
    return whole_parameters(module)


def train(module: LightningModule, world_size: int, stage: int) -> None:
    strategy: Any = ZeROStrategy(telemetry=False, stage=stage) if stage else "auto"
    window = 1 if isinstance(module, Sharpened) else 2
    run = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1,
        use_distributed_sampler=False, accumulate_grad_batches=window, **QUIET,
    )  # fmt: skip
    run.fit(module, token_data(16, 4))


@pytest.mark.sample("Shards")
@pytest.mark.parametrize("kind", [Shards, Gathered, BetweenBatches, SharpenedGathered, RowsByHook])
def test_what_is_written_is_what_is_computed_with(kind: type[LightningModule]) -> None:
    (wanted,) = run_ranks(fit, 1, kind, 0)
    for results in run_ranks(in_turn, 2, fit, [(kind, 1), (kind, 2), (kind, 3)]):
        for found in results:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def refused(rank: int, world_size: int, kind: type[LightningModule], stage: int) -> str:
    module = kind()
    with pytest.raises(ConfigError) as caught:
        train(module, world_size, stage)
    assert all(isinstance(each, DTensor) for each in module.parameters())  # nothing stays gathered
    return str(caught.value)


class Both(Written):
    """Writes to the gathered parameters and to the shards, which cannot both count."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.halve()
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.mul_(0.5)


@pytest.mark.sample("Both-1")
@pytest.mark.parametrize(("kind", "stage"), [(Both, 1), (Sharpened, 3)])
def test_a_write_that_would_be_lost_is_refused(kind: type[LightningModule], stage: int) -> None:
    for message in run_ranks(refused, 2, kind, stage):
        name, found, advice = message.partition(" was changed while it was gathered")
        assert found
        assert name.strip("'") in dict(nn.Module.named_parameters(Stack()))
        assert "gathered_parameters(module, writes=True)" in advice


@pytest.mark.sample("RowsOfGradient-1")
@pytest.mark.parametrize(("kind", "stage"), [(RowsOfGradient, 1), (RowsOfWeight, 3)])
def test_a_write_to_some_rows_of_a_shard_is_refused(
    kind: type[LightningModule], stage: int
) -> None:
    for message in run_ranks(refused, 2, kind, stage):
        assert "A part of a tensor is written to (" in message
        assert "test_writes.py:" in message
        assert "register_hook" in message


def failed(rank: int, world_size: int, stage: int) -> None:
    train(BeforeBackward(), world_size, stage)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 1)])
def test_a_write_that_autograd_refuses_in_one_process_is_refused(
    num_ranks: int, stage: int
) -> None:
    with pytest.raises(RankFailure, match="modified by an inplace operation"):
        run_ranks(failed, num_ranks, stage)
