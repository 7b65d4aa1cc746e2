"""Where a loop of validation, test or prediction stands."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher


def _evaluating_loop(trainer: Trainer) -> Any:
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def evaluation_length(trainer: Trainer) -> float:
    """Return how many batches this rank evaluates, infinity where nobody knows.

    Valid from the start of validation, test or prediction on.
    """
    loop = _evaluating_loop(trainer)
    if any(sized_len(each) is None for each in loop._combined_loader.flattened):
        return math.inf  # a limit says how many there are at most
    return float(sum(loop.max_batches))


def draws_batches(trainer: Trainer) -> bool:
    """Whether the steps of an evaluation take an iterator instead of a batch."""
    return isinstance(_evaluating_loop(trainer)._data_fetcher, _DataLoaderIterDataFetcher)


class _WatchedBatches:
    """An iterator over batches that says when it ends."""

    def __init__(
        self, batches: Iterator[Any], num_served: int, on_end: Callable[[int], None]
    ) -> None:
        self._batches, self._num_served, self._on_end = batches, num_served, on_end

    def __iter__(self) -> "_WatchedBatches":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._on_end(self._num_served)
            raise
        self._num_served += 1
        return batch


def watch_batches(trainer: Trainer, on_end: Callable[[int], None]) -> None:
    """Call ``on_end`` with the number of batches given when an evaluation's loaders end.

    A loader may end before the length that it or a limit tells, which the loop learns only here.
    """
    fetcher = _evaluating_loop(trainer)._data_fetcher
    fetched_ahead = len(getattr(fetcher, "batches", ()))
    if fetcher.done and not fetched_ahead:
        on_end(0)  # it has looked already, and will not again
    fetcher.iterator = _WatchedBatches(fetcher.iterator, fetched_ahead, on_end)


def evaluation_is_over(trainer: Trainer) -> bool:
    """Whether the batch in work, or the last one done, is this rank's last of the evaluation."""
    fetcher = _evaluating_loop(trainer)._data_fetcher
    return fetcher is None or bool(fetcher.done)


def evaluation_batch_index(trainer: Trainer) -> int:
    """How many batches of this evaluation came before the one in work, over all its loaders."""
    return int(_evaluating_loop(trainer).batch_progress.current.ready) - 1


def gives_last_batch(trainer: Trainer) -> bool:
    """Whether the running loop's loaders have no batch after the one that was fetched last."""
    loop: Any = trainer.fit_loop if trainer.training else _evaluating_loop(trainer)
    return loop._data_fetcher is not None and bool(loop._data_fetcher.done)
