"""Ranks with different numbers of batches evaluate to the end, and to the same numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from boltmesh.strategies import ZeROStrategy
from tests.support.ranks import RankFailure, run_ranks
from tests.support.stack import LENGTH, VOCABULARY, Stack, token_data
from tests.support.turns import in_turn

pytestmark = pytest.mark.ranks

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(world_size: int, stage: int = 3, **arguments: Any) -> Trainer:
    strategy = ZeROStrategy(telemetry=False, stage=stage)
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, **{**QUIET, **arguments}
    )


class Local(Stack):
    """Validates without asking other ranks, and calls its blocks as often as its batch says."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        for _ in range(1 + batch_idx):
            tokens = torch.cat((tokens, self(tokens)[:, -1:].argmax(-1)), dim=1)
        return self(tokens)


class Uneven(IterableDataset[Any]):
    """Gives each rank another number of samples and tells nobody."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for _ in range(self.counts[rank]):
            tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
            yield tokens[:-1], tokens[1:]


def model() -> LightningModule:
    seed_everything(1, verbose=False)
    return Local()


def expected(batches: list[Any]) -> list[Tensor]:
    plain = model().eval()
    with torch.no_grad():
        return [plain.predict_step(batch, number) for number, batch in enumerate(batches)]


def predict(rank: int, world_size: int, stage: int, count: int) -> None:
    data = token_data(count, 2)
    shares = [list(range(each, count, world_size)) for each in range(world_size)]
    whole: TensorDataset = data.dataset  # type: ignore[assignment]
    share = DataLoader(torch.utils.data.Subset(whole, shares[rank]), 2)
    predictions = trainer(world_size, stage).predict(model(), data)
    assert predictions is not None
    wanted = expected(list(share))
    assert len(predictions) == len(wanted)
    for one, other in zip(predictions, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "count"), [(2, 9), (4, 21)])
def test_prediction_ends_on_ranks_that_have_fewer_batches(world_size: int, count: int) -> None:
    run_ranks(in_turn, world_size, predict, [(stage, count) for stage in (1, 2, 3)])


def validate(rank: int, world_size: int, counts: list[int], limit: float) -> float:
    loader = DataLoader(Uneven(counts), batch_size=2)
    run = trainer(world_size, limit_val_batches=limit)
    run.validate(model(), loader, verbose=False)
    plain = model().eval()
    batches = list(loader)[: None if limit == 1.0 else int(limit)]
    if not batches:
        return -1.0
    with torch.no_grad():
        sizes = torch.tensor([float(len(batch[0])) for batch in batches])
        losses = torch.stack([plain.loss(batch) for batch in batches])  # type: ignore[operator]
    mean = (losses * sizes).sum() / sizes.sum()
    torch.testing.assert_close(torch.as_tensor(run.callback_metrics["val_loss"]), mean)
    return float(mean)


@pytest.mark.full
def test_loaders_without_a_length_may_end_at_different_times() -> None:
    uneven = [([7, 2], 1.0), ([1, 6], 1.0), ([9, 4], 3), ([4, 4], 1.0), ([0, 3], 1.0)]
    first, second = run_ranks(in_turn, 2, validate, uneven)
    assert len(first) == 5
    assert all(one != other for one, other in zip(first, second, strict=True))


class StepsAtWill(Local):
    """Draws its batches itself."""

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))


def validate_at_will(rank: int, world_size: int) -> int:
    run = trainer(world_size)
    run.validate(StepsAtWill(), DataLoader(Uneven([5, 2]), batch_size=1), verbose=False)
    return 1


@pytest.mark.full
def test_a_step_that_draws_its_own_batches_may_run_out() -> None:
    assert run_ranks(validate_at_will, 2) == [1, 1]


def validate_while_training(rank: int, world_size: int, stage: int) -> list[float]:
    """Validate between steps, unevenly; training has to go on as if nobody had looked."""
    losses = []
    for validates in (False, True):
        module = model()
        uneven = DataLoader(Uneven([5, 2]), batch_size=1) if validates else None
        run = trainer(world_size, stage, max_steps=6, val_check_interval=2, num_sanity_val_steps=1)
        run.fit(module, token_data(24, 2), uneven)
        losses.append(float(run.callback_metrics["train_loss"]))
    assert losses[0] == losses[1]
    return losses


@pytest.mark.full
def test_uneven_validation_between_steps_changes_nothing() -> None:
    run_ranks(in_turn, 2, validate_while_training, [(1,), (3,)])


def predict_almost_nothing(rank: int, world_size: int) -> None:
    data = token_data(1 if rank == 0 else 0, 2)
    trainer(world_size, use_distributed_sampler=False).predict(model(), data)


@pytest.mark.full
def test_a_rank_without_any_batch_is_named_on_every_rank() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(predict_almost_nothing, 2, grace_s=30)
    said = str(failure.value)
    assert said.count("ConfigError: Ranks [1] of the data axis would get no batch") == 2
