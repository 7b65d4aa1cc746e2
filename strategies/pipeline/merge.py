"""Puts what microbatches gave together to what the whole batch would have given.

Puts what a step returned for each microbatch together to what it would return for the batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from boltmesh.errors import PipelineError
from boltmesh.strategies.pipeline.runtime.stage import ValueSpec
from boltmesh.strategies.pipeline.stage.cut import StagePlan
from boltmesh.strategies.torch_compat.tensors import scalar_on

Joints = tuple[int | None, ...]
"""For each value the dimension that holds the batch's rows; None where it holds none of them."""


@dataclass(frozen=True)
class NoJoints:
    """Why values of microbatches cannot be joined."""

    reason: str
    number: int | None = None
    """Number of the value in the step's trace, if one is to blame."""


def find_joints(
    whole: StagePlan, parts: Sequence[StagePlan], sizes: Sequence[int]
) -> Joints | NoJoints:
    """Return how the values that a stage receives for a batch come out of those of microbatches.

    A dimension holds rows where it is as long as the batch, and for each microbatch as long as
    that. One that is some times as long may hold them in any order and is not relied on.

    Args:
        whole: What the stage receives for the whole batch.
        parts: What it receives for each microbatch.
        sizes: Rows of each microbatch.

    Returns:
        Why not, where a value depends on the rows and has none of its own, such as a loss that a
        layer computes.
    """
    if len(parts) == 1:
        return (None,) * len(whole.values_in)
    if any(_identities(each) != _identities(whole) for each in parts):
        return NoJoints("its code uses other values of layers for the batch than for a microbatch")
    joints: list[int | None] = []
    for slot, (spec, follows_batch) in enumerate(
        zip(whole.values_in, whole.row_values, strict=True)
    ):
        shapes = [each.values_in[slot].shape for each in parts]
        dims = _differing(spec, shapes)
        if not dims and not follows_batch:
            joints.append(None)
        elif _are_rows(dims, spec, shapes, sizes):
            joints.append(dims[0])
        else:
            return NoJoints(
                f"{spec.origin}, of shape {list(spec.shape)} for {sum(sizes)} rows, has no "
                f"dimension of rows",
                whole.received_numbers[slot],
            )
    return tuple(joints)


def _are_rows(
    dims: Sequence[int], spec: ValueSpec, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> bool:
    """Whether the only dimension that differs is as long as the batch, and each microbatch."""
    if len(dims) != 1 or spec.shape[dims[0]] != sum(sizes):
        return False
    return [shape[dims[0]] for shape in shapes] == list(sizes)


def join(
    parts: Sequence[tuple[Tensor, ...]], joints: Joints, specs: Sequence[ValueSpec]
) -> list[Tensor]:
    """Return the values of the batch.

    Args:
        parts: What each microbatch gave.
        joints: As :func:`find_joints` found them.
        specs: Of the batch's values.

    Raises:
        PipelineError: When microbatches gave different values for what should not depend on them.
    """
    if len(parts) == 1:
        return list(parts[0])
    joined = []
    for slot, (dim, spec) in enumerate(zip(joints, specs, strict=True)):
        values = [each[slot] for each in parts]
        if dim is not None:
            joined.append(torch.cat(values, dim))
            continue
        if not all(torch.equal(each, values[0]) for each in values[1:]):
            raise PipelineError(
                f"Microbatches gave different values of {spec.origin}, of shape "
                f"{list(spec.shape)}, which is not made of the batch: its value for the whole "
                f"batch is unknown. Use microbatches=1, or compute it behind the last layer."
            )
        joined.append(values[0])
    return joined


def split(
    whole: Sequence[Tensor | None], joints: Joints, shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[tuple[Tensor | None, ...]]:
    """Return the gradients of microbatches' values.

    Args:
        whole: Gradients of the joined values; None where one has none.
        joints: By which they were joined.
        shapes: Shapes of the values, by microbatch.

    Returns:
        By microbatch. The first one gets all of a value that is no microbatch's own.
    """
    starts = [0] * len(whole)
    parts = []
    for number, part in enumerate(shapes):
        grads: list[Tensor | None] = []
        for slot, (grad, dim, shape) in enumerate(zip(whole, joints, part, strict=True)):
            if grad is None or dim is None:
                grads.append(grad if number == 0 else None)
                continue
            grads.append(grad.narrow(dim, starts[slot], shape[dim]).contiguous())
            starts[slot] += shape[dim]
        parts.append(tuple(grads))
    return parts


def _identities(plan: StagePlan) -> list[tuple[object, ...]]:
    """Return which values of a step these are, whatever the size of the batch."""
    return [
        (number, spec.origin, spec.dtype, len(spec.shape))
        for number, spec in zip(plan.received_numbers, plan.values_in, strict=True)
    ]


def _differing(spec: ValueSpec, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [
        dim for dim, size in enumerate(spec.shape) if any(shape[dim] != size for shape in shapes)
    ]


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
        scaled = [scalar_on(each, parts[0].device).float() for each in weights]
        values = torch.stack(list(parts))
        factors = torch.stack(scaled).to(values.dtype)
        return torch.where(factors == 0, 0.0, values * factors).sum() / factors.sum()
    if _has_rows(parts, sizes):
        return torch.cat(list(parts))
    return list(parts)


def _has_rows(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    return [len(part) for part in parts] == list(sizes)
