"""Counts what is in a batch without touching its values.

What a batch takes and what the device can do, as Lightning's ThroughputMonitor reads them.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from boltmesh.telemetry.writer.lightning_compat import compute_dtype

_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers in their order; iterators are left alone."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name))


def count(batch: Any) -> tuple[int | None, int | None]:
    """Return the samples and the tokens of a batch, None for what it does not have.

    Samples are as Lightning infers them: the first dimension of the first tensor. Tokens are the
    elements of the first tensor of integers, when that has two dimensions: such a tensor is a batch
    of token sequences; padding counts. Labels (one dimension) and images (three or four) are not
    counted.
    """
    samples = None
    # The plain cases need no generator, whose code would be cold between two steps.
    kind = type(batch)
    if kind is Tensor:
        tensors: Any = (batch,)
    elif kind in {list, tuple} and all(type(each) is Tensor for each in batch):
        tensors = batch
    else:
        tensors = _tensors(batch)
    for tensor in tensors:
        if samples is None:
            samples = tensor.size(0) if tensor.ndim else 1
        if tensor.dtype in _INTEGERS:
            return samples, tensor.numel() if tensor.ndim == 2 else None
    return samples, None


def flops_per_batch(module: LightningModule) -> float | None:
    """Return ``module.flops_per_batch``, an attribute or a property; None where it has none.

    A property is the user's code, so what it raises and what is no number count as none.
    """
    try:
        found = getattr(module, "flops_per_batch", None)
        number = float(found) if found is not None else math.nan
    except Exception:  # noqa: BLE001 - telemetry never stops training
        return None
    return number if math.isfinite(number) and number > 0 else None


def peak_flops(trainer: Trainer) -> float | None:
    """Return what this rank's device can do at the run's precision, by its data sheet.

    None on a CPU, and for devices that Lightning has no data sheet of.
    """
    device = trainer.strategy.root_device
    if device.type == "cpu":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of devices that it does not know
        try:
            found = get_available_flops(device, compute_dtype(trainer))
        except Exception:  # noqa: BLE001 - it parses the names of devices
            return None
    return float(found) if found else None
