"""The private parts of Lightning that telemetry reads."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from torch import Tensor


def computed_metrics(trainer: Trainer) -> Mapping[str, Tensor]:
    """Return the metrics that Lightning has computed, without computing any.

    ``trainer.callback_metrics`` would reduce epoch metrics across ranks when it is read too
    early, and a rank without telemetry would not take part.
    """
    metrics: Mapping[str, Tensor] = trainer._logger_connector._callback_metrics
    return metrics


def compute_dtype(trainer: Trainer) -> torch.dtype:
    """Return the type in which the run's matrix products are made."""
    return _plugin_to_compute_dtype(trainer.precision_plugin)
