"""The private parts of Lightning and of its loaders that telemetry reads."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def computed_metrics(trainer: Trainer) -> Mapping[str, Tensor]:
    """Return the metrics that Lightning has computed, without computing any.

    ``trainer.callback_metrics`` would reduce epoch metrics across ranks when it is read too
    early, and a rank without telemetry would not take part.
    """
    metrics: Mapping[str, Tensor] = trainer._logger_connector._callback_metrics
    return metrics


def loader_queue(trainer: Trainer) -> int | None:
    """Return how many batches the workers of the training loader have ready; None without workers.

    The fewest of several loaders.
    """
    combined = trainer.fit_loop._combined_loader
    iterators = getattr(getattr(combined, "_iterator", None), "iterators", ())
    ready = []
    for iterator in iterators:
        loader = getattr(iterator, "inner", iterator)  # the strategies' own, which knows its place
        if isinstance(loader, _MultiProcessingDataLoaderIter):
            queues = {id(each): each for each in (loader._worker_result_queue, loader._data_queue)}
            num_early = sum(len(info) == 2 for info in loader._task_info.values())
            ready.append(num_early + sum(each.qsize() for each in queues.values()))
    return min(ready, default=None)


def compute_dtype(trainer: Trainer) -> torch.dtype:
    """Return the type in which the run's matrix products are made."""
    return _plugin_to_compute_dtype(trainer.precision_plugin)
