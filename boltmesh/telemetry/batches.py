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


def count_samples(batch: Any) -> int | None:
    """Return the batch size as Lightning infers it: the first dimension of the first tensor."""
    first = next(_tensors(batch), None)
    if first is None:
        return None
    return first.size(0) if first.ndim else 1


def count_tokens(batch: Any) -> int | None:
    """Return the elements of the first tensor of integers, when that has two dimensions.

    Such a tensor is a batch of token sequences; padding counts. Labels (one dimension) and images
    (three or four) are not counted, and then there are no tokens.
    """
    for tensor in _tensors(batch):
        if tensor.dtype in _INTEGERS:
            return tensor.numel() if tensor.ndim == 2 else None
    return None
