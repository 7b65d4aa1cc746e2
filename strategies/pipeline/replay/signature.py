"""What has to be equal for two batches to be run the same way."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from boltmesh.strategies.steps.structure import is_constant, take_apart


def batch_signature(
    root: Module,
    parameters: Iterable[Parameter],
    step: str,
    batch: Any,
    kwargs: Any,
) -> Hashable:
    """Return the nesting, shapes and types of a batch, and the state that the step may depend on.

    That is: numbers and strings in the batch, train or eval mode, grad mode, autocast, and which
    parameters are frozen.
    """
    leaves = take_apart((batch, kwargs))[0]
    device_type = next((each.device.type for each in parameters), "cpu")
    return (
        step,
        root.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        tuple(map(_leaf, leaves)),
        nesting(batch),
        tuple([each.requires_grad for each in parameters]),
    )


def nesting(value: Any) -> Hashable:
    """Return how a value is nested, down to the names of dictionary keys."""
    if isinstance(value, Mapping):
        return type(value), tuple((key, nesting(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(nesting, value))
    return type(value).__qualname__


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype.str
    return (type(leaf).__qualname__, leaf if is_constant(leaf) else None)
