"""Counts the samples and tokens of a batch without touching its values, and its FLOPs.

``flops_per_batch`` is the attribute that Lightning's ThroughputMonitor reads. Lightning's table of
devices is not used: some of its peaks are those with sparsity.

``FlopCounter`` counts operations while a batch runs. Model FLOPs do not have activations that are
computed again in the backward pass, hardware FLOPs do (Chowdhery et al. 2022, appendix B,
https://arxiv.org/abs/2204.02311).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from boltmesh.telemetry.writer.lightning_compat import compute_dtype
from boltmesh.telemetry.writer.phases import BACKWARD, FORWARD, PhaseClock
from boltmesh.telemetry.writer.torch_compat.flops import FunctionFlops

PEAKS = Path(__file__).with_name("peaks.yaml")

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
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
    """Return the peak of this rank's device at the run's precision, by its data sheet.

    None on a CPU, and for devices and precisions that ``peaks.yaml`` does not have.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    try:
        return peak_of(torch.cuda.get_device_name(device), compute_dtype(trainer))
    except Exception:  # noqa: BLE001 - telemetry never stops training
        return None


def peak_of(device: str, dtype: torch.dtype) -> float | None:
    """Return the peak of a device's matrix products in FLOPs a second, None if it is not known.

    Args:
        device: Its name, as the driver reports it.
        dtype: Dtype of the products; float32 runs as TF32 where torch allows it.
    """
    row = next((row for name, row in _peaks() if re.search(name, device, re.IGNORECASE)), {})
    name = _DTYPES.get(dtype)
    if name == "fp32" and torch.get_float32_matmul_precision() != "highest":
        name = "tf32" if "tf32" in row else name
    found = row.get(name) if name is not None else None
    return None if found is None else float(found) * 1e12


@cache
def _peaks() -> list[tuple[str, dict[str, float]]]:
    return list(yaml.safe_load(PEAKS.read_text(encoding="utf-8")).items())


COUNTED = frozenset({FORWARD, BACKWARD})


class BatchFlops(NamedTuple):
    """FLOPs of one batch on one rank, forward and backward."""

    model: int
    recomputed: int
    """FLOPs of activations computed again in the backward pass; hardware FLOPs have both."""


class FlopCounter:
    """Counts in the forward and backward phases of one batch; the optimizer does not count.

    Args:
        clock: Knows the phase.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._calls = FunctionFlops(lambda: clock.phase in COUNTED)
        self._depth = 0

    def enter_phase(self) -> None:
        """Follow the clock into a phase."""
        if self._clock.phase in COUNTED:
            self._depth += 1
            if self._depth == 1:
                self._calls.__enter__()

    def leave_phase(self) -> None:
        """Follow the clock out of its phase; to be called before the clock leaves it."""
        if self._clock.phase in COUNTED and self._depth:
            self._depth -= 1
            if not self._depth:
                self._calls.__exit__(None, None, None)

    def stop(self) -> BatchFlops | None:
        """Return the count, None if there is nothing; also in the middle of a phase."""
        if self._depth:
            self._depth = 0
            self._calls.__exit__(None, None, None)
        calls = self._calls
        return BatchFlops(calls.total, calls.recomputed) if calls.total else None
