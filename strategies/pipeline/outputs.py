"""Puts what a step returned for each microbatch together to what it would return for the batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def merge(parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[Tensor | float]) -> Any:
    """Return one output.

    Tensors with a row for each of the microbatch's are put one after the other, as lists with an
    item for each are. 0-dim tensors and numbers are averaged with the weights, or added if
    they are integers. Where nothing fits, the outputs stay a list.

    Args:
        parts: What the step returned, by microbatch; all of one structure.
        sizes: Rows of each microbatch.
        weights: How much each microbatch counts, as its loss does.
    """
    first = parts[0]
    if len(parts) == 1 or first is None or isinstance(first, str | bytes | bool):
        return first
    if isinstance(first, Tensor):
        return _merge_tensors(parts, sizes, weights)
    if isinstance(first, int):
        return sum(parts)  # a count
    if isinstance(first, float):
        total = sum(float(weight) for weight in weights)
        pairs = zip(parts, weights, strict=True)
        return sum(part * float(weight) for part, weight in pairs) / total
    if isinstance(first, Mapping):
        merged = {key: merge([part[key] for part in parts], sizes, weights) for key in first}
        return merged if type(first) is dict else type(first)(**merged)
    if isinstance(first, list) and _has_rows(parts, sizes):
        return [item for part in parts for item in part]
    if isinstance(first, list | tuple):
        items = [merge(each, sizes, weights) for each in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first) if each.init]
        members = {
            name: merge([getattr(part, name) for part in parts], sizes, weights) for name in names
        }
        return dataclasses.replace(first, **members)
    return list(parts)


def _merge_tensors(
    parts: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[Tensor | float]
) -> Any:
    if parts[0].ndim == 0:
        if not parts[0].is_floating_point():
            return torch.stack(list(parts)).sum()  # a count
        scaled = [torch.as_tensor(each, device=parts[0].device).float() for each in weights]
        values = torch.stack(list(parts))
        factors = torch.stack(scaled).to(values.dtype)
        return torch.where(factors == 0, 0.0, values * factors).sum() / factors.sum()
    if _has_rows(parts, sizes):
        return torch.cat(list(parts))
    return list(parts)


def _has_rows(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    return [len(part) for part in parts] == list(sizes)
