"""What the data ranks of a layout would train on, for the one process they are compared with."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from boltmesh.errors import ConfigError
from boltmesh.strategies.lightning_compat import rank_loader


class RankBatches:
    """The batches of all data ranks for one process: in turn, or as one.

    Each rank's share comes from Lightning's own distributed sampler with the numbers that it
    should have, so that a strategy which asks for others is found out.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        data_size: int,
        stage: RunningStage,
        *,
        is_merged: bool = False,
    ) -> None:
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"A comparison needs a DataLoader over a dataset with indices, and this is "
                f"{type(loader).__name__} over {type(dataset).__name__}: nothing says which rank "
                f"should see what of it."
            )
        self.loaders = [rank_loader(loader, rank, data_size, stage) for rank in range(data_size)]
        self.is_merged = is_merged
        # Where Lightning looks for ``set_epoch``.
        self.sampler, self.batch_sampler = self, None

    def split(self) -> "list[RankBatches]":
        """One rank each."""
        parts = [copy.copy(self) for _ in self.loaders]
        for part, loader in zip(parts, self.loaders, strict=True):
            part.loaders = [loader]
        return parts

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins."""
        for loader in self.loaders:
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.loaders]
        return max(lengths) if self.is_merged else sum(lengths)

    def __iter__(self) -> Iterator[Any]:
        nothing = object()
        for batches in itertools.zip_longest(*self.loaders, fillvalue=nothing):
            present = [batch for batch in batches if batch is not nothing]
            if self.is_merged:
                yield _concatenate(present)
            else:
                yield from present


def _concatenate(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {key: _concatenate([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_concatenate(parts) for parts in zip(*batches, strict=True))
    raise ConfigError(f"A batch that holds a {type(first).__name__} cannot be concatenated.")
