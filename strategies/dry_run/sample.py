"""Takes a first batch from the data, to divide a model before it takes any memory.

The loaders of the run are not used: the user's hook is called once more, and random states are
restored afterwards.
"""

import warnings
from collections.abc import Generator, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from boltmesh.errors import ConfigError
from boltmesh.strategies.lightning_compat.loops import (
    requested_loader,
    show_loader,
    transferred_to_host,
)
from boltmesh.strategies.random_state import random_state_unchanged


class Sample(NamedTuple):
    """A first batch of the run."""

    batch: Any
    batch_sizes: set[int]
    """Numbers of rows that its loaders return, if they are known."""


def sample_batch(trainer: Trainer) -> Sample:
    """Return a batch of the loop that is about to run, on the CPU, after the module's hooks.

    Steps that run on it find the loader in the Trainer, up to the end of the set-up.

    Raises:
        ConfigError: If the loaders have none.
    """
    with random_state_unchanged(torch.device("cpu")):
        loader = requested_loader(trainer)
        show_loader(trainer, loader)
        batch = _first_batch(loader)
        return Sample(transferred_to_host(trainer, batch), batch_sizes(loader))


def batch_sizes(loader: Any) -> set[int]:
    """Return the numbers of rows of a loader's batches, including the last one.

    Empty if they are not known in advance.
    """
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    if isinstance(loader, dict):
        loader = list(loader.values())
    if isinstance(loader, list | tuple):
        return {size for each in loader for size in batch_sizes(each)}
    if not isinstance(loader, DataLoader):
        return set()
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return set()
    try:
        last = len(loader.sampler) % size  # type: ignore[arg-type]
    except TypeError:
        return {size}
    return {size, last} - {0}


def _first_batch(loader: Any) -> Any:
    if isinstance(loader, CombinedLoader):
        loader = loader.iterables
    if isinstance(loader, dict):
        return {key: _first_batch(each) for key, each in loader.items()}
    if isinstance(loader, list | tuple) and not _is_of_numbers(loader):
        return type(loader)(_first_batch(each) for each in loader)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _collated(loader)
    if _gives_once(loader):
        raise ConfigError(
            f"The dataloader is an iterator ({type(loader).__name__}), which returns each batch "
            f"once, and the first one is needed before the run to divide the model. Give a "
            f"DataLoader, a list, or an object whose __iter__ restarts."
        )
    for batch in _aside(loader):
        if batch is not None:
            return batch
    raise ConfigError(
        "The dataloader gives no batch, and one is needed to find out how the model is divided. "
        "Give it data."
    )


def _aside(loader: Any) -> Any:
    """Return a loader to take a batch from: a copy if its dataset keeps its own position."""
    is_in_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    data = loader.dataset if isinstance(loader, DataLoader) else loader
    if is_in_workers or not isinstance(data, Iterator):
        return loader
    try:
        return deepcopy(loader)
    except Exception as error:  # noqa: BLE001 - it may hold anything: generators, files, locks
        warnings.warn(
            f"{type(data).__name__} is its own iterator and cannot be copied ({error}), so the "
            f"first batch is taken from it. If its __iter__ does not restart, the run continues "
            f"with the second one.",
            stacklevel=2,
        )
        return loader


def _gives_once(loader: Any) -> bool:
    """Whether a loader is an iterator that cannot restart: a generator, or one of Python's."""
    is_pythons = type(loader).__module__ in {"builtins", "itertools"}
    return isinstance(loader, Generator) or (isinstance(loader, Iterator) and is_pythons)


def _collated(loader: DataLoader[Any]) -> Any:
    """Return the loader's first batch, made without its workers."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batches = map(partial(_collate, loader), sampler)
    batch = next((each for each in batches if each is not None), None)  # the Trainer skips them too
    if batch is None:
        raise ConfigError(
            "The dataloader is empty, and a batch is needed to find out how the model is divided. "
            "Give it data, or a smaller batch_size where drop_last=True leaves none."
        )
    return batch


def _collate(loader: DataLoader[Any], indices: Any) -> Any:
    """Return the batch of these indices; the dataset may make batches itself."""
    dataset: Any = loader.dataset
    collate: Any = loader.collate_fn
    if loader.batch_sampler is None:
        return collate(dataset[indices])
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(indices))
    return collate([dataset[index] for index in indices])


def _is_of_numbers(loaders: list[Any] | tuple[Any, ...]) -> bool:
    """Whether Lightning treats it as one loader: a list of numbers or strings."""
    return all(isinstance(each, int | float | str) for each in loaders)
