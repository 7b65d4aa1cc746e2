"""The first look at the data finds a batch in all that the Trainer takes batches from."""

from threading import Lock
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from boltmesh.errors import ConfigError
from boltmesh.strategies import TensorParallelStrategy, gathered_parameters
from boltmesh.strategies.dry_run import sample
from boltmesh.strategies.dry_run.sample import sample_batch
from tests.support.pipelines import pipeline, quiet_trainer
from tests.support.ranks import run_ranks
from tests.support.stack import Stack, token_data


def sampled(monkeypatch: pytest.MonkeyPatch, loader: Any) -> Any:
    monkeypatch.setattr(sample, "requested_loader", lambda _: loader)
    monkeypatch.setattr(sample, "transferred_to_host", lambda _, batch: batch)
    return sample_batch(Trainer(accelerator="cpu", logger=False, barebones=True)).batch


class Some(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index


class Renewed:
    def __iter__(self) -> Any:
        return iter([None, torch.ones(1)])


def unless_small(rows: list[int]) -> Any:
    """Leave out a batch, as authors do whose files are broken."""
    return None if min(rows) < 2 else default_collate(rows)


def test_batches_that_the_trainer_skips_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Some(), batch_size=2, collate_fn=unless_small)
    assert sampled(monkeypatch, loader).tolist() == [2, 3]
    assert sampled(monkeypatch, Renewed()).tolist() == [1.0]


def test_an_iterator_is_refused_and_gives_its_first_batch_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = iter([torch.zeros(1), torch.ones(1)])
    with pytest.raises(ConfigError, match=r"is an iterator .* whose __iter__ restarts"):
        sampled(monkeypatch, loader)
    assert next(loader).tolist() == [0.0]


class Rewound:
    """An iterator that begins anew, as some loaders of GPUs do."""

    def __iter__(self) -> "Rewound":
        self.number = 0
        return self

    def __next__(self) -> torch.Tensor:
        self.number += 1
        return torch.full((1,), float(self.number))


def test_an_iterator_that_begins_anew_is_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Rewound()
    assert sampled(monkeypatch, loader).tolist() == [1.0]
    assert next(iter(loader)).tolist() == [1.0]


class Counted(IterableDataset[int]):
    """Goes on where it was, whoever asks."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number


def test_data_that_never_begin_anew_keep_their_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Counted()
    loader = DataLoader(data, batch_size=2)
    assert sampled(monkeypatch, loader).tolist() == [1, 2]
    assert next(iter(loader)).tolist() == [1, 2]
    assert sampled(monkeypatch, data) == 3
    assert next(data) == 3


class Uncopied(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


def test_data_that_cannot_be_copied_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"Uncopied is its own iterator and cannot be copied \(.*lock.*\), so the first batch"
    with pytest.warns(UserWarning, match=said):
        assert sampled(monkeypatch, DataLoader(Uncopied(), batch_size=2)).tolist() == [1, 2]


def test_a_loader_without_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="smaller batch_size where drop_last=True"):
        sampled(monkeypatch, DataLoader(Some(), batch_size=6, drop_last=True))


def test_a_list_of_numbers_is_a_loader_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = {"a": [0, 1, 2], "b": {3, 4}, "c": [DataLoader(Some()), DataLoader(Some())]}
    found = sampled(monkeypatch, CombinedLoader(loaders, "max_size_cycle"))
    assert found == {"a": 0, "b": 3, "c": [torch.tensor([0]), torch.tensor([0])]}


class Annealed(Stack):
    """Weighs a term by how much of the run is done, as variational models do."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        loader: Any = trainer.train_dataloader
        share = (batch_idx + 1) / (trainer.num_training_batches + len(loader))
        share += self.global_step / trainer.estimated_stepping_batches
        return self.loss(batch) + share * self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 2
        return super().configure_optimizers()


def annealed(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    strategies: list[Any] = ["auto"]
    if world_size > 1:
        strategies = [pipeline(), TensorParallelStrategy(telemetry=False)]
    found = []
    for each in strategies:
        seed_everything(1, verbose=False)
        module = Annealed()
        quiet_trainer(world_size, each).fit(module, token_data(16, 8))
        with gathered_parameters(module) as whole:
            found.append({name: value.detach().clone() for name, value in whole.items()})
    return found


@pytest.mark.ranks
def test_a_step_finds_how_many_batches_the_run_has_before_it_begins() -> None:
    ((wanted,),) = run_ranks(annealed, 1)
    for found in run_ranks(annealed, 2):
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-6)
