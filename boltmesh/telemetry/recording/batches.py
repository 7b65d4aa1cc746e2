"""Counts what is in a batch without touching its values."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

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
