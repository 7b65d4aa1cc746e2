"""All ranks of a pipeline work on one batch with the same random numbers, or are told why not."""

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from boltmesh.errors import BoltMeshError
from boltmesh.strategies.pipeline.stage.rng import host_random_state
from tests.support.pipelines import MICROBATCHES, pipeline, quiet_trainer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 6
SECONDS = 30.0
"""However busy the machine is; the ranks of these tests wait a minute for each other."""


class Layers(LightningModule):
    """Layers on rows of numbers; keeps a picture of each batch that it is given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(dropout) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)
        self.seen: list[Any] = []
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(self(x), y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([each.tolist() for each in batch])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.masks: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        dropped = self.dropout(x)
        if type(dropped) is Tensor:  # and not a trace's
            self.masks.append((dropped == 0).tolist())
        return x + dropped


def rows(count: int) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.sum(-1))


class Crops(Dataset[Any]):
    """Draws from all three generators that people draw from."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH) + random.random() + float(np.random.rand())
        return x, x.sum() + index


class Stream(IterableDataset[Any]):
    """Draws its rows, as many as asked for on this rank."""

    def __init__(self, count: int, *, offset: float = 0.0) -> None:
        self.count, self.offset = count, offset

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for _ in range(self.count // (1 if info is None else info.num_workers)):
            x = torch.randn(WIDTH) + np.random.rand()
            yield x + self.offset, x.sum()


def mixed(samples: list[Any]) -> list[Tensor]:
    weight = np.random.beta(0.4, 0.4)
    x, y = (torch.stack(each) for each in zip(*samples, strict=True))
    order = torch.randperm(len(x))
    return [x * weight + x[order] * (1 - weight), y * weight + y[order] * (1 - weight)]


def loaders(name: str, rank: int) -> DataLoader[Any]:
    if name == "workers":
        return DataLoader(Crops(), batch_size=8, num_workers=2, shuffle=True)
    if name == "a random collator":
        return DataLoader(rows(24), batch_size=8, collate_fn=mixed, shuffle=True)
    return DataLoader(Stream(26), batch_size=8, num_workers=2 if "workers" in name else 0)


def see(rank: int, world_size: int, names: list[str], is_seeded: bool) -> list[Any]:
    seen = []
    for name in names:
        if is_seeded:
            seed_everything(7, workers=True, verbose=False)
        else:
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
        module = Layers()
        trainer = quiet_trainer(world_size, pipeline(), max_epochs=2)
        trainer.fit(module, loaders(name, rank))
        seen.append((module.seen, module.losses))
    return seen


@pytest.mark.full
@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "unseeded"])
def test_all_ranks_see_the_same_random_data(is_seeded: bool) -> None:
    names = ["workers", "a random collator", "a stream", "a stream of workers"]
    first, second = run_ranks(see, 2, names, is_seeded)
    for name, (batches, losses), (others, told) in zip(names, first, second, strict=True):
        assert len(batches) >= 6, name
        assert batches == others, name
        assert losses == told, name
        # Every epoch draws anew.
        assert batches[0] != batches[len(batches) // 2], name


# What differs is refused, on all ranks and at once.


def meet(rank: int, world_size: int, how: str) -> tuple[str, float]:
    seed_everything(7, verbose=False)
    data: Any = rows(24)
    if how == "values":
        data = Stream(24, offset=float(rank == 1))
    if how == "shapes":
        data = Stream(24 - 2 * (rank == 1))
    if how == "length":
        data = Stream(24 - 8 * (rank == 1))
    module = Layers()
    start = time.monotonic()
    try:
        quiet_trainer(world_size, pipeline()).fit(module, DataLoader(data, batch_size=8))
    except BoltMeshError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("values", "Ranks 0 and 1 have batches of the same shapes with other values"),
        ("shapes", "Rank 0 has a batch of [0] float32 (8, 6), [1] float32 (8,), and rank 1 one of"),
        ("length", "The data of rank 1 ends with this batch, and rank 0 has more"),
    ],
)
def test_ranks_with_other_data_are_named(how: str, said: str) -> None:
    for text, seconds in run_ranks(meet, 2, how):
        assert said in text
        assert "All ranks of a pipeline have to get the same batch" in text
        assert seconds < SECONDS


# Random numbers within the step.


def drop(rank: int, world_size: int, seeds: list[tuple[int, int | None]]) -> list[Any]:
    told = []
    for seed, own in seeds:
        seed_everything(3, verbose=False)
        module = Layers(dropout=0.4)
        seed_everything(seed, verbose=False)
        trainer = quiet_trainer(world_size, pipeline(seed=own, schedule="zbv"))
        trainer.fit(module, DataLoader(rows(16), batch_size=8))
        told.append((module.losses, [layer.masks for layer in module.layers]))
    return told


@pytest.mark.full
def test_dropout_repeats_by_seed_and_differs_by_microbatch_layer_and_step() -> None:
    seeds = [(1, None), (1, None), (2, None), (1, 5), (2, 5)]
    ranks = run_ranks(drop, 2, seeds)
    for first, again, other, own, own_again in ranks:
        assert first == again
        assert own == own_again  # the strategy's seed reaches the layers
        assert len({tuple(each[0]) for each in (first, other, own)}) == 3
    masks = [mask for told in ranks for layer in told[0][1] for mask in layer]
    assert len(masks) == 4 * 2 * MICROBATCHES
    assert len({str(mask) for mask in masks}) > len(masks) - 3  # 12 elements each


class Mixup(Layers):
    """Mixes what is in a row by numbers of numpy and Python in the step, and in a layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, float, float]] = []
        self.given: list[tuple[float, float, float]] | None = None
        self.noisy = Noisy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weight = self.draw(0)
        x = self.noisy(x * weight + x.flip(1) * (1 - weight))
        scale = self.draw(1)  # used on the first stage and on the last, which ran no layer before
        loss = functional.mse_loss(self(x * scale) * scale, y * weight + y.cos() * (1 - weight))
        self.drawn.append((weight, scale, after := self.draw(2)))
        if self.given is not None:
            self.given.pop(0)
        return loss * after

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = host_random_state()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.given is None:  # what the step has drawn is taken back
            assert host_random_state() == self.before

    def draw(self, number: int) -> float:
        if self.given is not None:
            return self.given[0][number]
        return (np.random.beta(0.4, 0.4), random.random(), np.random.rand())[number]


class Noisy(nn.Module):
    """A layer that draws on the host, on its stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + 0.0 * (np.random.rand() + random.random())


def mix(rank: int, world_size: int, schedule: str) -> tuple[Any, ...]:
    if schedule == "1f1b":  # an unseeded run, but for the model
        torch.manual_seed(3)
        np.random.seed(rank)
        random.seed(rank)
    else:
        seed_everything(3, verbose=False)
    module = Mixup()
    strategy = pipeline(schedule=schedule)
    trainer = quiet_trainer(world_size, strategy)
    trainer.fit(module, DataLoader(rows(24), batch_size=8))
    held = {
        name: each.detach().clone()
        for name, each in module.named_parameters()
        if strategy.holds(name)
    }
    return module.losses, module.drawn, held


def mix_in_one_process(rank: int, world_size: int, drawn: list[Any]) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    module = Mixup()
    module.given = list(drawn)
    trainer = quiet_trainer(1, accumulate_grad_batches=MICROBATCHES)
    trainer.fit(module, DataLoader(rows(24), batch_size=8 // MICROBATCHES))
    return {name: each.detach() for name, each in module.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_numpy_and_python_draw_the_same_on_all_stages(schedule: str) -> None:
    ranks = run_ranks(mix, 2, schedule)
    assert ranks[0][0] == ranks[1][0]
    last = ranks[1][1]  # the last stage's rank runs steps to their end, others only up to a layer
    assert len(set(last)) == 3 * MICROBATCHES
    reference = run_ranks(mix_in_one_process, 1, last)[0]
    held = {name: each for _, _, own in ranks for name, each in own.items()}
    assert held.keys() == reference.keys()
    torch.testing.assert_close(held, reference, rtol=1e-5, atol=1e-6)


class Changes(Layers):
    """Takes an entry out of its batch, scales in place, marks values to be left out."""

    def loss(self, batch: Any) -> Tensor:
        y = batch.pop("y")
        batch["x"] /= 2
        y -= 1
        y[y < -3] = 0
        return functional.mse_loss(self(batch["x"]), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    on_train_batch_start = LightningModule.on_train_batch_start  # type: ignore[assignment]


def named(samples: list[Any]) -> dict[str, Tensor]:
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def change(rank: int, world_size: int) -> list[Any]:
    strategies: list[Any] = ["auto"]
    if world_size > 1:
        names = ("1f1b", "gpipe", "interleaved_1f1b")
        strategies = [pipeline(schedule=each) for each in names] + [pipeline(microbatches=1)]
    found = []
    for each in strategies:
        seed_everything(3, verbose=False)
        module = Changes()
        trainer = quiet_trainer(world_size, each)
        loader = DataLoader(rows(24), 8, collate_fn=named)
        trainer.fit(module, loader, loader)
        found.append([*module.losses, float(trainer.callback_metrics["val_loss"])])
    return found


def test_a_step_may_change_its_batch() -> None:
    (wanted,) = run_ranks(change, 1)[0]
    for found in run_ranks(change, 2):
        for numbers in found:
            assert numbers == pytest.approx(wanted, rel=1e-5)
